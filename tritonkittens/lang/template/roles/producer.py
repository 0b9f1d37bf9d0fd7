"""The producer role: one warp that loads input and task tiles, and lagged tiles too, unless a second warp
(`lagged_producer`) loads those."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.schedule.dynamic_scheduler import fetch_no_more
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.cluster import cluster_opened, leave_cluster, open_cluster
from tritonkittens.lang.template.contexts import at_iteration, extended, new_context
from tritonkittens.lang.template.dependencies import end_after_previous
from tritonkittens.lang.template.extension import at, context_at
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.loads import load_epilogue, load_input, load_lagged, load_task
from tritonkittens.lang.template.next_tile import fetched_tile, first_tile, following_tile, next_tile
from tritonkittens.lang.template.pipeline_state import next_slot, phase_before, skip_slots
from tritonkittens.lang.template.storage import own_rings


@triton.jit
def early_count(tile, T: tl.constexpr):
    """How many stages of the CTA's first work tile are filled before the roles begin; with `epilogue_loads` not its
    last, after which the producer loads those."""
    LIMIT: tl.constexpr = facts(T).early_stages
    EPILOGUE_LOADS: tl.constexpr = facts(T).epilogue_loads
    if EPILOGUE_LOADS:
        return tl.minimum(tl.maximum(tile.count - 1, 0), LIMIT)
    else:
        return tl.minimum(tile.count, LIMIT)


@triton.jit
def iteration_context(whole, memory, i, PART: tl.constexpr, T: tl.constexpr):
    """The context of iteration number `i` of a work tile, for a producer."""
    return context_at(T, "producer_iteration", at_iteration(whole, whole.begin + i), memory, i, PART, T)


@triton.jit
def load_early(ctx, tile, memory, T: tl.constexpr):
    """Load the CTA's first input before the roles begin: starting them takes as long as the first bytes are in
    flight. A CTA of a cluster loads it for itself, because the others' barriers may not be there yet."""
    LAGGED: tl.constexpr = facts(T).lagged
    if tile.is_valid:
        whole = extended(ctx, tile)
        own = own_rings(memory, T)
        # The first input before the task tiles of one consumer (measured: docs/notes/attention_decode.md). Those of
        # several are as many bytes as the input or more, and go first
        LAST: tl.constexpr = T.consumers == 1
        count = early_count(tile, T)
        if not LAST:
            load_task(whole, own, 0)
        for i in range(count):
            load_input(iteration_context(whole, memory, i, 0, T), own, i)
            if LAST:
                if i == 0:
                    load_task(whole, own, 0)
            if LAGGED:
                if i > 0:
                    load_lagged(iteration_context(whole, memory, i - 1, 0, T), own, i - 1)
        if LAST:
            if count == 0:
                load_task(whole, own, 0)


@triton.jit
def await_ring(memory, turn):
    """Once a task, before the stages that epilogue tiles lie over are filled: the previous task's stores have read
    them. Each producer arrives for the next phase when it has seen so."""
    wait(memory.ring_empty[0], (turn & 1) ^ 1)
    arrive(memory.ring_empty[0], per="warp")


@triton.jit
def load_lagged_of(whole, memory, i, slot, phases, T: tl.constexpr):
    """Load the lagged tiles of iteration `i`, which are used one iteration later, into `slot`."""
    before = iteration_context(whole, memory, i, 0, T)
    wait(memory.lagged_pipeline.empty[slot], phase_before(phases, slot))
    load_lagged(before, memory, slot)


@triton.jit
def load_tile(whole, memory, tile, begun, slot, phases, previous, turn, T: tl.constexpr):
    """Load what a work tile needs, from iteration `begun` on: (next stage, phases, the last stage)."""
    STAGES: tl.constexpr = facts(T).stages
    SAFE: tl.constexpr = facts(T).safe_stages
    OVER_RING: tl.constexpr = facts(T).over_ring
    TASK: tl.constexpr = facts(T).any_task
    EPILOGUE_LOADS: tl.constexpr = facts(T).epilogue_loads
    EARLY: tl.constexpr = facts(T).early_stages
    LAGGED: tl.constexpr = facts(T).lagged and not T.lagged_producer
    if TASK:
        if (tile.count == 0) and (turn > 0 or EARLY == 0):
            load_task(whole, memory, turn)
    if OVER_RING:
        slot = begun  # the tail of the ring must be the stages that are filled last
    at(T, "producer_task_begins", whole, memory, turn, 0, T)
    for i in range(begun, tile.count):
        if OVER_RING:
            if i == SAFE:
                await_ring(memory, turn)
        at(T, "producer_iteration_begins", i, T)
        here = iteration_context(whole, memory, i, 0, T)
        wait(memory.input_pipeline.empty[slot], (phases >> slot) & 1)
        load_input(here, memory, slot)
        if TASK:
            if (i == 0) and (turn > 0 or EARLY == 0):
                load_task(whole, memory, turn)
        if LAGGED:
            if i > 0:
                load_lagged_of(whole, memory, i - 1, previous, phases, T)
            previous = slot
        slot, phases = next_slot(slot, phases, STAGES)
        # consumers release the epilogue tiles once they are in the task: not before its first stages are on their way
        if EPILOGUE_LOADS:
            if i == tl.minimum(tile.count, STAGES) - 1:
                load_epilogue(whole, memory, turn)
        at(T, "producer_iteration_ends", whole, memory, i, 0, T)
    if LAGGED:
        if tile.count > 0:
            load_lagged_of(whole, memory, tile.count - 1, previous, phases, T)
    if EPILOGUE_LOADS:
        if tile.count == 0:
            load_epilogue(whole, memory, turn)
    if OVER_RING:
        if tile.count <= SAFE:
            await_ring(memory, turn)
    return slot, phases, previous


@triton.jit
def producer(G, A, memory, T: tl.constexpr):
    """Run the producer of template `T`: the hooks that load, task after task.

    `G`: the tensors of the call. `A`: its numbers. `memory`: shared memory and pipelines of the thread block.
    """
    STAGES: tl.constexpr = facts(T).stages
    EARLY: tl.constexpr = facts(T).early_stages
    DYNAMIC: tl.constexpr = facts(T).dynamic
    slot = 0
    phases = -1  # one parity bit a stage: a fresh barrier counts as empty
    turn = 0
    begun = 0
    previous = 0
    open_cluster(T)
    ctx = new_context(G, A, T)
    index, tile = first_tile(ctx, A, memory, T)
    if EARLY > 0:
        begun = tl.where(tile.is_valid, early_count(tile, T), 0)
        slot, phases = skip_slots(slot, phases, begun, STAGES)
        previous = tl.maximum(begun - 1, 0)
    while tile.is_valid:
        slot, phases, previous = load_tile(extended(ctx, tile), memory, tile, begun, slot, phases, previous, turn, T)
        if DYNAMIC:  # the ring is full: there is nothing to load before the answer is here
            index, tile = fetched_tile(ctx, A, memory, turn)
        else:
            index, tile = next_tile(ctx, A, index, tile)
        turn += 1
        begun = 0
    if DYNAMIC:
        fetch_no_more(ctx)
    cluster_opened(T)
    leave_cluster(memory, phases, T)
    end_after_previous(T)


@triton.jit
def load_lagged_tile(whole, memory, tile, begun, slot, phases, turn, T: tl.constexpr):
    """Load the lagged tiles of a work tile, from iteration `begun` on: (next stage, phases)."""
    SAFE: tl.constexpr = facts(T).safe_stages
    OVER_RING: tl.constexpr = facts(T).over_ring
    if OVER_RING:
        slot = begun
    at(T, "producer_task_begins", whole, memory, turn, 1, T)
    for i in range(begun, tile.count):
        if OVER_RING:
            if i == SAFE:
                await_ring(memory, turn)
        at(T, "producer_iteration_begins", i, T)
        here = iteration_context(whole, memory, i, 1, T)
        wait(memory.lagged_pipeline.empty[slot], (phases >> slot) & 1)
        load_lagged(here, memory, slot)
        slot, phases = next_slot(slot, phases, facts(T).stages)
        at(T, "producer_iteration_ends", whole, memory, i, 1, T)
    if OVER_RING:
        if tile.count <= SAFE:
            await_ring(memory, turn)
    return slot, phases


@triton.jit
def lagged_producer(G, A, memory, T: tl.constexpr):
    """Loads the lagged tiles where the producer loads only the others."""
    STAGES: tl.constexpr = facts(T).stages
    EARLY: tl.constexpr = facts(T).early_stages
    slot = 0
    phases = -1  # one parity bit a stage: a fresh barrier counts as empty
    turn = 0
    begun = 0
    open_cluster(T)
    ctx = new_context(G, A, T)
    index, tile = first_tile(ctx, A, memory, T)
    if EARLY > 1:
        begun = tl.where(tile.is_valid, tl.maximum(early_count(tile, T) - 1, 0), 0)
        slot, phases = skip_slots(slot, phases, begun, STAGES)
    while tile.is_valid:
        slot, phases = load_lagged_tile(extended(ctx, tile), memory, tile, begun, slot, phases, turn, T)
        index, tile = following_tile(ctx, A, memory, index, tile, turn, T)
        turn += 1
        begun = 0
    cluster_opened(T)
