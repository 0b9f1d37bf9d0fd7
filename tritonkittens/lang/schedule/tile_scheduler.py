"""Tile schedulers: which task, or which part of one, a thread block (or cluster) computes next.

A scheduler is a small value that a template takes as a knob: `Gemm(schedule=tk.StreamK())`. On the host it says how many work tiles and thread blocks a launch
has, and what they share in global memory; on the device, while a kernel is traced, which work tile a block begins with, which comes next, and what it is.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import numbers_of, struct
from tritonkittens.lang.register.compiler_hints import opaque_zero
from tritonkittens.lang.schedule.index import Knob

# What else the context of a hook holds
RESERVED = {"globals", "args", "config", "task", "iterations", "valid", "iter", "consumer", "worker", "rank", "scratch", "common", "deferred", "working",
            "exchange", "accumulators", "sending", "begin", "count", "parts", "part", "slot", "late", "params", "entries", "edge"}


@op
def task(t: Trace, iterations: Any, when: Any = None, edges: Any = None, **coordinates: Any) -> Any:
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
    return struct(iterations=t.scalar(iterations), valid=t.method(t.scalar(when), "to", tl.int1), edges=edges, **scalars)


class SplitPlan(NamedTuple):
    """How a launch splits its tasks: numbers for the kernel, and partial sums (of one consumer's accumulators) that are in global memory at most."""

    numbers: tuple[int, ...]
    parts: int


@dataclass(frozen=True)
class Schedule(Knob):
    """Base of the tile schedulers, with what a persistent one does."""

    splits: ClassVar[bool] = False  # are parts of a task joined through global memory?
    dynamic: ClassVar[bool] = False  # do thread blocks fetch a task when they need one?
    whole_tasks: ClassVar[bool] = True  # does one thread block compute all of a task?
    may_have_one_tile_per_block: ClassVar[bool] = True  # may a launch have a thread block for every work tile?
    single: ClassVar[bool] = False  # does it always?
    cluster_parts: ClassVar[int] = 1  # thread blocks of a cluster that share a task's iterations
    fixed_parts: ClassVar[int] = 0  # parts of every task, where that is a constant
    slots_per_part: ClassVar[int] = 1  # partial sums that a part may be found in
    sums_per_block: ClassVar[int] = 0  # partial sums of each thread block, where their number follows from the grid
    alone: ClassVar[str] = ""  # why it needs cluster=1 and pingpong=False, where it does

    def units(self, tasks: int, slots: int, blocks_per_sm: int = 1) -> int:
        """How many work tiles there are where `slots` thread blocks (clusters) run at once."""
        return tasks

    def blocks(self, units: int, slots: int) -> int:
        """How many thread blocks (clusters) a launch has: only as many as keep the number of rounds, so that every round is equally full."""
        rounds = max(1, -(-units // slots))
        return -(-units // rounds)

    def plan(self, tasks: int, blocks: int, slots: int, blocks_per_sm: int) -> SplitPlan:
        """How `tasks` are split, of schedulers that do."""
        raise NotImplementedError

    def conflict(self, cluster: int, pingpong: bool) -> str | None:
        """Why a template cannot have this scheduler with these knobs, if it cannot."""
        return f"{self.alone}; that needs cluster=1 and pingpong=False" if self.alone and (cluster > 1 or independent) else None

    # ------------------------------------------------------------ on the device

    def first(self, t: Trace, ctx: Any, A: Any) -> Any:
        """The number of this block's first work tile."""
        return t.call(_block, unwrap(ctx.config).cluster_size)

    def next(self, t: Trace, ctx: Any, A: Any, unit: Any, work: Any) -> Any:
        """The number of the work tile behind `unit`, whose `work` says how much of a task it was."""
        return t.method(unit, "__add__", t.call(_blocks, unwrap(ctx.config).cluster_size))

    def tile(self, t: Trace, ctx: Any, A: Any, unit: Any) -> struct:
        """Work tile number `unit`: the fields of its task, the iterations `begin` … `begin` + `count` of it, and who shares it."""
        info = setup(t, ctx, unit)
        return struct(**{**info.fields, "task": unit, "begin": t.scalar(0), "count": info.iterations})


@dataclass(frozen=True)
class OnePerBlock(Schedule):
    """A thread block for every task: the hardware schedules them, and a block's end overlaps with nothing of its own."""

    single: ClassVar[bool] = True

    def blocks(self, units: int, slots: int) -> int:
        return units


@dataclass(frozen=True)
class Persistent(Schedule):
    """As many thread blocks as run at once, each taking every so-many-th task: what one task ends with overlaps with the loads of the next."""


def setup(t: Trace, ctx: Any, index: Any) -> struct:
    """What hook `setup` says of task number `index`."""
    info = t.call(type(unwrap(ctx.config)).setup, struct(**{**ctx.fields, "task": index}))
    if not isinstance(info, struct) or "iterations" not in info.fields:
        raise TileError(f"{type(unwrap(ctx.config)).__name__}.setup must return tk.task(iterations, …)")
    return info


def extra(T: Any, A: Any) -> list[Any]:
    """What the host adds to the arguments where tasks are split: partial sums, counters, whole tasks, all tasks, and parts (split tails); where they are drawn:
    counters."""
    return list(A)[len(unwrap(T)._plan.args):]


@triton.jit
def _block(CLUSTER: tl.constexpr):
    return tl.program_id(0) // CLUSTER


@triton.jit
def _blocks(CLUSTER: tl.constexpr):
    return tl.num_programs(0) // CLUSTER


@op
def nothing_of(t: Trace, work: Any) -> Any:
    """Zero, made of all numbers of the work of a unit: who has it has computed them."""
    found = t.call(opaque_zero)
    mixed = t.scalar(0)
    for number in numbers_of(work):
        if number.dtype == tl.int32:
            mixed = t.method(mixed, "__or__", number)
    return t.method(mixed, "__and__", found)


@op
def first_unit(t: Trace, ctx: Any, A: Any) -> Any:
    """The number of the first work tile of this block."""
    return unwrap(ctx.config).schedule.compute_first(t, ctx, A)


@op
def next_unit(t: Trace, ctx: Any, A: Any, unit: Any, work: Any) -> Any:
    """The number of this block's work tile behind `unit`."""
    config = unwrap(ctx.config)
    return unit if config.one_tile_per_block else config.schedule.next(t, ctx, A, unit, work)


@op
def work_of(t: Trace, ctx: Any, A: Any, unit: Any) -> Any:
    """Work tile number `unit`, see `Schedule.tile`."""
    return unwrap(ctx.config).schedule.tile(t, ctx, A, unit)


@op
def work_behind(t: Trace, ctx: Any, A: Any, work: Any, following: Any) -> Any:
    """What unit number `following` is, behind the one of this `work`: none, where a block has one at most. The compiler then leaves the loop out, and nobody
    divides behind a task's last iteration."""
    if unwrap(ctx.config).one_tile_per_block:
        return struct(**{**work.fields, "valid": t.method(t.scalar(0), "to", tl.int1)})
    return t.call(work_of, ctx, A, following)


@op
def some_work(t: Trace, ctx: Any, A: Any) -> Any:
    """A work that has the fields of any unit's, for those who need nothing else of it: what computes its numbers is then dead code."""
    return t.call(work_of, ctx, A, t.scalar(0))
