"""Tile schedulers: which task, or which part of one, a thread block (or cluster) computes next.

A scheduler is a small value that a template takes as a knob: `Gemm(schedule=tk.StreamK())`. On the host it says how many work tiles and thread blocks a launch
has, and what they share in global memory; on the device, while a kernel is traced, which work tile a block begins with, which comes next, and what it is.
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

# What else the context of a hook holds
RESERVED = {"globals", "args", "config", "task_id", "task", "late_task", "iterations", "is_valid", "iter", "consumer", "worker", "rank", "scratch", "exchange",
            "accumulators", "reducing", "begin", "count", "parts", "part", "slot", "late", "params", "page_indices", "edge"}


@op
def task(t: Trace, /, iterations: Traced, when: Traced = None, edges: Traced = None, **coordinates: Traced) -> Traced:
    """What `setup` returns: the number of `iterations` (0 or more) of this task and its coordinates, scalars and records of them, which better are constants
    where they are the same in every task. A false `when` ends the loop over tasks. `edges`: how many iterations, from the first on, differ from the others (in
    attention: mask), where that is known, a number of the task or the constant 0 or 1, written in place, for a variable is a number of the task; see `ctx.edge`
    of `lcf`."""
    if unwrap(when) is None:
        raise TileError("task(iterations): give `when`, false past the last task; without it the loop over tasks never ends")
    clash = set(coordinates) & RESERVED
    if clash:
        raise TileError(f"task({', '.join(clash)}=…): reserved names of the context")
    scalars = {n: v if isinstance(v, struct) or isinstance(unwrap(v), int) else t.scalar(v) for n, v in coordinates.items()}
    if isinstance(unwrap(edges), int):
        if unwrap(edges) not in (0, 1):
            raise TileError(f"task(edges={unwrap(edges)}): as a constant it is 0 or 1, else a number of the task")
    elif unwrap(edges) is not None:
        edges = t.scalar(edges)
    return struct(iterations=t.scalar(iterations), is_valid=t.method(t.scalar(when), "to", tl.int1), edges=edges, **scalars)


class SplitPlan(NamedTuple):
    """How a launch splits its tasks: numbers for the kernel, and partial sums (of one consumer's accumulators) that are in global memory at most."""

    numbers: tuple[int, ...]
    parts: int


@dataclass(frozen=True)
class Schedule(Knob):
    """Base of the tile schedulers, with what a persistent one does."""

    splits: ClassVar[bool] = False  # are parts of a task joined through global memory?
    dynamic: ClassVar[bool] = False  # does a thread block fetch its next task from a counter?
    whole_tasks: ClassVar[bool] = True  # does one thread block compute all of a task?
    may_have_one_tile_per_block: ClassVar[bool] = True  # may a launch have a thread block for every work tile?
    one_tile_per_block: ClassVar[bool] = False  # does it always?
    cluster_parts: ClassVar[int] = 1  # thread blocks of a cluster that share a task's iterations
    fixed_parts: ClassVar[int] = 0  # parts of every task, where that is a constant
    slots_per_part: ClassVar[int] = 1  # partial sums that a part may be found in
    sums_per_block: ClassVar[int] = 0  # partial sums of each thread block, where their number follows from the grid
    alone: ClassVar[str] = ""  # why it needs cluster=1 and pingpong=False, where it does

    def work_tiles(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        """How many work tiles there are where `slots` thread blocks (clusters) run at once."""
        return tasks

    def blocks(self, work_tiles: int, slots: int) -> int:
        """How many thread blocks (clusters) a launch has: only as many as keep the number of rounds, so that every round is equally full."""
        rounds = max(1, -(-work_tiles // slots))
        return -(-work_tiles // rounds)

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        """How `tasks` are split, of schedulers that do."""
        raise NotImplementedError

    def conflict(self, cluster: int, pingpong: bool) -> str | None:
        """Why a template cannot have this scheduler with these knobs, if it cannot."""
        return f"{self.alone}; that needs cluster=1 and pingpong=False" if self.alone and (cluster > 1 or pingpong) else None

    # ------------------------------------------------------------ on the device

    def first(self, t: Trace, ctx: Traced, A: Traced) -> Traced:
        """The index of this thread block's first work tile."""
        return t.call(_block, unwrap(ctx.config).cluster_size)

    def next(self, t: Trace, ctx: Traced, A: Traced, index: Traced, tile: Traced) -> Traced:
        """The index of the work tile after `index`; `tile` says how much of a task that one is."""
        return t.method(index, "__add__", t.call(_blocks, unwrap(ctx.config).cluster_size))

    def tile(self, t: Trace, ctx: Traced, A: Traced, index: Traced) -> struct:
        """Work tile number `index`: the fields of its task, its iterations `begin` … `begin` + `count`, and which thread blocks share the task."""
        info = setup(t, ctx, index)
        return struct(**{**info.fields, "task_id": index, "begin": t.scalar(0), "count": info.iterations})


@dataclass(frozen=True)
class OnePerBlock(Schedule):
    """A thread block for every task: the hardware schedules them, and a block's end overlaps with nothing of its own."""

    one_tile_per_block: ClassVar[bool] = True

    def blocks(self, work_tiles: int, slots: int) -> int:
        return work_tiles


@dataclass(frozen=True)
class Persistent(Schedule):
    """As many thread blocks as run at once, each taking every so-many-th task: what one task ends with overlaps with the loads of the next."""


def setup(t: Trace, ctx: Traced, index: Traced) -> struct:
    """What hook `setup` returns for task number `index`."""
    info = t.call(type(unwrap(ctx.config)).setup, struct(**{**ctx.fields, "task_id": index}))
    if not isinstance(info, struct) or "iterations" not in info.fields:
        raise TileError(f"{type(unwrap(ctx.config)).__name__}.setup must return tk.task(iterations, …)")
    return info


def extra(T: Any, A: Any) -> list[Any]:
    """What the host adds to the arguments where tasks are split: partial sums, counters, whole tasks, all tasks, and parts (split tails); with a dynamic schedule:
    counters."""
    return list(A)[len(unwrap(T)._plan.args):]


@triton.jit
def _block(CLUSTER: tl.constexpr):
    return tl.program_id(0) // CLUSTER


@triton.jit
def _blocks(CLUSTER: tl.constexpr):
    return tl.num_programs(0) // CLUSTER


@op
def depends_on(t: Trace, tile: Traced) -> Traced:
    """Zero, computed from all numbers of a work tile: who has it has computed them."""
    found = t.call(opaque_zero)
    mixed = t.scalar(0)
    for number in numbers_of(tile):
        if number.dtype == tl.int32:
            mixed = t.method(mixed, "__or__", number)
    return t.method(mixed, "__and__", found)


@op
def first_index(t: Trace, ctx: Traced, A: Traced) -> Traced:
    """The index of this thread block's first work tile."""
    return unwrap(ctx.config).schedule.first(t, ctx, A)


@op
def next_index(t: Trace, ctx: Traced, A: Traced, index: Traced, tile: Traced) -> Traced:
    """The index of this thread block's work tile after `index`."""
    config = unwrap(ctx.config)
    return index if config.one_tile_per_block else config.schedule.next(t, ctx, A, index, tile)


@op
def work_tile(t: Trace, ctx: Traced, A: Traced, index: Traced) -> Traced:
    """Work tile number `index`, see `Schedule.tile`."""
    return unwrap(ctx.config).schedule.tile(t, ctx, A, index)


@op
def tile_after(t: Trace, ctx: Traced, A: Traced, tile: Traced, following: Traced) -> Traced:
    """Work tile number `following`, which comes after `tile`; with `one_tile_per_block` an invalid one. The compiler then leaves the loop out, and no division
    follows a task's last iteration."""
    if unwrap(ctx.config).one_tile_per_block:
        return struct(**{**tile.fields, "is_valid": t.method(t.scalar(0), "to", tl.int1)})
    return t.call(work_tile, ctx, A, following)


@op
def any_tile(t: Trace, ctx: Traced, A: Traced) -> Traced:
    """A work tile of which only the fields matter: the code that computes its numbers is dead."""
    return t.call(work_tile, ctx, A, t.scalar(0))
