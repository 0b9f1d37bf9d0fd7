"""The MMA role, on chips with tensor memory: one warp that runs the hooks which multiply into the accumulators.

It waits for pipeline stages and issues the products of all consumers of a task. When products complete, they release
their stage. When the last products of a task complete, its consumers may read the accumulators, and finish the task
while this warp is in the next.
Source: PTX ISA, tcgen05.commit; CUTLASS, `sm100_gemm_tma_warpspecialized`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.mma.tcgen05 import mma_commit
from tritonkittens.lang.sync.semaphores import wait
from tritonkittens.lang.template.cluster import cluster_opened, open_cluster
from tritonkittens.lang.template.compute import (
    await_block_task,
    begin_sums,
    call_compute,
    call_compute_first,
    call_compute_last,
    release_block_task,
    uses_previous,
)
from tritonkittens.lang.template.contexts import (
    accumulators_in,
    at_iteration,
    extended,
    marked_edges,
    new_context,
    of_consumer,
    slot_of_task,
)
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.next_tile import first_tile, following_tile
from tritonkittens.lang.template.pipeline_state import next_slot
from tritonkittens.lang.template.storage import slot_tiles, tiles_before


@op
def _contexts(t: Trace, whole: Traced, memory: Traced, turn: Traced) -> Traced:
    """The context of each consumer that shares the task. With `pingpong` it is that of the one whose turn it is."""
    config, found = unwrap(whole.config), {}
    slot, _ = t.call(slot_of_task, turn, config.accumulator_slots)
    for c in range(config.team):
        ctx = t.call(of_consumer, whole, memory, tl.constexpr(c), turn)
        found[f"c{c}"] = ctx.replace(accumulators=accumulators_in(t, memory, config, c, slot))
    return struct(**found)


@op
def _begin_all(t: Trace, contexts: Traced) -> Traced:
    """The states that the consumers' sums begin with."""
    return struct(**{c: t.call(begin_sums, ctx) for c, ctx in contexts.fields.items()})


def _for_all(name: str, call: Traced, at_one: bool = True) -> Traced:
    def run(t: Trace, contexts: Traced, states: Traced, i: Traced, edge: Traced, *tiles: Traced) -> Traced:
        found = {}
        for c, ctx in contexts.fields.items():
            here = t.call(at_iteration, ctx, i, edge) if at_one else ctx
            found[c] = t.call(call, here, states.fields[c], *tiles)
        return struct(**found)

    run.__name__ = name
    return op(run)


_compute_all = _for_all("_compute_all", call_compute)
_compute_first_all = _for_all("_compute_first_all", call_compute_first)
_compute_last_all = _for_all("_compute_last_all", call_compute_last, at_one=False)


@op
def _release_stage(t: Trace, memory: Traced, slot: Traced, T: Traced) -> Traced:
    """Release a stage, in all CTAs of the cluster that load into it together, once the products that read it are
    complete."""
    cluster = unwrap(T).cluster
    empty = t.call(memory.input_pipeline.empty.__getitem__, slot)
    t.call(mma_commit, empty, (1 << cluster) - 1 if cluster > 1 else None)


@op
def _commit_accumulators(t: Trace, memory: Traced, slot: Traced, T: Traced) -> Traced:
    """Signal the consumers, of both CTAs of a pair, when all products into the accumulators are complete."""
    full = t.call(memory.accumulator_pipeline.full.__getitem__, slot)
    t.call(mma_commit, full, 0b11 if unwrap(T).pairs(t.arch) else None)


@op
def _await_task_tiles(t: Trace, contexts: Traced, memory: Traced, turn: Traced) -> Traced:
    """Wait for the task tiles of all consumers."""
    plan = unwrap(contexts.c0.config)._plan
    if plan.task and plan.per == "consumer":
        for c in range(len(contexts.fields)):
            t.call(wait, t.call(memory.task_pipeline.full.__getitem__, c), t.method(turn, "__and__", 1))
    t.call(await_block_task, contexts.c0.task)


@op
def _release_task_tiles(t: Trace, contexts: Traced, memory: Traced, computed_last: Traced) -> Traced:
    plan = unwrap(contexts.c0.config)._plan
    if plan.task and plan.per == "consumer":
        for c in range(len(contexts.fields)):
            t.call(mma_commit, t.call(memory.task_pipeline.empty.__getitem__, c))
    t.call(release_block_task, contexts.c0, computed_last)


@triton.jit
def _multiply_pipelined(contexts, memory, states, slot, phases, tile, T: tl.constexpr):
    """Issue the products of a task with `compute_last`: (next stage, phases)."""
    STAGES: tl.constexpr = facts(T).stages
    LATER: tl.constexpr = uses_previous(T)
    EDGES: tl.constexpr = marked_edges(tile)
    EDGE: tl.constexpr = EDGES is None or EDGES != 0
    if tile.count > 0:
        wait(memory.input_pipeline.full[slot], (phases >> slot) & 1)
        states = _compute_first_all(contexts, states, tile.begin, EDGE, slot_tiles(memory, slot))
        if not LATER:
            _release_stage(memory, slot, T)
        previous = slot
        slot, phases = next_slot(slot, phases, STAGES)
        for i in range(1, tile.count):
            wait(memory.input_pipeline.full[slot], (phases >> slot) & 1)
            before = tiles_before(memory, previous, phases)
            states = _compute_all(contexts, states, tile.begin + i, EDGE, slot_tiles(memory, slot), before)
            _release_stage(memory, previous if LATER else slot, T)
            previous = slot
            slot, phases = next_slot(slot, phases, STAGES)
        _compute_last_all(contexts, states, None, None, tiles_before(memory, previous, phases))
        if LATER:
            _release_stage(memory, previous, T)
    return slot, phases


@triton.jit
def _multiply(contexts, memory, states, slot, phases, tile, T: tl.constexpr):
    """Issue the products of a task: (next stage, phases)."""
    STAGES: tl.constexpr = facts(T).stages
    EDGES: tl.constexpr = marked_edges(tile)
    for i in range(tile.count):
        wait(memory.input_pipeline.full[slot], (phases >> slot) & 1)
        states = _compute_all(contexts, states, tile.begin + i, EDGES is None or EDGES != 0, slot_tiles(memory, slot))
        _release_stage(memory, slot, T)
        slot, phases = next_slot(slot, phases, STAGES)
    return slot, phases


@triton.jit
def _acquire_accumulators(memory, turn, T: tl.constexpr):
    """Wait until the consumers have read what the accumulators of task number `turn` held. Returns their slot."""
    sums, parity = slot_of_task(turn, facts(T).accumulators)
    wait(memory.accumulator_pipeline.empty[sums], parity ^ 1)
    return sums


@triton.jit
def _multiply_all(ctx, A, memory, T: tl.constexpr):
    """Issue the products of all tasks of the CTA, or of its pair."""
    PIPELINED: tl.constexpr = facts(T).pipelined
    PAIRS: tl.constexpr = facts(T).pairs
    SLOTS: tl.constexpr = facts(T).accumulators
    slot = 0
    phases = 0
    turn = 0
    index, tile = first_tile(ctx, A, memory, T)
    while tile.is_valid:
        contexts = _contexts(extended(ctx, tile), memory, turn)
        sums = _acquire_accumulators(memory, turn, T)
        _await_task_tiles(contexts, memory, turn)
        states = _begin_all(contexts)
        if PIPELINED:
            slot, phases = _multiply_pipelined(contexts, memory, states, slot, phases, tile, T)
        else:
            slot, phases = _multiply(contexts, memory, states, slot, phases, tile, T)
        _release_task_tiles(contexts, memory, PIPELINED)
        _commit_accumulators(memory, sums, T)
        index, tile = following_tile(ctx, A, memory, index, tile, turn, T)
        turn += 1
    if PAIRS:  # no CTA ends while the consumers of the other still arrive at its barriers
        for _ in tl.static_range(SLOTS):
            _acquire_accumulators(memory, turn, T)
            turn += 1


@triton.jit
def _follow(ctx, A, memory, T: tl.constexpr):
    """Walk over the tasks of the odd CTA of a pair, which issues no products: its producer waits until every role has
    received a task."""
    turn = 0
    index, tile = first_tile(ctx, A, memory, T)
    while tile.is_valid:
        index, tile = following_tile(ctx, A, memory, index, tile, turn, T)
        turn += 1


@triton.jit
def mma_warp(G, A, memory, T: tl.constexpr):
    """Run the MMA role of template `T`: the hooks that multiply, task after task. Of a pair, the CTA of even rank
    issues the products of both.

    `G`: the tensors of the call. `A`: its numbers. `memory`: shared and tensor memory and pipelines of the thread
    block.
    """
    PAIRS: tl.constexpr = facts(T).pairs
    DYNAMIC: tl.constexpr = facts(T).dynamic
    open_cluster(T)
    ctx = new_context(G, A, T)
    if PAIRS:
        if ctx.rank == 0:
            _multiply_all(ctx, A, memory, T)
        elif DYNAMIC:
            _follow(ctx, A, memory, T)
    else:
        _multiply_all(ctx, A, memory, T)
    cluster_opened(T)
