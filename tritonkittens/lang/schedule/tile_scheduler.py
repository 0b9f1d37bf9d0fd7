"""Tile schedulers: they choose the task, or the part of one, that a CTA (or cluster) computes next.

A scheduler is a small value that a template takes as a knob: `Gemm(schedule=tk.StreamK())`.
On the host it gives the number of work tiles and CTAs of a launch, and their shared global memory. On the
device, while a kernel is traced, it gives a CTA's first work tile, the next one, and the work tile of an index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import numbers_of, struct
from tritonkittens.lang.register.compiler_hints import opaque_zero
from tritonkittens.lang.schedule.index import Knob

# Fields of a hook's context that are no coordinates
RESERVED = {
    "globals",
    "args",
    "config",
    "task_id",
    "task",
    "late_task",
    "iterations",
    "is_valid",
    "iter",
    "consumer",
    "block_consumer",
    "rank",
    "scratch",
    "exchange",
    "accumulators",
    "reducing",
    "begin",
    "count",
    "parts",
    "part",
    "slot",
    "late",
    "params",
    "page_indices",
    "edge",
}


@op
def task(t: Trace, /, iterations: Traced, when: Traced = None, edges: Traced = None, **coordinates: Traced) -> Traced:
    """Return the result of hook `setup`: one task's iterations and coordinates.

    Args:
        iterations: an int32 scalar, 0 or more.
        when: a condition. False ends the loop over tasks.
        edges: the iterations, from the first on, that differ from the others (in attention: that mask). Give an int32
            scalar, or 0 or 1 written in place; a variable becomes an int32 scalar. See `ctx.edge` of `lcf`.
        coordinates: scalars and records of them. Use constants where all tasks have the same value.

    Raises:
        TileError: without `when`, for a reserved name, or for another constant as `edges`.

    Example::

        return tk.task(iterations=K // 64, when=ctx.task_id < tiles, row=row, col=col)
    """
    if unwrap(when) is None:
        raise TileError(
            "task(iterations): give `when`, false past the last task; without it the loop over tasks never ends"
        )
    if clash := sorted(RESERVED.intersection(coordinates)):
        raise TileError(
            f"task({', '.join(clash)}=…): reserved names of the context; these are {', '.join(sorted(RESERVED))}"
        )
    scalars = {
        n: v if isinstance(v, struct) or isinstance(unwrap(v), int) else t.scalar(v) for n, v in coordinates.items()
    }
    if isinstance(unwrap(edges), int):
        if unwrap(edges) not in (0, 1):
            raise TileError(f"task(edges={unwrap(edges)}): as a constant it is 0 or 1, else a number of the task")
    elif unwrap(edges) is not None:
        edges = t.scalar(edges)
    return struct(
        iterations=t.scalar(iterations), is_valid=t.method(t.scalar(when), "to", tl.int1), edges=edges, **scalars
    )


class SplitPlan(NamedTuple):
    """A launch's split of its tasks: the numbers that the kernel receives, and the most partial sums (of one
    consumer's accumulators) in global memory.
    """

    numbers: tuple[int, ...]
    parts: int


@dataclass(frozen=True)
class Schedule(Knob):
    """Base of the tile schedulers; its methods are those of a persistent scheduler."""

    splits: ClassVar[bool] = False  # whether parts of a task are joined through global memory
    dynamic: ClassVar[bool] = False  # whether a CTA's producer fetches its next task, and broadcasts it
    counters: ClassVar[int] = 0  # counters in global memory from which CTAs fetch tasks
    one_cta_per_task: ClassVar[bool] = False  # whether a launch must have a CTA (cluster) for every task
    whole_tasks: ClassVar[bool] = True  # whether one CTA computes all of a task
    may_have_one_tile_per_block: ClassVar[bool] = True  # whether a launch may have a CTA for every work tile
    one_tile_per_block: ClassVar[bool] = False  # whether every launch has a CTA for every work tile
    cluster_parts: ClassVar[int] = 1  # CTAs of a cluster that share a task's iterations
    fixed_parts: ClassVar[int] = 0  # parts of every task, where that is a constant
    slots_per_part: ClassVar[int] = 1  # slots that may hold a part
    sums_per_block: ClassVar[int] = 0  # partial sums of each CTA, where their number follows from the grid
    alone: ClassVar[str] = ""  # the reason for cluster=1 and pingpong=False, where it needs them

    def work_tiles(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        """Return the number of work tiles where `slots` CTAs (clusters) run at once."""
        return tasks

    def blocks(self, work_tiles: int, slots: int) -> int:
        """Return the number of CTAs (clusters) of a launch: the fewest with the same number of rounds, so
        rounds are equally full.
        """
        rounds = max(1, -(-work_tiles // slots))
        return -(-work_tiles // rounds)

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        """Plan the split of `tasks`, for schedulers that split."""
        raise NotImplementedError

    def conflict(self, cluster: int, pingpong: bool) -> str | None:
        """Return the reason why a template cannot combine this scheduler with these knobs, or None."""
        return (
            f"{self.alone}; that needs cluster=1 and pingpong=False"
            if self.alone and (cluster > 1 or pingpong)
            else None
        )

    # ------------------------------------------------------------ on the device

    def first(self, t: Trace, ctx: Traced, A: Traced) -> Traced:
        """Return the index of this CTA's first work tile."""
        return t.call(_block, unwrap(ctx.config).cluster_size)

    def next(self, t: Trace, ctx: Traced, A: Traced, index: Traced, tile: Traced) -> Traced:
        """Return the index of the work tile after `index`. `tile` is the work tile of `index`."""
        return t.method(index, "__add__", t.call(_blocks, unwrap(ctx.config).cluster_size))

    def memory(self, t: Trace, cluster: int) -> dict[str, Traced]:
        """Allocate what the scheduler keeps in shared memory of clusters of this size, by name."""
        return {}

    def fetch(self, t: Trace, ctx: Traced, memory: Traced, nth: Traced) -> Traced:
        """Return the index of the `nth` work tile that this CTA fetches, where tasks are dynamic."""
        raise NotImplementedError

    def end(self, t: Trace, ctx: Traced) -> None:
        """Note that this CTA fetches no more."""

    def tile(self, t: Trace, ctx: Traced, A: Traced, index: Traced) -> struct:
        """Return work tile number `index`: its task's fields, its iterations `begin` … `begin` + `count` − 1, and the
        CTAs that share the task.
        """
        info = setup(t, ctx, index)
        return struct(**{**info.fields, "task_id": index, "begin": t.scalar(0), "count": info.iterations})


@dataclass(frozen=True)
class OnePerBlock(Schedule):
    """One CTA for every task. The hardware schedules the CTAs; a task's epilogue overlaps only with other
    CTAs.
    """

    one_tile_per_block: ClassVar[bool] = True

    def blocks(self, work_tiles: int, slots: int) -> int:
        return work_tiles


@dataclass(frozen=True)
class Persistent(Schedule):
    """As many CTAs as run at once; each takes every n-th task. A task's epilogue overlaps with the next
    task's loads.
    """


def setup(t: Trace, ctx: Traced, index: Traced) -> struct:
    """Return the result of hook `setup` for task number `index`."""
    template = type(unwrap(ctx.config))
    info = t.call(template.setup, struct(**{**ctx.fields, "task_id": index}))
    if not isinstance(info, struct) or "iterations" not in info.fields:
        raise TileError(f"{template.__name__}.setup must return tk.task(iterations, …)").of(template.setup)
    return info


def extra(T: Any, A: Any) -> list[Any]:
    """Return the arguments that the host adds.

    Where tasks are split: partial sums, counters, whole tasks, all tasks, and parts (split tails). With a dynamic
    schedule: counters.
    """
    return list(A)[len(unwrap(T)._plan.args) :]


@triton.jit
def _block(CLUSTER: tl.constexpr):
    return tl.program_id(0) // CLUSTER


@triton.jit
def _blocks(CLUSTER: tl.constexpr):
    return tl.num_programs(0) // CLUSTER


@op
def depends_on(t: Trace, tile: Traced) -> Traced:
    """Return a zero computed from all numbers of a work tile, to force their computation."""
    found = t.call(opaque_zero)
    mixed = t.scalar(0)
    for number in numbers_of(tile):
        if number.dtype == tl.int32:
            mixed = t.method(mixed, "__or__", number)
    return t.method(mixed, "__and__", found)


@op
def first_index(t: Trace, ctx: Traced, A: Traced) -> Traced:
    """Return the index of this CTA's first work tile."""
    return unwrap(ctx.config).schedule.first(t, ctx, A)


@op
def next_index(t: Trace, ctx: Traced, A: Traced, index: Traced, tile: Traced) -> Traced:
    """Return the index of this CTA's work tile after `index`."""
    config = unwrap(ctx.config)
    return index if config.one_tile_per_block else config.schedule.next(t, ctx, A, index, tile)


@op
def work_tile(t: Trace, ctx: Traced, A: Traced, index: Traced) -> Traced:
    """Return work tile number `index`; see `Schedule.tile`."""
    return unwrap(ctx.config).schedule.tile(t, ctx, A, index)


@op
def tile_after(t: Trace, ctx: Traced, A: Traced, tile: Traced, following: Traced) -> Traced:
    """Return work tile number `following`, the one after `tile`; with `one_tile_per_block` an invalid one.

    The compiler then removes the loop, and no division follows a task's last iteration.
    """
    if unwrap(ctx.config).one_tile_per_block:
        return struct(**{**tile.fields, "is_valid": t.method(t.scalar(0), "to", tl.int1)})
    return t.call(work_tile, ctx, A, following)


@op
def any_tile(t: Trace, ctx: Traced, A: Traced) -> Traced:
    """Return a work tile of which only the fields matter: the code for its numbers is dead."""
    return t.call(work_tile, ctx, A, t.scalar(0))
