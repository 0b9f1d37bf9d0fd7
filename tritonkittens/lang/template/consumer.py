"""The consumer role: waits for pipeline stages, computes on them, and finishes its tile."""
from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.memory.tma import fence_async, store_read_wait
from tritonkittens.lang.register.construction import scheduling_barrier
from tritonkittens.lang.schedule.tile_scheduler import next_unit, nothing_of, some_work, work_behind
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.calls import (
    addressed_anew,
    at_iteration,
    await_kept,
    call_compute,
    call_drain,
    call_fetch,
    call_first,
    call_start,
    extended,
    prefetch_deferred,
    finish_task,
    give_kept_back,
    give_staging,
    marked_edges,
    new_context,
    nothing_packed,
    of_consumer,
    pack_results,
    release_before,
    release_slot,
    without,
)
from tritonkittens.lang.template.cluster import cluster_opened, open_cluster
from tritonkittens.lang.template.consumer_barriers import await_previous, call_next, open_turns
from tritonkittens.lang.template.deferred_results import fill_packed_at, packed_until, store_last, store_packed_at, store_rest
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.next_tile import heard_work, next_work, told_work
from tritonkittens.lang.template.pipeline_state import next_slot, skip_slots
from tritonkittens.lang.template.reduce_warp import may_send
from tritonkittens.lang.template.storage import output_tiles, slot_tiles, tiles_before

# Rings full of iterations from which on consumers end a task one behind the other: before they do, and when the next task begins, the ring runs low. In a task
# of little more than a ring that costs more than it hides (GEMM 100×50000×512 on the H100: 3 to 5 %)
LONG_TASK = tl.constexpr(8)


@triton.jit
def leave_input(ctx, A, memory, following, work, WORKER: tl.constexpr, T: tl.constexpr):
    """A consumer has seen all input of its unit: the scratch tiles are free, and the ring is that of the consumer of the next unit, where there is one. Returns
    the work of that unit, or, where units are drawn, that of this one: the next is not known yet.

    It is computed here, while products are under way: its divisions take 500 cycles or more (GEMM bf16 6144×2816×8192 on the H100, four tasks a block: 551 to
    549 thousand cycles, in pairs of blocks 552 to 549). Where consumers take turns the other's products hide it anyway."""
    HAS_SCRATCH: tl.constexpr = facts(T).has_scratch
    TEAMS: tl.constexpr = facts(T).teams
    DRAWS: tl.constexpr = facts(T).draws
    if HAS_SCRATCH:
        arrive(memory.scratch_finished[WORKER], per="warp")
    behind = work if DRAWS else work_behind(ctx, A, work, following)
    if TEAMS > 1:
        if behind.valid:
            call_next(WORKER, T)
    elif not DRAWS:
        scheduling_barrier(nothing_of(behind))
    return behind


@triton.jit
def behind_edges(work, number):
    """How many iterations of a unit are edges, or among its first `number`."""
    EDGES: tl.constexpr = marked_edges(work)
    if EDGES is None or EDGES == 0 or EDGES == number:
        return number
    else:
        return tl.maximum(tl.minimum(work.edges - work.begin, work.count), number)


@triton.jit
def pipelined_iteration(mine, memory, state, slot, phases, previous, i, held_at, EDGE: tl.constexpr, WORKER: tl.constexpr, T: tl.constexpr):
    """An iteration behind the first: (state, next slot, phases, this slot)."""
    STAGGERS: tl.constexpr = facts(T).staggers
    if STAGGERS and WORKER > 0:
        if i == held_at:
            await_previous(WORKER)
    wait(memory.arrived[slot], (phases >> slot) & 1)
    here = may_send(at_iteration(addressed_anew(mine, memory), mine.begin + i, EDGE), memory, phases)
    state = call_compute(here, state, slot_tiles(memory, slot), tiles_before(memory, previous, phases))
    release_before(memory, previous, T)
    behind, phases = next_slot(slot, phases, facts(T).stages)
    return state, behind, phases, slot


@triton.jit
def held_from(ctx, A, following, work, T: tl.constexpr):
    """The iteration in front of which a consumer lets the one ahead end the task, 0 where it does not: behind the last task there is nothing to overlap with,
    in a short one it does not pay (and in one of no more iterations than slots the one ahead could come here again before this one has). The slot before is not
    given back yet: what the one ahead still needs are all others."""
    STAGGERS: tl.constexpr = facts(T).staggers
    STAGES: tl.constexpr = facts(T).stages
    if STAGGERS:
        return tl.where((work.count >= LONG_TASK * STAGES) & work_behind(ctx, A, work, following).valid, work.count - (STAGES - 1), 0)
    else:
        return 0


@triton.jit
def plain_iteration(mine, memory, state, slot, phases, out, out_phases, i, EDGE: tl.constexpr, T: tl.constexpr):
    """An iteration of a computation without `compute_last`: (state, next slot, phases, next output slot, their phases)."""
    OUTPUTS: tl.constexpr = facts(T).output_stages
    wait(memory.arrived[slot], (phases >> slot) & 1)
    here = may_send(at_iteration(addressed_anew(mine, memory), mine.begin + i, EDGE), memory, phases)
    if OUTPUTS > 0:
        wait(memory.stored[out], (out_phases >> out) & 1)
        state = call_compute(here, state, slot_tiles(memory, slot), output_tiles(memory, out))
        fence_async()  # what was written to the output tiles, for TMA to read
        arrive(memory.written[out], per="warp")
        out, out_phases = next_slot(out, out_phases, OUTPUTS)
    else:
        state = call_compute(here, state, slot_tiles(memory, slot))
    release_slot(memory.finished, slot, T)
    slot, phases = next_slot(slot, phases, facts(T).stages)
    return state, slot, phases, out, out_phases


@triton.jit
def consumer(WORKER: tl.constexpr, G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = facts(T).stages
    OVER_RING: tl.constexpr = facts(T).over_ring
    PIPELINED: tl.constexpr = facts(T).pipelined
    HAS_SCRATCH: tl.constexpr = facts(T).has_scratch
    TEAMS: tl.constexpr = facts(T).teams
    DRAWS: tl.constexpr = facts(T).draws
    STAGGERS: tl.constexpr = facts(T).staggers
    PACKS: tl.constexpr = facts(T).packs
    slot = 0
    phases = 0
    turn = 0
    out = 0
    out_phases = -1
    open_cluster(T)
    ctx = new_context(G, A, T)
    unit, work = told_work(ctx, A, memory, T)
    if TEAMS > 1:
        for _ in tl.static_range(WORKER):
            slot, phases = skip_slots(slot, phases, work.count, STAGES)
            unit, work = next_work(ctx, A, unit, work)
    open_turns(WORKER, T)
    if PACKS > 0:  # the results of task `done` wait in registers
        # Not `work`: in Triton 3.9 a name that a loop gives the value of another one is not carried by it where both begin as the same value
        packed, done, pending = nothing_packed(T), some_work(ctx, A), 0
    while work.valid:
        mine = of_consumer(extended(ctx, work), memory, WORKER, turn)
        if OVER_RING:
            slot = 0
        if HAS_SCRATCH:
            wait(memory.scratch_arrived[WORKER], turn & 1)
        await_kept(mine.common)
        mine = call_fetch(mine)
        state = call_start(mine)
        EDGES: tl.constexpr = marked_edges(work)
        following = unit if DRAWS else next_unit(ctx, A, unit, work)
        if TEAMS > 1:  # a parity tells a slot's last two phases apart: nobody looks at one before the consumer of the unit before has seen its own
            if turn > 0 or WORKER > 0:
                await_previous(WORKER)
        if PIPELINED:
            if work.count > 0:
                wait(memory.arrived[slot], (phases >> slot) & 1)
                here = at_iteration(addressed_anew(mine, memory), work.begin, EDGES is None or EDGES != 0)
                state = call_first(here, state, slot_tiles(memory, slot))
                if PACKS > 0:
                    before = of_consumer(extended(ctx, done), memory, WORKER, turn)
                await_kept(here.deferred)
                give_staging(memory, WORKER, T)
                previous = slot
                slot, phases = next_slot(slot, phases, STAGES)
                held_at = held_from(ctx, A, following, work, T)
                inner = behind_edges(work, 1)
                if EDGES == -1:
                    for i in range(1, inner):
                        state, slot, phases, previous = pipelined_iteration(mine, memory, state, slot, phases, previous, i, held_at, True, WORKER, T)
                        if PACKS > 0:
                            store_packed_at(before, packed, memory, i, pending, T)
                            fill_packed_at(mine, memory, i, T)
                for i in range(inner, work.count):
                    state, slot, phases, previous = pipelined_iteration(mine, memory, state, slot, phases, previous, i, held_at, EDGES is None, WORKER, T)
                    if PACKS > 0:
                        store_packed_at(before, packed, memory, i, pending, T)
                        fill_packed_at(mine, memory, i, T)
                if STAGGERS and WORKER + 1 < T.consumers:
                    if held_at > 0:
                        call_next(WORKER, T)
                    scheduling_barrier(held_at)  # and not behind the divisions that come next
                behind = leave_input(ctx, A, memory, following, work, WORKER, T)
                there = may_send(addressed_anew(without(mine, "scratch"), memory), memory, phases)
                state = call_drain(there, state, tiles_before(memory, previous, phases))
                release_before(memory, previous, T)
                give_kept_back(there, True)
            else:
                await_kept(mine.deferred)
                give_staging(memory, WORKER, T)
                behind = leave_input(ctx, A, memory, following, work, WORKER, T)
                give_kept_back(mine)
        else:
            give_staging(memory, WORKER, T)
            inner = behind_edges(work, 0)
            if EDGES is not None and EDGES != 0:
                for i in range(inner):
                    state, slot, phases, out, out_phases = plain_iteration(mine, memory, state, slot, phases, out, out_phases, i, True, T)
            for i in range(inner, work.count):
                state, slot, phases, out, out_phases = plain_iteration(mine, memory, state, slot, phases, out, out_phases, i, EDGES is None, T)
            behind = leave_input(ctx, A, memory, following, work, WORKER, T)
            give_kept_back(mine)
        ended = without(mine, "scratch", "common", "deferred")
        if PACKS > 0:
            store_rest(of_consumer(extended(ctx, done), memory, WORKER, turn), packed, memory, work.count, pending, T)
            if work.count <= packed_until(T):
                prefetch_deferred(ended, memory)
            packed, pending = pack_results(ended, state, memory, turn)
            done = work
        else:
            finish_task(ended, state, memory, turn, phases, behind.valid)
        unit, work = heard_work(ctx, A, memory, turn) if DRAWS else (following, behind)
        turn += 1
        if TEAMS > 1:
            for _ in tl.static_range(TEAMS - 1):
                slot, phases = skip_slots(slot, phases, work.count, STAGES)
                unit, work = next_work(ctx, A, unit, work)
    if PACKS > 0:
        store_last(of_consumer(extended(ctx, done), memory, WORKER, turn), packed, memory, pending, T)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is
    if turn == 0:
        cluster_opened(T)
