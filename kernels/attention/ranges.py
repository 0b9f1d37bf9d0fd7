"""Attention in which every query has a range of keys of its own: padded batches, several sequences in a row, caches that are not full.

Neighbouring queries whose ranges belong together are one call of the kernels, for all neighbouring sequences that have the same runs of such queries: no mask
is built, and no operand copied.
"""
from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, check_tensors, has_tangent, is_plain, register, second_derivative_of, vmap_by_batch
from tritonkittens.kernels.attention.call_plan import Scores, check, empty_like, run_forward, scores_of
from tritonkittens.kernels.attention.gradients import run_backward
from tritonkittens.kernels.attention.reference import LIMIT


class Run(NamedTuple):
    """Queries `first` … `behind` − 1 and keys `begin` … `end` − 1: the last query's own key is the last one, and a query sees `left` keys before and `right`
    keys behind its own (`LIMIT`: all)."""

    first: int
    behind: int
    begin: int
    end: int
    left: int = LIMIT
    right: int = LIMIT


class Call(NamedTuple):
    """A run of neighbouring sequences of a batch."""

    sequences: slice
    run: Run

    def of_queries(self, x: Tensor) -> Tensor:
        """Its part of a tensor (B, H, queries, …)."""
        return x[self.sequences, :, self.run.first : self.run.behind]

    def of_keys(self, x: Tensor) -> Tensor:
        """Its part of a tensor (B, H_kv, keys, …)."""
        return x[self.sequences, :, self.run.begin : self.run.end]


def runs(ranges: np.ndarray) -> tuple[Run, ...]:
    """The runs of a sequence for its ranges, (queries, 2). Queries with an empty range are in none.

    In a run ranges begin at one key and then, in a window, one key further each; they end one key further each and then, at the last key, no further. Where
    both readings are possible a run ends as soon as it can, so that sequences in a row are runs of their own.
    """
    if not len(ranges):
        return ()
    begin, end = ranges.T
    begins, ends, full = np.diff(begin), np.diff(end), begin < end
    apart = (begins != 0) & (begins != 1) | (ends != 0) & (ends != 1) | (full[1:] != full[:-1])
    split = apart.copy()
    split[:-1] |= (begins[:-1] == 1) & (begins[1:] == 0) & ~apart[1:]
    split[1:] |= (ends[:-1] == 0) & (ends[1:] == 1) & ~apart[:-1]
    firsts = [0, *(np.flatnonzero(split) + 1).tolist()]
    bounds = zip(firsts, [*firsts[1:], len(ranges)], strict=True)
    return tuple(_run(first, behind, begin, end) for first, behind in bounds if full[first])


def _run(first: int, behind: int, begin: np.ndarray, end: np.ndarray) -> Run:
    """The run of queries `first` … `behind` − 1 for where the ranges of all queries begin and end."""
    low, high = int(begin[first]), int(end[behind - 1])
    steps = behind - first - 1
    moved, grown = int(begin[behind - 1]) - low, high - int(end[first])  # how many ranges begin, and end, one key further than the one before
    left = LIMIT if not moved else (high - low) - (behind - first) + (steps - moved)
    return Run(first, behind, low, high, left, LIMIT if steps and not grown else steps - grown)


def calls(ranges: Tensor, keys: int) -> list[Call]:
    """What (B, 1, queries, 2) ranges come to. Raises ValueError for a range that ends before it begins or reaches beyond the keys."""
    numbers = ranges[:, 0].numpy(force=True)
    begin, end = numbers[..., 0], numbers[..., 1]
    if ((begin < 0) & (begin <= end) | (end > keys)).any():
        raise ValueError(f"attention_ranges: ranges has one beyond the {keys} keys")
    if (begin > end).any():
        raise ValueError("attention_ranges: ranges has one that ends before it begins")
    if numbers.strides[0] == 0 and len(numbers):  # one sequence's, expanded
        return [Call(slice(0, len(numbers)), run) for run in runs(numbers[0])]
    found, at = [], 0
    for same, sequences in itertools.groupby(runs(one) for one in numbers):
        count = len(list(sequences))
        found += [Call(slice(at, at + count), run) for run in same]
        at += count
    return found


def attention_ranges(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, *, scale: float | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`attention` in which query i of sequence b sees the keys ranges[b, 0, i, 0] … ranges[b, 0, i, 1] − 1.

    ranges: (batch, 1, queries, 2), int32; the host reads it, so on the CPU it costs no synchronisation. A query with an empty range gets zeros. Neighbours
    whose ranges begin and end at the same keys, or one key further each, run together: causal and bidirectional attention, with a window and without, are one
    kernel each, and so is every one of several sequences in a row. Other arguments, dtypes, gradients and torch.compile as for `attention`.

    Raises ValueError or TypeError for operands that do not fit together, ValueError for ranges of another shape or dtype, or one that ends before it begins or
    reaches beyond the keys.
    """
    if is_plain(q, k, v, ranges):
        check(q, k, v)
    else:  # the operator checks what a trace cannot
        check_tensors("attention_ranges", q=q, k=k, v=v, ranges=ranges)
        if has_tangent(q, k, v):
            raise ValueError("attention_ranges: it has no forward-mode derivative; use attention")
    scores = scores_of(q, scale, softcap, LIMIT, LIMIT, "attention_ranges")
    return call("attention_ranges", q, k, v, ranges, scores.scale, scores.softcap)[0]


@torch.library.custom_op("tritonkittens::attention_ranges", mutates_args=())
def ranges_operator(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of `attention_ranges`."""
    check(q, k, v)
    if ranges.shape != (q.shape[0], 1, q.shape[2], 2) or ranges.dtype != torch.int32:
        raise ValueError(f"attention_ranges: ranges is {tuple(ranges.shape)}, {ranges.dtype}; it must be {(q.shape[0], 1, q.shape[2], 2)}, torch.int32")
    out, lse = empty_like(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    found = calls(ranges, k.shape[2])
    if not _covers(found, q):
        out.zero_()
        lse.fill_(-torch.inf)
    for c in found:
        scores = Scores(scale, softcap, c.run.left, c.run.right)
        run_forward(c.of_queries(q), c.of_keys(k), c.of_keys(v), c.of_queries(out), c.of_queries(lse), scores)
    return out, lse


@ranges_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    return empty_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _covers(found: list[Call], q: Tensor) -> bool:
    """Is every query in a call?"""
    return sum((c.sequences.stop - c.sequences.start) * (c.run.behind - c.run.first) for c in found) == q.shape[0] * q.shape[2]


@torch.library.custom_op("tritonkittens::attention_ranges_backward", mutates_args=())
def backward_operator(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dQ, dK, dV) for the gradient of the output; whether with the same bits in every run, torch says."""
    found, deterministic = calls(ranges, k.shape[2]), torch.are_deterministic_algorithms_enabled()
    scores = [Scores(scale, softcap, c.run.left, c.run.right) for c in found]
    if len(found) == 1 and found[0].sequences == slice(0, q.shape[0]) and found[0].run[:4] == (0, q.shape[2], 0, k.shape[2]):
        return run_backward(grad, None, q, k, v, out, lse, scores[0], deterministic)
    dq, dk, dv = (empty_like(x, x.shape[3]).zero_() for x in (q, k, v))
    for c, of in zip(found, scores, strict=True):
        part = run_backward(c.of_queries(grad), None, c.of_queries(q), c.of_keys(k), c.of_keys(v), c.of_queries(out), c.of_queries(lse), of, deterministic)
        for whole, some in zip((c.of_queries(dq), c.of_keys(dk), c.of_keys(dv)), part, strict=True):
            whole += some
    return dq, dk, dv


@backward_operator.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_like(x, x.shape[3]) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ranges, *scores = inputs
    ctx.save_for_backward(q, k, v, ranges, *output)
    ctx.scores = scores
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    check_no_tangent("attention_ranges")
    gradients = (None,) * 3 if grad is None else call("attention_ranges_backward", grad, *ctx.saved_tensors, *ctx.scores)
    return *gradients, *(None,) * 3


register(ranges_operator, vmap_by_batch, _backward, _save)
register(backward_operator, vmap_by_batch, second_derivative_of("attention_ranges"))
