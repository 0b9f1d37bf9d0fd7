"""The producer roles: one warp that loads input tiles, and where asked for one that loads lagged tiles."""
from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.schedule.dynamic_scheduler import draw_no_more
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.calls import at_iteration, extended, load_epilogue, load_input, load_block_task, load_task, load_lagged, new_context
from tritonkittens.lang.template.cluster import cluster_opened, leave_cluster, open_cluster
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.index_prefetch import ask_entries, await_entries, window_of, with_entries
from tritonkittens.lang.template.next_tile import drawn_work, next_work, told_next, told_work
from tritonkittens.lang.template.pipeline_state import next_slot, phase_before, skip_slots
from tritonkittens.lang.template.storage import own_rings


@triton.jit
def early_count(work, T: tl.constexpr):
    """How many slots of the block's first unit are filled before the roles begin; with preloaded tiles not its last, behind which the producer loads those."""
    LIMIT: tl.constexpr = facts(T).early_stages
    PRELOAD: tl.constexpr = facts(T).has_preload
    if PRELOAD:
        return tl.minimum(tl.maximum(work.count - 1, 0), LIMIT)
    else:
        return tl.minimum(work.count, LIMIT)


@triton.jit
def iteration_context(whole, memory, i, PRODUCER: tl.constexpr, T: tl.constexpr):
    """The context of a unit's iteration number `i` for a producer."""
    WINDOW: tl.constexpr = facts(T).window
    here = at_iteration(whole, whole.begin + i)
    if WINDOW > 0:
        return with_entries(here, memory, window_of(i // WINDOW, PRODUCER), i % WINDOW)
    else:
        return here


@triton.jit
def ask_window(whole, memory, number, PRODUCER: tl.constexpr, T: tl.constexpr):
    """Ask for the entries of a unit's window, where there is one."""
    WINDOW: tl.constexpr = facts(T).window
    if number * WINDOW < whole.count:
        ask_entries(at_iteration(whole, whole.begin + number * WINDOW), memory, window_of(number, PRODUCER))


@triton.jit
def open_windows(whole, memory, turn, PRODUCER: tl.constexpr, T: tl.constexpr):
    """The entries of a unit's first window, which the block's first unit may have already, and those of the second under way."""
    WINDOW: tl.constexpr = facts(T).window
    EARLY: tl.constexpr = facts(T).early_stages
    if WINDOW > 0:
        if EARLY == 0 or not T.one_tile_per_block:
            if EARLY == 0 or turn > 0:
                ask_window(whole, memory, 0, PRODUCER, T)
                await_entries()
        ask_window(whole, memory, 1, PRODUCER, T)


@triton.jit
def await_window(i, T: tl.constexpr):
    """In front of an iteration: are the entries of its window there? The first's were waited for."""
    WINDOW: tl.constexpr = facts(T).window
    if WINDOW > 0:
        if (i > 0) and (i % WINDOW == 0):
            await_entries()


@triton.jit
def ask_next_window(whole, memory, i, PRODUCER: tl.constexpr, T: tl.constexpr):
    """Behind the first iteration of a window: nobody reads the one before any more, where the next comes."""
    WINDOW: tl.constexpr = facts(T).window
    if WINDOW > 0:
        if (i > 0) and (i % WINDOW == 0):
            ask_window(whole, memory, i // WINDOW + 1, PRODUCER, T)


@triton.jit
def load_early(ctx, work, memory, T: tl.constexpr):
    """Ask for the block's first input before the roles begin: starting them takes as long as the first bytes are under way. A block of a cluster loads it for
    itself, for the others' semaphores may not be there yet."""
    TRAILING: tl.constexpr = facts(T).has_trailing
    if work.valid:
        whole = extended(ctx, work)
        own = own_rings(memory, T)
        # The first input before the tiles of the task: 0.1 to 0.3 µs of decoding with attention, whose keys no cache has (H200). Those of several consumers, as
        # many bytes as the input or more, go first
        LAST: tl.constexpr = T.consumers == 1
        count = early_count(work, T)
        if not LAST:
            load_for_task(whole, own, 0)
        for i in range(count):
            load_input(iteration_context(whole, memory, i, 0, T), own, i)
            if LAST:
                if i == 0:
                    load_for_task(whole, own, 0)
            if TRAILING:
                if i > 0:
                    load_lagged(iteration_context(whole, memory, i - 1, 0, T), own, i - 1)
        if LAST:
            if count == 0:
                load_for_task(whole, own, 0)


@triton.jit
def load_for_task(ctx, memory, turn):
    """Ask for the tiles that consumers keep for a whole task."""
    load_task(ctx, memory, turn)
    load_block_task(ctx, memory, turn)


@triton.jit
def await_staging(memory, turn):
    """Once a task, before the slots that epilogue tiles lie over are filled: the stores of the task before have read them. Each producer says that it has seen
    so, for the next phase."""
    wait(memory.staging_free[0], (turn & 1) ^ 1)
    arrive(memory.staging_free[0], per="warp")


@triton.jit
def producer(G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = facts(T).stages
    SAFE: tl.constexpr = facts(T).safe_stages
    OVER_RING: tl.constexpr = facts(T).over_ring
    HAS_SCRATCH: tl.constexpr = facts(T).has_scratch
    HAS_KEPT: tl.constexpr = facts(T).has_kept
    PRELOAD: tl.constexpr = facts(T).has_preload
    EARLY: tl.constexpr = facts(T).early_stages
    TRAILING: tl.constexpr = facts(T).has_trailing and not facts(T).lagged_producer
    DRAWS: tl.constexpr = facts(T).draws
    slot = 0
    phases = -1  # one parity bit a slot: a fresh semaphore counts as released
    turn = 0
    begun = 0
    previous = 0
    open_cluster(T)
    ctx = new_context(G, A, T)
    unit, work = told_work(ctx, A, memory, T)
    if EARLY > 0:
        begun = tl.where(work.valid, early_count(work, T), 0)
        slot, phases = skip_slots(slot, phases, begun, STAGES)
        previous = tl.maximum(begun - 1, 0)
    while work.valid:
        whole = extended(ctx, work)
        if HAS_SCRATCH or HAS_KEPT:
            if (work.count == 0) and (turn > 0 or EARLY == 0):
                load_for_task(whole, memory, turn)
        if OVER_RING:
            slot = begun  # the tail of the ring must be the slots that are filled last
        open_windows(whole, memory, turn, 0, T)
        for i in range(begun, work.count):
            if OVER_RING:
                if i == SAFE:
                    await_staging(memory, turn)
            await_window(i, T)
            here = iteration_context(whole, memory, i, 0, T)
            wait(memory.finished[slot], (phases >> slot) & 1)
            load_input(here, memory, slot)
            if HAS_SCRATCH or HAS_KEPT:
                if (i == 0) and (turn > 0 or EARLY == 0):
                    load_for_task(whole, memory, turn)
            if TRAILING:  # used one iteration later, and so asked for
                if i > 0:
                    before = iteration_context(whole, memory, i - 1, 0, T)
                    wait(memory.lagged_empty[previous], phase_before(phases, previous))
                    load_lagged(before, memory, previous)
                previous = slot
            slot, phases = next_slot(slot, phases, STAGES)
            if PRELOAD:  # consumers give the epilogue tiles back once they are in the task: not before its first slots are on their way
                if i == tl.minimum(work.count, STAGES) - 1:
                    load_epilogue(whole, memory, turn)
            ask_next_window(whole, memory, i, 0, T)
        if TRAILING:
            if work.count > 0:
                before = iteration_context(whole, memory, work.count - 1, 0, T)
                wait(memory.lagged_empty[previous], phase_before(phases, previous))
                load_lagged(before, memory, previous)
        if PRELOAD:
            if work.count == 0:
                load_epilogue(whole, memory, turn)
        if OVER_RING:
            if work.count <= SAFE:
                await_staging(memory, turn)
        if DRAWS:  # the ring is full: there is nothing to load before the answer is here
            unit, work = drawn_work(ctx, A, memory, turn)
        else:
            unit, work = next_work(ctx, A, unit, work)
        turn += 1
        begun = 0
    if DRAWS:
        draw_no_more(ctx)
    cluster_opened(T)
    leave_cluster(memory, phases, T)


@triton.jit
def lagged_producer(G, A, memory, T: tl.constexpr):
    """Loads the lagged tiles where the producer loads only the others."""
    STAGES: tl.constexpr = facts(T).stages
    SAFE: tl.constexpr = facts(T).safe_stages
    OVER_RING: tl.constexpr = facts(T).over_ring
    EARLY: tl.constexpr = facts(T).early_stages
    slot = 0
    phases = -1  # one parity bit a slot: a fresh semaphore counts as released
    turn = 0
    begun = 0
    open_cluster(T)
    ctx = new_context(G, A, T)
    unit, work = told_work(ctx, A, memory, T)
    if EARLY > 1:
        begun = tl.where(work.valid, tl.maximum(early_count(work, T) - 1, 0), 0)
        slot, phases = skip_slots(slot, phases, begun, STAGES)
    while work.valid:
        whole = extended(ctx, work)
        if OVER_RING:
            slot = begun
        open_windows(whole, memory, turn, 1, T)
        for i in range(begun, work.count):
            if OVER_RING:
                if i == SAFE:
                    await_staging(memory, turn)
            await_window(i, T)
            here = iteration_context(whole, memory, i, 1, T)
            wait(memory.lagged_empty[slot], (phases >> slot) & 1)
            load_lagged(here, memory, slot)
            slot, phases = next_slot(slot, phases, STAGES)
            ask_next_window(whole, memory, i, 1, T)
        if OVER_RING:
            if work.count <= SAFE:
                await_staging(memory, turn)
        unit, work = told_next(ctx, A, memory, unit, work, turn, T)
        turn += 1
        begun = 0
    cluster_opened(T)
