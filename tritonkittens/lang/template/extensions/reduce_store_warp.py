"""A warp beside each consumer that reduces its tiles into global memory: what the reduction waits for, the consumer
need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import triton

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import WARPS, unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.tma import store_read_wait
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.compute import counted
from tritonkittens.lang.template.contexts import at_iteration, extended, new_context, of_consumer
from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.hook_table import Hook
from tritonkittens.lang.template.next_tile import first_tile, following_tile
from tritonkittens.lang.template.pipeline_state import parity_of_uses
from tritonkittens.lang.template.storage import new_pipeline

REDUCER = "reduce-store warp"


def _of(ctx: Any, call: str, of_reducer: bool = False) -> Any:
    """What a context has for the reduce pipeline."""
    reducing = ctx.fields.get("reducing")
    if reducing is None or ("empty" in reducing.fields) == of_reducer:
        where = (
            "it is for hook 'reduce_store'"
            if of_reducer
            else "it is for consumers of a tk.ReduceStoreWarp, in 'compute' and 'compute_last'"
        )
        raise TileError(f"{call} in {type(unwrap(ctx.config)).__name__}: {where}")
    return reducing


@op
def _consumer_iteration(t: Trace, ctx: Traced, memory: Traced, phases: Traced) -> Traced:
    """A consumer's context of an iteration, or of `compute_last`, with its stage of the reduce pipeline: `phases` are
    those of the input ring before it."""
    config = unwrap(ctx.config)
    # A fresh barrier counts as empty. Tiles are committed once an iteration; in a pipelined computation from the second
    # on and in `compute_last`
    uses = t.call(parity_of_uses, phases, config.placement(t.arch).stages)
    parity = uses if config.pipelined else t.method(uses, "__xor__", 1)
    pipe = memory.reduce_pipeline
    reducing = struct(
        full=t.call(pipe.full.__getitem__, ctx.block_consumer),
        empty=t.call(pipe.empty.__getitem__, ctx.block_consumer),
        parity=parity,
    )
    return struct(**{**ctx.fields, "reducing": reducing})


@op
def reduce_acquire(t: Trace, ctx: Traced) -> Traced:
    """Wait until the reduce-store warp has read the scratch tiles, so that this consumer may write them. Once an
    iteration, before `tk.reduce_commit`."""
    bill().reduces_acquired += 1
    reducing = _of(ctx, "reduce_acquire")
    t.call(wait, reducing.empty, reducing.parity)


@op
def reduce_commit(t: Trace, ctx: Traced) -> Traced:
    """Pass the scratch tiles, written and fenced (`tk.fence_async`), to this consumer's reduce-store warp, which calls
    hook `reduce_store`. Once an iteration; in a pipelined computation not in the first, but in `compute_last`."""
    bill().reduces_committed += 1
    t.call(arrive, _of(ctx, "reduce_commit").full, per="warp")


@op
def reduce_wait(t: Trace, ctx: Traced) -> Traced:
    """The reduce-store warp waits until its consumer has called `tk.reduce_commit`: the scratch tiles may be read. Once
    in hook `reduce_store`, after what can be done before."""
    bill().reduces_awaited += 1
    reducing = _of(ctx, "reduce_wait", of_reducer=True)
    t.call(wait, reducing.full, reducing.parity)


@op
def _epilogue_begins(t: Trace, ctx: Traced, memory: Traced, phases: Traced) -> Traced:
    """After a task: its scratch tiles have been read."""
    uses = t.call(parity_of_uses, phases, unwrap(ctx.config).placement(t.arch).stages)
    t.call(wait, t.call(memory.reduce_pipeline.empty.__getitem__, ctx.block_consumer), t.method(uses, "__xor__", 1))


@op
def _call_reduce_store(t: Trace, ctx: Traced, memory: Traced, uses: Traced) -> Traced:
    """Call hook `reduce_store` for use number `uses` of a consumer's scratch tiles, and release them."""
    config = unwrap(ctx.config)
    hook, pipe = type(config).reduce_store, memory.reduce_pipeline
    reducing = struct(full=t.call(pipe.full.__getitem__, ctx.block_consumer), parity=t.method(uses, "__and__", 1))
    here = struct(**{**ctx.fields, "reducing": reducing})
    value, (awaited,) = counted(t, hook, f"reduce_store: {hook.cache_key}", ("reduces_awaited",), here, ctx.scratch)
    if awaited != 1:
        raise TileError(
            f"{type(config).__name__}.reduce_store calls tk.reduce_wait {awaited} times; it does so once, in the hook "
            "itself, before it reads the "
            "scratch tiles"
        )
    t.call(store_read_wait, 0)
    t.call(arrive, t.call(pipe.empty.__getitem__, ctx.block_consumer), per="warp")
    if hasattr(type(config), "reduce_store_done"):
        t.call(type(config).reduce_store_done, ctx, value)


@triton.jit
def reducer(CONSUMER: triton.language.constexpr, G, A, memory, T: triton.language.constexpr):
    """The role: reduces what a consumer commits once an iteration."""
    uses = 0
    turn = 0
    ctx = new_context(G, A, T)
    index, tile = first_tile(ctx, A, memory, T)
    while tile.is_valid:
        mine = of_consumer(extended(ctx, tile), memory, CONSUMER, turn)
        for i in range(tile.count):
            _call_reduce_store(at_iteration(mine, tile.begin + i), memory, uses)
            uses += 1
        index, tile = following_tile(ctx, A, memory, index, tile, turn, T)
        turn += 1
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is


class ReduceStoreWarp(Extension):
    """A warp beside each consumer reduces tiles into global memory (attention's backward: dQ).

    In `compute` and `compute_last` a consumer acquires the scratch tiles (`tk.reduce_acquire`),
    writes and fences them, and commits them (`tk.reduce_commit`). Hook `reduce_store` waits for the commit
    (`tk.reduce_wait`) and starts the copies."""

    added_hooks: ClassVar[tuple[Hook, ...]] = (
        Hook(
            "reduce_store",
            REDUCER,
            "once an iteration",
            ("ctx", "scratch"),
            "any value",
            "Waits for the scratch tiles (`tk.reduce_wait`) and starts copies out of them. They are released when the "
            "copies have read them.",
        ),
        Hook(
            "reduce_store_done",
            REDUCER,
            "once an iteration, after `reduce_store`",
            ("ctx", "value"),
            "",
            "Does what must follow the copies, such as `tk.mark_initialized`. `value` is what `reduce_store` returned. "
            "The copies have read the scratch tiles, and the consumer may write them again.",
        ),
    )
    counters: ClassVar[tuple[str, ...]] = ("reduces_committed", "reduces_acquired")
    points: ClassVar[dict[str, Callable[..., Any]]] = dict(
        consumer_iteration=_consumer_iteration, epilogue_begins=_epilogue_begins
    )

    @staticmethod
    def check_template(T: Any) -> None:
        if not T._plan.scratch:
            raise T._error("hook 'reduce_store' reads scratch tiles; its layout has none")
        if not hasattr(type(T), "reduce_store"):
            raise T._error("tk.ReduceStoreWarp needs hook 'reduce_store'")
        if T.pipelined and not hasattr(type(T), "compute_first"):
            raise T._error(
                "hook 'reduce_store' of a pipelined computation needs hook 'compute_first': an iteration's tiles are "
                "committed one later"
            )
        if T.cluster > 1 or T.pingpong or not T.schedule.whole_tasks:
            raise T._error(
                f"(schedule={T.schedule!r}, cluster={T.cluster}, pingpong={T.pingpong}): hook 'reduce_store' is for "
                "whole tasks that the consumers of "
                "a block share; that needs cluster=1, pingpong=False and a schedule that splits none"
            )

    @staticmethod
    def check_hook(T: Any, what: str, counts: dict[str, int]) -> None:
        times, committed, acquired = (
            int(what != "compute_first"),
            counts["reduces_committed"],
            counts["reduces_acquired"],
        )
        # calls in a helper function are not seen where the same function was called before
        if (committed, acquired) != (times, times):
            raise TileError(
                f"{type(T).__name__}.{what} calls tk.reduce_acquire {acquired} times, tk.reduce_commit {committed} "
                "times; with hook 'reduce_store' "
                "'compute' and 'compute_last' call each once, in the hook itself, 'compute_first' neither"
            ).of(getattr(type(T), what))

    @staticmethod
    def added_memory(t: Trace, T: Traced) -> dict[str, Traced]:
        return {"reduce_pipeline": new_pipeline(t, T.consumers, WARPS, 1)}

    @staticmethod
    def added_warps(T: Any) -> list[tuple[Any, int]]:
        return [(reducer, c) for c in range(T.consumers)]

    @staticmethod
    def explained_lines(T: Any, arch: int) -> list[str]:
        return ["  the scratch tiles leave by a warp of its own for each consumer"]


__all__ = ["reduce_acquire", "reduce_commit", "reduce_wait"]
