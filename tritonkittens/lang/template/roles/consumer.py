"""The consumer role: waits for pipeline stages, computes on them, and finishes its task."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.memory.tma import fence_async, store_read_wait
from tritonkittens.lang.register.construction import scheduling_barrier
from tritonkittens.lang.schedule.tile_scheduler import depends_on, next_index, tile_after
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.cluster import cluster_opened, open_cluster
from tritonkittens.lang.template.compute import (
    await_block_task,
    begin_sums,
    call_compute,
    call_compute_first,
    call_compute_last,
    call_load_params,
    call_start,
    fill_zeros,
    readable,
    release_before,
    release_block_task,
    release_own_task,
    release_slot,
)
from tritonkittens.lang.template.consumer_barriers import await_previous, call_next, open_turns
from tritonkittens.lang.template.contexts import (
    accumulator_slot,
    addressed_anew,
    after_input,
    at_iteration,
    extended,
    marked_edges,
    new_context,
    of_consumer,
    without,
)
from tritonkittens.lang.template.epilogue import end_task, release_epilogue
from tritonkittens.lang.template.extension import at_with, context_at, values_at, values_from
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.next_tile import first_tile, next_tile, received_tile
from tritonkittens.lang.template.pipeline_state import next_slot, skip_slots
from tritonkittens.lang.template.storage import output_tiles, slot_tiles, tiles_before

# Rings full of iterations from which on consumers end a task one after the other: before they do, and when the next
# task begins, the ring runs low. In a task of little more than a ring that costs more than it hides (measured:
# docs/notes/gemm.md)
LONG_TASK = tl.constexpr(8)


@triton.jit
def leave_input(ctx, A, memory, following, tile, CONSUMER: tl.constexpr, T: tl.constexpr):
    """A consumer has seen all input of its work tile: its task tiles are free, and with `pingpong` the ring is that of
    the consumer of the next work tile. Returns the next work tile, or with a dynamic schedule this one: the next is not
    known yet.

    It is computed here, while products are in flight: its divisions take 500 cycles or more (measured:
    docs/notes/gemm.md). With `pingpong` the other consumer's products hide them anyway."""
    OWN_TASK: tl.constexpr = facts(T).own_task
    TEAMS: tl.constexpr = facts(T).teams
    DYNAMIC: tl.constexpr = facts(T).dynamic
    if OWN_TASK:
        release_own_task(memory, CONSUMER)
    after = tile if DYNAMIC else tile_after(ctx, A, tile, following)
    if TEAMS > 1:
        if after.is_valid:
            call_next(CONSUMER, T)
    elif not DYNAMIC:
        scheduling_barrier(depends_on(after))
    return after


@triton.jit
def last_edge(tile, number):
    """How many iterations of a work tile are edges, or among its first `number`."""
    EDGES: tl.constexpr = marked_edges(tile)
    if EDGES is None or EDGES == 0 or EDGES == number:
        return number
    else:
        return tl.maximum(tl.minimum(tile.edges - tile.begin, tile.count), number)


@triton.jit
def held_from(ctx, A, following, tile, T: tl.constexpr):
    """With `staggered_epilogue`: the iteration before which a consumer waits until the one ahead ends the task; 0 where
    it does not wait. After the last task there is nothing to overlap with; in a short one it does not pay (and in one
    of no more iterations than stages the one ahead could come here again before this one has). The previous stage is
    not released yet: the one ahead still needs all others."""
    STAGGERS: tl.constexpr = facts(T).staggers
    STAGES: tl.constexpr = facts(T).stages
    if STAGGERS:
        return tl.where(
            (tile.count >= LONG_TASK * STAGES) & tile_after(ctx, A, tile, following).is_valid,
            tile.count - (STAGES - 1),
            0,
        )
    else:
        return 0


@triton.jit
def await_input(memory, slot, phases, T: tl.constexpr):
    """Wait for a stage. What threads copied to it are ordinary writes, for products to read."""
    FENCED: tl.constexpr = facts(T).fenced_input
    wait(memory.input_pipeline.full[slot], (phases >> slot) & 1)
    if FENCED:
        fence_async()


@triton.jit
def pipelined_iteration(
    mine,
    memory,
    state,
    slot,
    phases,
    previous,
    i,
    held_at,
    during,
    EDGE: tl.constexpr,
    CONSUMER: tl.constexpr,
    T: tl.constexpr,
):
    """An iteration after the first: (state, next stage, phases, this stage)."""
    STAGGERS: tl.constexpr = facts(T).staggers
    if STAGGERS and CONSUMER > 0:
        if i == held_at:
            await_previous(CONSUMER)
    await_input(memory, slot, phases, T)
    here = context_at(
        T, "consumer_iteration", at_iteration(addressed_anew(mine, memory), mine.begin + i, EDGE), memory, phases
    )
    state = call_compute(here, state, slot_tiles(memory, slot), tiles_before(memory, previous, phases))
    release_before(memory, previous, T)
    after, phases = next_slot(slot, phases, facts(T).stages)
    at_with(T, "iteration_ends", during, mine, memory, i)
    return state, after, phases, slot


@triton.jit
def pipelined_task(
    ctx, A, mine, memory, state, slot, phases, turn, following, tile, carried, CONSUMER: tl.constexpr, T: tl.constexpr
):
    """The iterations of a task with `compute_last`: (state, next stage, phases, the next work tile)."""
    STAGES: tl.constexpr = facts(T).stages
    STAGGERS: tl.constexpr = facts(T).staggers
    EDGES: tl.constexpr = marked_edges(tile)
    if tile.count > 0:
        await_input(memory, slot, phases, T)
        here = at_iteration(addressed_anew(mine, memory), tile.begin, EDGES is None or EDGES != 0)
        state = call_compute_first(here, state, slot_tiles(memory, slot))
        during = values_from(T, "task_begins", carried, ctx, memory, CONSUMER, turn)
        await_block_task(here.late_task)
        release_epilogue(memory, CONSUMER, T)
        previous = slot
        slot, phases = next_slot(slot, phases, STAGES)
        held_at = held_from(ctx, A, following, tile, T)
        inner = last_edge(tile, 1)
        if EDGES == -1:
            for i in range(1, inner):
                state, slot, phases, previous = pipelined_iteration(
                    mine, memory, state, slot, phases, previous, i, held_at, during, True, CONSUMER, T
                )
        for i in range(inner, tile.count):
            state, slot, phases, previous = pipelined_iteration(
                mine, memory, state, slot, phases, previous, i, held_at, during, EDGES is None, CONSUMER, T
            )
        if STAGGERS and CONSUMER + 1 < T.consumers:
            if held_at > 0:
                call_next(CONSUMER, T)
            scheduling_barrier(held_at)  # and not after the divisions that come next
        after = leave_input(ctx, A, memory, following, tile, CONSUMER, T)
        there = context_at(T, "consumer_iteration", addressed_anew(after_input(mine), memory), memory, phases)
        state = call_compute_last(there, state, tiles_before(memory, previous, phases))
        release_before(memory, previous, T)
        release_block_task(there, True)
    else:
        await_block_task(mine.late_task)
        release_epilogue(memory, CONSUMER, T)
        after = leave_input(ctx, A, memory, following, tile, CONSUMER, T)
        release_block_task(mine)
    return state, slot, phases, after


@triton.jit
def plain_iteration(mine, memory, state, slot, phases, out, out_phases, i, EDGE: tl.constexpr, T: tl.constexpr):
    """An iteration of a computation without `compute_last`: (state, next stage, phases, next output stage, its
    phases)."""
    OUTPUTS: tl.constexpr = facts(T).output_stages
    await_input(memory, slot, phases, T)
    here = context_at(
        T, "consumer_iteration", at_iteration(addressed_anew(mine, memory), mine.begin + i, EDGE), memory, phases
    )
    if OUTPUTS > 0:
        wait(memory.output_pipeline.empty[out], (out_phases >> out) & 1)
        state = call_compute(here, state, slot_tiles(memory, slot), output_tiles(memory, out))
        fence_async()  # what was written to the output tiles, for TMA to read
        arrive(memory.output_pipeline.full[out], per="warp")
        out, out_phases = next_slot(out, out_phases, OUTPUTS)
    else:
        state = call_compute(here, state, slot_tiles(memory, slot))
    release_slot(memory.input_pipeline.empty, slot, T)
    slot, phases = next_slot(slot, phases, facts(T).stages)
    return state, slot, phases, out, out_phases


@triton.jit
def plain_task(
    ctx, A, mine, memory, state, slot, phases, out, out_phases, following, tile, CONSUMER: tl.constexpr, T: tl.constexpr
):
    """The iterations of a task without `compute_last`: (state, next stage, phases, next output stage, its phases, the
    next work tile)."""
    EDGES: tl.constexpr = marked_edges(tile)
    release_epilogue(memory, CONSUMER, T)
    inner = last_edge(tile, 0)
    if EDGES is not None and EDGES != 0:
        for i in range(inner):
            state, slot, phases, out, out_phases = plain_iteration(
                mine, memory, state, slot, phases, out, out_phases, i, True, T
            )
    for i in range(inner, tile.count):
        state, slot, phases, out, out_phases = plain_iteration(
            mine, memory, state, slot, phases, out, out_phases, i, EDGES is None, T
        )
    after = leave_input(ctx, A, memory, following, tile, CONSUMER, T)
    release_block_task(mine)
    return state, slot, phases, out, out_phases, after


@triton.jit
def begin_task(mine, memory, turn, CONSUMER: tl.constexpr, T: tl.constexpr):
    """(context, state) with which a consumer begins to compute a task."""
    OWN_TASK: tl.constexpr = facts(T).own_task
    if OWN_TASK:
        wait(memory.task_pipeline.full[CONSUMER], turn & 1)
    await_block_task(mine.task)
    mine = call_load_params(mine)
    return mine, call_start(mine)


@triton.jit
def computed_sums(mine, memory, turn, CONSUMER: tl.constexpr, T: tl.constexpr):
    """The state that the MMA warp has computed of a task, once its products are complete. Without an iteration it is
    zeros, which this consumer writes."""
    sums, parity = accumulator_slot(turn, CONSUMER, T)
    state = readable(begin_sums(mine))
    wait(memory.accumulator_pipeline.full[sums], parity)
    if mine.count == 0:
        fill_zeros(state)
    return state


@triton.jit
def release_sums(memory, turn, CONSUMER: tl.constexpr, T: tl.constexpr):
    """This consumer has read its accumulators: the MMA warp may overwrite them."""
    PAIRS: tl.constexpr = facts(T).pairs
    sums, _ = accumulator_slot(turn, CONSUMER, T)
    if PAIRS:  # its MMA warp is in the CTA of even rank
        arrive(memory.accumulator_pipeline.empty[sums], per="warp", cta=0, scope="cta", fenced=True)
    else:
        arrive(memory.accumulator_pipeline.empty[sums], per="warp", fenced=True)


@triton.jit
def consumer(CONSUMER: tl.constexpr, G, A, memory, T: tl.constexpr):
    """Run consumer number `CONSUMER` of template `T`: the hooks that compute, task after task.

    `G`: the tensors of the call. `A`: its numbers. `memory`: shared memory and pipelines of the thread block.
    """
    STAGES: tl.constexpr = facts(T).stages
    OVER_RING: tl.constexpr = facts(T).over_ring
    PIPELINED: tl.constexpr = facts(T).pipelined
    MMA_WARP: tl.constexpr = facts(T).mma_warp
    TEAMS: tl.constexpr = facts(T).teams
    DYNAMIC: tl.constexpr = facts(T).dynamic
    slot = 0
    phases = 0
    turn = 0
    out = 0
    out_phases = -1
    open_cluster(T)
    ctx = new_context(G, A, T)
    index, tile = first_tile(ctx, A, memory, T)
    if TEAMS > 1:
        for _ in tl.static_range(CONSUMER):
            slot, phases = skip_slots(slot, phases, tile.count, STAGES)
            index, tile = next_tile(ctx, A, index, tile)
    open_turns(CONSUMER, T)
    carried = values_at(T, "consumer_begins", ctx, A, T)
    while tile.is_valid:
        mine = of_consumer(extended(ctx, tile), memory, CONSUMER, turn)
        if OVER_RING:
            slot = 0
        if MMA_WARP:
            mine = call_load_params(without(mine, "task", "late_task"))
        else:
            mine, state = begin_task(mine, memory, turn, CONSUMER, T)
        following = index if DYNAMIC else next_index(ctx, A, index, tile)
        # a parity tells a stage's last two phases apart: nobody looks at one before the consumer of the previous work
        # tile has seen its own
        if TEAMS > 1 and not MMA_WARP:
            if turn > 0 or CONSUMER > 0:
                await_previous(CONSUMER)
        if MMA_WARP:
            release_epilogue(memory, CONSUMER, T)
            after = tile if DYNAMIC else tile_after(ctx, A, tile, following)
            state = computed_sums(mine, memory, turn, CONSUMER, T)
        elif PIPELINED:
            state, slot, phases, after = pipelined_task(
                ctx, A, mine, memory, state, slot, phases, turn, following, tile, carried, CONSUMER, T
            )
        else:
            state, slot, phases, out, out_phases, after = plain_task(
                ctx, A, mine, memory, state, slot, phases, out, out_phases, following, tile, CONSUMER, T
            )
        carried = end_task(
            carried, ctx, without(mine, "task", "late_task"), state, memory, turn, phases, tile, after.is_valid
        )
        if MMA_WARP:
            release_sums(memory, turn, CONSUMER, T)
        index, tile = received_tile(ctx, A, memory, turn) if DYNAMIC else (following, after)
        turn += 1
        if TEAMS > 1:
            for _ in tl.static_range(TEAMS - 1):
                slot, phases = skip_slots(slot, phases, tile.count, STAGES)
                index, tile = next_tile(ctx, A, index, tile)
    at_with(T, "consumer_ends", carried, ctx, memory, CONSUMER, turn)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is
    if turn == 0:
        cluster_opened(T)
