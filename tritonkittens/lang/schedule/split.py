"""Tile schedulers that split tasks between thread blocks: split-K, split tails, stream-K. `schedule/split_k.py` joins the parts."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.schedule.index import deal
from tritonkittens.lang.schedule.tile_scheduler import Schedule, SplitPlan, _block, _blocks, extra, setup

MOST_TAIL_PARTS, MOST_REST_PARTS = 4, 8


class _Split(Schedule):
    """Whole tasks below a number, behind it equal parts of the others, by part."""

    whole_tasks: ClassVar[bool] = False

    def _parts(self, t: Trace, numbers: list[Any]) -> Any:
        """Parts of a task that is split."""
        raise NotImplementedError

    def tile(self, t: Trace, ctx: Any, A: Any, unit: Any) -> struct:
        if not self.splits:
            return super().tile(t, ctx, A, unit)
        whole, tasks, *numbers = extra(ctx.config, A)[2:]
        index, parts, part, slot, valid = t.call(_tail_part, unit, whole, tasks, self._parts(t, numbers))
        info = setup(t, ctx, index)
        begin, count = t.call(iterations_of, part, parts, info.iterations)
        shared = {"begin": begin, "count": count, "parts": parts, "part": part, "slot": slot, "late": t.scalar(0)}
        return struct(**{**info.fields, "valid": t.method(info.valid, "__and__", valid), "task": index, **shared})


@dataclass(frozen=True)
class SplitK(_Split):
    """Every task's iterations in `parts` equal parts, each worked on like a task, for launches of few tasks. The parts' accumulators are summed in fp32 in a
    fixed order by whichever part comes last, so that results do not change from run to run. With hooks `part` and `merge` it is what they make of the state,
    rather than sums of accumulators.
    """

    parts: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.parts, int) or not 1 <= self.parts <= 64:
            raise TileError(f"SplitK(parts={self.parts!r}): must be 1 to 64")

    @property
    def splits(self) -> bool:  # type: ignore[override]
        return self.parts > 1

    @property
    def fixed_parts(self) -> int:  # type: ignore[override]
        return self.parts

    def units(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        return tasks * self.parts

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        return SplitPlan((0, tasks), self.parts * tasks)

    def _parts(self, t: Trace, numbers: list[Any]) -> Any:
        return t.scalar(self.parts)


@dataclass(frozen=True)
class SplitTail(_Split):
    """Whole tasks while they fill the device; each of the last, incomplete round in as many equal parts (see `SplitK`) as the device has room for.

    Blocks that work at the same time are at the same depth of neighbouring tiles and share them in L2, which stream-K's are not.
    """

    splits: ClassVar[bool] = True

    def split(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> tuple[int, int]:
        """(tasks that are done whole, parts of each of the others) where `slots` blocks run at once. Behind whole rounds `MOST_TAIL_PARTS` at most: the last of
        a task's parts reads them all, which takes longer than more of them spare (GEMM 8192³ on the H200: a tail of 4 tasks)."""
        whole = tasks // slots * slots
        return whole, max(1, min(MOST_TAIL_PARTS if whole else slots, slots // max(1, tasks - whole)))

    def units(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        whole, parts = self.split(tasks, slots, blocks_per_sm)
        return whole + (tasks - whole) * parts

    def blocks(self, units: int, slots: int) -> int:
        return min(units, slots)

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        whole, each = self.split(tasks, slots, blocks_per_sm)
        return SplitPlan((whole, tasks, each), (tasks - whole) * each)

    def _parts(self, t: Trace, numbers: list[Any]) -> Any:
        return numbers[0]


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

    splits: ClassVar[bool] = True
    whole_tasks: ClassVar[bool] = False
    may_have_one_tile_per_block: ClassVar[bool] = False
    slots_per_part: ClassVar[int] = 2
    sums_per_block: ClassVar[int] = 2

    def blocks(self, units: int, slots: int) -> int:
        return slots if units % slots else min(units, slots)

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        """As many whole rounds as leave between one and two rounds to be dealt out evenly."""
        blocks = max(1, blocks)
        whole = tasks if tasks % blocks == 0 else max(0, tasks // blocks - 1) * blocks
        return SplitPlan((whole, tasks), self.sums_per_block * blocks)

    def first(self, t: Trace, ctx: Any, A: Any) -> Any:
        block, blocks, whole, _, _, steps = _stream(t, ctx, A)
        return t.call(_stream_first, block, blocks, whole, steps)

    def next(self, t: Trace, ctx: Any, A: Any, unit: Any, work: Any) -> Any:
        block, blocks, whole, _, _, steps = _stream(t, ctx, A)
        return t.call(_stream_next, unit, work.count, block, blocks, whole, steps)

    def tile(self, t: Trace, ctx: Any, A: Any, unit: Any) -> struct:
        index, begin, count, valid, parts, part, slot, late = t.call(_stream_part, unit, *_stream(t, ctx, A))
        info = setup(t, ctx, index)
        shared = {"begin": begin, "count": count, "parts": parts, "part": part, "slot": slot, "late": late}
        return struct(**{**info.fields, "valid": valid, "task": index, **shared})


@triton.jit
def _holder(step, blocks, steps):
    """The block that has a step."""
    each = steps // blocks
    edge = steps % blocks * (each + 1)
    return tl.where(step < edge, step // (each + 1), steps % blocks + (step - edge) // tl.maximum(each, 1))


@triton.jit
def _stream_first(block, blocks, whole, steps):
    return tl.where(block < whole, block, whole + deal(block, blocks, steps))


@triton.jit
def _stream_next(unit, count, block, blocks, whole, steps):
    behind = unit + blocks
    return tl.where(unit < whole, tl.where(behind < whole, behind, whole + deal(block, blocks, steps)), unit + tl.maximum(count, 1))


@triton.jit
def _stream_part(unit, block, blocks, whole, tasks, iterations, steps):
    """(task, begin, count, valid, parts, part, slot, late) of a unit: a whole task below `whole`, above it `whole` plus a step of the rest."""
    depth = tl.maximum(iterations, 1)
    is_part = unit >= whole
    step = unit - whole
    tile = step // depth
    start = tile * depth
    end = deal(block + 1, blocks, steps)
    begin = tl.where(is_part, step - start, 0)
    count = tl.where(is_part, tl.minimum(iterations - begin, end - step), iterations)
    valid = tl.where(is_part, step < end, unit < tasks)
    first = _holder(start, blocks, steps)
    parts = tl.where(is_part, _holder(start + depth - 1, blocks, steps) - first + 1, 1)
    late = tl.where(deal(first, blocks, steps) < start, 1, 0)
    return tl.where(is_part, whole + tile, unit), begin, count, valid, parts, block - first, 2 * first, late


@triton.jit
def iterations_of(part, parts, iterations):
    """(first, number) of the iterations of a part. The block of a whole task does not divide (see `_tail_part`)."""
    begin, count = 0, iterations
    if parts > 1:
        begin = part * iterations // parts
        count = (part + 1) * iterations // parts - begin
    return begin, count


@triton.jit
def _steps(tasks, whole, iterations):
    return (tasks - whole) * tl.maximum(iterations, 1)  # a task of no iterations is a step too: somebody must finish it


@triton.jit
def _tail_part(unit, whole, tasks, parts):
    """(task, parts, part, first slot, valid) of a unit: a whole task below `whole`, behind it the first parts of all others, then their second, …: blocks side
    by side work on neighbouring tiles at the same depth, and L2 answers them together. What a block divides here keeps its first copy waiting: where its task
    is a whole one, nothing."""
    task, shared, part, slot = unit, 1, 0, 0
    if unit >= whole:
        tail, split = unit - whole, tl.maximum(tasks - whole, 1)
        part = tail // split
        nth = tail - part * split
        task, shared, slot = whole + nth, parts, nth * parts
    return task, shared, part, slot, part < parts


def _stream(t: Trace, ctx: Any, A: Any) -> tuple[Any, ...]:
    """(block, blocks, whole tasks, all tasks, iterations of a task, steps of the tasks that are shared)."""
    cluster = unwrap(ctx.config).cluster_size
    whole, tasks = extra(ctx.config, A)[2:4]
    iterations = setup(t, ctx, t.scalar(0)).iterations
    steps = t.call(_steps, tasks, whole, iterations)
    return t.call(_block, cluster), t.call(_blocks, cluster), whole, tasks, iterations, steps


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
