"""What a call of linear attention does: its launches, and the memory of its results."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._sequences import ends_of, packed, sequences_of
from tritonkittens.kernels._tensors import padded_empty, power_of_two, remember, signature
from tritonkittens.kernels.linear_attention.checks import check
from tritonkittens.kernels.linear_attention.config import HEADS, ROWS, STATE_BLOCK, shape_of, span_of
from tritonkittens.kernels.linear_attention.device.chunks import LinearAttention, SegmentStates, carry_states, sum_gates
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps
from tritonkittens.kernels.recurrent_step.config import is_short
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


def sums_of(gates: Tensor, ends: Tensor, sums: Tensor) -> Tensor:
    """Sums (heads, slots, ROWS) of gates (rows, heads) within chunks, in the memory `sums`."""
    (heads, slots, _), sequences = sums.shape, ends.shape[0]
    numbers = (sequences, heads, slots, *gates.stride(), max(16, power_of_two(sequences)))
    sum_gates.bind((slots, -(-heads // HEADS), 1), gates, ends, sums, *numbers)(gates, ends, sums)
    return sums


class Plan:
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
        batches, length, key_heads, self.keys = q.shape
        self.heads, self.values = v.shape[2:]
        self.total, self.sequences, self.device = batches * length, sequences_of(q, starts), q.device
        self.ends_wanted = ends_wanted
        self.reverse, self.paired = kind.get("reverse", False), kind.get("paired", False)
        multiprocessors = device_facts(q.device).multiprocessors
        shape = shape_of(self.keys, self.values, 0 if self.paired else self.sequences * self.heads, multiprocessors)
        tasks = self.heads * -(-self.values // shape.value_dim)
        fitting = multiprocessors * shape.blocks
        span = span_of(length, self.total, tasks, self.sequences, fitting)
        self.cut = span < length
        # at most, since each sequence may end with a short one: segments, and chunks
        self.segments = self.total // span + self.sequences
        self.slots = self.total // ROWS + self.sequences
        self.numbers = dict(span=span, total=self.total, group=self.heads // max(key_heads, 1))
        self.ends = ends_of(q, None)  # of sequences of one length
        self.knobs: dict[str, Any] = dict(
            dtype=tk.from_torch(q.dtype), consumers=shape.consumers, key_dim=shape.key_dim, value_dim=shape.value_dim,
            blocks_per_sm=shape.blocks, most=max(16, power_of_two(self.sequences)), **kind,
        )  # fmt: skip
        begins = begins or self.cut
        self.results = self.template(
            **self.knobs, begins=begins, cut=self.cut, ends_wanted=ends_wanted and not self.cut, **(of_results or {})
        )

    def empty(self, *shape: int) -> Tensor:
        """Memory that kernels write."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

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
        ends: Tensor | None,
        scale: float,
        beside: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`beside`: more operands of the template of results."""
        home = padded_empty((self.total, self.heads, self.values), v)
        before = None if state is None else state.mT
        after = self.after(before)
        if self.total and self.heads:
            ends = self.ends if ends is None else ends
            sums = self.sums(gates, ends)
            q, k, v = (packed(x) for x in (q, k, v))
            given = self.around(k, v, sums, before, after, ends)
            operands = (q, k, v, *sums, *(beside or []), home.transpose(0, 1))
            self.results(*operands, *given, ends, scale=scale, **self.numbers)
        return home if home.is_contiguous() else home.contiguous(), None if after is None else after.mT

    def after(self, before: Tensor | None) -> Tensor | None:
        """Memory of the states after the sequences, where they are wanted."""
        after = self.states(self.sequences) if self.ends_wanted else None
        if after is not None and not self.cut:  # sequences without rows have no task
            after.zero_() if before is None else after.copy_(before)
        return after

    def around(
        self, k: Tensor, v: Tensor, sums: list[Tensor], before: Tensor | None, after: Tensor | None, ends: Tensor
    ) -> list[Tensor]:
        """What the template of results takes of states: S1 and S0, or S0 of segments."""
        if self.cut:
            return [self._before_segments(k, v, sums, before, after, ends)]
        return [x for x in (after, before) if x is not None]

    def states(self, count: int) -> Tensor:
        """Memory of so many states, transposed: a consumer has all columns of K for some of V."""
        return self.empty(count, self.heads, self.values, self.keys)

    def _before_segments(
        self, k: Tensor, v: Tensor, sums: list[Tensor], before: Any, after: Any, ends: Tensor
    ) -> Tensor:
        """The state before each segment; `after` receives those after the sequences."""
        states = self.states(self.segments)
        SegmentStates(**self.knobs, cut=True)(k, v, *sums, states, ends, scale=1.0, **self.numbers)
        heads, values = self.heads, self.values
        if self.paired:  # each head by itself has gates
            heads, values = 2 * heads, values // 2
            before, after = (x if x is None else x.unflatten(2, (2, values)).flatten(1, 2) for x in (before, after))
        grid = (self.sequences * heads, -(-values * self.keys // STATE_BLOCK), 1)
        given = [states if x is None else x for x in (before, after, ends, *(sums[:1] or [None]))]
        strides = [(0,) * 4 if x is None else x.stride() for x in (before, after)]
        numbers = (self.sequences, heads, (values, self.keys), self.numbers["span"], self.slots, *strides)
        kinds = (before is not None, after is not None, bool(sums), self.reverse, self.knobs["most"], STATE_BLOCK)
        carry_states.bind(grid, states, *given, *numbers, *kinds)(states, *given)
        return states


def pairs(x: Tensor | None, dim: int) -> Tensor | None:
    """Two heads (dimension `dim`) as one of twice the columns (the next dimension)."""
    return (
        None if x is None else x.reshape(*x.shape[:dim], x.shape[dim] // 2, 2 * x.shape[dim + 1], *x.shape[dim + 2 :])
    )


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    g: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    scale: float,
    ends_wanted: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`linear_attention` of plain tensors, without its gradient. `reverse`: time runs backwards."""
    if is_short(q, starts) and not reverse:
        sign = 1.0 if g is not None else 0.0 if decay is None else -1.0
        step = Step(q, k, v, gates=g, decay=decay, state=None if state is None else state.mT)
        verify = functools.partial(check, q, k, v, decay, g, state, starts)
        o, after = run_steps(step, Rule(scale, sign), ends_wanted, verify)
        return o, None if after is None else after.mT
    key = (signature(q, k, v, decay, g, state, starts), ends_wanted, reverse)
    plan = _plans.get(key)
    if plan is None:
        check(q, k, v, decay, g, state, starts)
        gated = decay is not None or g is not None
        kind = dict(gated=gated, reverse=reverse)
        plan = remember(_plans, key, Plan(q, v, state is not None, ends_wanted, starts, kind))
    gates = None if decay is None else (-decay).expand(plan.total, -1)
    gates = gates if g is None else g.flatten(0, 1)
    o, after = plan(q, k, v, gates, state, None if starts is None else starts[1:].contiguous(), scale)
    return o.view(v.shape), after
