"""The storer role of `lcsf`: a warp that stores output tiles; and the warps that only fill up a warpgroup."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.lang.memory.tma import store_read_wait
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.cluster import cluster_opened, open_cluster
from tritonkittens.lang.template.contexts import at_iteration, extended, new_context
from tritonkittens.lang.template.epilogue import call_store, wait_for_stores
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.next_tile import first_tile, next_tile
from tritonkittens.lang.template.pipeline_state import next_slot
from tritonkittens.lang.template.storage import output_tiles


@triton.jit
def storer(G, A, memory, T: tl.constexpr):
    """Stores output stages in the order in which consumers write them; a stage is empty once the store after it is
    issued and this one has read it."""
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
            wait(memory.output_pipeline.full[slot], (phases >> slot) & 1)
            call_store(at_iteration(whole, tile.begin + i), output_tiles(memory, slot))
            if STAGES > 1:
                if stores > 0:
                    wait_for_stores(ctx, 1)
                    arrive(memory.output_pipeline.empty[tl.where(slot == 0, STAGES - 1, slot - 1)], per="warp")
            else:
                wait_for_stores(ctx, 0)
                arrive(memory.output_pipeline.empty[slot], per="warp")
            stores += 1
            slot, phases = next_slot(slot, phases, STAGES)
        index, tile = next_tile(ctx, A, index, tile)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is


@triton.jit
def bystander(T: tl.constexpr):
    """The warps that fill up a warpgroup: the barrier of a cluster counts every warp that was launched."""
    open_cluster(T)
    cluster_opened(T)
