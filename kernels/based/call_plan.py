"""What a call of Based does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._sequences import packed, sequences_of
from tritonkittens.kernels._tensors import padded_empty, power_of_two, remember, signature
from tritonkittens.kernels.based.checks import check
from tritonkittens.kernels.based.config import (
    CONSTANT,
    FEATURES,
    KEYS,
    NARROWEST,
    SUMS,
    maps,
    numbers,
    rows_of_state,
    shape_of,
)
from tritonkittens.kernels.based.device.taylor import Based, BasedGradient, BasedStates
from tritonkittens.kernels.linear_attention.config import ROWS, STATE_BLOCK, span_of
from tritonkittens.kernels.linear_attention.device.chunks import carry_states
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan:
    """The launches of a call of one kind. States of kernels have other rows than those of users: `config`.

    reverse: time runs backwards. gradient: of q, a part for each block of columns of v.
    """

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        starts: Tensor | None,
        *,
        begins: bool,
        ends_wanted: bool = False,
        normalized: bool = False,
        reverse: bool = False,
        gradient: bool = False,
    ):
        batches, length = q.shape[:2]
        self.heads, self.values = v.shape[2:]
        self.total, self.sequences, self.device = batches * length, sequences_of(q, starts), q.device
        self.ends_wanted, self.normalized, self.reverse = ends_wanted, normalized, reverse
        shape = shape_of(NARROWEST if gradient else self.values)
        blocks = -(-self.values // shape.value_dim)
        fitting = device_facts(q.device).multiprocessors * shape.blocks
        span = span_of(length, self.total, self.heads * blocks, self.sequences, fitting)
        self.cut = span < length
        self.segments = self.total // span + self.sequences  # at most: each sequence may end with a short one
        self.numbers = dict(span=span, total=self.total, group=1)
        self.ends = torch.arange(1, batches + 1, dtype=torch.int32, device=q.device) * length
        self.knobs: dict[str, Any] = dict(
            dtype=tk.from_torch(q.dtype), consumers=shape.consumers, key_dim=KEYS, value_dim=shape.value_dim,
            blocks_per_sm=shape.blocks, gated=False, most=max(16, power_of_two(self.sequences)),
            normalized=normalized, reverse=reverse,
        )  # fmt: skip
        knobs: dict[str, Any] = dict(**self.knobs, begins=begins or self.cut, cut=self.cut)
        self.columns = blocks * KEYS if gradient else self.values
        self.template = BasedGradient(**knobs) if gradient else Based(**knobs, ends_wanted=ends_wanted and not self.cut)

    def states(self, count: int) -> list[Tensor]:
        """Memory of so many states, and of sums of keys where results are normalised."""
        shapes = [(FEATURES, self.values), *([SUMS] if self.normalized else [])]
        return [torch.empty(count, self.heads, *s, dtype=torch.float32, device=self.device) for s in shapes]

    def __call__(
        self, operands: tuple[Tensor, ...], state: Tensor | None, ends: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """`operands`: q, k, v, and for the gradient y."""
        q = operands[0]
        home = padded_empty((self.total, self.heads, self.columns), q)
        before = [] if state is None else self._of_user(state)
        after = self.states(self.sequences) if self.ends_wanted else []
        if not self.cut:  # sequences without rows have no task
            for i, x in enumerate(after):
                x.copy_(before[i]) if before else x.zero_()
        if self.total and self.heads:
            ends = self.ends if ends is None else ends
            rows = [packed(x) for x in operands]
            given = [*after, *before[::-1]]  # S0 is the last
            if self.cut:
                given = self._before_segments(rows[1], rows[2], before, after, ends)[::-1]
            constants = maps(self.device, q.dtype), numbers(self.device, scale)
            self.template(*rows, home.transpose(0, 1), *constants, *given, ends, scale=scale, **self.numbers)
        found = home if home.is_contiguous() else home.contiguous()
        return found, self._for_user(*after) if after else None

    def _of_user(self, state: Tensor) -> list[Tensor]:
        """The states of kernels for that of a user."""
        _, left, right = rows_of_state(self.device)
        before = [x.zero_() for x in self.states(self.sequences)]
        values = state[..., : self.values]
        before[0][:, :, : CONSTANT + 1] = (values[:, :, left] + values[:, :, right]) / 2
        if self.normalized:
            sums = state[..., -1]
            before[1][:, :, 48] = sums[..., :1]
            before[1][:, :, 32] = sums[..., 1 : 1 + KEYS]
            before[1][:, :, 16:32] = sums[..., 1 + KEYS :].unflatten(-1, (KEYS, KEYS))
        return before

    def _for_user(self, state: Tensor, sums: Tensor | None = None) -> Tensor:
        """The state of a user for those of kernels."""
        found = state[:, :, rows_of_state(self.device)[0]]
        if sums is None:
            return found
        column = torch.cat([sums[:, :, 48, :1], sums[:, :, 32], sums[:, :, 16:32].flatten(2)], -1)
        return torch.cat([found, column[..., None]], -1)

    def _before_segments(
        self, k: Tensor, v: Tensor, before: list[Tensor], after: list[Tensor], ends: Tensor
    ) -> list[Tensor]:
        """The states before each segment; `after` receives those after the sequences."""
        states = self.states(self.segments)
        constants = maps(self.device, k.dtype), numbers(self.device, 1.0)
        BasedStates(**self.knobs, cut=True)(k, v, *constants, *states, ends, scale=1.0, **self.numbers)
        slots = self.total // ROWS + self.sequences
        for i, x in enumerate(states):
            first, last = (y[i] if y else None for y in (before, after))
            size = tuple(x.shape[2:])
            grid = (self.sequences * self.heads, -(-size[0] * size[1] // STATE_BLOCK), 1)
            given = [x if y is None else y for y in (first, last, ends, None)]
            strides = [(0,) * 4 if y is None else y.stride() for y in (first, last)]
            counts = (self.sequences, self.heads, size, self.numbers["span"], slots)
            kinds = (bool(before), bool(after), False, self.reverse, self.knobs["most"], STATE_BLOCK)
            carry_states.bind(grid, x, *given, *counts, *strides, *kinds)(x, *given)
        return states


def _ends_of(starts: Tensor | None) -> Tensor | None:
    """Where packed sequences end."""
    return None if starts is None else starts[1:].contiguous()


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    scale: float,
    normalized: bool,
    ends_wanted: bool,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`based_attention` of plain tensors. `reverse`: time runs backwards."""
    key = (signature(q, k, v, state, starts), normalized, ends_wanted, reverse)
    plan = _plans.get(key)
    if plan is None:
        check(q, k, v, state, starts, normalized)
        kind = dict(begins=state is not None, ends_wanted=ends_wanted, normalized=normalized, reverse=reverse)
        plan = remember(_plans, key, Plan(q, v, starts, **kind))
    o, after = plan((q, k, v), state, _ends_of(starts), scale)
    return o.view(v.shape), after


def run_gradient(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, state: Tensor | None, starts: Tensor | None, scale: float, reverse: bool
) -> Tensor:
    """The gradient of q where y is that of the results, which are not normalised."""
    key = (signature(q, k, v, y, state, starts), reverse)
    plan = _plans.get(key)
    if plan is None:
        check(q, k, v, state, starts, False)
        plan = remember(_plans, key, Plan(q, v, starts, begins=state is not None, reverse=reverse, gradient=True))
    parts, _ = plan((q, k, v, y), state, _ends_of(starts), scale)
    parts = parts.view(*q.shape[:3], plan.columns // KEYS, KEYS)
    return parts[..., 0, :] if parts.shape[3] == 1 else parts.float().sum(3).to(q.dtype)
