"""The end of a task: epilogue tiles, the call of `finish`, and stores."""

from __future__ import annotations

from typing import Any

import triton

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.tma import store_read_wait
from tritonkittens.lang.schedule.cluster_split_k import join_in_cluster
from tritonkittens.lang.schedule.split_k import join_parts, own_part
from tritonkittens.lang.sync.semaphores import arrive, publish, sync, wait
from tritonkittens.lang.template.compute import counted
from tritonkittens.lang.template.consumer_barriers import meet_at_end
from tritonkittens.lang.template.extension import at, values_from
from tritonkittens.lang.template.smem_plan import nbytes
from tritonkittens.lang.template.storage import epilogue_tiles
from tritonkittens.lang.types.tiles import st


@op
def call_store(t: Trace, ctx: Traced, output: Traced) -> Traced:
    """Call the store hook, and compare the bytes that it stores with those of its tiles: a view is as good as a
    tile."""
    hook, expected = type(unwrap(ctx.config)).store, nbytes(unwrap(ctx.config)._plan.output)
    _, (stored, _) = counted(t, hook, _key_of_store(ctx), ("stored_bytes", "stored"), ctx, output)
    if stored != expected:
        raise TileError(
            f"{type(unwrap(ctx.config)).__name__}: hook 'store' stores {stored} bytes, but its output tiles have "
            f"{expected}: store every tile of the argument exactly once"
        ).of(hook)


def _key_of_store(ctx: Traced) -> str:
    return f"store: {type(unwrap(ctx.config)).store.cache_key}"


@op
def wait_for_stores(t: Trace, ctx: Traced, slots: Traced) -> Traced:
    """Wait until at most the stores of the newest `slots` slots still read shared memory."""
    t.call(store_read_wait, unwrap(slots) * bill().by_hook[f"stored {_key_of_store(ctx)}"])


def _loads_tiles(config: Any) -> bool:
    """Are tiles among what is loaded for `finish`, which stores may still be reading, and not only vectors?"""
    return any(isinstance(tile, st) for n, tile in config._plan.epilogue if n in config._plan.epilogue_loads)


@op
def release_epilogue(t: Trace, memory: Traced, consumer: Traced, T: Traced) -> Traced:
    """Let the producer load for `finish`, or consumers write scratch tiles over which the previous task's results were
    staged. Called in the first iteration: by then the previous task's stores have been read while products were in
    flight."""
    config = unwrap(T)
    if config.placement(t.arch).over_scratch is not None:
        t.call(_leave_epilogue, T)
    if not config._plan.epilogue_loads:
        return
    if _loads_tiles(config):
        t.call(store_read_wait, 0)
    publish(t)  # threads read these tiles in the previous task, before TMA overwrites them
    t.call(arrive, t.call(memory.epilogue_pipeline.empty.__getitem__, consumer), per="warp", fenced=True)


@op
def _leave_epilogue(t: Trace, T: Traced) -> Traced:
    """All stores have read shared memory, and products are done: of all consumers whose tiles lie over one another."""
    t.call(store_read_wait, 0)
    if unwrap(T).placement(t.arch).over_own:
        t.call(sync)
    else:
        t.call(meet_at_end, T)


def staged(t: Trace, ctx: Traced, memory: Traced) -> Traced:
    """The epilogue tiles of a consumer, with the barrier on which it loads them itself, if it does."""
    tiles = t.call(epilogue_tiles, ctx, memory, ctx.block_consumer)
    if unwrap(ctx.config)._plan.epilogue_reloads:
        tiles = struct(**tiles.fields, reload_full=t.call(memory.reload_full.__getitem__, unwrap(ctx.block_consumer)))
    return tiles


@op
def _call_finish(t: Trace, ctx: Traced, state: Traced, memory: Traced) -> Traced:
    hook = getattr(type(unwrap(ctx.config)), "finish", None)
    if hook is not None:
        t.call(hook, ctx, state, staged(t, ctx, memory))


@triton.jit
def _finish_if_last(ctx, state, memory):
    """Finish a task that CTAs share, where this one is the last of them."""
    state, last = join_parts(ctx, own_part(ctx, state))
    if last:
        _call_finish(ctx, state, memory)


@op
def finish_task(
    t: Trace, ctx: Traced, state: Traced, memory: Traced, turn: Traced, phases: Traced, more: Traced
) -> Traced:
    """Stage and store the results. The epilogue tiles must be free: the previous task's stores have read them, and over
    the ring all consumers are done.

    `ring_empty` completes once a task, by an arrival of every consumer warp after its stores and one of each producer,
    which has then seen the completion of the previous task. So no role is two phases ahead, also where tasks of no
    iterations need nothing of each other. `more`: does this CTA begin another task? CTAs that share tasks wait for
    that to send it their sums.
    """
    config = unwrap(ctx.config)
    placed, plan = config.placement(t.arch), config._plan
    over_ring = placed.over_ring is not None
    if placed.over_scratch is not None:
        t.call(at, config, "epilogue_begins", ctx, memory, phases)
        t.call(_leave_epilogue, ctx.config)
    elif over_ring:  # one consumer too: its warps leave the last stage at different times
        t.call(meet_at_end, ctx.config)
        t.call(wait, t.call(memory.ring_empty.__getitem__, 0), t.method(t.method(turn, "__and__", 1), "__xor__", 1))
    elif plan.epilogue and not _loads_tiles(config):
        t.call(store_read_wait, 0)
    if plan.epilogue_loads:
        t.call(
            wait,
            t.call(memory.epilogue_pipeline.full.__getitem__, unwrap(ctx.block_consumer)),
            t.method(turn, "__and__", 1),
        )
    if config.splits:
        t.call(_finish_if_last, ctx, state, memory)
    elif config.sharers > 1:
        t.call(_call_finish, ctx, t.call(join_in_cluster, ctx, state, memory, turn, more), memory)
    else:
        t.call(_call_finish, ctx, state, memory)
    if over_ring:
        t.call(store_read_wait, 0)
        t.call(arrive, t.call(memory.ring_empty.__getitem__, 0), per="warp")


@op
def end_task(
    t: Trace,
    carried: Traced,
    ctx: Traced,
    ended: Traced,
    state: Traced,
    memory: Traced,
    turn: Traced,
    phases: Traced,
    tile: Traced,
    more: Traced,
) -> Traced:
    """Finish a task, or let an extension do it (point `task_ends`); returns what the extensions carry to the next
    task."""
    config = unwrap(ctx.config)
    if any("task_ends" in extension.points for extension in config.extensions):
        return t.call(
            values_from, config, "task_ends", carried, ctx, ended, state, memory, ended.block_consumer, turn, tile
        )
    t.call(finish_task, ended, state, memory, turn, phases, more)
    return carried
