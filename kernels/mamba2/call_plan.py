"""What a call of the scan of Mamba-2 does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from tritonkittens.kernels._sequences import packed
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.linear_attention import call_plan as linear
from tritonkittens.kernels.linear_attention.config import HEADS, ROWS
from tritonkittens.kernels.mamba2.checks import Operands, check
from tritonkittens.kernels.mamba2.device.scan import MambaScan, sum_steps

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan(linear.Plan):
    """The launches of a call of one kind: those of linear attention, with other sums."""

    template = MambaScan

    def sums(self, gates: tuple[Operands, bool, tuple[float, float]], ends: Tensor) -> list[Tensor]:
        given, softplus, limits = gates
        sums = [self.empty(self.heads, self.slots, ROWS) for _ in range(2)]
        dt = given.dt.flatten(0, 1)
        tensors = (dt, given.A, given.A if given.dt_bias is None else given.dt_bias, ends, *sums)
        numbers = (self.sequences, self.heads, self.slots, *dt.stride(), *limits)
        kinds = (softplus, given.dt_bias is not None, self.knobs["most"])
        grid = (self.slots, -(-self.heads // HEADS), 1)
        sum_steps.bind(grid, *tensors, *numbers, *kinds)(*tensors)
        return sums


def run(
    given: Operands, softplus: bool, limits: tuple[float, float], ends_wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """`mamba_chunk_scan` of plain tensors."""
    x, _, _, B, C, D, z, _, state, starts = given
    key = (signature(*given), softplus, limits, ends_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(given, limits)
        of_results = dict(skip=D is not None, silu=z is not None)
        found = Plan(C, x, state is not None, ends_wanted, starts, dict(weighted=True), of_results)
        plan = remember(_plans, key, found)
    given = given._replace(A=given.A.contiguous())
    beside = [] if z is None else [packed(z)]
    if D is not None:
        beside.append((D if D.ndim == 2 else D[:, None]).expand(x.shape[2:]))
    ends = None if starts is None else starts[1:].contiguous()
    y, after = plan(C, B, x, (given, softplus, limits), None if state is None else state.mT, ends, 1.0, beside)
    return y.view(x.shape), None if after is None else after.mT
