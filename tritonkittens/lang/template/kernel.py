"""What a template runs: the roles, their pipelines, and the loop over the tiles of a thread block. The hooks are called from here.

A thread block (or cluster) walks over work tiles (`lang/schedule/tile_scheduler.py`). For each, the producer fills pipeline stages in the order of the
iterations, and the consumers that share the tile compute on them and finish it. Consumers that work on tiles of their own (`pingpong`) skip the stages of
the others' tiles. Senders move what consumers give them.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx.tensormap import parameter_address
from tritonkittens.inline_ptx.tma import prefetch_tensormap
from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.kernel import kernel
from tritonkittens.lang.schedule.dynamic_scheduler import tell_first
from tritonkittens.lang.sync.warp_specialize import start_roles
from tritonkittens.lang.template.calls import extended, new_context
from tritonkittens.lang.template.consumer import consumer
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.helper_warps import bystander, sender, storer
from tritonkittens.lang.template.index_prefetch import await_entries
from tritonkittens.lang.template.next_tile import first_work
from tritonkittens.lang.template.producer import ask_window, load_early, producer, lagged_producer
from tritonkittens.lang.template.storage import open_memory, template_memory
from tritonkittens.lang.types.global_layout import rank_of
from tritonkittens.lang.types.tiles import split


@op
def _run_roles(t: Trace, G: Any, A: Any, memory: Any, T: Any) -> Any:
    config = unwrap(T)
    roles: list[tuple[Any, tuple]] = [(consumer, (tl.constexpr(c), G, A, memory, T)) for c in range(config.consumers)]
    roles.append((producer, (G, A, memory, T)))
    warps = [*(WARPS,) * config.consumers, 1]
    if config.lagged_producer:
        roles.append((lagged_producer, (G, A, memory, T)))
        warps.append(1)
    if config._plan.output:
        roles.append((storer, (G, A, memory, T)))
        warps.append(1)
    for c in range(config.senders):
        roles.append((sender, (tl.constexpr(c), G, A, memory, T)))
        warps.append(1)
    if config.cluster_size > 1:
        for idle in split(config.idle_warps):  # a role has a power of two of warps
            roles.append((bystander, (T,)))
            warps.append(idle)
    registers = config.registers()
    start_roles(t, roles, tuple(warps), (*registers, *registers[-1:] * (len(roles) - len(registers))) if config.reallocates else None)


@op
def _prefetch_descriptors(t: Trace, G: Any, T: Any) -> Any:
    """Fetch the tensor maps while the semaphores are made: the first copy would wait for them."""
    t.require(f"{type(unwrap(T)).__name__} (TMA, warp roles)", "tma")
    for g in G:
        for number in range(len(g.maps)):
            t.call(prefetch_tensormap, t.call(parameter_address, unwrap(g.parameter) + number * (1 + 2 * rank_of(g))), issuer="cta")


@kernel(num_warps=WARPS)
@triton.jit
def _template_kernel(G, A, T: tl.constexpr):
    _prefetch_descriptors(G, T)
    EARLY: tl.constexpr = facts(T).early_stages
    TOLD: tl.constexpr = facts(T).tells_first
    WINDOW: tl.constexpr = facts(T).window
    memory = template_memory(T)
    if EARLY > 0:
        ctx = new_context(G, A, T)
        unit, work = first_work(ctx, A)  # what hook `setup` reads from memory is under way while semaphores are made
        if WINDOW > 0:  # under way meanwhile, too: 0.6 % of decoding with attention from pages of 16 keys, 8 × 4,096 of dimension 64 (H200)
            if work.valid:
                for number in tl.static_range(1 + T.lagged_producer):
                    ask_window(extended(ctx, work), memory, 0, number, T)
    open_memory(memory, T)
    if EARLY > 0:
        if TOLD:
            tell_first(memory, work)
        if WINDOW > 0:
            await_entries()
        load_early(ctx, work, memory, T)
    _run_roles(G, A, memory, T)
