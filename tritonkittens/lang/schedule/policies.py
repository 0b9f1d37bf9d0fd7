"""Which work a block does: schedules (how tasks are dealt to blocks), orders (which tile a task is), and the arithmetic behind them.

Schedules and orders are small values that a template takes as knobs: `Gemm(schedule=tk.StreamK(), order=tk.Supergroup(8))`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.schedule.index import Knob, deal

MOST_TAIL_PARTS, MOST_REST_PARTS = 4, 8


@dataclass(frozen=True)
class Schedule(Knob):
    """Base of the schedules: how the tasks of a launch are dealt to its blocks."""

    def units(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        """How many tasks, or parts of tasks where the schedule fixes these, there are to do where `slots` blocks run at once."""
        return tasks


@dataclass(frozen=True)
class OnePerBlock(Schedule):
    """A block for every task: the hardware deals them, and a block's end overlaps with nothing of its own."""


@dataclass(frozen=True)
class Persistent(Schedule):
    """As many blocks as run at once, each taking every so-many-th task: what one task ends with overlaps with the loads of the next."""


@dataclass(frozen=True)
class Dynamic(Schedule):
    """As many blocks as run at once, each taking the next task when it needs one: for tasks of unequal length, the longest first, so that all blocks end at
    nearly the same time. What a task ends with overlaps with the loads of the next. Which block does a task, and so when, changes from run to run.
    """


@dataclass(frozen=True)
class SplitK(Schedule):
    """Every task's iterations in `parts` equal parts, each worked on like a task, for launches of few tasks. The parts' accumulators are summed in fp32 in a
    fixed order by whichever part comes last, so that results do not change from run to run. With hooks `part` and `merge` it is what they make of the state,
    rather than sums of accumulators.
    """

    parts: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.parts, int) or not 1 <= self.parts <= 64:
            raise TileError(f"SplitK(parts={self.parts!r}): must be 1 to 64")

    def units(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        return tasks * self.parts


@dataclass(frozen=True)
class ClusterSplitK(Schedule):
    """Every task's iterations in `parts` equal parts, one for each block of a cluster. Behind them each block sends the others their share of the columns of
    its accumulators, through distributed shared memory, and finishes its own: `finish` gets those of number `ctx.part` of `ctx.config.sharers` only. With hooks
    `part` and `merge` it is what they make of the state, rather than sums of accumulators.

    For few tasks of many iterations. Unlike `SplitK` it needs no memory, no counters and no second pass through L2. The sum is always taken in the same order.
    """

    parts: int = 2

    def __post_init__(self) -> None:
        if self.parts not in (2, 4, 8):
            raise TileError(f"ClusterSplitK(parts={self.parts!r}): must be 2, 4 or 8, the blocks of a cluster")


@dataclass(frozen=True)
class SplitTail(Schedule):
    """Whole tasks while they fill the device; each of the last, incomplete round in as many equal parts (see `SplitK`) as the device has room for.

    Blocks that work at the same time are at the same depth of neighbouring tiles and share them in L2, which stream-K's are not.
    """

    def split(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> tuple[int, int]:
        """(tasks that are done whole, parts of each of the others) where `slots` blocks run at once. Behind whole rounds `MOST_TAIL_PARTS` at most: the last of
        a task's parts reads them all, which takes longer than more of them spare (GEMM 8192³ on the H200: a tail of 4 tasks)."""
        whole = tasks // slots * slots
        return whole, max(1, min(MOST_TAIL_PARTS if whole else slots, slots // max(1, tasks - whole)))

    def units(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        whole, parts = self.split(tasks, slots, blocks_per_sm)
        return whole + (tasks - whole) * parts


@dataclass(frozen=True)
class SplitRest(SplitTail):
    """One round that leaves all multiprocessors equally much to do: equally many whole tasks on each, and the rest, fewer than there are multiprocessors, in
    as many equal parts each (see `SplitK`) as there are multiprocessors for, beside the whole ones: `blocks_per_sm` must leave them room. For tasks bound by
    memory, which the blocks of a multiprocessor read at the same time.
    """

    def split(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> tuple[int, int]:
        """The same: as many whole tasks on every multiprocessor, and at most `MOST_REST_PARTS`, so that none gets more than one."""
        multiprocessors = max(1, slots // blocks_per_sm)
        whole = tasks // multiprocessors * multiprocessors
        return whole, max(1, min(MOST_REST_PARTS, multiprocessors // max(1, tasks - whole)))


@dataclass(frozen=True)
class StreamK(Schedule):
    """Whole tasks while they fill the device; the iterations of the rest, of one to two rounds, dealt evenly to all blocks, which sum up the tasks that they
    share as in `SplitK`. All tasks must have equally many iterations. Source: Osama et al. (2023), "Stream-K", section 5.2.
    """


@triton.jit
def _stream_k(block, blocks, tiles, iterations):
    total = tiles * iterations
    begin = deal(block, blocks, total)
    depth = tl.maximum(iterations, 1)
    return begin // depth, begin % depth, deal(block + 1, blocks, total) - begin


@op
def stream_k(t: Trace, block: Any, blocks: Any, tiles: Any, iterations: Any) -> Any:
    """(tile, iteration, count): where block `block` of `blocks` starts, and its share of the `tiles` · `iterations` steps, dealt evenly.

    From there it goes on through the iterations of the following tiles; a tile that it enters or leaves in the middle is summed up with its
    neighbours' parts. Counts differ by at most one; the total must be below 2³¹. Source: Osama et al. (2023), "Stream-K".
    """
    return t.call(_stream_k, block, blocks, tiles, iterations)
