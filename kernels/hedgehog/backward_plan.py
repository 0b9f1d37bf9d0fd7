"""What the gradient of Hedgehog does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._sequences import begin_states, packed
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.hedgehog.checks import DIM, MAPPED, Operands
from tritonkittens.kernels.hedgehog.device.backward import NUMBERS, FeatureGradients, WindowGradients, prepare_rows
from tritonkittens.kernels.linear_attention.call_plan import SegmentPlan
from tritonkittens.kernels.linear_attention.config import ROWS
from tritonkittens.launch import device_facts

_plans: dict[Hashable, GradientPlan] = {}  # by what is known of a call


class GivenGradients(NamedTuple):
    """What a forward left, and the gradients of its results."""

    o: Tensor
    totals: Tensor
    do: Tensor
    d_kv: Tensor | None
    d_z: Tensor | None


class GradientPlan(SegmentPlan):
    """The launches of a gradient of one kind. `ends`: are there gradients of the states after?"""

    def __init__(self, given: Operands, ends: bool):
        begins = given.kv is not None
        super().__init__(given.q, given.v, given.cu_seqlens)
        self.cut_for(DIM, device_facts(self.device).multiprocessors)  # for windows
        # the gradient of the state before needs the queries of the first block, after the keys of all
        of_keys = dict(begins=ends, ends_wanted=begins, further=int(begins), reverse=True)
        # both run at once: neither reads what the other writes
        self.of_features = (
            FeatureGradients(**self.knobs, begins=begins, launch_pdl=True),
            FeatureGradients(**self.knobs, **of_keys, launch_pdl="overlap"),
        )
        self.of_windows = WindowGradients(**self.knobs), WindowGradients(**self.knobs, reverse=True)

    def zeros(self, *shape: int) -> Tensor:
        """Memory of parts that are summed: sequences without rows, and segments behind the last, have no task."""
        return self.empty(*shape).zero_()

    def gradients(self, given: Operands, more: GivenGradients) -> tuple[Tensor, ...]:
        """Of all operands but `cu_seqlens`."""
        ends = self.ends_of(given.cu_seqlens)
        dq, dk, dv = (self.rows(given.v, ends, self.heads, DIM) for _ in range(3))
        maps = [self.zeros(self.sequences, self.heads, DIM, MAPPED) for _ in range(2)]
        alphas, betas = self.zeros(2, self.sequences, self.heads, ROWS), self.zeros(self.segments, self.heads, ROWS)
        before = [] if given.kv is None or given.z is None else [given.kv, given.z]
        after = [] if more.d_kv is None or more.d_z is None else [more.d_kv, more.d_z]
        d_before = [self.empty(*x.shape) for x in before]
        begin_states(d_before, after)
        if self.total and self.heads:
            q, k, v, do = (packed(x) for x in (given.q, given.k, given.v, more.do))
            map_q, map_k = (as_addressable(x) for x in (given.map_q, given.map_k))
            factors, of_rows = (given.alpha, given.beta), self._of_rows(more, do, ends)
            of_q, of_k = [dq.transpose(0, 1)], [x.transpose(0, 1) for x in (dk, dv)]
            parts: dict[str, Any] = dict(**self.numbers, scale=1.0)
            whole = parts | dict(span=-(-max(self.length, 1) // ROWS) * ROWS)
            queries, keys = (q, do, k, v, of_rows), (k, v, q, do, of_rows)
            feature, mirrored = self.of_features
            feature(*queries, map_q, map_k, *factors, *of_q, alphas, maps[0], *before[::-1], ends, **whole)
            mirrored(*keys, map_k, map_q, *factors, *of_k, maps[1], *d_before, *after[::-1], ends, **whole)
            window, mirrored_window = self.of_windows
            window(*queries, *factors, *of_q, betas, ends, **parts)
            mirrored_window(*keys, *factors, *of_k, ends, **parts)
        found = (x.contiguous().view(given.q.shape) for x in (dq, dk, dv))
        of_maps = (x.sum(0).to(given.map_q.dtype) for x in maps)
        states = d_before or [self.empty(0), self.empty(0)]
        return (*found, *of_maps, alphas.sum((0, 1, 3)), betas.sum((0, 2)), *states)

    def _of_rows(self, more: GivenGradients, do: Tensor, ends: Tensor) -> Tensor:
        """The numbers of rows, of which `FeatureGradients` adds the last."""
        numbers = self.empty(self.heads, self.slots, NUMBERS.value * ROWS)
        o = more.o.flatten(0, 1)
        tensors = (o, do, more.totals, numbers, ends)
        strides = (*o.stride()[:2], *do.stride()[:2])
        grid = (self.slots, self.heads, 1)
        prepare_rows.bind(grid, *tensors, self.sequences, self.slots, *strides, self.knobs["most"])(*tensors)
        return numbers


def run_backward(given: Operands, more: GivenGradients) -> tuple[Any, ...]:
    """The gradients of `hedgehog_attention` of plain tensors."""
    key = signature(*given, *more)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, GradientPlan(given, more.d_kv is not None))
    return plan.gradients(given, more)
