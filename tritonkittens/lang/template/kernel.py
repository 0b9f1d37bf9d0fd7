"""What a template runs: the roles, their pipelines, and the loop over the tiles of a thread block. The hooks are called from here.

A thread block (or cluster) walks over work tiles (`lang/schedule/tile_scheduler.py`). For each, the producer fills pipeline stages in the order of the
iterations, and the consumers that share the tile compute on them and finish it. Consumers that work on tiles of their own (`independent`) skip the stages of
the others' tiles. Senders move what consumers give them.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx.tensormap import parameter_address
from tritonkittens.inline_ptx.tma import prefetch_tensormap
from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.kernel import kernel
from tritonkittens.lang.memory.tma import fence_async, store_read_wait
from tritonkittens.lang.register.construction import scheduling_barrier
from tritonkittens.lang.schedule.dynamic_scheduler import draw, draw_no_more, hear, hear_first, numbered, tell, tell_first
from tritonkittens.lang.schedule.tile_scheduler import first_unit, next_unit, nothing_of, some_work, work_behind, work_of
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.sync.warp_specialize import start_roles
from tritonkittens.lang.template.calls import (
    addressed_anew,
    at_iteration,
    await_kept,
    call_compute,
    call_drain,
    call_fetch,
    call_first,
    call_send,
    call_start,
    call_store,
    extended,
    fill_packed,
    finish_packed,
    finish_task,
    give_kept_back,
    give_staging,
    load_finish,
    load_input,
    load_kept,
    load_scratch,
    load_trailing,
    marked_edges,
    new_context,
    nothing_packed,
    of_consumer,
    pack_results,
    release_before,
    release_slot,
    store_packed,
    wait_for_stores,
    without,
)
from tritonkittens.lang.template.consumer_barriers import await_previous, call_next, open_turns
from tritonkittens.lang.template.index_prefetch import ask_entries, await_entries, iterations_of_window, window_of, with_entries
from tritonkittens.lang.template.pipeline_state import next_slot, phase_before, skip_slots
from tritonkittens.lang.template.reduce_warp import may_send
from tritonkittens.lang.template.storage import open_memory, output_tiles, own_rings, slot_tiles, template_memory, tiles_before
from tritonkittens.lang.types.global_layout import rank_of
from tritonkittens.lang.types.tiles import split

EARLY_SLOTS = 2  # measured on the H200: 1 to 2 % of a GEMM of 1024³; more keep the roles waiting for the barriers between their copies
# Rings full of iterations from which on consumers end a task one behind the other: before they do, and when the next task begins, the ring runs low. In a task
# of little more than a ring that costs more than it hides (GEMM 100×50000×512 on the H100: 3 to 5 %)
LONG_TASK = tl.constexpr(8)


@op
def _run_roles(t: Trace, G: Any, A: Any, memory: Any, T: Any) -> Any:
    config = unwrap(T)
    roles: list[tuple[Any, tuple]] = [(_consumer, (tl.constexpr(c), G, A, memory, T)) for c in range(config.consumers)]
    roles.append((_producer, (G, A, memory, T)))
    warps = [*(WARPS,) * config.consumers, 1]
    if config.trailing_producer:
        roles.append((_trailing_producer, (G, A, memory, T)))
        warps.append(1)
    if config._plan.output:
        roles.append((_storer, (G, A, memory, T)))
        warps.append(1)
    for c in range(config.senders):
        roles.append((_sender, (tl.constexpr(c), G, A, memory, T)))
        warps.append(1)
    if config.cluster_size > 1:
        for idle in split(config.idle_warps):  # a role has a power of two of warps
            roles.append((_bystander, (T,)))
            warps.append(idle)
    registers = config.registers()
    start_roles(t, roles, tuple(warps), (*registers, *registers[-1:] * (len(roles) - len(registers))) if config.reallocates else None)


@op
def _open(t: Trace, T: Any) -> Any:
    """Before the first copy to other blocks all warps of a cluster meet: no block is written to whose semaphores are not there yet. Blocks that share a task's
    iterations only say that they are there: they send each other nothing before its end, see `_opened`. Semaphores are all that was written, and fenced."""
    if unwrap(T).cluster_size > 1:
        t.call(ptx_cluster.arrive, "relaxed")
    if unwrap(T).cluster > 1:
        t.call(ptx_cluster.wait)


@op
def _opened(t: Trace, T: Any) -> Any:
    """The other half of `_open`, where that is not all."""
    if unwrap(T).sharers > 1:
        t.call(ptx_cluster.wait)


@triton.jit
def _leave(memory, phases, T: tl.constexpr):
    """Behind a block's last copy: no block of a cluster ends while others still arrive at its semaphores. What they write to its tiles its consumers have
    waited for; that they have given every slot back its producer sees here. A barrier of the cluster would have each of its threads wait until all that it
    wrote is visible on the device (`fence.acq_rel.gpu`)."""
    CLUSTER: tl.constexpr = T.cluster
    STAGES: tl.constexpr = _facts(T)[0]
    TRAILING: tl.constexpr = _facts(T)[9]
    if CLUSTER > 1:
        for slot in range(STAGES):
            wait(memory.finished[slot], (phases >> slot) & 1)
            if TRAILING:
                wait(memory.trailing_finished[slot], (phases >> slot) & 1)


@op
def _prefetch_descriptors(t: Trace, G: Any, T: Any) -> Any:
    """Fetch the tensor maps while the semaphores are made: the first copy would wait for them."""
    t.require(f"{type(unwrap(T)).__name__} (TMA, warp roles)", "tma")
    for g in G:
        for number in range(len(g.maps)):
            t.call(prefetch_tensormap, t.call(parameter_address, unwrap(g.parameter) + number * (1 + 2 * rank_of(g))), issuer="cta")


@op
def _facts(t: Trace, T: Any) -> Any:
    """(stages, safe stages, over ring, pipelined, has scratch, has preload, output stages, independent, early slots, trailing, has kept tiles, draws, staggers,
    has a trailing producer, tells the first task, iterations of a window of entries, packs, iterations for each) as constants.

    Early are the slots that nothing must be waited for to fill.
    """
    T = unwrap(T)
    placed, plan = T.placement(t.arch), T._plan
    over_ring = placed.over_ring is not None
    early = 0 if T.draws else min(EARLY_SLOTS, placed.safe_stages, placed.stages - bool(plan.preload))
    facts = (placed.stages, placed.safe_stages, over_ring, T.pipelined, bool(plan.scratch), bool(plan.preload), T.output_stages if plan.output else 0,
             T.consumers // T.team, early, bool(plan.trailing), bool(plan.common or plan.deferred), T.draws, T.staggers(t.arch),
             T.trailing_producer, early > 0 and T.tells_tasks, iterations_of_window(plan), len(plan.packed), 1 + plan.packed_steps)
    return tl.tuple([tl.constexpr(x) for x in facts])


# ---------------------------------------------------------------- device code


@triton.jit
def _first_work(ctx, A):
    """(unit, its work) that this block begins with, where it does not draw it."""
    unit = first_unit(ctx, A)
    return unit, work_of(ctx, A, unit)


@triton.jit
def _drawn_work(ctx, A, memory, nth):
    """The same of the `nth` unit that this block draws: the producer tells the others."""
    unit = draw(ctx)
    if ctx.config.tells_tasks:
        work = work_of(ctx, A, unit)
        tell(memory, work, nth)
    else:
        tell(memory, numbered(unit), nth)
        work = work_of(ctx, A, unit)
    return unit, work


@triton.jit
def _heard_work(ctx, A, memory, nth):
    """The same, as the others hear of it."""
    if ctx.config.tells_tasks:
        work = hear(memory, some_work(ctx, A), nth)
    else:
        work = work_of(ctx, A, hear(memory, numbered(0), nth).number)
    return work.task, work


@triton.jit
def _told_work(ctx, A, memory, T: tl.constexpr):
    """The same that a role begins with which draws none."""
    TOLD: tl.constexpr = _facts(T)[14]
    if TOLD:
        return first_unit(ctx, A), hear_first(memory, some_work(ctx, A))
    else:
        return _first_work(ctx, A)


@triton.jit
def _next_work(ctx, A, unit, work):
    """The same behind a unit."""
    following = next_unit(ctx, A, unit, work)
    return following, work_behind(ctx, A, work, following)


@triton.jit
def _told_next(ctx, A, memory, unit, work, turn, T: tl.constexpr):
    """The same behind a role's unit number `turn`, where it draws none."""
    DRAWS: tl.constexpr = _facts(T)[11]
    return _heard_work(ctx, A, memory, turn) if DRAWS else _next_work(ctx, A, unit, work)


@triton.jit
def _leave_input(ctx, A, memory, following, work, WORKER: tl.constexpr, T: tl.constexpr):
    """A consumer has seen all input of its unit: the scratch tiles are free, and the ring is that of the consumer of the next unit, where there is one. Returns
    the work of that unit, or, where units are drawn, that of this one: the next is not known yet.

    It is computed here, while products are under way: its divisions take 500 cycles or more (GEMM bf16 6144×2816×8192 on the H100, four tasks a block: 551 to
    549 thousand cycles, in pairs of blocks 552 to 549). Where consumers take turns the other's products hide it anyway."""
    HAS_SCRATCH: tl.constexpr = _facts(T)[4]
    TEAMS: tl.constexpr = _facts(T)[7]
    DRAWS: tl.constexpr = _facts(T)[11]
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
def _early_count(work, T: tl.constexpr):
    """How many slots of the block's first unit are filled before the roles begin; with preloaded tiles not its last, behind which the producer loads those."""
    LIMIT: tl.constexpr = _facts(T)[8]
    PRELOAD: tl.constexpr = _facts(T)[5]
    if PRELOAD:
        return tl.minimum(tl.maximum(work.count - 1, 0), LIMIT)
    else:
        return tl.minimum(work.count, LIMIT)


@triton.jit
def _iteration(whole, memory, i, PRODUCER: tl.constexpr, T: tl.constexpr):
    """The context of a unit's iteration number `i` for a producer."""
    WINDOW: tl.constexpr = _facts(T)[15]
    here = at_iteration(whole, whole.begin + i)
    if WINDOW > 0:
        return with_entries(here, memory, window_of(i // WINDOW, PRODUCER), i % WINDOW)
    else:
        return here


@triton.jit
def _ask_window(whole, memory, number, PRODUCER: tl.constexpr, T: tl.constexpr):
    """Ask for the entries of a unit's window, where there is one."""
    WINDOW: tl.constexpr = _facts(T)[15]
    if number * WINDOW < whole.count:
        ask_entries(at_iteration(whole, whole.begin + number * WINDOW), memory, window_of(number, PRODUCER))


@triton.jit
def _open_windows(whole, memory, turn, PRODUCER: tl.constexpr, T: tl.constexpr):
    """The entries of a unit's first window, which the block's first unit may have already, and those of the second under way."""
    WINDOW: tl.constexpr = _facts(T)[15]
    EARLY: tl.constexpr = _facts(T)[8]
    if WINDOW > 0:
        if EARLY == 0 or not T.single:
            if EARLY == 0 or turn > 0:
                _ask_window(whole, memory, 0, PRODUCER, T)
                await_entries()
        _ask_window(whole, memory, 1, PRODUCER, T)


@triton.jit
def _await_window(i, T: tl.constexpr):
    """In front of an iteration: are the entries of its window there? The first's were waited for."""
    WINDOW: tl.constexpr = _facts(T)[15]
    if WINDOW > 0:
        if (i > 0) and (i % WINDOW == 0):
            await_entries()


@triton.jit
def _ask_next_window(whole, memory, i, PRODUCER: tl.constexpr, T: tl.constexpr):
    """Behind the first iteration of a window: nobody reads the one before any more, where the next comes."""
    WINDOW: tl.constexpr = _facts(T)[15]
    if WINDOW > 0:
        if (i > 0) and (i % WINDOW == 0):
            _ask_window(whole, memory, i // WINDOW + 1, PRODUCER, T)


@triton.jit
def _load_early(ctx, work, memory, T: tl.constexpr):
    """Ask for the block's first input before the roles begin: starting them takes as long as the first bytes are under way. A block of a cluster loads it for
    itself, for the others' semaphores may not be there yet."""
    TRAILING: tl.constexpr = _facts(T)[9]
    if work.valid:
        whole = extended(ctx, work)
        own = own_rings(memory, T)
        # The first input before the tiles of the task: 0.1 to 0.3 µs of decoding with attention, whose keys no cache has (H200). Those of several consumers, as
        # many bytes as the input or more, go first
        LAST: tl.constexpr = T.consumers == 1
        count = _early_count(work, T)
        if not LAST:
            _load_for_task(whole, own, 0)
        for i in range(count):
            load_input(_iteration(whole, memory, i, 0, T), own, i)
            if LAST:
                if i == 0:
                    _load_for_task(whole, own, 0)
            if TRAILING:
                if i > 0:
                    load_trailing(_iteration(whole, memory, i - 1, 0, T), own, i - 1)
        if LAST:
            if count == 0:
                _load_for_task(whole, own, 0)


@triton.jit
def _load_for_task(ctx, memory, turn):
    """Ask for the tiles that consumers keep for a whole task."""
    load_scratch(ctx, memory, turn)
    load_kept(ctx, memory, turn)


@triton.jit
def _await_staging(memory, turn):
    """Once a task, before the slots that staging tiles lie over are filled: the stores of the task before have read them. Each producer says that it has seen
    so, for the next phase."""
    wait(memory.staging_free[0], (turn & 1) ^ 1)
    arrive(memory.staging_free[0], per="warp")


@triton.jit
def _producer(G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = _facts(T)[0]
    SAFE: tl.constexpr = _facts(T)[1]
    OVER_RING: tl.constexpr = _facts(T)[2]
    HAS_SCRATCH: tl.constexpr = _facts(T)[4]
    HAS_KEPT: tl.constexpr = _facts(T)[10]
    PRELOAD: tl.constexpr = _facts(T)[5]
    EARLY: tl.constexpr = _facts(T)[8]
    TRAILING: tl.constexpr = _facts(T)[9] and not _facts(T)[13]
    DRAWS: tl.constexpr = _facts(T)[11]
    slot = 0
    phases = -1  # one parity bit a slot: a fresh semaphore counts as released
    turn = 0
    begun = 0
    previous = 0
    _open(T)
    ctx = new_context(G, A, T)
    unit, work = _told_work(ctx, A, memory, T)
    if EARLY > 0:
        begun = tl.where(work.valid, _early_count(work, T), 0)
        slot, phases = skip_slots(slot, phases, begun, STAGES)
        previous = tl.maximum(begun - 1, 0)
    while work.valid:
        whole = extended(ctx, work)
        if HAS_SCRATCH or HAS_KEPT:
            if (work.count == 0) and (turn > 0 or EARLY == 0):
                _load_for_task(whole, memory, turn)
        if OVER_RING:
            slot = begun  # the tail of the ring must be the slots that are filled last
        _open_windows(whole, memory, turn, 0, T)
        for i in range(begun, work.count):
            if OVER_RING:
                if i == SAFE:
                    _await_staging(memory, turn)
            _await_window(i, T)
            here = _iteration(whole, memory, i, 0, T)
            wait(memory.finished[slot], (phases >> slot) & 1)
            load_input(here, memory, slot)
            if HAS_SCRATCH or HAS_KEPT:
                if (i == 0) and (turn > 0 or EARLY == 0):
                    _load_for_task(whole, memory, turn)
            if TRAILING:  # used one iteration later, and so asked for
                if i > 0:
                    before = _iteration(whole, memory, i - 1, 0, T)
                    wait(memory.trailing_finished[previous], phase_before(phases, previous))
                    load_trailing(before, memory, previous)
                previous = slot
            slot, phases = next_slot(slot, phases, STAGES)
            if PRELOAD:  # consumers give the staging tiles back once they are in the task: not before its first slots are on their way
                if i == tl.minimum(work.count, STAGES) - 1:
                    load_finish(whole, memory, turn)
            _ask_next_window(whole, memory, i, 0, T)
        if TRAILING:
            if work.count > 0:
                before = _iteration(whole, memory, work.count - 1, 0, T)
                wait(memory.trailing_finished[previous], phase_before(phases, previous))
                load_trailing(before, memory, previous)
        if PRELOAD:
            if work.count == 0:
                load_finish(whole, memory, turn)
        if OVER_RING:
            if work.count <= SAFE:
                _await_staging(memory, turn)
        if DRAWS:  # the ring is full: there is nothing to load before the answer is here
            unit, work = _drawn_work(ctx, A, memory, turn)
        else:
            unit, work = _next_work(ctx, A, unit, work)
        turn += 1
        begun = 0
    if DRAWS:
        draw_no_more(ctx)
    _opened(T)
    _leave(memory, phases, T)


@triton.jit
def _trailing_producer(G, A, memory, T: tl.constexpr):
    """Loads the trailing tiles where the producer loads only the others."""
    STAGES: tl.constexpr = _facts(T)[0]
    SAFE: tl.constexpr = _facts(T)[1]
    OVER_RING: tl.constexpr = _facts(T)[2]
    EARLY: tl.constexpr = _facts(T)[8]
    slot = 0
    phases = -1  # one parity bit a slot: a fresh semaphore counts as released
    turn = 0
    begun = 0
    _open(T)
    ctx = new_context(G, A, T)
    unit, work = _told_work(ctx, A, memory, T)
    if EARLY > 1:
        begun = tl.where(work.valid, tl.maximum(_early_count(work, T) - 1, 0), 0)
        slot, phases = skip_slots(slot, phases, begun, STAGES)
    while work.valid:
        whole = extended(ctx, work)
        if OVER_RING:
            slot = begun
        _open_windows(whole, memory, turn, 1, T)
        for i in range(begun, work.count):
            if OVER_RING:
                if i == SAFE:
                    _await_staging(memory, turn)
            _await_window(i, T)
            here = _iteration(whole, memory, i, 1, T)
            wait(memory.trailing_finished[slot], (phases >> slot) & 1)
            load_trailing(here, memory, slot)
            slot, phases = next_slot(slot, phases, STAGES)
            _ask_next_window(whole, memory, i, 1, T)
        if OVER_RING:
            if work.count <= SAFE:
                _await_staging(memory, turn)
        unit, work = _told_next(ctx, A, memory, unit, work, turn, T)
        turn += 1
        begun = 0
    _opened(T)


@triton.jit
def _behind_edges(work, number):
    """How many iterations of a unit are edges, or among its first `number`."""
    EDGES: tl.constexpr = marked_edges(work)
    if EDGES is None or EDGES == 0 or EDGES == number:
        return number
    else:
        return tl.maximum(tl.minimum(work.edges - work.begin, work.count), number)


@triton.jit
def _pipelined(mine, memory, state, slot, phases, previous, i, held_at, EDGE: tl.constexpr, WORKER: tl.constexpr, T: tl.constexpr):
    """An iteration behind the first: (state, next slot, phases, this slot)."""
    STAGGERS: tl.constexpr = _facts(T)[12]
    if STAGGERS and WORKER > 0:
        if i == held_at:
            await_previous(WORKER)
    wait(memory.arrived[slot], (phases >> slot) & 1)
    here = may_send(at_iteration(addressed_anew(mine, memory), mine.begin + i, EDGE), memory, phases)
    state = call_compute(here, state, slot_tiles(memory, slot), tiles_before(memory, previous, phases))
    release_before(memory, previous, T)
    behind, phases = next_slot(slot, phases, _facts(T)[0])
    return state, behind, phases, slot


@triton.jit
def _held_at(ctx, A, following, work, T: tl.constexpr):
    """The iteration in front of which a consumer lets the one ahead end the task, 0 where it does not: behind the last task there is nothing to overlap with,
    in a short one it does not pay (and in one of no more iterations than slots the one ahead could come here again before this one has). The slot before is not
    given back yet: what the one ahead still needs are all others."""
    STAGGERS: tl.constexpr = _facts(T)[12]
    STAGES: tl.constexpr = _facts(T)[0]
    if STAGGERS:
        return tl.where((work.count >= LONG_TASK * STAGES) & work_behind(ctx, A, work, following).valid, work.count - (STAGES - 1), 0)
    else:
        return 0


@triton.jit
def _alone(mine, memory, state, slot, phases, out, out_phases, i, EDGE: tl.constexpr, T: tl.constexpr):
    """An iteration of a computation without `drain`: (state, next slot, phases, next output slot, their phases)."""
    OUTPUTS: tl.constexpr = _facts(T)[6]
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
    slot, phases = next_slot(slot, phases, _facts(T)[0])
    return state, slot, phases, out, out_phases


@triton.jit
def _packed_until(T: tl.constexpr):
    """The iteration in which packed results of the task before have left."""
    return _facts(T)[0] - 1 + _facts(T)[16] * _facts(T)[17]


@triton.jit
def _store_packed_at(before, packed, memory, i, pending, T: tl.constexpr):
    """Behind the product of iteration i: stage one tile of the results of the task `before`, where those are pending, or do what is left to do with it, by
    code that all tiles share. The first iterations do neither: while the other consumer ends its task, for as many iterations as it was held in front of, this
    one's products are all that tensor cores have."""
    PACKS: tl.constexpr = _facts(T)[16]
    EVERY: tl.constexpr = _facts(T)[17]
    FIRST: tl.constexpr = _facts(T)[0] - 1
    if (i >= FIRST) & (i < _packed_until(T)) & (pending > 0):
        step = (i - FIRST) % EVERY
        if EVERY == 1 or step == 0:
            for n in tl.static_range(PACKS):
                if i == FIRST + n * EVERY:
                    store_packed(before, packed, memory, n)
        else:
            finish_packed(before, memory, (i - FIRST) // EVERY, step - 1, EVERY - 1)


@triton.jit
def _fill_packed_at(mine, memory, i, T: tl.constexpr):
    if i == _packed_until(T):
        fill_packed(mine, memory)


@triton.jit
def _store_rest(before, packed, memory, i, pending, T: tl.constexpr):
    """What iterations before `i` have not stored of packed results, in front of the end of a short task."""
    for j in range(tl.maximum(i, _facts(T)[0] - 1), _packed_until(T)):
        _store_packed_at(before, packed, memory, j, pending, T)


@triton.jit
def _store_last(before, packed, memory, pending, T: tl.constexpr):
    """The packed results of a block's last task: no products hide what is done with them, nor need registers."""
    PACKS: tl.constexpr = _facts(T)[16]
    EVERY: tl.constexpr = _facts(T)[17]
    if pending > 0:
        for tile in range(PACKS):
            for n in tl.static_range(PACKS):
                if tile == n:
                    store_packed(before, packed, memory, n)
            if EVERY > 1:
                finish_packed(before, memory, tile, 0, 1)


@triton.jit
def _consumer(WORKER: tl.constexpr, G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = _facts(T)[0]
    OVER_RING: tl.constexpr = _facts(T)[2]
    PIPELINED: tl.constexpr = _facts(T)[3]
    HAS_SCRATCH: tl.constexpr = _facts(T)[4]
    TEAMS: tl.constexpr = _facts(T)[7]
    DRAWS: tl.constexpr = _facts(T)[11]
    STAGGERS: tl.constexpr = _facts(T)[12]
    PACKS: tl.constexpr = _facts(T)[16]
    slot = 0
    phases = 0
    turn = 0
    out = 0
    out_phases = -1
    _open(T)
    ctx = new_context(G, A, T)
    unit, work = _told_work(ctx, A, memory, T)
    if TEAMS > 1:
        for _ in tl.static_range(WORKER):
            slot, phases = skip_slots(slot, phases, work.count, STAGES)
            unit, work = _next_work(ctx, A, unit, work)
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
                held_at = _held_at(ctx, A, following, work, T)
                inner = _behind_edges(work, 1)
                if EDGES == -1:
                    for i in range(1, inner):
                        state, slot, phases, previous = _pipelined(mine, memory, state, slot, phases, previous, i, held_at, True, WORKER, T)
                        if PACKS > 0:
                            _store_packed_at(before, packed, memory, i, pending, T)
                            _fill_packed_at(mine, memory, i, T)
                for i in range(inner, work.count):
                    state, slot, phases, previous = _pipelined(mine, memory, state, slot, phases, previous, i, held_at, EDGES is None, WORKER, T)
                    if PACKS > 0:
                        _store_packed_at(before, packed, memory, i, pending, T)
                        _fill_packed_at(mine, memory, i, T)
                if STAGGERS and WORKER + 1 < T.consumers:
                    if held_at > 0:
                        call_next(WORKER, T)
                    scheduling_barrier(held_at)  # and not behind the divisions that come next
                behind = _leave_input(ctx, A, memory, following, work, WORKER, T)
                there = may_send(addressed_anew(without(mine, "scratch"), memory), memory, phases)
                state = call_drain(there, state, tiles_before(memory, previous, phases))
                release_before(memory, previous, T)
                give_kept_back(there, True)
            else:
                await_kept(mine.deferred)
                give_staging(memory, WORKER, T)
                behind = _leave_input(ctx, A, memory, following, work, WORKER, T)
                give_kept_back(mine)
        else:
            give_staging(memory, WORKER, T)
            inner = _behind_edges(work, 0)
            if EDGES is not None and EDGES != 0:
                for i in range(inner):
                    state, slot, phases, out, out_phases = _alone(mine, memory, state, slot, phases, out, out_phases, i, True, T)
            for i in range(inner, work.count):
                state, slot, phases, out, out_phases = _alone(mine, memory, state, slot, phases, out, out_phases, i, EDGES is None, T)
            behind = _leave_input(ctx, A, memory, following, work, WORKER, T)
            give_kept_back(mine)
        ended = without(mine, "scratch", "common", "deferred")
        if PACKS > 0:
            _store_rest(of_consumer(extended(ctx, done), memory, WORKER, turn), packed, memory, work.count, pending, T)
            if work.count <= _packed_until(T):
                fill_packed(ended, memory)
            packed, pending = pack_results(ended, state, memory, turn)
            done = work
        else:
            finish_task(ended, state, memory, turn, phases, behind.valid)
        unit, work = _heard_work(ctx, A, memory, turn) if DRAWS else (following, behind)
        turn += 1
        if TEAMS > 1:
            for _ in tl.static_range(TEAMS - 1):
                slot, phases = skip_slots(slot, phases, work.count, STAGES)
                unit, work = _next_work(ctx, A, unit, work)
    if PACKS > 0:
        _store_last(of_consumer(extended(ctx, done), memory, WORKER, turn), packed, memory, pending, T)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is
    if turn == 0:
        _opened(T)


@triton.jit
def _storer(G, A, memory, T: tl.constexpr):
    """Stores output slots in the order in which consumers write them; a slot is free once the store after it is issued and this one has read it."""
    STAGES: tl.constexpr = _facts(T)[6]
    slot = 0
    phases = 0
    stores = 0
    _open(T)
    ctx = new_context(G, A, T)
    unit, work = _told_work(ctx, A, memory, T)
    while work.valid:
        whole = extended(ctx, work)
        for i in range(work.count):
            wait(memory.written[slot], (phases >> slot) & 1)
            call_store(at_iteration(whole, work.begin + i), output_tiles(memory, slot))
            if STAGES > 1:
                if stores > 0:
                    wait_for_stores(ctx, 1)
                    arrive(memory.stored[tl.where(slot == 0, STAGES - 1, slot - 1)], per="warp")
            else:
                wait_for_stores(ctx, 0)
                arrive(memory.stored[slot], per="warp")
            stores += 1
            slot, phases = next_slot(slot, phases, STAGES)
        unit, work = _next_work(ctx, A, unit, work)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is


@triton.jit
def _sender(WORKER: tl.constexpr, G, A, memory, T: tl.constexpr):
    """Sends the working tiles that a consumer gives it once an iteration."""
    sends = 0
    turn = 0
    ctx = new_context(G, A, T)
    unit, work = _told_work(ctx, A, memory, T)
    while work.valid:
        mine = of_consumer(extended(ctx, work), memory, WORKER, turn)
        for i in range(work.count):
            call_send(at_iteration(mine, work.begin + i), memory, sends)
            sends += 1
        unit, work = _told_next(ctx, A, memory, unit, work, turn, T)
        turn += 1
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is


@triton.jit
def _bystander(T: tl.constexpr):
    """The warps that fill up a warpgroup: the barrier of a cluster counts every warp that was launched."""
    _open(T)
    _opened(T)


@kernel(num_warps=WARPS)
@triton.jit
def _template_kernel(G, A, T: tl.constexpr):
    _prefetch_descriptors(G, T)
    EARLY: tl.constexpr = _facts(T)[8]
    TOLD: tl.constexpr = _facts(T)[14]
    WINDOW: tl.constexpr = _facts(T)[15]
    memory = template_memory(T)
    if EARLY > 0:
        ctx = new_context(G, A, T)
        unit, work = _first_work(ctx, A)  # what hook `setup` reads from memory is under way while semaphores are made
        if WINDOW > 0:  # under way meanwhile, too: 0.6 % of decoding with attention from pages of 16 keys, 8 × 4,096 of dimension 64 (H200)
            if work.valid:
                for producer in tl.static_range(1 + T.trailing_producer):
                    _ask_window(extended(ctx, work), memory, 0, producer, T)
    open_memory(memory, T)
    if EARLY > 0:
        if TOLD:
            tell_first(memory, work)
        if WINDOW > 0:
            await_entries()
        _load_early(ctx, work, memory, T)
    _run_roles(G, A, memory, T)
