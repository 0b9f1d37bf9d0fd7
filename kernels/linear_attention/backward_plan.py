"""Gradients of linear attention with gates: their launches, and the memory of their results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._sequences import SequencePlan, ends_of, most_of, packed, slots_of, transposed
from tritonkittens.kernels._tensors import padded_empty, remember, signature
from tritonkittens.kernels.linear_attention.call_plan import Plan, pairs, sums_of
from tritonkittens.kernels.linear_attention.checks import Operands
from tritonkittens.kernels.linear_attention.config import HEADS, NARROWEST, ROWS, WIDEST, shape_of
from tritonkittens.kernels.linear_attention.device.gradients import ChunkGradients, ChunkStates, gate_gradients
from tritonkittens.launch import device_facts

_plans: dict[Hashable, BackwardPlan] = {}  # by what is known of a call


class Found(NamedTuple):
    """dq, dk (rows, heads of keys, K), dv (rows, heads, V), gradients of D, (heads,) or (heads, V), and of the states
    before (sequences, heads, V, K), and what gradients of gates are made of."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dskip: Tensor | None
    dstate: Tensor | None
    sums: Tensor


class StatesPlan(Plan):
    """The launches that compute the states before all chunks."""

    template = ChunkStates

    def of_chunks(self, k: Tensor, v: Tensor, sums: list[Tensor], before: Any, ends: Tensor) -> tuple[Tensor, Any]:
        """(the states before the chunks, (slots · heads, values, keys), the states after the sequences)."""
        home, after = padded_empty((self.slots * self.heads, self.values, self.keys), v), self.after(before)
        if self.total and self.heads:
            k, v = packed(k), packed(v)
            given = self.around(k, v, sums, before, after, ends)
            self.results(k, v, *sums, home, *given, ends, scale=1.0, **self.numbers)
        return home, after


class BackwardPlan(SequencePlan):
    """The launches of gradients of one kind.

    around: are there states before, and gradients of those after? kind: knobs of both templates.
    """

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        around: tuple[bool, bool],
        starts: Tensor | None,
        paired: bool = False,
        skip: Tensor | None = None,
        **kind: bool,
    ):
        super().__init__(q, v, starts)
        self.paired, (begins, ends) = paired, around
        of_pairs: Any = pairs(v, 2) if paired else v
        kinds = dict(gated=True, paired=paired)
        self.before = StatesPlan(q, of_pairs, begins, False, starts, kinds | kind)
        self.after = StatesPlan(q, of_pairs, ends, begins, starts, kinds | dict(reverse=True))
        multiprocessors = device_facts(q.device).multiprocessors
        shape = shape_of(self.keys, self.values, 0, multiprocessors)
        group = self.numbers["group"]
        tasks = self.slots * self.key_heads
        # as few parts of a group as fill the GPU
        parts = next((n for n in range(1, group) if group % n == 0 and n * tasks >= multiprocessors), max(group, 1))
        self.parts = self.key_heads * parts
        self.numbers["shared"] = group // parts
        self.template = ChunkGradients(
            **self.knobs, key_dim=shape.key_dim, whole=self.values <= NARROWEST,
            skip=None if skip is None else tk.from_torch(skip.dtype), skips_columns=skip is not None and skip.ndim == 2,
            **kind,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, sums: list[Tensor], around: tuple[Any, Any],
        ends: Tensor, scale: float, skip: Tensor | None = None,
    ) -> Found:  # fmt: skip
        """around: states before, and gradients of those after, (sequences, heads, V, K).

        sums: G, and where rows of v have weights W of `Chunks` and the weights.
        """
        of_v, of_do, (s0, ds1) = v, do, around
        if self.paired:
            of_v, of_do, s0, ds1 = pairs(v, 2), pairs(do, 2), pairs(s0, 1), pairs(ds1, 1)
        h, _ = self.before.of_chunks(k, of_v, sums[:2], s0, ends)
        dh, dstate = self.after.of_chunks(q, of_do, sums[:1], None if ds1 is None else ds1 / scale, ends)
        h, dh = (x.view(-1, self.values, self.keys) if self.paired else x for x in (h, dh))
        whole = self.parts == self.key_heads
        kind = None if whole else torch.float32
        dq, dk = (self.rows(q, ends, self.parts, self.keys, dtype=kind) for _ in range(2))
        dv = self.rows(v, ends, self.heads, self.values)
        found = q.new_empty(self.heads, 5 if len(sums) > 1 else 4, self.slots, ROWS, dtype=torch.float32)
        dskip = None
        if skip is not None:  # no kernel writes slots without a chunk
            dskip = found.new_zeros(self.heads, self.slots, ROWS if skip.ndim == 1 else self.values)
        if self.total and self.heads:
            given, results = (packed(x) for x in (q, k, v, do)), (x.transpose(0, 1) for x in (dv, dq, dk))
            beside = () if skip is None else (skip, dskip)
            self.template(*given, *sums[::2], h, dh, *results, found, *beside, ends, scale=scale, **self.numbers)
        if not whole:
            dq, dk = (x.unflatten(1, (self.key_heads, -1)).sum(2).to(q.dtype) for x in (dq, dk))
        if dskip is not None and skip is not None:
            dskip = dskip.sum(1) if skip.ndim == 2 else dskip.sum((1, 2))
        return Found(dq, dk, dv, dskip, None if dstate is None else dstate.mul_(scale), found)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, sums: list[Tensor], around: tuple[Any, Any], starts: Any,
    ends: Tensor, scale: float, skip: Tensor | None = None, paired: bool = False,
) -> Found:  # fmt: skip
    """Gradients for any number of columns of keys, whose blocks are computed one by one. Arguments are those of
    `BackwardPlan`; ends: of the sequences."""
    if q.shape[-1] > WIDEST:
        found = []
        for i in range(0, q.shape[-1], WIDEST):
            at = slice(i, i + WIDEST)
            s0, ds1 = (x if x is None else x[..., at] for x in around)
            of_skip = None if i else skip  # it has no columns of keys
            of_block = q[..., at], k[..., at], v, do
            found.append(gradients(*of_block, sums, (s0, ds1), starts, ends, scale, of_skip, paired))
        return _joined(found)
    key = (signature(q, k, v, do, *around, skip, starts), len(sums), paired)
    plan = _plans.get(key)
    if plan is None:
        before, d_after = (x is not None for x in around)
        plan = BackwardPlan(q, v, (before, d_after), starts, paired, skip, weighted=len(sums) > 1)
        remember(_plans, key, plan)
    return plan(q, k, v, do, sums, around, ends, scale, skip)


def summed(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one dtype, rounded once."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    return torch.stack([*parts]).float().sum(0).to(parts[0].dtype)


def _joined(found: list[Found]) -> Found:
    """Gradients of all columns of keys, of those of blocks."""
    dq, dk, dv, dskip, dstate, sums = zip(*found, strict=True)
    state = None if dstate[0] is None else torch.cat(dstate, -1)
    return Found(torch.cat(dq, -1), torch.cat(dk, -1), summed(dv), dskip[0], state, summed(sums))


def run_backward(
    given: Operands, do: Tensor, d_final: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, the gates (`decay` or `g`) and the state of `linear_attention`."""
    q, k, v, decay, g, state, starts = given
    (batches, length, heads, _), slots, ends = q.shape, slots_of(q, starts), ends_of(q, starts)
    total, sequences = batches * length, ends.shape[0]
    gates = (-decay).expand(total, -1) if g is None else g.flatten(0, 1)  # type: ignore[operator]
    dg = q.new_zeros(total, heads, dtype=torch.float32 if g is None else g.dtype)
    sums = [q.new_empty(heads, slots, ROWS, dtype=torch.float32)]
    if total and heads:
        sums_of(gates, ends, sums[0])
    found = gradients(q, k, v, do, sums, (transposed(state), transposed(d_final)), starts, ends, scale)
    if total and heads:
        tensors, numbers = (found.sums, ends, dg), (sequences, heads, slots, *dg.stride(), scale, most_of(sequences))
        gate_gradients.bind((slots, -(-heads // HEADS), 1), *tensors, *numbers)(*tensors)
    dq, dk, dv = (x.contiguous().view(y.shape) for x, y in ((found.dq, q), (found.dk, k), (found.dv, v)))
    of_gates = -dg.sum(0) if g is None else dg.view(g.shape)
    return dq, dk, dv, of_gates, transposed(found.dstate)
