"""How long the kernels of attention take, as far as the choice between them depends on it.

The models count tasks, the blocks of a task, and what the consumers of an SM take from each other. Their constants are
microseconds on an H200, fitted to the measurements in docs/notes/attention_forward.md and attention_backward.md. Only
ratios decide, so that other chips of the architecture get the same choices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

UNIT = 64  # keys or queries of a block that the constants are for
TILE = 128  # queries or keys of a task of the backward
MAX_SUMS = 256  # columns of dK and dV of one consumer's keys that registers hold
MEGABYTE = 0.3  # of microseconds: a megabyte to memory or back


class Work(NamedTuple):
    """Tasks of a kernel: their number, the blocks of the longest one, and as shares of that the mean number of blocks
    and the smallest."""

    tasks: int
    blocks: int
    share: float
    least: float


@functools.lru_cache(maxsize=256)  # the choices of parts ask about the same tasks again
def work(heads: int, rows: int, cols: int, tile: int, block: int, before: int, after: int) -> Work:
    """The tasks of `tile` rows, of blocks of `block` columns, of so many heads.

    Row i sees the columns from i + cols − rows − `before` to i + cols − rows + `after`. Rows are queries and columns
    keys, or, with `before` and `after` exchanged, the other way round.
    """
    shift, counts = cols - rows, []
    for first in range(0, rows, tile):
        begin = max(first + shift - before, 0) // block
        end = min(min(first + tile, rows) + shift + after, cols)
        counts.append(max(-(-end // block) - begin, 0))
    longest = max(*counts, 1)
    return Work(heads * len(counts), longest, sum(counts) / len(counts) / longest, min(counts) / longest)


@dataclass(frozen=True)
class ForwardPace:
    """Microseconds of `AttentionForward`.

    Args:
        begin: of a task, for each consumer of the SM: queries come, the output leaves.
        block: of a block, whatever its size.
        latency: of 64 keys, from the MMA of their scores to that with V.
        issue: of 64 keys, for each consumer of the SM: what others wait for.
    """

    begin: float
    block: float
    latency: float
    issue: float

    def time(self, found: Work, slots: int, consumers: int, keys: int, blocks_per_sm: int) -> float:
        """Of a launch on so many SMs. `keys`: of a block."""

        def wave(resident: float) -> float:
            """Of the longest task, where so many CTAs share an SM."""
            busy, units = resident * consumers, keys / UNIT
            return self.begin * busy + found.blocks * (self.block + units * (self.latency + self.issue * busy))

        if found.share == 1:  # equal tasks come in whole waves
            whole, rest = divmod(-(-found.tasks // slots), blocks_per_sm)
            return whole * wave(blocks_per_sm) + (wave(rest) if rest else 0)
        load = max(1.0, found.tasks * found.share / slots)
        resident = min(load, blocks_per_sm)
        return load / resident * wave(resident)


FORWARD = {64: ForwardPace(0.7, 0.155, 0.166, 0.135), 128: ForwardPace(1.5, 0.1, 0.32, 0.115)}  # by padded dimension


@dataclass(frozen=True)
class BackwardPace:
    """Microseconds of the backward's kernels. Blocks are of 64 queries or keys, for 128 of the others.

    Args:
        begin: of a wave of two passes: first loads and results.
        queries: of a block of keys, for dQ.
        keys: of a block of queries, for dK and dV, where one SM is busy.
        crowd: what that grows by where all SMs are.
        begin_single: of a wave of the single pass.
        single: of a block of queries in the single pass.
        part: of a wave of the single pass, for each part of a group: all add to the same dK and dV.
    """

    begin: float
    queries: float
    keys: float
    crowd: float
    begin_single: float
    single: float
    part: float


BACKWARD = {
    64: BackwardPace(1.3, 0.75, 0.84, 0.23, 2.9, 1.15, 1.2),
    128: BackwardPace(5.2, 0.85, 1.0, 0.55, 7.9, 1.83, 1.26),
}
SUM_LAUNCH = 1.0  # the launch that sums the parts of two passes
SINGLE_LAUNCH = 0.2  # what the launches of the single pass take beyond those of two


class BackwardShape(NamedTuple):
    """What a backward computes.

    `heads`: of keys, of all batches; `group`: query heads of each; `before` and `after`: keys that a query sees before
    and after its own, see `work`.
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
        return BACKWARD[64 if max(self.head_dim, self.value_dim) <= 64 else 128]

    @property
    def keys_of_task(self) -> int:
        """Keys of a task of the kernel for dK and dV: one consumer's where registers do not hold both sums."""
        return UNIT if self.head_dim + self.value_dim > MAX_SUMS else TILE

    def of_keys(self, parts: int, block: int = UNIT) -> Work:
        """The tasks for dK and dV, of a part of a group each, in blocks of UNIT queries."""
        found = work(self.heads, self.keys, self.queries, self.keys_of_task, block, self.after, self.before)
        blocks = found.blocks * (block // UNIT) * self.group // parts
        return found._replace(tasks=found.tasks * parts, blocks=blocks)

    @property
    def fetched(self) -> bool:
        """Whether CTAs fetch tasks where there are more than CTAs, the longest first."""
        return self.after == 0 and self.before >= self.keys + self.queries

    def waves(self, found: Work, slots: int) -> float:
        """Waves of tasks. Where CTAs fetch them, they end a smallest task apart."""
        if not self.fetched:
            return -(-found.tasks // slots)
        return max(1.0, found.tasks * found.share / slots + (found.least if found.tasks > slots else 0.0))


def two_passes(shape: BackwardShape, slots: int, parts: int) -> float:
    """Microseconds of a kernel for dQ and one for dK and dV, without what both kinds of backwards do.

    They overlap where no CTA fetches tasks: dK and dV take the SMs that the last wave of dQ leaves free.
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
    """Microseconds of the kernel for all gradients and of the launch that writes dQ; see `two_passes`."""
    pace, mine = shape.pace, shape.of_keys(parts, 2 * UNIT if shape.head_dim <= 64 else UNIT)
    adding = pace.part * parts if parts > 1 else 0.0
    written = 6 * shape.heads * shape.group * shape.queries * shape.head_dim
    if parts > 1:  # dK and dV in fp32: zeros, sums read, results
        written += 28 * shape.heads * shape.keys * shape.head_dim
    each = pace.begin_single + adding + mine.blocks * pace.single
    return SINGLE_LAUNCH + shape.waves(mine, slots) * each + written * MEGABYTE / 1e6
