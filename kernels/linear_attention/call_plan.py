"""What a call of linear attention does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._sequences import packed, sequences_of
from tritonkittens.kernels._tensors import padded_empty, power_of_two, remember, signature
from tritonkittens.kernels.linear_attention.checks import check
from tritonkittens.kernels.linear_attention.config import shape_of, span_of
from tritonkittens.kernels.linear_attention.device.chunks import LinearAttention, SegmentStates, carry_states
from tritonkittens.launch import device_facts

LOG2_E = 1.4426950408889634
BLOCK = 1024  # numbers of a state that a program of `carry_states` has

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan:
    """The launches of a call of one kind."""

    def __init__(
        self, q: Tensor, v: Tensor, decayed: bool, begins: bool, ends_wanted: bool, starts: Tensor | None, reverse: bool
    ):
        batches, length, self.heads, self.keys = q.shape
        self.values, self.total, self.uniform = v.shape[-1], batches * length, starts is None
        self.sequences = sequences_of(q, starts)
        self.begins, self.ends_wanted, self.decayed, self.reverse = begins, ends_wanted, decayed, reverse
        shape = shape_of(self.keys, self.values)
        blocks = -(-self.values // shape.value_dim)
        slots = device_facts(q.device).multiprocessors * shape.blocks
        self.length, self.device = length, q.device
        self.span = span_of(length, self.total, self.heads * blocks, self.sequences, slots)
        self.cut = self.span < length
        # an upper bound: each sequence may end with a short segment
        each = -(-length // self.span)
        self.segments = batches * each if starts is None else self.total // self.span + self.sequences
        self.most = max(16, power_of_two(self.sequences))
        self.knobs: dict[str, Any] = dict(
            dtype=tk.from_torch(q.dtype), consumers=shape.consumers, key_dim=shape.key_dim, value_dim=shape.value_dim,
            blocks_per_sm=shape.blocks, decayed=decayed, uniform=self.uniform, cut=self.cut, most=self.most,
            reverse=reverse,
        )  # fmt: skip

    def states(self, *shape: int) -> Tensor:
        """Memory of so many states, transposed: a consumer has all columns of K for some of V."""
        return torch.empty((*shape, self.heads, self.values, self.keys), dtype=torch.float32, device=self.device)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rate: Tensor | None,
        state: Tensor | None,
        ends: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor | None]:
        home = padded_empty((self.total, self.heads, self.values), v)
        after = self.states(self.sequences) if self.ends_wanted else None
        if self.total and self.heads:
            self._launch(q, k, v, rate, state, ends, scale, home, after)
        elif after is not None:
            after.zero_() if state is None else after.copy_(state.mT)
        return (home if home.is_contiguous() else home.contiguous()).view(v.shape), None if after is None else after.mT

    def _launch(
        self, q: Any, k: Any, v: Any, rate: Any, state: Any, ends: Any, scale: float, home: Any, after: Any
    ) -> None:
        q, k, v = (packed(x) for x in (q, k, v))
        numbers = dict(span=self.span, length=self.length, total=self.total)
        others = [x for x in (ends, rate) if x is not None]
        before, last = None if state is None else state.mT, after
        if self.cut:
            states = self.states(self.segments)
            SegmentStates(**self.knobs)(k, v, states, *others, **numbers)
            self._carry(states, before, last, ends, rate)
            before = states
        elif last is not None and not self.uniform:
            last.zero_() if before is None else last.copy_(before)  # sequences without rows have no task
        template = LinearAttention(
            **self.knobs, begins=before is not None, ends_wanted=last is not None and not self.cut
        )
        given = [x for x in (before, None if self.cut else last) if x is not None]
        template(k, v, q, home.transpose(0, 1), *given, *others, scale=scale, **numbers)

    def _carry(self, states: Tensor, before: Any, last: Any, ends: Any, rate: Any) -> None:
        grid = (self.sequences * self.heads, -(-self.values * self.keys // BLOCK), 1)
        given = [states if x is None else x for x in (before, last, ends, rate)]
        strides = [(0,) * 4 if x is None else x.stride() for x in (before, last)]
        size = (self.values, self.keys)
        numbers = (self.sequences, self.heads, size, self.span, self.length, *strides)
        kinds = (before is not None, last is not None, self.decayed, self.uniform, self.reverse, self.most, BLOCK)
        carry_states.bind(grid, states, *given, *numbers, *kinds)(states, *given)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    scale: float,
    ends_wanted: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`linear_attention` of plain tensors, without its gradient. `reverse`: time runs backwards."""
    key = (signature(q, k, v, decay, state, starts), ends_wanted, reverse)
    plan = _plans.get(key)
    if plan is None:
        check(q, k, v, decay, state, starts)
        plan = remember(_plans, key, Plan(q, v, decay is not None, state is not None, ends_wanted, starts, reverse))
    rate = None if decay is None else decay.float() * LOG2_E
    return plan(q, k, v, rate, state, None if starts is None else starts[1:].contiguous(), scale)
