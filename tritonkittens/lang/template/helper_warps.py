"""Roles beside the producer and the consumers: warps that store output tiles or send reduce_buffer tiles."""
from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.memory.tma import store_read_wait
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.calls import at_iteration, call_reduce_store, call_store, extended, new_context, of_consumer, wait_for_stores
from tritonkittens.lang.template.cluster import cluster_opened, open_cluster
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.next_tile import next_tile, following_tile, first_tile
from tritonkittens.lang.template.pipeline_state import next_slot
from tritonkittens.lang.template.storage import output_tiles


@triton.jit
def storer(G, A, memory, T: tl.constexpr):
    """Stores output slots in the order in which consumers write them; a slot is free once the store after it is issued and this one has read it."""
    STAGES: tl.constexpr = facts(T).output_stages
    slot = 0
    phases = 0
    stores = 0
    open_cluster(T)
    ctx = new_context(G, A, T)
    index, tile = first_tile(ctx, A, memory, T)
    while tile.is_valid:
        whole = extended(ctx, tile)
        for i in range(tile.count):
            wait(memory.output_full[slot], (phases >> slot) & 1)
            call_store(at_iteration(whole, tile.begin + i), output_tiles(memory, slot))
            if STAGES > 1:
                if stores > 0:
                    wait_for_stores(ctx, 1)
                    arrive(memory.output_empty[tl.where(slot == 0, STAGES - 1, slot - 1)], per="warp")
            else:
                wait_for_stores(ctx, 0)
                arrive(memory.output_empty[slot], per="warp")
            stores += 1
            slot, phases = next_slot(slot, phases, STAGES)
        index, tile = next_tile(ctx, A, index, tile)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is


@triton.jit
def reducer(WORKER: tl.constexpr, G, A, memory, T: tl.constexpr):
    """Sends the reduce_buffer tiles that a consumer gives it once an iteration."""
    reduces = 0
    turn = 0
    ctx = new_context(G, A, T)
    index, tile = first_tile(ctx, A, memory, T)
    while tile.is_valid:
        mine = of_consumer(extended(ctx, tile), memory, WORKER, turn)
        for i in range(tile.count):
            call_reduce_store(at_iteration(mine, tile.begin + i), memory, reduces)
            reduces += 1
        index, tile = following_tile(ctx, A, memory, index, tile, turn, T)
        turn += 1
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is


@triton.jit
def bystander(T: tl.constexpr):
    """The warps that fill up a warpgroup: the barrier of a cluster counts every warp that was launched."""
    open_cluster(T)
    cluster_opened(T)
