"""What a call of Hedgehog does: its launch, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._sequences import begin_states, packed
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.hedgehog.checks import DIM, Operands, check
from tritonkittens.kernels.hedgehog.device.window import Hedgehog, HedgehogStates
from tritonkittens.kernels.linear_attention.call_plan import SegmentPlan
from tritonkittens.kernels.linear_attention.config import ROWS
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Results(NamedTuple):
    """The result, kv and z after where they are wanted, and the sums of weights where gradients need them."""

    o: Tensor
    state: tuple[Tensor, Tensor] | None
    totals: Tensor | None


class Plan(SegmentPlan):
    """The launches of a call of one kind."""

    def __init__(self, given: Operands, ends_wanted: bool, totals_wanted: bool):
        super().__init__(given.q, given.v, given.cu_seqlens)
        self.ends_wanted, self.totals_wanted = ends_wanted, totals_wanted
        self.cut_for(DIM, device_facts(self.device).multiprocessors)
        self.numbers["scale"] = 1.0
        self.template = Hedgehog(
            **self.knobs, begins=given.kv is not None or self.cut, cut=self.cut,
            ends_wanted=ends_wanted and not self.cut, totals_wanted=totals_wanted,
        )  # fmt: skip

    def states(self, count: int) -> list[Tensor]:
        """Memory of so many states: kv, transposed, and z."""
        return [self.empty(count, self.heads, *shape) for shape in ((DIM, DIM), (DIM,))]

    def __call__(self, given: Operands) -> Results:
        ends = self.ends_of(given.cu_seqlens)
        home = self.rows(given.v, ends, self.heads, DIM)
        before = [] if given.kv is None or given.z is None else [given.kv.mT, given.z]
        after = self.states(self.sequences) if self.ends_wanted else []
        kept = [self.empty(self.heads, self.slots, ROWS)] if self.totals_wanted else []
        if not self.cut:
            begin_states(after, before)
        if self.total and self.heads:
            rows = [packed(x) for x in (given.q, given.k, given.v)]
            of_heads = [as_addressable(given.map_q), as_addressable(given.map_k), given.alpha, given.beta]
            states = [*after, *before[::-1]]  # S0 is the last
            if self.cut:
                states = self._before_segments(rows[1:], of_heads[1], before, after, ends)[::-1]
            self.template(*rows, *of_heads, home.transpose(0, 1), *kept, *states, ends, **self.numbers)
        o = home if home.is_contiguous() else home.contiguous()
        return Results(o.view(given.q.shape), (after[0].mT, after[1]) if after else None, kept[0] if kept else None)

    def _before_segments(
        self, rows: list[Tensor], map_k: Tensor, before: list[Tensor], after: list[Tensor], ends: Tensor
    ) -> list[Tensor]:
        """The states before each segment, of rows of k and v; `after` receives those after the sequences."""
        states = self.states(self.segments)
        HedgehogStates(**self.knobs)(*rows, map_k, *states, ends, **self.numbers)
        self.carry_each(states, before, after, ends)
        return states


def run(given: Operands, ends_wanted: bool, totals_wanted: bool = False) -> Results:
    """`hedgehog_attention` of plain tensors."""
    key = (signature(*given), ends_wanted, totals_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(given)
        plan = remember(_plans, key, Plan(given, ends_wanted, totals_wanted))
    return plan(given)
