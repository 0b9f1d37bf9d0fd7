"""What a template keeps in shared and tensor memory: tiles of the rings, of a task and of the epilogue, and their
pipelines."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from tritonkittens.inline_ptx import mbarrier as ptx_mbarrier
from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.selected_rows import row_arrivals
from tritonkittens.lang.memory.shared_tiles import allocate_pieces, piece_shared_layout, shared
from tritonkittens.lang.memory.tensor_memory import tensor_allocator
from tritonkittens.lang.schedule.cluster_split_k import new_mailboxes
from tritonkittens.lang.schedule.dynamic_scheduler import tile_broadcast_memory
from tritonkittens.lang.sync.semaphores import make_semaphores, new_semaphores, publish, semaphore
from tritonkittens.lang.template.pipeline_state import phase_before
from tritonkittens.lang.template.smem_plan import EXCHANGE_SLOTS
from tritonkittens.lang.types.tiles import rt, tt

GATHER_WARPS = 2  # that copy gathered tiles: with the producer and a warp of products they are one warpgroup
BLOCK_TASK = ("task", "late_task")  # tiles that all consumers of a task share, in the order in which they need them


def block_tasks(plan: Any) -> tuple[str, ...]:
    """Those of `BLOCK_TASK` that a layout has."""
    return tuple(group for group in BLOCK_TASK if getattr(plan, group) and (group != "task" or plan.per == "block"))


def new_pipeline(t: Trace, stages: int, full_arrivals: int, empty_arrivals: int) -> struct:
    """The full and empty barriers of so many stages, to be made by `open_memory`."""
    full = new_semaphores(t, stages, full_arrivals)
    return struct(full=full, empty=new_semaphores(t, stages, empty_arrivals))


@op
def template_memory(t: Trace, T: Traced) -> Traced:
    """All shared and tensor memory of the template, and room for its barriers, which `open_memory` makes, as one
    record."""
    T = unwrap(T)
    plan, placed = T.stored(t.arch), T.placement(t.arch)
    bill().blocks_per_sm = T.blocks_per_sm
    fields: dict[str, Any] = {}

    def rings(what: str, tiles: Any, number: int, of: str) -> struct:
        return struct(**{n: allocate_pieces(t, s, number, f"{what} {n}: {s!r} × {number} {of}") for n, s in tiles})

    def tiles_of(name: str, number: int, of: str) -> None:
        fields[name] = rings(name, getattr(plan, name), number, of)

    per_consumer = (T.consumers, "consumers")
    tiles_of("input", placed.stages, "stages")
    tiles_of("lagged", placed.stages, "stages")
    tiles_of("task", *(per_consumer if plan.per == "consumer" else (1, "slot")))
    tiles_of("late_task", 1, "slot")
    # The exchange tiles before scratch tiles of the same size, where the compiler then puts them (measured:
    # docs/notes/attention_backward.md)
    tiles_of("exchange", EXCHANGE_SLOTS, "slots")
    tiles_of("scratch", *per_consumer)
    if placed.over_ring is None and placed.over_scratch is None:
        tiles_of("epilogue", *per_consumer)
    if plan.output:
        tiles_of("output", T.output_stages, "stages")
    for name, group in fields.items():
        for n, tile in group.fields.items():
            tile._set_name(t.builder, f"{name}.{n}")  # what `inspect` calls the buffer
    if T.pairs(t.arch):
        own = fields["input"].fields
        fields["input"] = struct(**{n: ring.of_pair(T.pair_part(n, t.arch)) for n, ring in own.items()})
    else:
        fields |= _shared_by(T.cluster, plan, fields)
    found = _pipelines(t, T) | _other_memory(t, T)
    for name, field in found.items():
        field._set_name(t.builder, name.removesuffix("_pipeline"))
    return struct(**fields, **found, **_accumulators(t, T))


def _pipelines(t: Trace, T: Traced) -> dict[str, Traced]:
    """The pipelines between producers, consumers and the storer: `NAME_pipeline` has the full and empty barriers of
    tiles NAME."""
    plan, stages, team = T._plan, T.placement(t.arch).stages, T.team * WARPS
    found: dict[str, Any] = {}
    # arrivals that free a stage, the task tiles of a consumer, and those of the block: with an MMA warp its commits
    readers = (team * T.cluster, WARPS, T.consumers * WARPS)
    if T.has_mma_warp(t.arch):
        pairs = T.pairs(t.arch)
        readers = (1 if pairs else T.cluster, 1, 1)
        found["accumulator_pipeline"] = new_pipeline(t, T.accumulator_slots, 1, team * (2 if pairs else 1))
    if plan.output:
        found["output_pipeline"] = new_pipeline(t, T.output_stages, team, 1)
    gathered = unwrap(t.call(row_arrivals, GATHER_WARPS)) if plan.gathered else 0
    found["input_pipeline"] = new_pipeline(t, stages, 1 + gathered, readers[0])
    if plan.lagged:
        found["lagged_pipeline"] = new_pipeline(t, stages, 1, readers[0])
    if plan.task and plan.per == "consumer":
        found["task_pipeline"] = new_pipeline(t, T.consumers, 1, readers[1])
    for group in block_tasks(plan):
        found[f"{group}_pipeline"] = new_pipeline(t, 1, 1, readers[2])
    if plan.epilogue_loads:
        found["epilogue_pipeline"] = new_pipeline(t, T.consumers, 1, WARPS)
    if plan.epilogue_reloads:
        found["reload_full"] = new_semaphores(t, T.consumers, 1)
    return found


def _other_memory(t: Trace, T: Traced) -> dict[str, Traced]:
    """What tile schedulers and extensions keep, and the barrier of epilogue tiles over the ring."""
    found: dict[str, Any] = {}
    if T.sharers > 1:
        found |= new_mailboxes(t, T)
    if T.dynamic or T.broadcast_tile:
        found |= tile_broadcast_memory(t, T)
    for extension in T.extensions:
        found |= extension.added_memory(t, T)
    if T.placement(t.arch).over_ring is not None:
        found["ring_empty"] = new_semaphores(t, 1, T.consumers * WARPS + 1 + T.lagged_producer)
    return found


def tensor_home(tile: rt) -> tt:
    """The tile of tensor memory for an accumulator. It adds in fp32 where wgmma would in fp16."""
    return tt(tl.float32 if tile.dtype == tl.float16 else tile.dtype, tile.rows, tile.cols)


def _accumulators(t: Trace, T: Traced) -> dict[str, Traced]:
    """The accumulators of the consumers that share a task, rings in tensor memory, where an MMA warp fills them."""
    if not T.has_mma_warp(t.arch):
        return {}
    found = {
        f"accumulator_{n}_{c}": t.call(tensor_allocator, tensor_home(s), T.accumulator_slots, T.pairs(t.arch))
        for n, s in T._plan.accumulators
        for c in range(T.team)
    }
    for name, field in found.items():
        field._set_name(t.builder, name)
    return found


@op
def open_memory(t: Trace, memory: Traced, T: Traced) -> Traced:
    """Make the semaphores of `template_memory`: after it all threads of the CTA, and copies, find them."""
    pairs = [field.fields.values() if isinstance(field, struct) else (field,) for field in memory.fields.values()]
    make_semaphores(t, [found for pair in pairs for found in pair if isinstance(found, semaphore)])
    if unwrap(T).cluster_size > 1:
        t.call(ptx_mbarrier.fence_init)
    publish(t)
    t.call(gl.barrier)


def _shared_by(blocks: int, plan: Any, fields: dict[str, Any]) -> dict[str, struct]:
    """The rings, where so many CTAs load the multicast tiles together."""
    return {
        rings: struct(
            **{
                name: ring.loaded_by(blocks) if name in plan.multicast else ring
                for name, ring in fields[rings].fields.items()
            }
        )
        for rings in ("input", "lagged")
    }


@op
def own_rings(t: Trace, memory: Traced, T: Traced) -> Traced:
    """The same memory, for a CTA of a cluster that loads its rings alone. One thread issues the many copies of a
    stage with page indices: between two of them the compiler would put a barrier."""
    plan = unwrap(T)._plan
    rings = _shared_by(1, plan, memory.fields)
    if plan.page_indices:
        rings = {
            n: struct(**{name: ring.loaded_alone() for name, ring in of.fields.items()}) for n, of in rings.items()
        }
    return struct(**{**memory.fields, **rings})


def in_slot(t: Trace, rings: struct, slot: Traced) -> dict[str, Traced]:
    """The tiles in a slot of several rings, by name."""
    return {name: t.call(ring.__getitem__, slot) for name, ring in rings.fields.items()}


def block_task_tiles(t: Trace, memory: Traced, plan: Traced, slot: Traced, phase: Traced) -> dict[str, struct]:
    """The tiles that all consumers of a task share, by group, with their full and empty barriers. `phase`: of the task;
    `slot`: zero."""
    found = {}
    for group in block_tasks(plan):
        pipe = memory.fields[f"{group}_pipeline"]
        barriers = {name: t.call(pipe.fields[name].__getitem__, 0) for name in ("full", "empty")}
        found[group] = struct(
            **in_slot(t, memory.fields[group], slot), group=tl.constexpr(group), phase=phase, **barriers
        )
    return found


@op
def epilogue_tiles(t: Trace, ctx: Traced, memory: Traced, consumer: Traced) -> Traced:
    """The epilogue tiles of a consumer: memory of its own, or views over the tail of the ring or over the scratch
    tiles."""
    config, c = unwrap(ctx.config), unwrap(consumer)
    placed = config.placement(t.arch)
    over = placed.over_ring if placed.over_scratch is None else placed.over_scratch
    if over is None:
        return struct(**in_slot(t, memory.epilogue, c))
    tiles = {}
    homes = {**memory.input.fields, **memory.lagged.fields} if placed.over_scratch is None else memory.scratch.fields
    for (name, spec), places in zip(config._plan.epilogue, over, strict=True):
        source, slot, part, parts = places[c]
        piece = t.call(homes[source].__getitem__, slot).pieces[0]
        home = piece_shared_layout(spec.dtype, spec.piece_swizzle(spec.cols), 2)
        view = t.call(piece.reinterpret, spec.dtype, [parts, spec.rows, spec.cols], home)
        tiles[name] = shared(spec, ((spec.rows,), (spec.cols,)), None, (t.call(view.index, part),))
    return struct(**tiles)


@op
def slot_tiles(t: Trace, memory: Traced, slot: Traced) -> Traced:
    """A consumer's tiles of a stage, with its empty barrier where there are lagged tiles."""
    tiles = in_slot(t, memory.input, slot)
    if memory.lagged.fields:
        tiles["empty"] = t.call(memory.input_pipeline.empty.__getitem__, slot)
    return struct(**tiles)


@op
def tiles_before(t: Trace, memory: Traced, slot: Traced, phases: Traced) -> Traced:
    """What `compute` sees of the previous iteration, and `compute_last` of the last: its lagged tiles, their full
    barrier and its phase, or all its tiles."""
    if not memory.lagged.fields:
        return t.call(slot_tiles, memory, slot)
    full = t.call(memory.lagged_pipeline.full.__getitem__, slot)
    return struct(**in_slot(t, memory.lagged, slot), full=full, phase=t.call(phase_before, phases, slot))


@op
def output_tiles(t: Trace, memory: Traced, slot: Traced) -> Traced:
    """The tiles of a slot of the output ring."""
    return struct(**in_slot(t, memory.output, slot))
