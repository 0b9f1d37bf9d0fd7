"""What a call of Based does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._sequences import begin_states, packed
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.based.checks import Operands, check
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
from tritonkittens.kernels.linear_attention.call_plan import SegmentPlan
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan(SegmentPlan):
    """The launches of a call of one kind. States of kernels have other rows than those of users: `config`.

    reverse: time runs backwards. gradient: of q, a part for each block of columns of v.
    """

    def __init__(
        self,
        given: Operands,
        *,
        ends_wanted: bool = False,
        normalized: bool = False,
        reverse: bool = False,
        gradient: bool = False,
    ):
        super().__init__(given.q, given.v, given.cu_seqlens)
        self.ends_wanted, self.normalized, self.reverse = ends_wanted, normalized, reverse
        shape = shape_of(NARROWEST if gradient else self.values)
        self.cut_for(shape.value_dim, device_facts(self.device).multiprocessors * shape.blocks)
        self.knobs |= dict(
            consumers=shape.consumers, key_dim=KEYS, value_dim=shape.value_dim, blocks_per_sm=shape.blocks,
            gated=False, normalized=normalized, reverse=reverse,
        )  # fmt: skip
        begins = given.initial_state is not None or self.cut
        knobs: dict[str, Any] = dict(**self.knobs, begins=begins, cut=self.cut)
        self.columns = -(-self.values // shape.value_dim) * KEYS if gradient else self.values
        self.template = BasedGradient(**knobs) if gradient else Based(**knobs, ends_wanted=ends_wanted and not self.cut)

    def states(self, count: int) -> list[Tensor]:
        """Memory of so many states, and of sums of keys where results are normalised."""
        shapes = [(FEATURES, self.values), *([SUMS] if self.normalized else [])]
        return [self.empty(count, self.heads, *shape) for shape in shapes]

    def __call__(self, given: Operands, scale: float, *y: Tensor) -> tuple[Tensor, Tensor | None]:
        """`y`: an operand of the gradient."""
        q, k, v, state, starts = given
        ends = self.ends_of(starts)
        home = self.rows(q, ends, self.heads, self.columns)
        before = [] if state is None else self._of_user(state)
        after = self.states(self.sequences) if self.ends_wanted else []
        if not self.cut:
            begin_states(after, before)
        if self.total and self.heads:
            rows = [packed(x) for x in (q, k, v, *y)]
            states = [*after, *before[::-1]]  # S0 is the last
            if self.cut:
                states = self._before_segments(rows[1], rows[2], before, after, ends)[::-1]
            constants = maps(self.device, q.dtype), numbers(self.device, scale)
            self.template(*rows, home.transpose(0, 1), *constants, *states, ends, scale=scale, **self.numbers)
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
        self.carry_each(states, before, after, ends)
        return states


def run(
    given: Operands, scale: float, normalized: bool, ends_wanted: bool, reverse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`based_attention` of plain tensors. `reverse`: time runs backwards."""
    key = (signature(*given), normalized, ends_wanted, reverse)
    plan = _plans.get(key)
    if plan is None:
        check(given, normalized)
        kind = dict(ends_wanted=ends_wanted, normalized=normalized, reverse=reverse)
        plan = remember(_plans, key, Plan(given, **kind))
    o, after = plan(given, scale)
    return o.view(given.v.shape), after


def run_gradient(given: Operands, y: Tensor, scale: float, reverse: bool) -> Tensor:
    """The gradient of q where y is that of the results, which are not normalised."""
    key = (signature(*given, y), reverse)
    plan = _plans.get(key)
    if plan is None:
        check(given, False)
        plan = remember(_plans, key, Plan(given, reverse=reverse, gradient=True))
    parts, _ = plan(given, scale, y)
    parts = parts.view(*given.q.shape[:3], plan.columns // KEYS, KEYS)
    return parts[..., 0, :] if parts.shape[3] == 1 else parts.float().sum(3).to(given.q.dtype)
