"""What a template keeps in shared and tensor memory: rings, tiles of a task, staged results, and their semaphores."""
from __future__ import annotations

from typing import Any

import triton.language as tl

from tritonkittens.inline_ptx import mbarrier as ptx_mbarrier
from tritonkittens.lang.core.backend import Trace, gl, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.memory.shared_tiles import allocate_pieces, piece_shared_layout, shared
from tritonkittens.lang.memory.tensor_memory import tensor_allocator
from tritonkittens.lang.schedule.cluster_split_k import new_mailboxes
from tritonkittens.lang.schedule.dynamic_scheduler import new_numbers
from tritonkittens.lang.sync.semaphores import make_semaphores, new_semaphores, publish, semaphore
from tritonkittens.lang.template.index_prefetch import new_windows
from tritonkittens.lang.template.pipeline_state import phase_before
from tritonkittens.lang.template.reduce_warp import sending_semaphores
from tritonkittens.lang.template.smem_plan import EXCHANGE_SLOTS
from tritonkittens.lang.types.tiles import tt

KEPT = ("common", "deferred")  # tiles that all consumers of a task share, in the order in which they need them


@op
def template_memory(t: Trace, T: Any) -> Any:
    """All shared and tensor memory of the template, with room for its semaphores (`open_memory`), as one record."""
    T = unwrap(T)
    plan, placed = T._plan, T.placement(t.arch)
    fields: dict[str, Any] = {}

    def named(what: str, tiles: dict[str, Any]) -> struct:
        for n, tile in tiles.items():
            tile._set_name(t.builder, f"{what}.{n}")  # what `inspect` calls the buffer
        return struct(**tiles)

    def rings(what: str, tiles: Any, number: int, of: str) -> dict[str, Any]:
        return {n: allocate_pieces(t, s, number, f"{what} {n}: {s!r} × {number} {of}") for n, s in tiles}

    ring = rings("input", plan.input, placed.stages, "stages")
    lagged = rings("lagged", plan.lagged, placed.stages, "stages")
    scratch = rings("scratch", plan.task, T.consumers, "consumers")
    fields |= {group: named(group, rings(group, getattr(plan, group), 1, "slot")) for group in KEPT}
    # Exchange tiles in front of working tiles of the same size, where the compiler puts them so: the backward of attention at dimension 64 takes 1 to 2 % less
    # time, for the same instructions (why was not found: neither products nor stores nor copies alone care where in shared memory they work)
    fields["exchange"] = named("exchange", rings("exchange", plan.exchange, EXCHANGE_SLOTS, "slots"))
    fields["working"] = named("working", rings("working", plan.reduce_buffer, T.consumers, "consumers"))
    if placed.over_ring is None and placed.over_working is None:
        fields["epilogue"] = named("finish", rings("finish", plan.epilogue, T.consumers, "consumers"))
    fields |= {"ring": named("input", ring), "scratch": named("scratch", scratch), "lagged": named("lagged", lagged)}
    fields |= _shared_by(T.cluster, plan, fields)
    if plan.output:
        fields["outputs"] = named("output", rings("output", plan.output, T.output_stages, "stages"))
        fields["written"] = new_semaphores(t, T.output_stages, T.team * WARPS)
        fields["stored"] = new_semaphores(t, T.output_stages, 1)
    fields["arrived"] = new_semaphores(t, placed.stages, 1)
    fields["finished"] = new_semaphores(t, placed.stages, T.team * WARPS * T.cluster)
    if plan.lagged:
        fields["lagged_full"] = new_semaphores(t, placed.stages, 1)
        fields["lagged_empty"] = new_semaphores(t, placed.stages, T.team * WARPS * T.cluster)
    if plan.task:
        fields["scratch_arrived"] = new_semaphores(t, T.consumers, 1)
        fields["scratch_finished"] = new_semaphores(t, T.consumers, WARPS)
    for group in KEPT:
        if getattr(plan, group):
            fields[f"{group}_arrived"] = new_semaphores(t, 1, 1)
            fields[f"{group}_finished"] = new_semaphores(t, 1, T.consumers * WARPS)
    if plan.epilogue_loads:
        fields["preload_arrived"] = new_semaphores(t, T.consumers, 1)
        fields["preload_free"] = new_semaphores(t, T.consumers, WARPS)
    if plan.epilogue_reloads:
        fields["filled"] = new_semaphores(t, T.consumers, 1)
    if T.sharers > 1:
        fields |= new_mailboxes(t, T)
    if T.dynamic or T.broadcast_tile:
        fields |= new_numbers(t, T)
    if plan.page_indices:
        fields |= new_windows(t, T)
    if T.sends:
        fields |= sending_semaphores(t, T)
    if placed.over_ring is not None:
        fields["staging_free"] = new_semaphores(t, 1, T.consumers * WARPS + 1 + T.lagged_producer)
    if t.chip.tcgen05:
        for n, s in plan.accumulators:
            for c in range(T.consumers):
                fields[f"accumulator_{n}_{c}"] = t.call(tensor_allocator, tt(s.dtype, s.rows, s.cols))
    for name, field in fields.items():
        if not isinstance(field, struct):
            field._set_name(t.builder, name)
    return struct(**fields)


@op
def open_memory(t: Trace, memory: Any, T: Any) -> Any:
    """Make the semaphores of `template_memory`: behind it all threads of the block find them, and what copies."""
    make_semaphores(t, [field for field in memory.fields.values() if isinstance(field, semaphore)])
    if unwrap(T).cluster_size > 1:
        t.call(ptx_mbarrier.fence_init)
    publish(t)
    t.call(gl.barrier)


def _shared_by(blocks: int, plan: Any, fields: dict[str, Any]) -> dict[str, struct]:
    """The rings, where so many blocks load the multicast tiles together."""
    return {rings: struct(**{name: ring.loaded_by(blocks) if name in plan.multicast else ring for name, ring in fields[rings].fields.items()})
            for rings in ("ring", "lagged")}


@op
def own_rings(t: Trace, memory: Any, T: Any) -> Any:
    """The same memory, for a block of a cluster that loads its rings alone. The many copies of a slot with entries one thread issues: between two of them the
    compiler would put a barrier."""
    plan = unwrap(T)._plan
    rings = _shared_by(1, plan, memory.fields)
    if plan.page_indices:
        rings = {n: struct(**{name: ring.loaded_alone() for name, ring in of.fields.items()}) for n, of in rings.items()}
    return struct(**{**memory.fields, **rings})


def in_slot(t: Trace, rings: struct, slot: Any) -> dict[str, Any]:
    """The tiles in a slot of several rings, by name."""
    return {name: t.call(ring.__getitem__, slot) for name, ring in rings.fields.items()}


def kept_tiles(t: Trace, memory: Any, slot: Any, phase: Any) -> dict[str, struct]:
    """The tiles that all consumers of a task share, by group, with the semaphores that they arrive on and that give them back. `phase`: of the task; `slot`:
    zero."""
    found = {}
    for group in KEPT:
        tiles = in_slot(t, memory.fields[group], slot)
        if tiles:
            semaphores = {name: t.call(memory.fields[f"{group}_{name}"].__getitem__, 0) for name in ("arrived", "finished")}
            tiles |= dict(group=tl.constexpr(group), phase=phase, **semaphores)
        found[group] = struct(**tiles)
    return found


@op
def staging_tiles(t: Trace, ctx: Any, memory: Any, worker: Any) -> Any:
    """The epilogue tiles of a consumer: memory of its own, or views over the tail of the ring or over what consumers worked in."""
    config, c = unwrap(ctx.config), unwrap(worker)
    placed = config.placement(t.arch)
    over = placed.over_ring if placed.over_working is None else placed.over_working
    if over is None:
        return struct(**in_slot(t, memory.epilogue, c))
    tiles = {}
    homes = {**memory.ring.fields, **memory.lagged.fields} if placed.over_working is None else memory.reduce_buffer.fields
    for (name, spec), places in zip(config._plan.finish, over, strict=True):
        source, slot, part, parts = places[c]
        piece = t.call(homes[source].__getitem__, slot).pieces[0]
        home = piece_shared_layout(spec.dtype, spec.piece_swizzle(spec.cols), 2)
        view = t.call(piece.reinterpret, spec.dtype, [parts, spec.rows, spec.cols], home)
        tiles[name] = shared(spec, ((spec.rows,), (spec.cols,)), None, (t.call(view.index, part),))
    return struct(**tiles)


@op
def slot_tiles(t: Trace, memory: Any, slot: Any, producer: Any = False) -> Any:
    """The tiles of a ring slot; for the producer also the semaphore that they arrive on, for a consumer with lagged tiles that which gives them back."""
    tiles = in_slot(t, memory.ring, slot)
    if unwrap(producer):
        tiles["arrived"] = t.call(memory.arrived.__getitem__, slot)
    elif memory.lagged.fields:
        tiles["finished"] = t.call(memory.finished.__getitem__, slot)
    return struct(**tiles)


@op
def tiles_before(t: Trace, memory: Any, slot: Any, phases: Any) -> Any:
    """What `compute` sees of the iteration before, and `compute_last` of the last: its lagged tiles, their semaphore and its phase, or all its tiles."""
    if not memory.lagged.fields:
        return t.call(slot_tiles, memory, slot)
    return struct(**in_slot(t, memory.lagged, slot), arrived=t.call(memory.lagged_full.__getitem__, slot), phase=t.call(phase_before, phases, slot))


@op
def output_tiles(t: Trace, memory: Any, slot: Any) -> Any:
    """The tiles of a slot of the output ring."""
    return struct(**in_slot(t, memory.outputs, slot))
