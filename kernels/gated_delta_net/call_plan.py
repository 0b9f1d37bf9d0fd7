"""What a call of the gated delta rule does: its launches, and the memory of its results."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._sequences import packed, sequences_of
from tritonkittens.kernels._tensors import padded_empty, power_of_two, remember, signature
from tritonkittens.kernels.gated_delta_net.checks import check
from tritonkittens.kernels.gated_delta_net.config import shape_of
from tritonkittens.kernels.gated_delta_net.device.delta import GatedDeltaNet, invert_chunks
from tritonkittens.kernels.linear_attention.call_plan import sums_of
from tritonkittens.kernels.linear_attention.config import ROWS
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps
from tritonkittens.kernels.recurrent_step.config import is_short
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan:
    """The launches of a call of one kind."""

    def __init__(self, q: Tensor, v: Tensor, begins: bool, ends_wanted: bool, starts: Tensor | None):
        batches, length, key_heads, self.keys = q.shape
        self.heads, self.values = v.shape[2:]
        self.total, self.sequences, self.device = batches * length, sequences_of(q, starts), q.device
        self.ends_wanted, self.slots = ends_wanted, self.total // ROWS + self.sequences  # chunks at most
        self.numbers = dict(span=max(self.total, 1), total=self.total, group=self.heads // key_heads)
        self.ends = torch.arange(1, batches + 1, dtype=torch.int32, device=q.device) * length
        shape = shape_of(self.keys, self.values, self.sequences * self.heads, device_facts(q.device).multiprocessors)
        self.knobs: dict[str, Any] = dict(
            dtype=tk.from_torch(q.dtype), consumers=shape.consumers, key_dim=shape.key_dim, value_dim=shape.value_dim,
            most=max(16, power_of_two(self.sequences)),
        )  # fmt: skip
        self.template = GatedDeltaNet(**self.knobs, begins=begins, ends_wanted=ends_wanted)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that kernels write."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def __call__(
        self, q: Any, k: Any, v: Any, g: Tensor, beta: Tensor, state: Tensor | None, ends: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        home = padded_empty((self.total, self.heads, self.values), v)
        before = None if state is None else state.mT
        # transposed: a consumer has all columns of K for some of V
        after = self.empty(self.sequences, self.heads, self.values, self.keys) if self.ends_wanted else None
        if after is not None:  # sequences without rows have no task
            after.zero_() if before is None else after.copy_(before)
        if self.total:
            ends = self.ends if ends is None else ends
            q, k, v = (packed(x) for x in (q, k, v))
            _, *chunks = self.chunks(q, k, g, beta, ends)
            states = [x for x in (after, before) if x is not None]
            self.template(q, k, v, *chunks, home.transpose(0, 1), *states, ends, scale=scale, **self.numbers)
        return home if home.is_contiguous() else home.contiguous(), None if after is None else after.mT

    def chunks(self, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        """G, T, P and B of all chunks."""
        sums = sums_of(g.flatten(0, 1), ends, self.empty(self.heads, self.slots, ROWS))
        t, p = (self.empty(self.heads, self.slots * ROWS, ROWS, dtype=k.dtype) for _ in range(2))
        of_rows, beta = self.empty(self.heads, self.slots, 4 * ROWS), beta.flatten(0, 1)
        q, k = q.transpose(0, 1), k.transpose(0, 1)
        given = (q, k, beta, ends, sums, t, p, of_rows)
        strides = (*q.stride()[:2], *k.stride()[:2], *beta.stride())
        numbers = (self.sequences, self.numbers["group"], self.slots, self.keys, *strides)
        constants = (self.knobs["key_dim"], self.knobs["most"])
        invert_chunks.bind((self.slots, self.heads, 1), *given, *numbers, *constants)(*given)
        return sums, t, p, of_rows


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    scale: float,
    ends_wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule` of plain tensors."""
    if is_short(q, starts):
        step = Step(q, k, v, gates=g, beta=beta, state=None if state is None else state.mT)
        verify = functools.partial(check, q, k, v, g, beta, state, starts)
        o, after = run_steps(step, Rule(scale), ends_wanted, verify)
        return o, None if after is None else after.mT
    key = (signature(q, k, v, g, beta, state, starts), ends_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(q, k, v, g, beta, state, starts)
        plan = remember(_plans, key, Plan(q, v, state is not None, ends_wanted, starts))
    ends = None if starts is None else starts[1:].contiguous()
    o, after = plan(q, k, v, g, beta, state, ends, scale)
    return o.view(v.shape), after
