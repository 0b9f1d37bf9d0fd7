"""The units of work that a block of a template walks over: whole tasks, or parts of them where the schedule splits tasks between blocks."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import numbers_of, struct
from tritonkittens.lang.register.compiler_hints import opaque_zero
from tritonkittens.lang.schedule.index import deal
from tritonkittens.lang.schedule.policies import ClusterSplitK, SplitK, SplitTail, StreamK

# What else the context of a hook holds
RESERVED = {"globals", "args", "config", "task", "iterations", "valid", "iter", "consumer", "worker", "rank", "scratch", "common", "deferred", "working",
            "exchange", "accumulators", "sending", "begin", "count", "parts", "part", "slot", "late", "fetched", "entries", "edge"}


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


def _setup(t: Trace, ctx: Any, index: Any) -> Any:
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
def _iterations_of(part, parts, iterations):
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


@op
def nothing_of(t: Trace, work: Any) -> Any:
    """Zero, made of all numbers of the work of a unit: who has it has computed them."""
    found = t.call(opaque_zero)
    mixed = t.scalar(0)
    for number in numbers_of(work):
        if number.dtype == tl.int32:
            mixed = t.method(mixed, "__or__", number)
    return t.method(mixed, "__and__", found)


def _stream(t: Trace, ctx: Any, A: Any) -> tuple[Any, ...]:
    """(block, blocks, whole tasks, all tasks, iterations of a task, steps of the tasks that are shared)."""
    cluster = unwrap(ctx.config).cluster_size
    whole, tasks = extra(ctx.config, A)[2:4]
    iterations = _setup(t, ctx, t.scalar(0)).iterations
    steps = t.call(_steps, tasks, whole, iterations)
    return t.call(_block, cluster), t.call(_blocks, cluster), whole, tasks, iterations, steps


@op
def first_unit(t: Trace, ctx: Any, A: Any) -> Any:
    """The number of the first unit of this block."""
    config = unwrap(ctx.config)
    if isinstance(config.schedule, StreamK):
        block, blocks, whole, _, _, steps = _stream(t, ctx, A)
        return t.call(_stream_first, block, blocks, whole, steps)
    return t.call(_block, config.cluster_size)


@op
def next_unit(t: Trace, ctx: Any, A: Any, unit: Any, work: Any) -> Any:
    """The number of this block's unit behind `unit`, whose `work` says how much of a shared task it was."""
    config = unwrap(ctx.config)
    if config.single:
        return unit
    if isinstance(config.schedule, StreamK):
        block, blocks, whole, _, _, steps = _stream(t, ctx, A)
        return t.call(_stream_next, unit, work.count, block, blocks, whole, steps)
    return t.method(unit, "__add__", t.call(_blocks, config.cluster_size))


@op
def work_of(t: Trace, ctx: Any, A: Any, unit: Any) -> Any:
    """What unit number `unit` is: the fields of its task, the iterations `begin` … `begin` + `count` of it, and who shares it."""
    schedule = unwrap(ctx.config).schedule
    if isinstance(schedule, StreamK):
        index, begin, count, valid, parts, part, slot, late = t.call(_stream_part, unit, *_stream(t, ctx, A))
        info = _setup(t, ctx, index)
        shared = {"begin": begin, "count": count, "parts": parts, "part": part, "slot": slot, "late": late}
        return struct(**{**info.fields, "valid": valid, "task": index, **shared})
    if isinstance(schedule, (SplitK, SplitTail)):
        whole, tasks, *each = extra(ctx.config, A)[2:]
        index, parts, part, slot, valid = t.call(_tail_part, unit, whole, tasks, t.scalar(schedule.parts) if isinstance(schedule, SplitK) else each[0])
        info = _setup(t, ctx, index)
        begin, count = t.call(_iterations_of, part, parts, info.iterations)
        shared = {"begin": begin, "count": count, "parts": parts, "part": part, "slot": slot, "late": t.scalar(0)}
        return struct(**{**info.fields, "valid": t.method(info.valid, "__and__", valid), "task": index, **shared})
    info = _setup(t, ctx, unit)
    begin, count = t.scalar(0), info.iterations
    if isinstance(schedule, ClusterSplitK):
        begin, count = t.call(_iterations_of, ctx.part, t.scalar(schedule.parts), info.iterations)
    return struct(**{**info.fields, "task": unit, "begin": begin, "count": count})


@op
def work_behind(t: Trace, ctx: Any, A: Any, work: Any, following: Any) -> Any:
    """What unit number `following` is, behind the one of this `work`: none, where a block has one at most. The compiler then leaves the loop out, and nobody
    divides behind a task's last iteration."""
    if unwrap(ctx.config).single:
        return struct(**{**work.fields, "valid": t.method(t.scalar(0), "to", tl.int1)})
    return t.call(work_of, ctx, A, following)


@op
def some_work(t: Trace, ctx: Any, A: Any) -> Any:
    """A work that has the fields of any unit's, for those who need nothing else of it: what computes its numbers is then dead code."""
    return t.call(work_of, ctx, A, t.scalar(0))
