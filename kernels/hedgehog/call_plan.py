"""What a call of Hedgehog does: its launch, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._sequences import packed, sequences_of
from tritonkittens.kernels._tensors import padded_empty, power_of_two, remember, signature
from tritonkittens.kernels.hedgehog.checks import DIM, Operands, check
from tritonkittens.kernels.hedgehog.device.window import Hedgehog
from tritonkittens.kernels.linear_attention.config import ROWS

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Results(NamedTuple):
    """The result, kv and z after where they are wanted, and the sums of weights where gradients need them."""

    o: Tensor
    state: tuple[Tensor, Tensor] | None
    totals: Tensor | None


def slots_of(q: Tensor, starts: Tensor | None) -> int:
    """The number of places for blocks: see `linear_attention.device.chunks`."""
    return q.shape[0] * q.shape[1] // ROWS + sequences_of(q, starts)


class Plan:
    """The launch of a call of one kind."""

    def __init__(self, given: Operands, ends_wanted: bool, totals_wanted: bool):
        q = given.q
        batches, length, self.heads = q.shape[:3]
        self.total, self.sequences, self.device = batches * length, sequences_of(q, given.cu_seqlens), q.device
        self.ends_wanted, self.totals_wanted = ends_wanted, totals_wanted
        self.slots = slots_of(q, given.cu_seqlens)
        self.ends = torch.arange(1, batches + 1, dtype=torch.int32, device=q.device) * length
        self.span = -(-max(length, 1) // ROWS) * ROWS  # sequences stay whole
        self.template = Hedgehog(
            dtype=tk.from_torch(q.dtype),
            begins=given.kv is not None,
            ends_wanted=ends_wanted,
            totals_wanted=totals_wanted,
            most=max(16, power_of_two(self.sequences)),
        )

    def empty(self, *shape: int) -> Tensor:
        """Memory in fp32."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def states(self) -> list[Tensor]:
        """Memory of states after: kv, transposed, and z."""
        return [self.empty(self.sequences, self.heads, *shape) for shape in ((DIM, DIM), (DIM,))]

    def __call__(self, given: Operands) -> Results:
        home = padded_empty((self.total, self.heads, DIM), given.v)
        before = [] if given.kv is None or given.z is None else [given.kv.mT, given.z]
        after = self.states() if self.ends_wanted else []
        kept = [self.empty(self.heads, self.slots, ROWS)] if self.totals_wanted else []
        for i, x in enumerate(after):  # sequences without rows have no task
            x.copy_(before[i]) if before else x.zero_()
        if self.total and self.heads:
            ends = self.ends if given.cu_seqlens is None else given.cu_seqlens[1:].contiguous()
            rows = [packed(x) for x in (given.q, given.k, given.v)]
            of_heads = [as_addressable(given.map_q), as_addressable(given.map_k), given.alpha, given.beta]
            others = [*kept, *after, *before[::-1]]  # S0 is the last
            numbers = dict(span=self.span, total=self.total, group=1, scale=1.0)
            self.template(*rows, *of_heads, home.transpose(0, 1), *others, ends, **numbers)
        o = home if home.is_contiguous() else home.contiguous()
        return Results(o.view(given.q.shape), (after[0].mT, after[1]) if after else None, kept[0] if kept else None)


def run(given: Operands, ends_wanted: bool, totals_wanted: bool = False) -> Results:
    """`hedgehog_attention` of plain tensors."""
    key = (signature(*given), ends_wanted, totals_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(given)
        plan = remember(_plans, key, Plan(given, ends_wanted, totals_wanted))
    return plan(given)
