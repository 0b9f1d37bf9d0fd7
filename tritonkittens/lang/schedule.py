"""Which work a block does: schedules (how tasks are dealt to blocks), orders (which tile a task is), and the arithmetic behind them.

Schedules and orders are small values that a template takes as knobs: `Gemm(schedule=tk.StreamK(), order=tk.Supergroup(8))`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang._backend import Trace, op
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.types import unwrap

MOST_TAIL_PARTS, MOST_REST_PARTS = 4, 8


class Knob:
    """Base of the plain immutable values (frozen dataclasses) that a template may have as knobs, beside numbers, strings and tile types."""


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


@dataclass(frozen=True)
class Order(Knob):
    """Base of the orders: which tile of a grid of tiles a task is."""


@dataclass(frozen=True)
class RowMajor(Order):
    """Row by row."""


@dataclass(frozen=True)
class ColumnMajor(Order):
    """Column by column."""


@dataclass(frozen=True)
class Supergroup(Order):
    """In bands of `rows` rows, column by column within a band (TK's SUPER_M): see `supergroup`."""

    rows: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or self.rows < 1:
            raise TileError(f"Supergroup(rows={self.rows!r}): must be at least 1")


@dataclass(frozen=True)
class LongestFirst(Order):
    """The last row first, for work that grows with the row: see `longest_first`. With `rounds` of as few columns at a time as make a task for every block, and
    at the end of as many as make that many: L2 then holds what the tasks of a column read, and with `Dynamic()` all blocks still end at nearly the same time.
    """

    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and (not isinstance(self.rounds, int) or self.rounds < 1):
            raise TileError(f"LongestFirst(rounds={self.rounds!r}): must be at least 1, or None")


@dataclass(frozen=True)
class LongAndShort(Order):
    """Pairs of a long and a short tile of one column, for work that grows with the row: see `long_and_short`."""


@op
def tile_at(t: Trace, order: Any, task: Any, rows: Any, cols: Any) -> Any:
    """(row, col) of task number `task` of a `rows` × `cols` grid of tiles, in an `Order`. Past the last task, row or col lies outside."""
    order = unwrap(order)
    if isinstance(order, Supergroup):
        return t.call(_supergroup, task, rows, cols, order.rows)
    if isinstance(order, RowMajor):
        return t.call(_unravel, task, cols)
    if isinstance(order, ColumnMajor):
        return t.call(_column_major, task, rows)
    if isinstance(order, LongestFirst):
        if order.rounds is None:
            return t.call(_longest_first, task, rows, cols)
        return t.call(_longest_of_few, task, rows, cols, t.call("num_programs", 0), order.rounds)
    if isinstance(order, LongAndShort):
        return t.call(_long_and_short, task, rows, t.call("num_programs", 0))
    raise TileError(f"tile_at(order={order!r}): must be RowMajor(), ColumnMajor(), Supergroup(rows), LongestFirst() or LongAndShort()")


@triton.jit
def _column_major(task, rows):
    return task % rows, task // rows


@triton.jit
def _supergroup(task, rows, cols, GROUP: tl.constexpr):
    per_group = GROUP * cols
    first = (task // per_group) * GROUP
    size = tl.minimum(rows - first, GROUP)
    size = tl.maximum(size, 1)  # past the last task
    inside = task % per_group
    return first + inside % size, inside // size


@op
def supergroup(t: Trace, task: Any, rows: Any, cols: Any, group: Any) -> Any:
    """(row, col) of tile number `task` of a `rows` × `cols` grid, walked in bands of `group` rows, column by column within a band.

    Blocks that run at the same time then share rows of A and columns of B in L2. Source: Triton matmul tutorial, "L2 cache optimizations".
    """
    return t.call(_supergroup, task, rows, cols, group)


@triton.jit
def _ceil_div(a, b):
    return (a + b - 1) // b


@op
def ceil_div(t: Trace, a: Any, b: Any) -> Any:
    """⌈a / b⌉ for non-negative integers."""
    return t.call(_ceil_div, a, b)


@op
def block_index(t: Trace, axis: Any = 0) -> Any:
    """Index of this block in the launch grid."""
    return t.call("program_id", axis)


@op
def block_count(t: Trace, axis: Any = 0) -> Any:
    """Blocks in the launch grid."""
    return t.call("num_programs", axis)


@triton.jit
def _unravel(index, extent):
    return index // extent, index % extent


@op
def unravel(t: Trace, index: Any, extent: Any) -> Any:
    """(index // extent, index % extent)."""
    return t.call(_unravel, index, extent)


@triton.jit
def _longest_first(task, tiles, others):
    others = tl.maximum(others, 1)
    return tiles - 1 - task // others, task % others


@triton.jit
def _longest_of_few(task, tiles, others, blocks, ROUNDS: tl.constexpr):
    tiles = tl.maximum(tiles, 1)
    each = tl.maximum(blocks // tiles, 1)  # others of a band
    bands = tl.maximum(others - _ceil_div(ROUNDS * blocks, tiles), 0) // each  # before the last, which has all that are left
    band = tl.minimum(task // (tiles * each), bands)
    inside = task - band * tiles * each
    few = tl.maximum(tl.where(band < bands, each, others - bands * each), 1)
    return tiles - 1 - inside // few, band * each + inside % few


@op
def longest_first(t: Trace, task: Any, tiles: Any, others: Any = 1) -> Any:
    """(tile, other) of task number `task`, longest first, where the work of tile i grows with i, as under a causal mask.

    There are `tiles` tiles for each of `others` (heads · batches); the last tiles of all others come first. Blocks ending on short tasks
    end at nearly the same time. Past the last task, tile < 0. Source: Graham (1969), "Bounds on multiprocessing timing anomalies".
    """
    return t.call(_longest_first, task, tiles, others)


@triton.jit
def _long_and_short(task, tiles, blocks):
    pairs = tl.maximum((tiles + 1) // 2, 1)
    turn = task // blocks
    unit = turn // 2 * blocks + task % blocks
    nth = unit % pairs
    short = tl.where(2 * nth + 1 == tiles, tiles, nth)  # the tile in the middle has no partner: one without work, past the last
    return tl.where(turn % 2 == 0, tiles - 1 - nth, short), unit // pairs


@op
def long_and_short(t: Trace, task: Any, tiles: Any, blocks: Any) -> Any:
    """(tile, other) of task number `task`, where the work of tile i of `tiles` grows evenly with i, as under a causal mask.

    A block (of `blocks`, each taking every `blocks`-th task) does the longest tile and then the shortest of one `other` (head · batch), the second longest and
    the second shortest, …: every pair is the same work, and blocks that run together share what an `other` reads. Where `tiles` is odd the middle one is
    followed by tile number `tiles`, which does not exist. `pairs(tiles, others)` says how many pairs there are.
    """
    return t.call(_long_and_short, task, tiles, blocks)


def pairs(tiles: int, others: int) -> int:
    """Pairs of `long_and_short` (host side): two tasks each."""
    return -(-tiles // 2) * others


@triton.jit
def deal(block, blocks, steps):
    """The first step of a block, where `steps` are dealt evenly."""
    return block * (steps // blocks) + tl.minimum(block, steps % blocks)


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


def supergroup_rows(rows: int, cols: int, depth: int, tile: tuple[int, int], itemsize: int, l2_bytes: int) -> int:
    """Row tiles a band of `supergroup` should have (host side): C is `rows` × `cols` in tiles of `tile`, A and B are `depth` deep.

    A band reads B once, so bands should be few; its rows of A must stay in L2 with the column tile of B that passes, and half of L2 is left
    to what streams through. Bands come out even. `itemsize` in bytes; `l2_bytes`: `tritonkittens.launch.l2_bytes(device)`. Raises
    `ValueError` for numbers that are not positive.
    """
    if min(rows, cols, depth, *tile, itemsize, l2_bytes) <= 0:
        raise ValueError(f"supergroup_rows({rows}, {cols}, {depth}, {tile}, {itemsize}, {l2_bytes}): all must be positive")
    tiles = -(-rows // tile[0])
    column, row = min(cols, tile[1]) * depth * itemsize, tile[0] * depth * itemsize
    fit = max(1, min(tiles, (l2_bytes // 2 - column) // row))
    return -(-tiles // -(-tiles // fit))
