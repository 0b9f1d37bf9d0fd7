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
from tritonkittens.kernels.based.config import CONSTANT, FEATURES, KEYS, maps, numbers, rows_of_state, shape_of
from tritonkittens.kernels.based.device.taylor import Based, BasedStates
from tritonkittens.kernels.linear_attention.config import ROWS, STATE_BLOCK, span_of
from tritonkittens.kernels.linear_attention.device.chunks import carry_states
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan:
    """The launches of a call of one kind. States of kernels have other rows than those of users: `config`."""

    def __init__(self, q: Tensor, v: Tensor, begins: bool, ends_wanted: bool, starts: Tensor | None):
        batches, length = q.shape[:2]
        self.heads, self.values = v.shape[2:]
        self.total, self.sequences, self.device = batches * length, sequences_of(q, starts), q.device
        self.ends_wanted = ends_wanted
        shape = shape_of(self.values)
        tasks = self.heads * -(-self.values // shape.value_dim)
        fitting = device_facts(q.device).multiprocessors * shape.blocks
        span = span_of(length, self.total, tasks, self.sequences, fitting)
        self.cut = span < length
        self.segments = self.total // span + self.sequences  # at most: each sequence may end with a short one
        self.numbers = dict(span=span, total=self.total, group=1)
        self.ends = torch.arange(1, batches + 1, dtype=torch.int32, device=q.device) * length
        self.knobs: dict[str, Any] = dict(
            dtype=tk.from_torch(q.dtype), consumers=shape.consumers, key_dim=KEYS, value_dim=shape.value_dim,
            blocks_per_sm=shape.blocks, gated=False, most=max(16, power_of_two(self.sequences)),
        )  # fmt: skip
        begins = begins or self.cut
        self.template = Based(**self.knobs, begins=begins, cut=self.cut, ends_wanted=ends_wanted and not self.cut)

    def states(self, count: int) -> Tensor:
        """Memory of so many states."""
        return torch.empty(count, self.heads, FEATURES, self.values, dtype=torch.float32, device=self.device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, ends: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        home = padded_empty((self.total, self.heads, self.values), v)
        of_user, left, right = rows_of_state(self.device)
        before = None
        if state is not None:
            before = state.new_zeros(self.sequences, self.heads, FEATURES, self.values)
            before[:, :, : CONSTANT + 1] = (state[:, :, left] + state[:, :, right]) / 2
        after = self.states(self.sequences) if self.ends_wanted else None
        if after is not None and not self.cut:  # sequences without rows have no task
            after.zero_() if before is None else after.copy_(before)
        if self.total and self.heads:
            ends = self.ends if ends is None else ends
            q, k, v = (packed(x) for x in (q, k, v))
            given = [x for x in (after, before) if x is not None]
            if self.cut:
                given = [self._before_segments(k, v, before, after, ends)]
            constants = maps(self.device, q.dtype), numbers(self.device, scale)
            self.template(q, k, v, *constants, home.transpose(0, 1), *given, ends, scale=scale, **self.numbers)
        found = home if home.is_contiguous() else home.contiguous()
        return found, None if after is None else after[:, :, of_user]

    def _before_segments(self, k: Tensor, v: Tensor, before: Any, after: Any, ends: Tensor) -> Tensor:
        """The state before each segment; `after` receives those after the sequences."""
        states = self.states(self.segments)
        constants = maps(self.device, k.dtype), numbers(self.device, 1.0)
        BasedStates(**self.knobs, cut=True)(k, v, *constants, states, ends, scale=1.0, **self.numbers)
        size = (FEATURES, self.values)
        grid = (self.sequences * self.heads, -(-FEATURES * self.values // STATE_BLOCK), 1)
        given = [states if x is None else x for x in (before, after, ends, None)]
        strides = [(0,) * 4 if x is None else x.stride() for x in (before, after)]
        counts = (self.sequences, self.heads, size, self.numbers["span"], self.total // ROWS + self.sequences)
        kinds = (before is not None, after is not None, False, False, self.knobs["most"], STATE_BLOCK)
        carry_states.bind(grid, states, *given, *counts, *strides, *kinds)(states, *given)
        return states


def run(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, starts: Tensor | None, scale: float, ends_wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """`based_attention` of plain tensors, not normalised."""
    key = (signature(q, k, v, state, starts), ends_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(q, k, v, state, starts)
        plan = remember(_plans, key, Plan(q, v, state is not None, ends_wanted, starts))
    o, after = plan(q, k, v, state, None if starts is None else starts[1:].contiguous(), scale)
    return o.view(v.shape), after
