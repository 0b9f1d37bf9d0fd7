"""The copies that the producers start: how each load hook is called, and what it must do, checked when the kernel is
compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.sync.semaphores import expect, wait
from tritonkittens.lang.template.compute import counted
from tritonkittens.lang.template.smem_plan import nbytes
from tritonkittens.lang.template.storage import block_tasks, in_slot

if TYPE_CHECKING:
    from tritonkittens.lang.template.template import lcf


def load_checked(t: Trace, config: lcf, what: str, expected: int, *args: Traced, consumer: int | None = None) -> None:
    """Call a load hook (for one consumer) and compare the bytes that it copies with those that its barrier expects."""
    hook = getattr(type(config), what)
    _, (copied,) = counted(t, hook, f"{what} for {consumer}: {hook.cache_key}", ("copied",), *args)
    if copied != expected:
        raise TileError(
            f"{type(config).__name__}: hook {what!r} copies {copied} bytes, but its barrier expects {expected}, the "
            "bytes of all its tiles: load every tile of the argument exactly once, with its `full` as the barrier"
        ).of(hook)


def _fill(t: Trace, ctx: Traced, what: str, memory: Traced, group: str, slot: Traced) -> None:
    """Announce the bytes of a group's tiles in a slot and call the hook that loads them."""
    config = unwrap(ctx.config)
    others = config._plan.gathered if group == "input" else ()
    chosen = tuple((n, s) for n, s in getattr(config.stored(t.arch), group) if n not in others)
    expected = nbytes(chosen)
    bar = t.call(memory.fields[f"{group}_pipeline"].full.__getitem__, slot)
    if group == "input" and config.pairs(t.arch):
        t.call(_expect_of_pair, ctx.rank, bar, tl.constexpr(2 * expected))
    else:
        t.call(expect, bar, expected)
    filled = in_slot(t, memory.fields[group], slot)
    load_checked(t, config, what, expected, ctx, struct(**{n: filled[n] for n, _ in chosen}, full=bar))


@triton.jit
def _expect_of_pair(rank, bar, BYTES: tl.constexpr):
    """The copies of both CTAs of a pair complete in the one of even rank."""
    if rank == 0:
        expect(bar, BYTES)


@op
def load_input(t: Trace, ctx: Traced, memory: Traced, slot: Traced) -> Traced:
    """Start the loads of the input tiles of an iteration."""
    _fill(t, ctx, "load", memory, "input", slot)


@op
def load_lagged(t: Trace, ctx: Traced, memory: Traced, slot: Traced) -> Traced:
    """Start the loads of the lagged tiles of an iteration."""
    _fill(t, ctx, "load_lagged", memory, "lagged", slot)


@triton.jit
def _remainder(number, divisor: tl.constexpr):
    return number % divisor


def _load_for_consumers(
    t: Trace, ctx: Traced, what: str, tiles: Traced, chosen: Traced, pipe: Traced, turn: Traced
) -> None:
    """Fill tiles of every consumer of the task, once it has released those of its previous task."""
    config = unwrap(ctx.config)
    expected, teams = nbytes(chosen), config.consumers // config.team
    first = t.call(_remainder, turn, teams) if teams > 1 else None
    phase = t.method(t.method(turn, "__floordiv__", teams), "__and__", 1)
    for c in range(config.team):
        block_consumer = first if teams > 1 else c
        bar = t.call(pipe.full.__getitem__, block_consumer)
        t.call(wait, t.call(pipe.empty.__getitem__, block_consumer), phase)
        t.call(expect, bar, expected)
        mine = struct(**{**ctx.fields, "consumer": tl.constexpr(c)})
        filled = struct(**{n: t.call(tiles[n].__getitem__, block_consumer) for n, _ in chosen}, full=bar)
        load_checked(t, config, what, expected, mine, filled, consumer=c)


@op
def load_task(t: Trace, ctx: Traced, memory: Traced, turn: Traced) -> Traced:
    """Fill the tiles that consumers keep for a task, once they have released those of the previous task."""
    plan = unwrap(ctx.config)._plan
    if plan.task and plan.per == "consumer":
        fresh = t.method(turn, "__add__", 1)  # a fresh barrier counts as empty
        _load_for_consumers(t, ctx, "load_task", memory.task.fields, plan.task, memory.task_pipeline, fresh)
    for group in block_tasks(plan):
        empty = t.call(memory.fields[f"{group}_pipeline"].empty.__getitem__, 0)
        t.call(wait, empty, t.method(t.method(turn, "__add__", 1), "__and__", 1))
        _fill(t, ctx, f"load_{group}", memory, group, 0)


@op
def load_epilogue(t: Trace, ctx: Traced, memory: Traced, turn: Traced) -> Traced:
    """Load what `finish` reads into the epilogue tiles of each consumer, once it has released them."""
    plan = unwrap(ctx.config)._plan
    chosen = tuple((n, s) for n, s in plan.epilogue if n in plan.epilogue_loads)
    _load_for_consumers(t, ctx, "load_epilogue", memory.epilogue.fields, chosen, memory.epilogue_pipeline, turn)
