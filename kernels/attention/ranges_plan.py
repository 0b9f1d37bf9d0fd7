"""What a call of `attention_ranges` does: queries whose ranges fit one mask become one call of the kernels.

Neighbouring queries form a *run* where one causal or sliding-window mask describes their ranges. Neighbouring sequences
with the same runs share the calls. No mask is built and no operand is copied.
"""

from __future__ import annotations

import collections
import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonkittens.kernels.attention.backward_plan import run_backward
from tritonkittens.kernels.attention.call_plan import Scores, empty_like, run_forward
from tritonkittens.kernels.attention.reference import LIMIT


class Run(NamedTuple):
    """Queries `first` … `behind` − 1 and keys `begin` … `end` − 1, under one mask.

    The last query's own key is the last key. A query sees `left` keys before and `right` keys after its own (`LIMIT`:
    all).
    """

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
        """The call's part of a tensor (B, H, queries, …)."""
        return x[self.sequences, :, self.run.first : self.run.behind]

    def of_keys(self, x: Tensor) -> Tensor:
        """The call's part of a tensor (B, H_kv, keys, …)."""
        return x[self.sequences, :, self.run.begin : self.run.end]


def runs(ranges: np.ndarray) -> tuple[Run, ...]:
    """The runs of one sequence for its ranges, (queries, 2). Queries with an empty range are in no run.

    In a run all ranges begin at one key, and then (in a window) each begins one key after the one before. They end one
    key later each, and then all at the last key. Where a run could end at several queries it ends at the first, so that
    packed sequences are runs of their own.
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
    """The run of queries `first` … `behind` − 1, for the begins and ends of all queries' ranges."""
    low, high = int(begin[first]), int(end[behind - 1])
    steps = behind - first - 1
    # ranges that begin, and that end, one key later than the one before
    moved, grown = int(begin[behind - 1]) - low, high - int(end[first])
    left = LIMIT if not moved else (high - low) - (behind - first) + (steps - moved)
    return Run(first, behind, low, high, left, LIMIT if steps and not grown else steps - grown)


class Known(NamedTuple):
    """The calls for ranges, (B, queries, 2), of so many keys."""

    ranges: np.ndarray
    keys: int
    calls: list[Call]


_known: collections.deque[Known] = collections.deque(maxlen=4)  # the layers of a model have few different ranges


def calls(ranges: Tensor, keys: int) -> list[Call]:
    """The calls for (B, 1, queries, 2) ranges, found once for equal ones.

    Raises ValueError for a range that ends before it begins or reaches beyond the keys.
    """
    numbers = ranges[:, 0].numpy(force=True)
    begin, end = numbers[..., 0], numbers[..., 1]
    if ((begin < 0) & (begin <= end) | (end > keys)).any():
        raise ValueError(f"attention_ranges: ranges has one beyond the {keys} keys")
    if (begin > end).any():
        raise ValueError("attention_ranges: ranges has one that ends before it begins")
    if numbers.strides[0] == 0 and len(numbers):  # those of one sequence, expanded
        return [Call(slice(0, len(numbers)), run) for run in runs(numbers[0])]
    for known in tuple(_known):
        if known.keys == keys and np.array_equal(known.ranges, numbers):
            return known.calls
    found, at = list[Call](), 0
    for same, sequences in itertools.groupby(runs(one) for one in numbers):
        count = len(list(sequences))
        found += [Call(slice(at, at + count), run) for run in same]
        at += count
    _known.append(Known(numbers.copy(), keys, found))
    return found


def compute_ranges(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of checked operands, in new memory."""
    out, lse = empty_like(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    found = calls(ranges, k.shape[2])
    if not _covers(found, q):
        out.zero_()
        lse.fill_(-torch.inf)
    for c in found:
        scores = Scores(scale, softcap, c.run.left, c.run.right)
        run_forward(c.of_queries(q), c.of_keys(k), c.of_keys(v), c.of_queries(out), c.of_queries(lse), scores)
    return out, lse


def _covers(found: list[Call], q: Tensor) -> bool:
    """Whether every query is in a call."""
    return (
        sum((c.sequences.stop - c.sequences.start) * (c.run.behind - c.run.first) for c in found)
        == q.shape[0] * q.shape[2]
    )


def compute_ranges_backward(
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
    """(dQ, dK, dV) for the gradient of the output, deterministic as `torch.use_deterministic_algorithms` says."""
    found, deterministic = calls(ranges, k.shape[2]), torch.are_deterministic_algorithms_enabled()
    scores = [Scores(scale, softcap, c.run.left, c.run.right) for c in found]
    if (
        len(found) == 1
        and found[0].sequences == slice(0, q.shape[0])
        and found[0].run[:4] == (0, q.shape[2], 0, k.shape[2])
    ):
        return run_backward(grad, None, q, k, v, out, lse, scores[0], deterministic)
    dq, dk, dv = (empty_like(x, x.shape[3]).zero_() for x in (q, k, v))
    for c, of in zip(found, scores, strict=True):
        part = run_backward(
            c.of_queries(grad),
            None,
            c.of_queries(q),
            c.of_keys(k),
            c.of_keys(v),
            c.of_queries(out),
            c.of_queries(lse),
            of,
            deterministic,
        )
        for whole, some in zip((c.of_queries(dq), c.of_keys(dk), c.of_keys(dv)), part, strict=True):
            whole += some
    return dq, dk, dv
