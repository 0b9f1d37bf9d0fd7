"""What a template runs: the roles, their pipelines, and the loop over the work tiles of a CTA. The hooks are
called from here.

A CTA (or cluster) walks over work tiles (`lang/schedule/tile_scheduler.py`). For each, the producer fills
pipeline stages in the order of the iterations, and the consumers that share the tile compute on them and finish it.
With `pingpong` each consumer skips the stages of the others' tiles.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx.tensormap import parameter_address
from tritonkittens.inline_ptx.tma import prefetch_tensormap
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.kernel import kernel
from tritonkittens.lang.schedule.dynamic_scheduler import broadcast_first
from tritonkittens.lang.sync.warp_specialize import start_roles
from tritonkittens.lang.template.contexts import new_context
from tritonkittens.lang.template.dependencies import begin_after_previous
from tritonkittens.lang.template.extension import at
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.next_tile import computed_first_tile
from tritonkittens.lang.template.roles.consumer import consumer
from tritonkittens.lang.template.roles.mma_warp import mma_warp
from tritonkittens.lang.template.roles.producer import lagged_producer, load_early, producer
from tritonkittens.lang.template.roles.storer import bystander, storer
from tritonkittens.lang.template.storage import open_memory, template_memory
from tritonkittens.lang.types.global_layout import rank_of
from tritonkittens.lang.types.tiles import split


@op
def _run_roles(t: Trace, G: Traced, A: Traced, memory: Traced, T: Traced) -> Traced:
    config, shared = unwrap(T), (G, A, memory, T)
    roles: list[tuple[Any, tuple[Any, ...]]] = [(consumer, (tl.constexpr(c), *shared)) for c in range(config.consumers)]
    roles.append((producer, shared))
    if config.has_mma_warp(t.arch):
        roles.append((mma_warp, shared))
    if config.lagged_producer:
        roles.append((lagged_producer, shared))
    if config._plan.output:
        roles.append((storer, shared))
    warps = [*(WARPS,) * config.consumers, *(1,) * (len(roles) - config.consumers)]
    for extension in config.extensions:
        added = extension.added_warps(config)
        roles += [(role, (tl.constexpr(number), *shared)) for role, number in added]
        warps += [extension.role_warps] * len(added)
    if config.cluster_size > 1:
        for idle in split(-sum(warps) % WARPS):  # a role has a power of two of warps
            roles.append((bystander, (T,)))
            warps.append(idle)
    registers = config.registers(t.arch)
    start_roles(
        t,
        roles,
        tuple(warps),
        (*registers, *registers[-1:] * (len(roles) - len(registers))) if config.reallocates else None,
    )


@op
def _prefetch_descriptors(t: Trace, G: Traced, T: Traced) -> Traced:
    """Fetch the tensor maps while the semaphores are made: the first copy would wait for them."""
    t.require(f"{type(unwrap(T)).__name__} (TMA, warp roles)", "tma")
    for g in G:
        for number in range(len(g.maps)):
            t.call(
                prefetch_tensormap,
                t.call(parameter_address, unwrap(g.parameter) + number * (1 + 2 * rank_of(g))),
                issuer="cta",
            )


@kernel(num_warps=WARPS)
@triton.jit
def _template_kernel(G, A, T: tl.constexpr):
    _prefetch_descriptors(G, T)
    EARLY: tl.constexpr = facts(T).early_stages
    BROADCAST: tl.constexpr = facts(T).broadcasts_first
    memory = template_memory(T)
    if EARLY > 0:
        ctx = new_context(G, A, T)
        # what hook `setup` reads from memory is in flight while semaphores are made
        index, tile = computed_first_tile(ctx, A)
        at(T, "block_begins", ctx, tile, memory, T)
    open_memory(memory, T)
    begin_after_previous(T)
    if EARLY > 0:
        if BROADCAST:
            broadcast_first(memory, tile)
        at(T, "early_loads_begin")
        load_early(ctx, tile, memory, T)
    _run_roles(G, A, memory, T)
