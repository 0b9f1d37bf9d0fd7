"""How the compute hooks are called, and what each must do, checked when the kernel is compiled; the release of pipeline
stages."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma.pending import pending
from tritonkittens.lang.mma.tcgen05 import mma_commit
from tritonkittens.lang.register.construction import zero
from tritonkittens.lang.sync.semaphores import arrive, wait
from tritonkittens.lang.template.storage import BLOCK_TASK


def counted(t: Trace, hook: Traced, key: str, counters: tuple[str, ...], *args: Traced) -> tuple[Traced, list[int]]:
    """Call a hook; what it returns and how much it adds to counters of the bill. A hook that is already in the module
    is not traced again: then, what it added when it was."""
    account, found = bill(), []
    before = [getattr(account, counter) for counter in counters]
    result = t.call(hook, *args)
    for counter, value in zip(counters, before, strict=True):
        added, name = getattr(account, counter) - value, f"{counter} {key}"
        if added or name not in account.by_hook:
            account.by_hook[name] = added
        found.append(account.by_hook[name])
    return result, found


def in_mma_warp(t: Trace, ctx: Traced) -> bool:
    """Does the MMA warp run this hook? Its releases wait for the products that read the tiles."""
    return bool(unwrap(ctx.config).has_mma_warp(t.arch))


@op
def await_block_task(t: Trace, tiles: Traced) -> Traced:
    """Wait until the CTA's task tiles are full, when a task begins, or its late ones, after the first iteration: a
    parity tells two phases apart, so no consumer may miss one."""
    if "group" in tiles.fields:
        t.call(wait, tiles.full, tiles.phase)


@op
def release_block_task(t: Trace, ctx: Traced, computed_last: Traced = False) -> Traced:
    """Release the CTA's task tiles that hook `compute_last`, where it was called, has not released."""
    last = f"compute_last: {type(unwrap(ctx.config)).compute_last.cache_key}" if unwrap(computed_last) else ""
    for group in BLOCK_TASK:
        if (
            group in ctx.fields
            and "group" in ctx.fields[group].fields
            and not bill().by_hook.get(f"{group}_released {last}", 0)
        ):
            if in_mma_warp(t, ctx):
                t.call(mma_commit, ctx.fields[group].empty)
            else:
                t.call(arrive, ctx.fields[group].empty, per="warp", fenced=hooks_read_no_shared())


@op
def call_start(t: Trace, ctx: Traced) -> Traced:
    """The state that a consumer begins a task with."""
    hook = getattr(type(unwrap(ctx.config)), "start", None)
    return struct() if hook is None else _state(t, ctx, "start", t.call(hook, ctx), None)


@op
def begin_sums(t: Trace, ctx: Traced) -> Traced:
    """The state that the MMA warp begins a task with, for one consumer: accumulators in tensor memory only."""
    cls = type(unwrap(ctx.config))
    state = t.call(call_start, ctx)
    for name, value in state.fields.items():
        if not isinstance(value, tensor_tile) or not value.is_completed_by_template:
            raise TileError(
                f"{cls.__name__}.start returns state.{name}, {value.type!r}; on sm_{t.arch} one warp runs the products "
                "of a template with `accumulators`, so its state is made of ctx.accumulators only (tk.zero, "
                "tk.mma_zero). A state in registers needs accumulators in registers: tk.zero(tk.rt(…)), none in the "
                "layout"
            ).of(getattr(cls, "start", None))
    return state


@op
def readable(t: Trace, state: Traced) -> Traced:
    """The state with accumulators that threads may read."""
    return struct(**{n: tile.completed() for n, tile in state.fields.items()})


@op
def fill_zeros(t: Trace, state: Traced) -> Traced:
    """Write zeros to the accumulators of a readable state."""
    for tile in state.fields.values():
        t.call(zero, tile)


@op
def uses_previous(t: Trace, T: Traced) -> Traced:
    """Does hook `compute` use its argument `previous`? Then a stage is released one iteration later."""
    compute = type(unwrap(T)).compute
    name = list(inspect.signature(compute.fn).parameters)[-1]
    nodes = ast.walk(ast.parse(compute.src))
    used = any(isinstance(node, ast.Name) and node.id == name for node in nodes)
    return tl.constexpr(unwrap(T).pipelined and (used or hasattr(type(unwrap(T)), "compute_first")))


@op
def call_load_params(t: Trace, ctx: Traced) -> Traced:
    """The context plus what hook `load_params` returns."""
    hook = getattr(type(unwrap(ctx.config)), "load_params", None)
    return ctx if hook is None else struct(**{**ctx.fields, "params": t.call(hook, ctx)})


def _state(t: Trace, ctx: Traced, what: str, new: Traced, old: Traced) -> Traced:
    cls = type(unwrap(ctx.config))
    hook, said = getattr(cls, what), f"{cls.__name__}.{what}"
    if not isinstance(new, struct):
        raise TileError(f"{said} must return the state (a tk.struct), got {unwrap(new)!r}").of(hook)
    if old is not None and new.type != old.type:
        raise TileError(f"{said} returns {_changed(new, old)}").of(hook)
    return new


def _changed(new: struct, old: struct) -> str:
    """What differs between the state that a hook returns and the one that it got, and what to do about it."""
    for name in [n for n in new.fields if n in old.fields and new.fields[n].type != old.fields[n].type]:
        made, got = (isinstance(state.fields[name], pending) for state in (new, old))
        if made and got:
            return (
                f"state.{name} with other products in flight than it got: end with tk.mma_retire, which leaves only "
                "the newest in flight"
            )
        if made:
            return (
                f"state.{name} as a product in flight (wait=False), and got it as a tile: begin the state with "
                "tk.mma_zero or tk.mma_begin in hook 'start', and end it with tk.mma_wait or tk.mma_retire"
            )
        if got:
            return (
                f"state.{name} as a tile, and got it as a product in flight (tk.mma_zero, tk.mma_begin): issue the "
                "product with wait=False and end with tk.mma_retire, or begin with a tile, tk.zero, in hook 'start'"
            )
    return f"a state of type {new.type!r}; it must keep the type {old.type!r}"


def _hook(what: str) -> Any:
    def call(t: Trace, ctx: Traced, state: Traced, *inputs: Traced) -> Traced:
        config = unwrap(ctx.config)
        hook = getattr(type(config), what)
        read_before = bill().reads_shared
        lagged = ("released", "awaited") if config._plan.lagged else ()
        added = tuple(counter for extension in config.extensions for counter in extension.counters)
        wanted = (*lagged, *added, *(f"{group}_released" for group in BLOCK_TASK))
        new, counts = counted(t, hook, f"{what}: {hook.cache_key}", wanted, ctx, state, *inputs)
        if config.has_mma_warp(t.arch) and bill().reads_shared > read_before:
            raise TileError(
                f"{type(config).__name__}.{what} reads shared memory; on sm_{t.arch} one warp runs the products of a "
                "template with `accumulators`, and only tensor cores read its input. Keep the sums in registers "
                "(tk.zero(tk.rt(…)), no accumulators in the layout)"
            ).of(hook)
        found = dict(zip(wanted, counts, strict=True))
        if lagged:
            _check_lagged(config, what, found["released"], found["awaited"])
        for extension in config.extensions:
            extension.check_hook(config, what, found)
        for group in BLOCK_TASK:
            _check_released(config, what, group, found[f"{group}_released"])
        _note_reads(read_before)
        return _state(t, ctx, what, new, state)

    call.__name__ = f"_{what}"
    return op(call)


def _note_reads(before: int) -> None:
    """Remember whether hooks that work on ring slots read shared memory into registers. A function that is already in
    the module is not traced again: what was read before the first of these hooks counts too."""
    account = bill()
    account.reads_ring = bool(account.reads_ring) or account.reads_shared > (
        0 if account.reads_ring is None else before
    )


def hooks_read_no_shared() -> bool:
    """Do the compute hooks traced so far read no shared memory into registers? Then a release after them needs no
    fence. A release must not rely on what `arrive` knows by itself, the reads traced before it: those of `finish` come
    before it in the previous task, but after it in the program."""
    return bill().reads_ring is False


def _check_lagged(config: Any, what: str, released: int, awaited: int) -> None:
    """Refuse a hook that does not release its input once or does not wait for its lagged tiles once. Calls in a helper
    function are not seen where the same function was called before."""
    hook, name = getattr(type(config), what), type(config).__name__
    if released != (what != "compute_last"):
        raise TileError(
            f"{name}.{what} calls tk.release {released} times; 'compute_first' and 'compute' release their input once, "
            "in the hook itself, 'compute_last' has none"
        ).of(hook)
    if awaited != (what != "compute_first"):
        raise TileError(
            f"{name}.{what} calls tk.wait_for {awaited} times; 'compute' and 'compute_last' wait once, in the hook "
            "itself, for their lagged tiles, 'compute_first' has none"
        ).of(hook)


def _check_released(config: Any, what: str, group: str, times: int) -> None:
    if times > (what == "compute_last"):
        raise TileError(
            f"{type(config).__name__}.{what} calls tk.release(ctx, ctx.{group}) {times} times; 'compute_last' may "
            "release them, once"
        ).of(getattr(type(config), what))


call_compute, call_compute_last, _first_hook = _hook("compute"), _hook("compute_last"), _hook("compute_first")


@op
def call_compute_first(t: Trace, ctx: Traced, state: Traced, input: Traced) -> Traced:
    """Iteration 0 of a pipelined computation."""
    return (
        t.call(_first_hook, ctx, state, input)
        if hasattr(type(unwrap(ctx.config)), "compute_first")
        else t.call(call_compute, ctx, state, input, input)
    )


@op
def release(t: Trace, ctx: Traced, tiles: Traced) -> Traced:
    """Release the input tiles of this iteration to the producer: `compute_first` and `compute` of a template with
    lagged tiles do so once, as soon as nothing reads the tiles any more. Or, in `compute_last` itself, release
    `ctx.task` tiles with `per="block"` or `ctx.late_task` tiles: stores that read them have been waited for
    (`tk.store_read_wait`)."""
    account, group = bill(), unwrap(tiles.fields.get("group"))
    if group is not None:
        setattr(account, f"{group}_released", getattr(account, f"{group}_released") + 1)
        t.call(mma_commit, tiles.empty) if in_mma_warp(t, ctx) else t.call(arrive, tiles.empty, per="warp")
        return
    account.released += 1
    t.call(_release, tiles.empty, ctx.config)


@op
def wait_for(t: Trace, tiles: Traced) -> Traced:
    """Wait until lagged tiles are full: `compute` and `compute_last` do so once, before they use them and after what
    needs the input only. Or, in `compute_first`, wait for `ctx.late_task`, where it uses them; later hooks need not
    wait."""
    group = unwrap(tiles.fields.get("group"))
    if group == "task":
        raise TileError(
            "wait_for(ctx.task): task tiles are full when a task begins; those that `compute_first` waits for itself "
            "are late_task tiles"
        )
    bill().awaited += group is None
    t.call(wait, tiles.full, tiles.phase)


@op
def release_own_task(t: Trace, memory: Traced, consumer: Traced) -> Traced:
    """Release a consumer's own task tiles, after the hooks that use them."""
    t.call(arrive, t.call(memory.task_pipeline.empty.__getitem__, consumer), per="warp", fenced=hooks_read_no_shared())


@op
def release_slot(t: Trace, empty: Traced, slot: Traced, T: Traced) -> Traced:
    """Release a stage, after the hook that used it."""
    t.call(_release, t.call(empty.__getitem__, slot), T, hooks_read_no_shared())


@op
def release_before(t: Trace, memory: Traced, slot: Traced, T: Traced) -> Traced:
    """Release what is left of the previous iteration's stage: its lagged tiles, or all of it."""
    t.call(release_slot, (memory.lagged_pipeline if memory.lagged.fields else memory.input_pipeline).empty, slot, T)


@op
def _release(t: Trace, bar: Traced, T: Traced, unread: Traced = False) -> Traced:
    """Arrive at the empty barrier of a stage, for the producers of all CTAs of the cluster: each writes into the
    stages of all.

    Scope "cta" is enough in a cluster too: what reads a stage are the tensor cores, whose products were waited for, or
    threads, whose reads `arrive` fences, unless no thread reads the stage (`unread`).
    """
    cluster = unwrap(T).cluster
    for rank in range(cluster):
        t.call(arrive, bar, per="warp", cta=rank if cluster > 1 else None, scope="cta", fenced=unread)


__all__ = ["release", "wait_for"]
