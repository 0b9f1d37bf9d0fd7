"""Results that wait in registers and leave during the products of the CTA's next task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import shape_of, struct
from tritonkittens.lang.register.construction import zero
from tritonkittens.lang.schedule.split_k import join_parts, own_part
from tritonkittens.lang.schedule.tile_scheduler import any_tile
from tritonkittens.lang.sync.semaphores import wait
from tritonkittens.lang.template.contexts import extended, of_consumer, without
from tritonkittens.lang.template.epilogue import staged
from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.facts import facts
from tritonkittens.lang.template.hook_table import CONSUMER, Hook


@op
def _tiles(t: Trace, T: Traced) -> Traced:
    """How many tiles of results wait."""
    return tl.constexpr(len(unwrap(T)._plan.deferred_results))


@op
def _every(t: Trace, T: Traced) -> Traced:
    """Iterations in which one of them leaves."""
    return tl.constexpr(1 + unwrap(T)._plan.deferred_steps)


# ---------------------------------------------------------------- the hooks


@op
def _staged(t: Trace, ctx: Traced, memory: Traced) -> Traced:
    """The epilogue tiles, without those of `epilogue_loads`: the producer already loads these for the next task."""
    return t.call(without, staged(t, ctx, memory), *unwrap(ctx.config)._plan.epilogue_loads)


@op
def _call_defer_results(t: Trace, ctx: Traced, state: Traced, memory: Traced) -> Traced:
    config = unwrap(ctx.config)
    results = t.call(type(config).defer_results, ctx, state, staged(t, ctx, memory))
    declared = {n: (tile.shape, tile.dtype) for n, tile in config._plan.deferred_results}
    if not isinstance(results, struct) or {n: (shape_of(v), v.dtype) for n, v in results.fields.items()} != declared:
        have = (
            ", ".join(f"{n} {list(shape_of(v))} of {name_of(v.dtype)}" for n, v in results.fields.items())
            if isinstance(results, struct)
            else repr(results)
        )
        raise TileError(
            f"{type(config).__name__}.defer_results: must return a tk.struct as "
            f"layout(deferred_results={dict(config._plan.deferred_results)}) says, "
            f"not {have}"
        ).of(type(config).defer_results)
    return struct(**{n: results.fields[n] for n in declared})


@triton.jit
def _defer_joined(ctx, state, memory):
    """The results of a task that CTAs share, and whether this CTA is the last of them. In another CTA the results
    are unused; a branch would keep the previous task's results in registers."""
    state, last = join_parts(ctx, own_part(ctx, state))
    return _call_defer_results(ctx, state, memory), tl.where(last, 1, 0)


@op
def _defer(t: Trace, ctx: Traced, state: Traced, memory: Traced, turn: Traced) -> Traced:
    """(what hook `defer_results` returns, 1 or 0 where another CTA finishes the task)."""
    config = unwrap(ctx.config)
    if config._plan.epilogue_loads:
        t.call(
            wait,
            t.call(memory.epilogue_pipeline.full.__getitem__, unwrap(ctx.block_consumer)),
            t.method(turn, "__and__", 1),
        )
    if config.splits:
        return t.call(_defer_joined, ctx, state, memory)
    return tl.tuple([t.call(_call_defer_results, ctx, state, memory), 1])


@op
def _store(t: Trace, ctx: Traced, results: Traced, epilogue: Traced, n: Traced) -> Traced:
    """Store tile number n, or stage it for `finish_deferred`."""
    config, n = unwrap(ctx.config), unwrap(n)
    t.call(
        type(config).store_deferred, ctx, results.fields[config._plan.deferred_results[n][0]], epilogue, tl.constexpr(n)
    )


@op
def _finish(t: Trace, ctx: Traced, epilogue: Traced, n: Traced, step: Traced, steps: Traced) -> Traced:
    """Step `step` of `steps` on tile number n, which is staged."""
    hook = getattr(type(unwrap(ctx.config)), "finish_deferred", None)
    if hook is not None:
        t.call(hook, ctx, epilogue, n, step, tl.constexpr(unwrap(steps)))


@op
def _prefetch(t: Trace, ctx: Traced, memory: Traced) -> Traced:
    """Start the loads for the next results, once the previous task's have left the epilogue tiles."""
    hook = getattr(type(unwrap(ctx.config)), "prefetch_deferred", None)
    if hook is not None and unwrap(ctx.config)._plan.epilogue_reloads:
        t.call(hook, ctx, t.call(_staged, ctx, memory))


# ---------------------------------------------------------------- the points


@triton.jit
def _until(T: tl.constexpr):
    """The iteration in which the previous task's results have left."""
    return facts(T).stages - 1 + _tiles(T) * _every(T)


@triton.jit
def _store_at(before, results, memory, i, pending, T: tl.constexpr):
    """After the product of iteration i: store or stage one tile of the previous task's results, or take one step on it,
    by code that all tiles share. The first
    iterations do neither: while the other consumer ends its task, the tensor cores have only this one's products."""
    TILES: tl.constexpr = _tiles(T)
    EVERY: tl.constexpr = _every(T)
    FIRST: tl.constexpr = facts(T).stages - 1
    if (i >= FIRST) & (i < _until(T)) & (pending > 0):
        step = (i - FIRST) % EVERY
        epilogue = _staged(before, memory)
        if EVERY == 1 or step == 0:
            for n in tl.static_range(TILES):
                if i == FIRST + n * EVERY:
                    _store(before, results, epilogue, n)
        else:
            _finish(before, epilogue, (i - FIRST) // EVERY, step - 1, EVERY - 1)


@op
def _nothing(t: Trace, T: Traced) -> Traced:
    """The results before the first task has ended."""
    return struct(**{n: t.call(zero, tile) for n, tile in unwrap(T)._plan.deferred_results})


@op
def _record(t: Trace, results: Traced, done: Traced, pending: Traced) -> Traced:
    return struct(results=results, done=done, pending=t.scalar(pending))


@triton.jit
def _consumer_begins(ctx, A, T: tl.constexpr):
    # Not the first task's tile: in Triton 3.9 a loop does not carry a name that it gives another one's value where both
    # begin as the same value
    return _record(_nothing(T), any_tile(ctx, A), 0)


@op
def _during(t: Trace, carried: Traced, before: Traced) -> Traced:
    return struct(results=carried.results, pending=carried.pending, before=before)


@triton.jit
def _task_begins(carried, ctx, memory, CONSUMER: tl.constexpr, turn):
    return _during(carried, of_consumer(extended(ctx, carried.done), memory, CONSUMER, turn))


@triton.jit
def _iteration_ends(during, mine, memory, i):
    _store_at(during.before, during.results, memory, i, during.pending, mine.config)
    if i == _until(mine.config):
        _prefetch(mine, memory)


@triton.jit
def _task_ends(carried, ctx, ended, state, memory, CONSUMER: tl.constexpr, turn, tile):
    """What the iterations of a short task have not stored leaves before the task's own results are computed."""
    T: tl.constexpr = ctx.config
    before = of_consumer(extended(ctx, carried.done), memory, CONSUMER, turn)
    MMA_WARP: tl.constexpr = facts(T).mma_warp
    done = 0 if MMA_WARP else tile.count  # iterations that this consumer has run
    for j in range(tl.maximum(done, facts(T).stages - 1), _until(T)):
        _store_at(before, carried.results, memory, j, carried.pending, T)
    if done <= _until(T):
        _prefetch(ended, memory)
    results, pending = _defer(ended, state, memory, turn)
    return _record(results, tile, pending)


@triton.jit
def _consumer_ends(carried, ctx, memory, CONSUMER: tl.constexpr, turn):
    """The results of the CTA's last task: no products overlap with them, nor need registers."""
    T: tl.constexpr = ctx.config
    TILES: tl.constexpr = _tiles(T)
    EVERY: tl.constexpr = _every(T)
    before = of_consumer(extended(ctx, carried.done), memory, CONSUMER, turn)
    if carried.pending > 0:
        epilogue = _staged(before, memory)
        for tile in range(TILES):
            for n in tl.static_range(TILES):
                if tile == n:
                    _store(before, carried.results, epilogue, n)
            if EVERY > 1:
                _finish(before, epilogue, tile, 0, 1)


class DeferredEpilogue(Extension):
    """Results wait in registers and leave during the products of the CTA's next task. They take fewer registers than
    the accumulators.

    The layout's `deferred_results` declares the register tiles (`rt`). Hook `defer_results` replaces `finish`. In an
    iteration of the next task `store_deferred` stores a tile, or only stages it: then `finish_deferred` runs in each of
    the next `deferred_steps` (0) iterations. The first such iteration is number `stages` − 1. In a short task, the rest
    runs before `defer_results`. Tiles of `epilogue_reloads` are loaded by `prefetch_deferred`, `store_deferred`
    and `finish_deferred`, an even number of times for each task."""

    added_hooks: ClassVar[tuple[Hook, ...]] = (
        Hook(
            "defer_results",
            CONSUMER,
            "once a task, instead of `finish`",
            ("ctx", "state", "epilogue"),
            "a `tk.struct` of the layout's `deferred_results`",
            "Returns the task's results.",
            "deferred_results",
        ),
        Hook(
            "store_deferred",
            CONSUMER,
            "after the product of an iteration",
            ("ctx", "tile", "epilogue", "n"),
            "",
            "Stores result tile number `n` (a constant) through the epilogue tiles, except those in `epilogue_loads`. "
            "`ctx` is that of the task that computed it.",
            "deferred_results",
        ),
        Hook(
            "finish_deferred",
            CONSUMER,
            "in each of the next `deferred_steps` iterations",
            ("ctx", "epilogue", "n", "step", "steps"),
            "",
            "Does step number `step` of `steps` on tile number `n`, which `store_deferred` has staged. Where that does "
            "not store the tile, the last step stores it. `steps` is a constant: `deferred_steps`, or 1 after the last "
            "task of a CTA. `n` and `step` are run-time numbers, so that one copy of the code serves all tiles. `ctx` "
            "is that of the task that computed the tile.",
        ),
        Hook(
            "prefetch_deferred",
            CONSUMER,
            "once a task with `epilogue_reloads`, before `defer_results`",
            ("ctx", "epilogue"),
            "",
            "Starts the loads of what the first result tile of this task needs into the tiles of `epilogue_reloads`, "
            "with `epilogue.reload_full` as the barrier. All stores of the previous task have started; "
            "`tk.store_read_wait` waits until they have read the tiles.",
        ),
    )
    replaced_hooks: ClassVar[tuple[str, ...]] = ("finish",)
    needs_fields: ClassVar[bool] = False
    added_fields: ClassVar[tuple[str, ...]] = ("deferred_results", "deferred_steps")
    points: ClassVar[dict[str, Callable[..., Any]]] = dict(
        consumer_begins=_consumer_begins,
        task_begins=_task_begins,
        iteration_ends=_iteration_ends,
        task_ends=_task_ends,
        consumer_ends=_consumer_ends,
    )

    @staticmethod
    def check_template(T: Any) -> None:
        plan = T._plan
        if not T.pipelined or T.sharers > 1 or plan.scratch:
            raise T._error(
                f"(schedule={T.schedule!r}): deferred results are stored during products of the next task; that needs "
                "hook 'compute_last', whole tasks "
                "of a block, and no scratch tiles"
            )
        if plan.epilogue_reloads and T.splits:
            raise T._error(
                f"(schedule={T.schedule!r}): of the blocks that share a task only one stores deferred results; none "
                "can load epilogue tiles itself "
                f"(epilogue_reloads={plan.epilogue_reloads})"
            )

    @staticmethod
    def explained_lines(T: Any, arch: int) -> list[str]:
        plan, stages = T._plan, T.placement(arch).stages
        tiles = ", ".join(f"{n} {tile!r}" for n, tile in plan.deferred_results)
        often = "an iteration" if plan.deferred_steps == 0 else f"in {1 + plan.deferred_steps} iterations"
        return [
            f"  results wait in registers ({tiles}) and leave during the next task, a tile {often}, after its first "
            f"{stages - 1}"
        ]
