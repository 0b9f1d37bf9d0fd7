"""What the gradient of the gated delta rule does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._sequences import begin_states, packed, present, transposed
from tritonkittens.kernels._tensors import padded_empty, remember, signature
from tritonkittens.kernels.gated_delta_net.call_plan import ChunksPlan
from tritonkittens.kernels.gated_delta_net.checks import Operands
from tritonkittens.kernels.gated_delta_net.device.backward import (
    PARTS,
    DeltaGradients,
    DeltaStateGradients,
    DeltaStates,
    gather_gates,
)
from tritonkittens.kernels.linear_attention.config import HEADS, ROWS

_plans: dict[Hashable, GradientPlan] = {}  # by what is known of a call


class GradientPlan(ChunksPlan):
    """The launches of a gradient of one kind. `ends`: is there a gradient of the states after?"""

    def __init__(self, given: Operands, ends: bool):
        super().__init__(given)
        begins = given.initial_state is not None
        # states and their gradients are computed at once: neither reads what the other writes
        self.states = DeltaStates(**self.knobs, begins=begins, launch_pdl=True)
        # stages of the output ring fill shared memory
        stages = 1 if self.knobs["key_dim"] + self.knobs["value_dim"] > 3 * ROWS else 2
        kind = dict(begins=ends, ends_wanted=begins, output_stages=stages)
        self.of_states = DeltaStateGradients(**self.knobs, **kind, launch_pdl="overlap")
        self.rest = DeltaGradients(dtype=self.knobs["dtype"], most=self.knobs["most"])

    def gradients(self, given: Operands, do: Tensor, d_final: Tensor | None, scale: float) -> list[Tensor | None]:
        """Of q, k, v, g, beta and the initial state."""
        before, after = present(transposed(given.initial_state)), present(transposed(d_final))
        d_before = [self.empty(*x.shape) for x in before]
        begin_states(d_before, after)
        ends = self.ends_of(given.cu_seqlens)
        y, du = (padded_empty((self.total, self.heads, self.values), given.v) for _ in range(2))
        dv = self.rows(given.v, ends, self.heads, self.values)
        dq, dk = (self.rows(given.q, ends, self.heads, self.keys) for _ in range(2))
        gates = (self.empty(self.total, self.heads, dtype=x.dtype) for x in (given.g, given.beta))
        dg, d_beta = (self.ended(x, ends) for x in gates)
        if self.total:
            q, k, v, do = (packed(x) for x in (given.q, given.k, given.v, do))
            sums, t, p, of_rows = self.chunks(q, k, given.g, given.beta, ends)
            s, ds = (padded_empty((self.slots, self.heads, self.values, self.keys), given.v) for _ in range(2))
            numbers: dict[str, Any] = dict(**self.numbers, scale=scale)
            y, *found = (x.transpose(0, 1) for x in (y, du, dv, dq, dk))
            self.states(k, v, t, of_rows, s, y, *before, ends, **numbers)
            self.of_states(q, k, do, t, p, of_rows, ds, *found[:2], *d_before, *after, ends, **numbers)
            parts = self.empty(2 * PARTS.value, self.heads, self.slots, ROWS)
            self.rest(q, k, sums, of_rows, v, y, do, found[0], s, ds, *found[2:], parts, ends, **numbers)
            grid = (self.slots, -(-self.heads // HEADS), 1)
            of_gates = (parts, ends, dg, d_beta)
            of_chunks = (self.sequences, self.heads, self.slots, self.knobs["most"])
            gather_gates.bind(grid, *of_gates, *of_chunks)(*of_gates)
        dq, dk = (self._sums_of_groups(x, given.q) for x in (dq, dk))
        dv, dg, d_beta = (x.contiguous().view(y.shape) for x, y in ((dv, given.v), (dg, given.g), (d_beta, given.beta)))
        return [dq, dk, dv, dg, d_beta, d_before[0].mT if d_before else None]

    def _sums_of_groups(self, x: Tensor, like: Tensor) -> Tensor:
        """The gradient of a head of keys is the sum of those of heads of values."""
        group = self.numbers["group"]
        x = x if group == 1 else x.unflatten(1, (-1, group)).sum(2, dtype=torch.float32).to(x.dtype)
        return x.contiguous().view(like.shape)


def run_backward(given: Operands, do: Tensor, d_final: Tensor | None, scale: float) -> list[Tensor | None]:
    """The gradients of `gated_delta_rule` of plain tensors: of q, k, v, g, beta and the initial state."""
    key = signature(*given, do, d_final)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, GradientPlan(given, d_final is not None))
    return plan.gradients(given, do, d_final, scale)
