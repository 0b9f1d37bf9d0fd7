"""What a call of Hedgehog does: its launch, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._sequences import packed, sequences_of
from tritonkittens.kernels._tensors import padded_empty, power_of_two, remember, signature
from tritonkittens.kernels.hedgehog.checks import DIM, Operands, check
from tritonkittens.kernels.hedgehog.device.window import Hedgehog

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


class Plan:
    """The launch of a call of one kind."""

    def __init__(self, given: Operands, ends_wanted: bool):
        q = given.q
        batches, length, self.heads = q.shape[:3]
        self.total, self.sequences, self.device = batches * length, sequences_of(q, given.cu_seqlens), q.device
        self.ends_wanted = ends_wanted
        self.ends = torch.arange(1, batches + 1, dtype=torch.int32, device=q.device) * length
        self.span = -(-max(length, 1) // 64) * 64  # sequences stay whole
        self.template = Hedgehog(
            dtype=tk.from_torch(q.dtype),
            begins=given.kv is not None,
            ends_wanted=ends_wanted,
            most=max(16, power_of_two(self.sequences)),
        )

    def states(self) -> list[Tensor]:
        """Memory of states after: kv, transposed, and z."""
        shapes = (DIM, DIM), (DIM,)
        return [torch.empty(self.sequences, self.heads, *s, dtype=torch.float32, device=self.device) for s in shapes]

    def __call__(self, given: Operands) -> tuple[Tensor, list[Tensor]]:
        home = padded_empty((self.total, self.heads, DIM), given.v)
        before = [] if given.kv is None or given.z is None else [given.kv.mT, given.z]
        after = self.states() if self.ends_wanted else []
        for i, x in enumerate(after):  # sequences without rows have no task
            x.copy_(before[i]) if before else x.zero_()
        if self.total and self.heads:
            ends = self.ends if given.cu_seqlens is None else given.cu_seqlens[1:].contiguous()
            rows = [packed(x) for x in (given.q, given.k, given.v)]
            of_heads = [as_addressable(given.map_q), as_addressable(given.map_k), given.alpha, given.beta]
            given_states = [*after, *before[::-1]]  # S0 is the last
            numbers = dict(span=self.span, total=self.total, group=1, scale=1.0)
            self.template(*rows, *of_heads, home.transpose(0, 1), *given_states, ends, **numbers)
        return home if home.is_contiguous() else home.contiguous(), after


def run(given: Operands, ends_wanted: bool) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """`hedgehog_attention` of plain tensors."""
    key = (signature(*given), ends_wanted)
    plan = _plans.get(key)
    if plan is None:
        check(given)
        plan = remember(_plans, key, Plan(given, ends_wanted))
    o, after = plan(given)
    return o.view(given.q.shape), (after[0].mT, after[1]) if after else None
