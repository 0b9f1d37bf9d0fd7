"""Cost models of attention's kernels, which choose tiles, one or two passes, and the parts of a group.

The models count tasks, the blocks of a task, and the issue slots for which the consumers of an SM compete. Constants
are microseconds on an H200, fitted to docs/notes/attention_forward.md and attention_backward.md. A choice depends on
ratios of times only, so other chips of the architecture use the same constants.

A task of the forward and of dQ is a tile of queries, and its blocks are keys. A task of dK and dV is a tile of keys,
and its blocks are queries. A group is the query heads that share a key head. Where a group has several parts, a task
for dK and dV has the query heads of one part, and the parts are summed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

UNIT = 64  # keys, queries or columns to which the constants refer
TILE = 128  # queries or keys of a task of the backward
MAX_SUMS = 256  # the most columns of dK and dV together for which registers hold 64 rows of both
MEGABYTE = 0.3  # microseconds to read or write a megabyte of memory


class Work(NamedTuple):
    """The tasks of a kernel."""

    tasks: int  # number of tasks
    blocks: int  # blocks of the longest task
    share: float  # mean number of blocks of a task, as a share of `blocks`
    least: float  # blocks of the shortest task, as a share of `blocks`
    masked: int  # blocks at the end of the last task that have columns which its first row does not see


@functools.lru_cache(maxsize=256)  # the choices of parts ask about the same tasks again
def work(heads: int, rows: int, cols: int, tile: int, block: int, before: int, after: int) -> Work:
    """The tasks of `heads` heads: each is `tile` rows, and iterates over blocks of `block` columns.

    Row i sees the columns from i + cols − rows − `before` to i + cols − rows + `after`. Rows are queries and columns
    are keys. Where rows are keys, the caller exchanges `before` and `after`.
    """
    shift, counts = cols - rows, []
    for first in range(0, rows, tile):
        begin = max(first + shift - before, 0) // block
        end = min(min(first + tile, rows) + shift + after, cols)
        counts.append(max(-(-end // block) - begin, 0))
    longest = max(*counts, 1)
    masked = -(-end // block) - max(min(first + 1 + shift + after, cols), 0) // block
    return Work(heads * len(counts), longest, sum(counts) / len(counts) / longest, min(counts) / longest, masked)


@dataclass(frozen=True)
class ForwardPace:
    """Microseconds of `AttentionForward`, most of them for UNIT keys and each consumer of the SM.

    Args:
        begin: load of a task's queries and store of its output, for UNIT columns of K and V.
        block: overhead of a block, independent of its size and of other consumers.
        latency: from the MMA of scores to the MMA with V, independent of other consumers and of columns.
        latency_mma: part of the latency that MMAs take, for UNIT columns, independent of other consumers.
        issue: issue slots of the softmax.
        mma: MMAs on the tensor cores, for UNIT columns.
        mask: issue slots of the mask of a block at the end of the keys that a task's queries see.
    """

    begin: float
    block: float
    latency: float
    latency_mma: float
    issue: float
    mma: float
    mask: float

    def time(
        self, found: Work, slots: int, columns: float, *, consumers: int, keys: int, blocks_per_sm: int, fetched: bool
    ) -> float:
        """Microseconds of a launch of the tasks `found` on `slots` SMs.

        Args:
            columns: mean of the columns of K and of V. They cost as much as the next multiple of UNIT.
            keys: keys of a block.
            fetched: whether CTAs fetch tasks (`tk.Dynamic`). Then no CTA waits for the longest task of a wave.
        """
        wide, units = -(-columns // UNIT), keys / UNIT

        def wave(resident: float) -> float:
            """Microseconds of the longest task where `resident` CTAs share an SM."""
            busy = resident * consumers
            each = max(self.latency + self.latency_mma * wide + self.issue * busy, self.mma * wide * busy)
            once = self.begin * wide + self.mask * units * found.masked
            return once * busy + found.blocks * (self.block + units * each)

        if fetched and found.share < 1:
            load = max(1.0, found.tasks * found.share / slots)
            resident = min(load, blocks_per_sm)
            return load / resident * wave(resident)
        whole, rest = divmod(-(-found.tasks // slots), blocks_per_sm)
        equal = whole * wave(blocks_per_sm) + (wave(rest) if rest else 0)
        last = wave(blocks_per_sm if whole else rest)
        return last + found.share * (equal - last)


FORWARD = ForwardPace(begin=0.5, block=0.18, latency=0.12, latency_mma=0.11, issue=0.13, mma=0.145, mask=0.25)


@dataclass(frozen=True)
class BackwardPace:
    """Microseconds of the backward's kernels.

    Args:
        begin: first loads and stores of a wave, in two passes.
        queries: a block of 64 keys for dQ of 128 queries.
        keys: a block of 64 queries for dK and dV of 128 keys, where one SM is busy.
        crowd: increase of `keys` where all SMs are busy.
        begin_single: first loads and stores of a wave, in the single pass.
        single: a block of 64 queries for all gradients, in the single pass.
        part: added to a wave of the single pass for each part of a group. All parts add to the same dK and dV.
    """

    begin: float
    queries: float
    keys: float
    crowd: float
    begin_single: float
    single: float
    part: float


BACKWARD = {  # by dimension, at most; the single pass pads dimensions to 64 or 128
    32: BackwardPace(1.3, 0.57, 0.66, 0.2, 7.0, 1.15, 5.0),
    64: BackwardPace(1.3, 0.75, 0.84, 0.23, 2.9, 1.15, 1.2),
    128: BackwardPace(5.2, 0.85, 1.0, 0.55, 7.9, 1.83, 2.5),
}
SUM_LAUNCH = 1.0  # launch of `sum_parts` after two passes
SINGLE_LAUNCH = 0.2  # what the launches of the single pass take longer than those of two passes


class BackwardShape(NamedTuple):
    """The shape of a backward.

    Args:
        heads: key heads of the whole batch.
        group: query heads of a key head.
        queries, keys: lengths.
        head_dim, value_dim: dimensions of Q and K, and of V.
        before, after: keys that a query sees before and after its own, see `work`.
    """

    heads: int
    group: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    before: int
    after: int

    @property
    def pace(self) -> BackwardPace:
        wide = max(self.head_dim, self.value_dim)
        return BACKWARD[32 if wide <= 32 else 64 if wide <= 64 else 128]

    @property
    def keys_of_task(self) -> int:
        """Keys of a task for dK and dV: 64 where registers of one consumer do not hold both accumulators."""
        return UNIT if self.head_dim + self.value_dim > MAX_SUMS else TILE

    def of_keys(self, parts: int, block: int = UNIT) -> Work:
        """The tasks for dK and dV, each of one part of a group. `blocks` counts blocks of UNIT queries."""
        found = work(self.heads, self.keys, self.queries, self.keys_of_task, block, self.after, self.before)
        blocks = found.blocks * (block // UNIT) * self.group // parts
        return found._replace(tasks=found.tasks * parts, blocks=blocks)

    @property
    def fetched(self) -> bool:
        """Whether CTAs fetch tasks, the longest first, where there are more tasks than CTAs."""
        return self.after == 0 and self.before >= self.keys + self.queries

    def waves(self, found: Work, slots: int) -> float:
        """Waves of tasks. Where CTAs fetch tasks, the last ones end at most the shortest task apart."""
        if not self.fetched:
            return -(-found.tasks // slots)
        return max(1.0, found.tasks * found.share / slots + (found.least if found.tasks > slots else 0.0))


def two_passes(shape: BackwardShape, slots: int, parts: int) -> float:
    """Microseconds of the kernel for dQ and the kernel for dK and dV, without `preprocess`.

    Both overlap where no CTA fetches tasks: dK and dV run on the SMs that the last wave of dQ leaves free.
    """
    pace, mine = shape.pace, shape.of_keys(parts)
    queries = work(shape.heads * shape.group, shape.queries, shape.keys, TILE, UNIT, shape.before, shape.after)
    each = mine.blocks * (pace.keys + pace.crowd * min(1.0, mine.tasks / slots))
    of_queries, of_keys = pace.begin + queries.blocks * pace.queries, pace.begin + each
    written = (2 * parts + 1) * 2 * shape.heads * shape.keys * (shape.head_dim + shape.value_dim)
    summed = SUM_LAUNCH + written * MEGABYTE / 1e6 if parts > 1 else 0.0
    if queries.tasks + mine.tasks <= slots:
        return max(of_queries, of_keys) + summed
    before = shape.waves(queries, slots)
    if not shape.fetched and queries.tasks > slots and mine.tasks <= -queries.tasks % slots:
        before -= 1
    elif shape.fetched and max(queries.tasks, mine.tasks) <= slots:
        before *= queries.share
    return before * of_queries + shape.waves(mine, slots) * of_keys + summed


def single_pass(shape: BackwardShape, slots: int, parts: int) -> float:
    """Microseconds of the kernel for all gradients and of `postprocess`, without `preprocess`."""
    pace, mine = shape.pace, shape.of_keys(parts, 2 * UNIT if shape.head_dim <= 64 else UNIT)
    adding = pace.part * parts if parts > 1 else 0.0
    written = 6 * shape.heads * shape.group * shape.queries * shape.head_dim
    if parts > 1:  # dK and dV in fp32: zeros, sums read, results
        written += 28 * shape.heads * shape.keys * shape.head_dim
    each = pace.begin_single + adding + mine.blocks * pace.single
    return SINGLE_LAUNCH + shape.waves(mine, slots) * each + written * MEGABYTE / 1e6
