"""What the hooks of a template see: the context of a task, of an iteration, of a consumer."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.register.compiler_hints import opaque_zero
from tritonkittens.lang.schedule.tile_scheduler import extra
from tritonkittens.lang.sync.cluster import cluster_rank
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.storage import block_task_tiles, block_tasks, in_slot
from tritonkittens.lang.types.tiles import by_rows


@op
def new_context(t: Trace, G: Traced, A: Traced, T: Traced) -> Traced:
    """What all hooks see before `setup` has said what the task is."""
    plan, args = unwrap(T)._plan, dict(zip(unwrap(T)._plan.args, A, strict=False))
    tensors = {}
    for (name, tiles), g in zip(plan.globals, G, strict=True):
        tensors[name] = (
            g
            if not tiles
            else struct(
                maps=g.maps,
                pointer=g.pointer,
                parameter=g.parameter,
                shape=tl.tuple([]),
                strides=tl.tuple([]),
                **({"ragged": None} if name in plan.ragged else {}),
                **({"even": None} if any(isinstance(tile, by_rows) for tile in tiles) else {}),
            )
        )
    rank = t.call(cluster_rank) if unwrap(T).cluster > 1 else tl.constexpr(0)
    names = ("partials", "counters") if unwrap(T).splits else ("counters",) if unwrap(T).schedule.counters else ()
    split = dict(zip(names, extra(T, A), strict=False))
    if unwrap(T).sharers > 1:
        split["part"] = t.call(cluster_rank)
    return struct(globals=struct(**tensors), args=struct(**args), config=T, rank=rank, **split)


@op
def extended(t: Trace, ctx: Traced, more: Traced) -> Traced:
    """The context plus the fields of a work tile."""
    scalars = {n: t.scalar(v) if isinstance(unwrap(v), int) and n != "edges" else v for n, v in more.fields.items()}
    return struct(**{**ctx.fields, **scalars})


@op
def at_iteration(t: Trace, ctx: Traced, i: Traced, edge: Traced = None) -> Traced:
    """The context of an iteration; for consumers also whether it is an `edge`."""
    return struct(**{**ctx.fields, "iter": i, **({} if edge is None else {"edge": edge})})


@op
def marked_edges(t: Trace, tile: Traced) -> Traced:
    """Which iterations of a work tile are edges, as a constant: None where any may be, 0 or 1 where none or the first
    one is, −1 where `setup` computes the number."""
    edges = unwrap(tile.edges)
    return tl.constexpr(edges if edges is None or isinstance(edges, int) else -1)


@op
def addressed_anew(t: Trace, ctx: Traced, memory: Traced) -> Traced:
    """The context with the CTA's task tiles addressed anew: their slot is zero, but the compiler cannot tell.
    Otherwise it would compute the descriptors of all their parts once, and keep them in registers that accumulators
    need."""
    plan = unwrap(ctx.config)._plan
    groups = block_tasks(plan)
    return (
        struct(**{**ctx.fields, **block_task_tiles(t, memory, plan, t.call(opaque_zero), ctx.fields[groups[0]].phase)})
        if groups
        else ctx
    )


@triton.jit
def accumulator_slot(turn, CONSUMER: tl.constexpr, T: tl.constexpr):
    """(slot, parity of its round) of the accumulators of a consumer's task number `turn`. With `pingpong` each consumer
    has a slot; the MMA warp counts the tasks of all as those of consumer 0 of one team."""
    TEAMS: tl.constexpr = facts(T).teams
    SLOTS: tl.constexpr = facts(T).accumulators
    nth = turn * TEAMS + CONSUMER if TEAMS > 1 else turn
    return slot_of_task(nth, SLOTS)


@triton.jit
def slot_of_task(nth, SLOTS: tl.constexpr):
    """(slot, parity of its round) of the accumulators of the CTA's task number `nth`."""
    return nth % SLOTS, (nth // SLOTS) & 1


def accumulators_in(t: Trace, memory: Traced, T: Traced, consumer: int, slot: Traced) -> struct:
    """The accumulators in a slot of tensor memory, of one of the consumers that share a task; their values do not
    count yet."""
    found = {}
    for n, _ in T._plan.accumulators:
        ring = memory.fields[f"accumulator_{n}_{consumer}"]
        found[n] = t.call(ring.__getitem__, slot).counting(t.scalar(False))
    return struct(**found)


@op
def of_consumer(t: Trace, ctx: Traced, memory: Traced, consumer: Traced, turn: Traced) -> Traced:
    """The context of one consumer in its CTA's task number `turn`: its number among those that share the task, its
    tiles and accumulators."""
    config, c = unwrap(ctx.config), unwrap(consumer)
    plan = config._plan
    tiles = {
        "scratch": struct(**in_slot(t, memory.scratch, c)),
        "exchange": memory.exchange,
        "task": struct(),
        "late_task": struct(),
    }
    if plan.per == "consumer":
        tiles["task"] = struct(**in_slot(t, memory.task, c))
    tiles |= block_task_tiles(t, memory, plan, 0, t.method(turn, "__and__", 1))
    if config.has_mma_warp(t.arch):
        accumulators = accumulators_in(t, memory, config, c % config.team, t.call(accumulator_slot, turn, c, config)[0])
    else:
        accumulators = struct(**{n: tl.constexpr(s) for n, s in plan.accumulators})
    return struct(
        **{
            **ctx.fields,
            "consumer": tl.constexpr(c % config.team),
            "block_consumer": tl.constexpr(c),
            **tiles,
            "accumulators": accumulators,
        }
    )


@op
def without(t: Trace, ctx: Traced, *names: Traced) -> Traced:
    """The context without these fields: their tiles were released."""
    gone = [unwrap(name) for name in names]
    return struct(**{n: v for n, v in ctx.fields.items() if n not in gone})


@op
def after_input(t: Trace, ctx: Traced) -> Traced:
    """The context after a consumer has released its own task tiles."""
    return t.call(without, ctx, "task") if unwrap(ctx.config)._plan.per == "consumer" else ctx
