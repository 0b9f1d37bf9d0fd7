"""What a call of linear attention does: its launches, and the memory of its results."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from tritonkittens.kernels._sequences import SequencePlan, begin_states, most_of, packed, present, transposed
from tritonkittens.kernels._tensors import remember, signature
from tritonkittens.kernels.linear_attention.checks import Operands, check
from tritonkittens.kernels.linear_attention.config import HEADS, ROWS, STATE_BLOCK, shape_of, span_of
from tritonkittens.kernels.linear_attention.device.chunks import LinearAttention, SegmentStates, carry_states, sum_gates
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps
from tritonkittens.kernels.recurrent_step.config import is_short
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


def sums_of(gates: Tensor, ends: Tensor, sums: Tensor) -> Tensor:
    """Sums (heads, slots, ROWS) of gates (rows, heads) within chunks, in the memory `sums`."""
    (heads, slots, _), sequences = sums.shape, ends.shape[0]
    numbers = (sequences, heads, slots, *gates.stride(), most_of(sequences))
    sum_gates.bind((slots, -(-heads // HEADS), 1), gates, ends, sums, *numbers)(gates, ends, sums)
    return sums


def _in_rows(state: Tensor) -> Tensor:
    return state.view(*state.shape[:2], -1, state.shape[-1])


class SegmentPlan(SequencePlan):
    """The launches of a call of one kind, where sequences are cut into segments if too few of them fill the GPU."""

    reverse = False

    def cut_for(self, columns: int, fitting: int) -> None:
        """Cut sequences for tasks of so many columns of V, of which `fitting` fit the GPU."""
        tasks = self.heads * -(-self.values // columns)
        self.span = span_of(self.length, self.total, tasks, self.sequences, fitting)
        self.cut = self.span < self.length
        self.segments = (
            self.total // self.span + self.sequences
        )  # at most, since each sequence may end with a short one
        self.numbers["span"] = self.span

    def carry(
        self, states: Tensor, before: Tensor | None, after: Tensor | None, ends: Tensor, sums: Tensor | None = None
    ) -> None:
        """Make of what segments add to states, (segments, heads, rows, columns), those before each segment. `after`
        receives those after the sequences."""
        heads, *sizes = states.shape[1:]
        grid = (self.sequences * heads, -(-sizes[0] * sizes[1] // STATE_BLOCK), 1)
        given = [states if x is None else x for x in (before, after, ends, sums)]
        strides = [(0,) * 4 if x is None else x.stride() for x in (before, after)]
        numbers = (self.sequences, heads, tuple(sizes), self.span, self.slots, *strides)
        has = (x is not None for x in (before, after, sums))
        kinds = (*has, self.reverse, self.knobs["most"], STATE_BLOCK)
        carry_states.bind(grid, states, *given, *numbers, *kinds)(states, *given)

    def carry_each(self, states: list[Tensor], before: list[Tensor], after: list[Tensor], ends: Tensor) -> None:
        """`carry` of each of several states, whose rows may be one, (segments, heads, columns)."""
        for i, x in enumerate(states):
            first, last = (_in_rows(t[i]) if t else None for t in (before, after))
            self.carry(_in_rows(x), first, last, ends)


class Plan(SegmentPlan):
    """The launches of a call of one kind. `kind`: knobs of all templates, `of_results`: of the one of results."""

    template: Any = LinearAttention

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        begins: bool,
        ends_wanted: bool,
        starts: Tensor | None,
        kind: dict[str, bool],
        of_results: dict[str, Any] | None = None,
    ):
        super().__init__(q, v, starts)
        self.ends_wanted = ends_wanted
        self.reverse, self.paired = kind.get("reverse", False), kind.get("paired", False)
        multiprocessors = device_facts(q.device).multiprocessors
        shape = shape_of(self.keys, self.values, 0 if self.paired else self.sequences * self.heads, multiprocessors)
        self.cut_for(shape.value_dim, multiprocessors * shape.blocks)
        self.knobs |= dict(
            consumers=shape.consumers, key_dim=shape.key_dim, value_dim=shape.value_dim, blocks_per_sm=shape.blocks,
            **kind,
        )  # fmt: skip
        begins = begins or self.cut
        self.results = self.template(
            **self.knobs, begins=begins, cut=self.cut, ends_wanted=ends_wanted and not self.cut, **(of_results or {})
        )

    def sums(self, gates: Any, ends: Tensor) -> list[Tensor]:
        """What templates read of the gates."""
        return [] if gates is None else [sums_of(gates, ends, self.empty(self.heads, self.slots, ROWS))]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Any,
        state: Tensor | None,
        starts: Tensor | None,
        scale: float,
        beside: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`beside`: more operands of the template of results."""
        ends = self.ends_of(starts)
        home = self.rows(v, ends, self.heads, self.values)
        before = transposed(state)
        after = self.after(before)
        if self.total and self.heads:
            sums = self.sums(gates, ends)
            q, k, v = (packed(x) for x in (q, k, v))
            given = self.around(k, v, sums, before, after, ends)
            operands = (q, k, v, *sums, *(beside or []), home.transpose(0, 1))
            self.results(*operands, *given, ends, scale=scale, **self.numbers)
        return home if home.is_contiguous() else home.contiguous(), transposed(after)

    def after(self, before: Tensor | None) -> Tensor | None:
        """Memory of the states after the sequences, where they are wanted."""
        after = self.states(self.sequences) if self.ends_wanted else None
        if not self.cut:
            begin_states(present(after), present(before))
        return after

    def around(
        self, k: Tensor, v: Tensor, sums: list[Tensor], before: Tensor | None, after: Tensor | None, ends: Tensor
    ) -> list[Tensor]:
        """What the template of results takes of states: S1 and S0, or S0 of segments."""
        if self.cut:
            return [self._before_segments(k, v, sums, before, after, ends)]
        return present(after, before)

    def states(self, count: int) -> Tensor:
        """Memory of so many states, transposed: a consumer has all columns of K for some of V."""
        return self.empty(count, self.heads, self.values, self.keys)

    def _before_segments(
        self, k: Tensor, v: Tensor, sums: list[Tensor], before: Any, after: Any, ends: Tensor
    ) -> Tensor:
        """The state before each segment; `after` receives those after the sequences."""
        states = self.states(self.segments)
        SegmentStates(**self.knobs, cut=True)(k, v, *sums, states, ends, scale=1.0, **self.numbers)
        of_heads = states
        if self.paired:  # each head by itself has gates
            of_heads, before, after = (
                x if x is None else x.unflatten(2, (2, -1)).flatten(1, 2) for x in (states, before, after)
            )
        self.carry(of_heads, before, after, ends, *sums[:1])
        return states


def pairs(x: Tensor | None, dim: int) -> Tensor | None:
    """Two heads (dimension `dim`) as one of twice the columns (the next dimension)."""
    return (
        None if x is None else x.reshape(*x.shape[:dim], x.shape[dim] // 2, 2 * x.shape[dim + 1], *x.shape[dim + 2 :])
    )


def run(given: Operands, scale: float, ends_wanted: bool, reverse: bool) -> tuple[Tensor, Tensor | None]:
    """`linear_attention` of plain tensors, without its gradient. `reverse`: time runs backwards."""
    q, k, v, decay, g, state, starts = given
    if is_short(q, starts) and not reverse:
        sign = 1.0 if g is not None else 0.0 if decay is None else -1.0
        step = Step(q, k, v, gates=g, decay=decay, state=transposed(state))
        o, after = run_steps(step, Rule(scale, sign), ends_wanted, functools.partial(check, given))
        return o, transposed(after)
    key = (signature(*given), ends_wanted, reverse)
    plan = _plans.get(key)
    if plan is None:
        check(given)
        gated = decay is not None or g is not None
        kind = dict(gated=gated, reverse=reverse)
        plan = remember(_plans, key, Plan(q, v, state is not None, ends_wanted, starts, kind))
    gates = None if decay is None else (-decay).expand(plan.total, -1)
    gates = gates if g is None else g.flatten(0, 1)
    o, after = plan(q, k, v, gates, state, starts, scale)
    return o.view(v.shape), after
