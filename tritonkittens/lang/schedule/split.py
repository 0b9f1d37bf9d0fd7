"""Tile schedulers that split tasks between CTAs: split-K, split tails, stream-K. `schedule/split_k.py` joins
the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.schedule.index import first_step
from tritonkittens.lang.schedule.tile_scheduler import Schedule, SplitPlan, _block, _blocks, extra, setup

MOST_TAIL_PARTS, MOST_REST_PARTS = 4, 8


class _Split(Schedule):
    """Base of the schedulers with whole tasks below a number, and equal parts of the other tasks after it, ordered by
    part.
    """

    whole_tasks: ClassVar[bool] = False

    def _parts(self, t: Trace, numbers: list[Traced]) -> Traced:
        """Return the parts of a split task."""
        raise NotImplementedError

    def tile(self, t: Trace, ctx: Traced, A: Traced, index: Traced) -> struct:
        if not self.splits:
            return super().tile(t, ctx, A, index)
        whole, tasks, *numbers = extra(ctx.config, A)[2:]
        index, parts, part, slot, is_valid = t.call(_tail_part, index, whole, tasks, self._parts(t, numbers))
        info = setup(t, ctx, index)
        begin, count = t.call(iterations_of, part, parts, info.iterations)
        shared = {"begin": begin, "count": count, "parts": parts, "part": part, "slot": slot, "late": t.scalar(0)}
        return struct(
            **{**info.fields, "is_valid": t.method(info.is_valid, "__and__", is_valid), "task_id": index, **shared}
        )


@dataclass(frozen=True)
class SplitK(_Split):
    """Split every task's iterations into `parts` equal parts (1 … 64), each scheduled like a task.

    It fits launches of few tasks. The last part to finish sums all accumulators in fp32 in a fixed order, so results
    do not change from run to run. With hooks `part` and `merge`, it merges their results instead.
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

    def work_tiles(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        return tasks * self.parts

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        return SplitPlan((0, tasks), self.parts * tasks)

    def _parts(self, t: Trace, numbers: list[Traced]) -> Traced:
        return t.scalar(self.parts)


@dataclass(frozen=True)
class SplitTail(_Split):
    """Schedule whole tasks for full rounds, and split the tasks of the last, incomplete round into equal parts; see
    `SplitK`.

    The last round has as many parts as fill the device, after whole rounds at most four of a task. Concurrent CTAs
    read the same range of K of neighbouring tiles and share it in L2, unlike stream-K's.
    """

    splits: ClassVar[bool] = True

    def split(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> tuple[int, int]:
        """Return (whole tasks, parts of each other task) where `slots` CTAs run at once.

        After whole rounds there are at most `MOST_TAIL_PARTS`: the last part of a task reads all others (measured:
        docs/notes/gemm.md).
        """
        whole = tasks // slots * slots
        return whole, max(1, min(MOST_TAIL_PARTS if whole else slots, slots // max(1, tasks - whole)))

    def work_tiles(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        whole, parts = self.split(tasks, slots, blocks_per_sm)
        return whole + (tasks - whole) * parts

    def blocks(self, work_tiles: int, slots: int) -> int:
        return min(work_tiles, slots)

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        whole, each = self.split(tasks, slots, blocks_per_sm)
        return SplitPlan((whole, tasks, each), (tasks - whole) * each)

    def _parts(self, t: Trace, numbers: list[Traced]) -> Traced:
        return numbers[0]


@dataclass(frozen=True)
class SplitRest(SplitTail):
    """One round with equal work on every SM: equally many whole tasks, and the remaining tasks in equal
    parts; see `SplitK`.

    There are as many parts as SMs allow, next to the whole tasks, so `blocks_per_sm` must exceed the
    whole tasks. It fits memory-bound tasks, which the CTAs of an SM read at the same time.
    """

    def split(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> tuple[int, int]:
        """Return (whole tasks, parts of each other task). There are at most `MOST_REST_PARTS`, and no SM
        gets two parts.
        """
        multiprocessors = max(1, slots // blocks_per_sm)
        whole = tasks // multiprocessors * multiprocessors
        return whole, max(1, min(MOST_REST_PARTS, multiprocessors // max(1, tasks - whole)))


@dataclass(frozen=True)
class StreamK(Schedule):
    """Schedule whole tasks for full rounds, and split the iterations of the last one to two rounds evenly among all
    CTAs.

    CTAs that share a task sum it as in `SplitK`. All tasks must have equally many iterations. Source: Osama et al.
    (2023), "Stream-K", section 5.2.
    """

    splits: ClassVar[bool] = True
    whole_tasks: ClassVar[bool] = False
    may_have_one_tile_per_block: ClassVar[bool] = False
    slots_per_part: ClassVar[int] = 2
    sums_per_block: ClassVar[int] = 2

    def blocks(self, work_tiles: int, slots: int) -> int:
        return slots if work_tiles % slots else min(work_tiles, slots)

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        """Plan as many whole rounds as leave between one and two rounds for the even split."""
        blocks = max(1, blocks)
        whole = tasks if tasks % blocks == 0 else max(0, tasks // blocks - 1) * blocks
        return SplitPlan((whole, tasks), self.sums_per_block * blocks)

    def first(self, t: Trace, ctx: Traced, A: Traced) -> Traced:
        block, blocks, whole, _, _, steps = _stream(t, ctx, A)
        return t.call(_stream_first, block, blocks, whole, steps)

    def next(self, t: Trace, ctx: Traced, A: Traced, index: Traced, tile: Traced) -> Traced:
        block, blocks, whole, _, _, steps = _stream(t, ctx, A)
        return t.call(_stream_next, index, tile.count, block, blocks, whole, steps)

    def tile(self, t: Trace, ctx: Traced, A: Traced, index: Traced) -> struct:
        index, begin, count, is_valid, parts, part, slot, late = t.call(_stream_part, index, *_stream(t, ctx, A))
        info = setup(t, ctx, index)
        shared = {"begin": begin, "count": count, "parts": parts, "part": part, "slot": slot, "late": late}
        return struct(**{**info.fields, "is_valid": is_valid, "task_id": index, **shared})


@triton.jit
def _holder(step, blocks, steps):
    """Return the CTA of a step."""
    each = steps // blocks
    edge = steps % blocks * (each + 1)
    return tl.where(step < edge, step // (each + 1), steps % blocks + (step - edge) // tl.maximum(each, 1))


@triton.jit
def _stream_first(block, blocks, whole, steps):
    return tl.where(block < whole, block, whole + first_step(block, blocks, steps))


@triton.jit
def _stream_next(index, count, block, blocks, whole, steps):
    after = index + blocks
    return tl.where(
        index < whole,
        tl.where(after < whole, after, whole + first_step(block, blocks, steps)),
        index + tl.maximum(count, 1),
    )


@triton.jit
def _stream_part(index, block, blocks, whole, tasks, iterations, steps):
    """Map an index to (task, begin, count, is_valid, parts, part, slot, late).

    An index below `whole` is a whole task. A later index is `whole` plus a step of the shared tasks.
    """
    depth = tl.maximum(iterations, 1)
    is_part = index >= whole
    step = index - whole
    tile = step // depth
    start = tile * depth
    end = first_step(block + 1, blocks, steps)
    begin = tl.where(is_part, step - start, 0)
    count = tl.where(is_part, tl.minimum(iterations - begin, end - step), iterations)
    is_valid = tl.where(is_part, step < end, index < tasks)
    first = _holder(start, blocks, steps)
    parts = tl.where(is_part, _holder(start + depth - 1, blocks, steps) - first + 1, 1)
    late = tl.where(first_step(first, blocks, steps) < start, 1, 0)
    return tl.where(is_part, whole + tile, index), begin, count, is_valid, parts, block - first, 2 * first, late


@triton.jit
def iterations_of(part, parts, iterations):
    """Return (first, number) of a part's iterations. The CTA of a whole task skips the division (see
    `_tail_part`)."""
    begin, count = 0, iterations
    if parts > 1:
        begin = part * iterations // parts
        count = (part + 1) * iterations // parts - begin
    return begin, count


@triton.jit
def _steps(tasks, whole, iterations):
    # a task of no iterations is a step too, because a block must run its epilogue
    return (tasks - whole) * tl.maximum(iterations, 1)


@triton.jit
def _tail_part(index, whole, tasks, parts):
    """Map an index to (task, parts, part, first slot, is_valid).

    An index below `whole` is a whole task. After it come the first parts of all other tasks, then their second parts,
    and so on. Neighbouring CTAs then work on the same range of K of neighbouring tiles, and share it in L2.
    A division here delays the CTA's first copy, so a whole task divides nothing.
    """
    task, shared, part, slot = index, 1, 0, 0
    if index >= whole:
        tail, split = index - whole, tl.maximum(tasks - whole, 1)
        part = tail // split
        nth = tail - part * split
        task, shared, slot = whole + nth, parts, nth * parts
    return task, shared, part, slot, part < parts


def _stream(t: Trace, ctx: Traced, A: Traced) -> tuple[Traced, ...]:
    """Return (CTA, CTAs, whole tasks, all tasks, iterations of a task, steps of the shared tasks)."""
    cluster = unwrap(ctx.config).cluster_size
    whole, tasks = extra(ctx.config, A)[2:4]
    iterations = setup(t, ctx, t.scalar(0)).iterations
    steps = t.call(_steps, tasks, whole, iterations)
    return t.call(_block, cluster), t.call(_blocks, cluster), whole, tasks, iterations, steps


@triton.jit
def _stream_k(block, blocks, tiles, iterations):
    total = tiles * iterations
    begin = first_step(block, blocks, total)
    depth = tl.maximum(iterations, 1)
    return begin // depth, begin % depth, first_step(block + 1, blocks, total) - begin


@op
def stream_k(t: Trace, block: Traced, blocks: Traced, tiles: Traced, iterations: Traced) -> Traced:
    """Return (tile, iteration, count): the first step of CTA `block` of `blocks`, and its share of the `tiles` ·
    `iterations` steps.

    The CTA continues through the iterations of the following tiles. A tile that it enters or leaves in the middle
    is summed with its neighbours' parts. Counts differ by at most one. The total must be below 2³¹. All values are
    int32 scalars.
    Source: Osama et al. (2023), "Stream-K".
    """
    return t.call(_stream_k, block, blocks, tiles, iterations)
