"""What a template runs: the roles, the ring and its semaphores, the loop over the work of a block. The hooks are called from here.

A block (a cluster) walks over units of work (`lang/work.py`). For each, the producer fills ring slots in the order of the iterations, the consumers that share
the unit compute on them and finish it; consumers that work on units of their own (`independent`) skip the slots of the others' units.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import mbarrier as ptx_mbarrier
from tritonkittens.inline_ptx.tensormap import parameter_address
from tritonkittens.inline_ptx.tma import prefetch_tensormap
from tritonkittens.lang._backend import Trace, gl, op
from tritonkittens.lang.budget import bill
from tritonkittens.lang.cluster_sums import new_mailboxes, sum_in_cluster
from tritonkittens.lang.consumers import WARPS, hand_ring, meet_at_end, open_turns, take_ring
from tritonkittens.lang.drawing import draw, draw_no_more, hear, new_numbers, tell
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.globals import rank_of
from tritonkittens.lang.kernel import kernel
from tritonkittens.lang.layout import EXCHANGE_SLOTS, nbytes
from tritonkittens.lang.memory import fence_async, store_read_wait
from tritonkittens.lang.partials import settled, sum_up
from tritonkittens.lang.roles import specialize
from tritonkittens.lang.shared import allocate_pieces, piece_shared_layout, shared
from tritonkittens.lang.sync import HOPPER_AND_BLACKWELL, arrive, cluster_rank, cluster_sync, expect, new_semaphores, publish, wait
from tritonkittens.lang.tensor_memory import tensor_allocator
from tritonkittens.lang.tiles import opaque_zero
from tritonkittens.lang.types import split, st, tt, unwrap
from tritonkittens.lang.values import struct
from tritonkittens.lang.work import extra, first_unit, next_unit, work_of

TENSOR_MEMORY = 100  # architecture from which on accumulators lie there
EARLY_SLOTS = 2  # measured on the H200: 1 to 2 % of a GEMM of 1024³; more keep the roles waiting for the barriers between their copies
PRELOAD_SHARES = tl.constexpr(16)  # of the blocks, which ask for what `finish` reads one after the other


@op
def release(t: Trace, ctx: Any, tiles: Any) -> Any:
    """Give the input tiles of this iteration back to the producer: `first` and `compute` of a template with trailing tiles do so once, as soon as nothing reads
    them any more."""
    bill().released += 1
    t.call(_give_back, tiles.finished, ctx.config)


@op
def wait_for(t: Trace, tiles: Any) -> Any:
    """Wait until trailing tiles have arrived: `compute` and `drain` do so once, before they use them and behind what needs the input only."""
    bill().awaited += 1
    t.call(wait, tiles.arrived, tiles.phase)


# ---------------------------------------------------------------- trace-time parts: memory


@op
def _allocate(t: Trace, T: Any) -> Any:
    """All shared and tensor memory of the template and its semaphores, as one record."""
    T = unwrap(T)
    plan, placed = T._plan, T.placement(t.arch)
    fields: dict[str, Any] = {}

    def named(what: str, tiles: dict[str, Any]) -> struct:
        for n, tile in tiles.items():
            tile._set_name(t.builder, f"{what}.{n}")  # what `inspect` calls the buffer
        return struct(**tiles)

    def rings(what: str, tiles: Any, number: int, of: str) -> dict[str, Any]:
        return {n: allocate_pieces(t, s, number, f"{what} {n}: {s!r} × {number} {of}") for n, s in tiles}

    ring = rings("input", plan.input, placed.stages, "stages")
    trailing = rings("trailing", plan.trailing, placed.stages, "stages")
    scratch = rings("scratch", plan.scratch, T.consumers, "consumers")
    fields["common"] = named("common", rings("common", plan.common, 1, "slot"))
    fields["working"] = named("working", rings("working", plan.working, T.consumers, "consumers"))
    fields["exchange"] = named("exchange", rings("exchange", plan.exchange, EXCHANGE_SLOTS, "slots"))
    if placed.over_ring is None and placed.over_working is None:
        fields["staging"] = named("finish", rings("finish", plan.finish, T.consumers, "consumers"))
    fields |= {"ring": named("input", ring), "scratch": named("scratch", scratch), "trailing": named("trailing", trailing)}
    for n in plan.multicast:
        (ring | trailing)[n].loaders = T.cluster
    if plan.output:
        fields["outputs"] = named("output", rings("output", plan.output, T.output_stages, "stages"))
        fields["written"] = new_semaphores(t, T.output_stages, T.team * WARPS)
        fields["stored"] = new_semaphores(t, T.output_stages, 1)
    fields["arrived"] = new_semaphores(t, placed.stages, 1)
    fields["finished"] = new_semaphores(t, placed.stages, T.team * WARPS * T.cluster)
    if plan.trailing:
        fields["trailing_arrived"] = new_semaphores(t, placed.stages, 1)
        fields["trailing_finished"] = new_semaphores(t, placed.stages, T.team * WARPS * T.cluster)
    if plan.scratch:
        fields["scratch_arrived"] = new_semaphores(t, T.consumers, 1)
        fields["scratch_finished"] = new_semaphores(t, T.consumers, WARPS)
    if plan.common:
        fields["common_arrived"] = new_semaphores(t, 1, 1)
        fields["common_finished"] = new_semaphores(t, 1, T.consumers * WARPS)
    if plan.preload:
        fields["preload_arrived"] = new_semaphores(t, T.consumers, 1)
        fields["preload_free"] = new_semaphores(t, T.consumers, WARPS)
    if plan.refill:
        fields["filled"] = new_semaphores(t, T.consumers, 1)
    if T.sharers > 1:
        fields |= new_mailboxes(t, T)
    if T.draws:
        fields |= new_numbers(t, T)
    if placed.over_ring is not None:
        fields["staging_free"] = new_semaphores(t, 1, T.consumers * WARPS + T.producer_warps)
    if t.arch >= TENSOR_MEMORY:
        for n, s in plan.accumulators:
            for c in range(T.consumers):
                fields[f"accumulator_{n}_{c}"] = t.call(tensor_allocator, tt(s.dtype, s.rows, s.cols))
    if T.cluster_size > 1:
        t.call(ptx_mbarrier.fence_init)
    publish(t)
    t.call(gl.barrier)
    for name, field in fields.items():
        if not isinstance(field, struct):
            field._set_name(t.builder, name)
    return struct(**fields)


@op
def _run_roles(t: Trace, G: Any, A: Any, memory: Any, T: Any) -> Any:
    config = unwrap(T)
    roles: list[tuple[Any, tuple]] = [(_consumer, (tl.constexpr(c), G, A, memory, T)) for c in range(config.consumers)]
    roles.append((_producer, (G, A, memory, T)))
    warps = [*(WARPS,) * config.consumers, config.producer_warps]
    if config._plan.output:
        roles.append((_storer, (G, A, memory, T)))
        warps.append(1)
    if config.cluster_size > 1:
        for idle in split(config.idle_warps):  # a role has a power of two of warps
            roles.append((_bystander, (T,)))
            warps.append(idle)
    registers = config.registers()
    t.call(specialize, roles, tuple(warps), (*registers, *registers[-1:] * (len(roles) - len(registers))) if config.reallocates else None)


@op
def _open(t: Trace, T: Any) -> Any:
    """Before the first copy all warps of a cluster meet, so that no block is written to whose semaphores are not there yet. Blocks that share a task's
    iterations only say that they are there: they send each other nothing before its end, see `_opened`. Semaphores are all that was written, and fenced."""
    if unwrap(T).cluster_size > 1:
        t.call(ptx_cluster.arrive, "relaxed")
    if unwrap(T).cluster > 1:
        t.call(ptx_cluster.wait)


@op
def _opened(t: Trace, T: Any) -> Any:
    """The other half of `_open`, where that is not all."""
    if unwrap(T).sharers > 1:
        t.call(ptx_cluster.wait)


@op
def _close(t: Trace, T: Any) -> Any:
    """Behind the last copy all warps of the cluster meet, so that no block leaves while others still write to its memory. Blocks that share a task have waited
    for all that is sent to them."""
    if unwrap(T).cluster > 1:
        t.call(cluster_sync)


@op
def _staging(t: Trace, ctx: Any, memory: Any, worker: Any) -> Any:
    """The staging tiles of a consumer: memory of its own, or views over the tail of the ring or over what consumers worked in."""
    config, c = unwrap(ctx.config), unwrap(worker)
    placed = config.placement(t.arch)
    over = placed.over_ring if placed.over_working is None else placed.over_working
    if over is None:
        return struct(**{n: t.call(s.__getitem__, c) for n, s in memory.staging.fields.items()})
    tiles = {}
    homes = {**memory.ring.fields, **memory.trailing.fields} if placed.over_working is None else memory.working.fields
    for (name, spec), places in zip(config._plan.finish, over, strict=True):
        source, slot, part, parts = places[c]
        piece = t.call(homes[source].__getitem__, slot).pieces[0]
        home = piece_shared_layout(spec.dtype, spec.piece_swizzle(spec.cols), 2)
        view = t.call(piece.reinterpret, spec.dtype, [parts, spec.rows, spec.cols], home)
        tiles[name] = shared(spec, ((spec.rows,), (spec.cols,)), None, (t.call(view.index, part),))
    return struct(**tiles)


@op
def _slot(t: Trace, memory: Any, slot: Any, producer: Any = False) -> Any:
    """The tiles of a ring slot; for the producer also the semaphore that they arrive on, for a consumer with trailing tiles that which gives them back."""
    tiles = {n: t.call(r.__getitem__, slot) for n, r in memory.ring.fields.items()}
    if unwrap(producer):
        tiles["arrived"] = t.call(memory.arrived.__getitem__, slot)
    elif memory.trailing.fields:
        tiles["finished"] = t.call(memory.finished.__getitem__, slot)
    return struct(**tiles)


@op
def _before(t: Trace, memory: Any, slot: Any, phases: Any) -> Any:
    """What `compute` sees of the iteration before, and `drain` of the last: its trailing tiles, their semaphore and its phase, or all its tiles."""
    if not memory.trailing.fields:
        return t.call(_slot, memory, slot)
    tiles = {n: t.call(r.__getitem__, slot) for n, r in memory.trailing.fields.items()}
    return struct(**tiles, arrived=t.call(memory.trailing_arrived.__getitem__, slot), phase=t.call(_phase_before, phases, slot))


@op
def _output(t: Trace, memory: Any, slot: Any) -> Any:
    return struct(**{n: t.call(r.__getitem__, slot) for n, r in memory.outputs.fields.items()})


@op
def _prefetch_descriptors(t: Trace, G: Any, T: Any) -> Any:
    """Fetch the tensor maps while the semaphores are made: the first copy would wait for them."""
    t.require(f"{type(unwrap(T)).__name__} (TMA, warp roles)", *HOPPER_AND_BLACKWELL)
    for g in G:
        for number in range(len(g.maps)):
            t.call(prefetch_tensormap, t.call(parameter_address, unwrap(g.parameter) + number * (1 + 2 * rank_of(g))), issuer="cta")


# ---------------------------------------------------------------- trace-time parts: contexts and hooks


@op
def _context(t: Trace, G: Any, A: Any, T: Any) -> Any:
    """What all hooks see before `setup` has said what the task is."""
    plan, args = unwrap(T)._plan, dict(zip(unwrap(T)._plan.args, A, strict=False))
    tensors = {}
    for (name, tiles), g in zip(plan.globals, G, strict=True):
        tensors[name] = g if not tiles else struct(maps=g.maps, pointer=g.pointer, parameter=g.parameter, shape=tl.tuple([]), strides=tl.tuple([]),
                                                   **({"ragged": None} if name in plan.ragged else {}))
    rank = t.call(cluster_rank) if unwrap(T).cluster > 1 else tl.constexpr(0)
    names = ("partials", "counters") if unwrap(T).splits else ("counters",) if unwrap(T).draws else ()
    split = dict(zip(names, extra(T, A), strict=False))
    if unwrap(T).sharers > 1:
        split["part"] = t.call(cluster_rank)
    return struct(globals=struct(**tensors), args=struct(**args), config=T, rank=rank, **split)


@op
def _with(t: Trace, ctx: Any, more: Any) -> Any:
    """The context plus the fields of another record."""
    return struct(**{**ctx.fields, **more.fields})


@op
def _at(t: Trace, ctx: Any, i: Any, edge: Any = None) -> Any:
    """The context of an iteration; for consumers also whether it is an `edge`."""
    return struct(**{**ctx.fields, "iter": i, **({} if edge is None else {"edge": edge})})


@op
def _marked(t: Trace, work: Any) -> Any:
    """Which iterations of a unit are edges, as a constant: None where any may be, 0 or 1 where none or the first one is, −1 where the task tells."""
    edges = unwrap(work.edges)
    return tl.constexpr(edges if edges is None or isinstance(edges, int) else -1)


@op
def _anew(t: Trace, ctx: Any, memory: Any, number: Any) -> Any:
    """The context with its common tiles addressed anew: their slot is zero, but from a run-time `number` the compiler cannot tell. Else it computes the
    descriptors of all their parts once, and keeps them in registers that accumulators need."""
    if not memory.common.fields:
        return ctx
    zero = t.call(opaque_zero, number)
    return struct(**{**ctx.fields, "common": struct(**{n: t.call(s.__getitem__, zero) for n, s in memory.common.fields.items()})})


@op
def _mine(t: Trace, ctx: Any, memory: Any, worker: Any) -> Any:
    """The context of one consumer: its number among those that share the task, its tiles and accumulators."""
    config, c = unwrap(ctx.config), unwrap(worker)

    def slot(tiles: struct, number: int) -> struct:
        return struct(**{n: t.call(s.__getitem__, number) for n, s in tiles.fields.items()})

    tiles = dict(scratch=slot(memory.scratch, c), common=slot(memory.common, 0), working=slot(memory.working, c), exchange=memory.exchange)
    place_of = {n: memory.fields.get(f"accumulator_{n}_{c}", tl.constexpr(s)) for n, s in config._plan.accumulators}
    number = tl.constexpr(c % config.team)
    return struct(**{**ctx.fields, "consumer": number, "worker": tl.constexpr(c), **tiles, "accumulators": struct(**place_of)})


@op
def _without(t: Trace, ctx: Any, *names: Any) -> Any:
    """The context after these tiles were given back."""
    gone = [unwrap(name) for name in names]
    return struct(**{n: v for n, v in ctx.fields.items() if n not in gone})


def _counted(t: Trace, hook: Any, key: str, counters: tuple[str, ...], *args: Any) -> tuple[Any, list[int]]:
    """Call a hook; what it returns and how much it adds to counters of the bill. A hook that is already in the module is not traced again: then, what it added
    when it was."""
    account, found = bill(), []
    before = [getattr(account, counter) for counter in counters]
    result = t.call(hook, *args)
    for counter, value in zip(counters, before, strict=True):
        added, name = getattr(account, counter) - value, f"{counter} {key}"
        if added or name not in account.by_hook:
            account.by_hook[name] = added
        found.append(account.by_hook[name])
    return result, found


def _checked_load(t: Trace, hook: Any, what: str, consumer: int | None, expected: int, *args: Any) -> None:
    """Call a load hook (for one consumer) and compare the bytes that it copies with those its barrier expects."""
    _, (copied,) = _counted(t, hook, f"{what} for {consumer}: {hook.cache_key}", ("copied",), *args)
    if copied != expected:
        raise TileError(f"hook {what!r} copies {copied} bytes, but its barrier expects {expected}, the bytes of all its tiles: load every "
                        "tile of the argument exactly once, on its `arrived`")


@op
def _load(t: Trace, ctx: Any, memory: Any, slot: Any) -> Any:
    config = unwrap(ctx.config)
    expected = nbytes(config._plan.input)
    t.call(expect, t.call(memory.arrived.__getitem__, slot), expected)
    _checked_load(t, type(config).load, "load", None, expected, ctx, t.call(_slot, memory, slot, True))


@op
def _load_trailing(t: Trace, ctx: Any, memory: Any, slot: Any) -> Any:
    """Ask for the trailing tiles of an iteration."""
    config = unwrap(ctx.config)
    expected, bar = nbytes(config._plan.trailing), t.call(memory.trailing_arrived.__getitem__, slot)
    t.call(expect, bar, expected)
    tiles = struct(**{n: t.call(r.__getitem__, slot) for n, r in memory.trailing.fields.items()}, arrived=bar)
    _checked_load(t, type(config).load_trailing, "load_trailing", None, expected, ctx, tiles)


def _load_for_consumers(t: Trace, ctx: Any, what: str, tiles: Any, chosen: Any, arrived: Any, free: Any, turn: Any) -> None:
    """Fill tiles of every consumer of the task, once it has given back those of its task before."""
    config = unwrap(ctx.config)
    expected, teams = nbytes(chosen), config.consumers // config.team
    first = t.call(_remainder, turn, teams) if teams > 1 else None
    phase = t.method(t.method(turn, "__floordiv__", teams), "__and__", 1)
    for c in range(config.team):
        worker = first if teams > 1 else c
        bar = t.call(arrived.__getitem__, worker)
        t.call(wait, t.call(free.__getitem__, worker), phase)
        t.call(expect, bar, expected)
        mine = struct(**{**ctx.fields, "consumer": tl.constexpr(c)})
        filled = struct(**{n: t.call(tiles[n].__getitem__, worker) for n, _ in chosen}, arrived=bar)
        _checked_load(t, getattr(type(config), what), what, c, expected, mine, filled)


@op
def _load_scratch(t: Trace, ctx: Any, memory: Any, turn: Any) -> Any:
    plan = unwrap(ctx.config)._plan
    if plan.scratch:
        free = t.method(turn, "__add__", 1)  # fresh scratch is free
        _load_for_consumers(t, ctx, "load_scratch", memory.scratch.fields, plan.scratch, memory.scratch_arrived, memory.scratch_finished, free)


@op
def _load_common(t: Trace, ctx: Any, memory: Any, turn: Any) -> Any:
    """Fill the tiles that the consumers of a task share, once all have given back those of the task before."""
    config = unwrap(ctx.config)
    if not config._plan.common:
        return
    bar, expected = t.call(memory.common_arrived.__getitem__, 0), nbytes(config._plan.common)
    t.call(wait, t.call(memory.common_finished.__getitem__, 0), t.method(t.method(turn, "__add__", 1), "__and__", 1))
    t.call(expect, bar, expected)
    tiles = struct(**{n: t.call(s.__getitem__, 0) for n, s in memory.common.fields.items()}, arrived=bar)
    _checked_load(t, type(config).load_common, "load_common", None, expected, ctx, tiles)


def _fills_tiles(config: Any) -> bool:
    """Are tiles among what is loaded for `finish`, which stores may still be reading, and not only vectors?"""
    return any(isinstance(tile, st) for n, tile in config._plan.finish if n in config._plan.preload)


@op
def _give_staging(t: Trace, memory: Any, worker: Any, T: Any) -> Any:
    """Let the producer load for `finish`, or consumers work where the results of the task before were staged. Called in the first iteration: then the stores of
    the task before have been read while products were under way."""
    config = unwrap(T)
    if config.placement(t.arch).over_working is not None:
        t.call(_leave_staging, T)
    if not config._plan.preload:
        return
    if _fills_tiles(config):
        t.call(store_read_wait, 0)
    t.call(arrive, t.call(memory.preload_free.__getitem__, worker), per="warp")


@op
def _leave_staging(t: Trace, T: Any) -> Any:
    """All consumers' stores, results' and those from working tiles, have read shared memory, and their products are done."""
    t.call(store_read_wait, 0)
    t.call(meet_at_end, T)


@op
def _load_finish(t: Trace, ctx: Any, memory: Any, turn: Any) -> Any:
    plan = unwrap(ctx.config)._plan
    chosen = tuple((n, s) for n, s in plan.finish if n in plan.preload)
    _load_for_consumers(t, ctx, "load_finish", memory.staging.fields, chosen, memory.preload_arrived, memory.preload_free, turn)


@op
def _start(t: Trace, ctx: Any) -> Any:
    hook = getattr(type(unwrap(ctx.config)), "start", None)
    return struct() if hook is None else _state(t, ctx, "start", t.call(hook, ctx), None)


def _state(t: Trace, ctx: Any, what: str, new: Any, old: Any) -> Any:
    name = type(unwrap(ctx.config)).__name__
    if not isinstance(new, struct):
        raise TileError(f"{name}.{what} must return the state (a tk.struct), got {new!r}")
    if old is not None and new.type != old.type:
        raise TileError(f"{name}.{what} returns a state of type {new.type!r}; it must keep the type {old.type!r}")
    return new


def _hook(what: str) -> Any:
    def call(t: Trace, ctx: Any, state: Any, *inputs: Any) -> Any:
        config = unwrap(ctx.config)
        hook = getattr(type(config), what)
        read_before = bill().reads_shared
        if config._plan.trailing:
            new, (released, awaited) = _counted(t, hook, f"{what}: {hook.cache_key}", ("released", "awaited"), ctx, state, *inputs)
            _check_trailing(config, what, released, awaited)
        else:
            new = t.call(hook, ctx, state, *inputs)
        _note_reads(read_before)
        return _state(t, ctx, what, new, state)

    call.__name__ = f"_{what}"
    return op(call)


def _note_reads(before: int) -> None:
    """Remember whether hooks that work on ring slots read shared memory into registers. A function that is already in the module is not traced again: what was
    read before the first of these hooks counts too."""
    account = bill()
    account.reads_ring = bool(account.reads_ring) or account.reads_shared > (0 if account.reads_ring is None else before)


def _check_trailing(config: Any, what: str, released: int, awaited: int) -> None:
    """Refuse a hook that does not give its input back once or does not wait for its trailing tiles once. What a helper function does is not seen where the same
    function was called before."""
    name = type(config).__name__
    if released != (what != "drain"):
        raise TileError(f"{name}.{what} calls tk.release {released} times; 'first' and 'compute' give their input back once, in the hook itself, "
                        "'drain' has none")
    if awaited != (what != "first"):
        raise TileError(f"{name}.{what} calls tk.wait_for {awaited} times; 'compute' and 'drain' wait once, in the hook itself, for their trailing tiles, "
                        "'first' has none")


@op
def _fetch(t: Trace, ctx: Any) -> Any:
    """The context plus what hook `fetch` reads."""
    hook = getattr(type(unwrap(ctx.config)), "fetch", None)
    return ctx if hook is None else struct(**{**ctx.fields, "fetched": t.call(hook, ctx)})


_compute, _drain = _hook("compute"), _hook("drain")
_first_hook = _hook("first")


@op
def _first(t: Trace, ctx: Any, state: Any, input: Any) -> Any:
    """Iteration 0 of a pipelined computation."""
    return t.call(_first_hook, ctx, state, input) if hasattr(type(unwrap(ctx.config)), "first") else t.call(_compute, ctx, state, input, input)


@op
def _store(t: Trace, ctx: Any, output: Any) -> Any:
    """Call the store hook, which must store every output tile once: it is waited for by the number of copies."""
    config = unwrap(ctx.config)
    expected = copies(config._plan.output)
    _, (stored,) = _counted(t, type(config).store, f"store: {type(config).store.cache_key}", ("stored",), ctx, output)
    if stored != expected:
        raise TileError(f"hook 'store' makes {stored} copies, but its output tiles are {expected}: store every tile of the argument exactly once")


@op
def _wait_for_stores(t: Trace, ctx: Any, slots: Any) -> Any:
    """Wait until at most the stores of the newest `slots` slots still read shared memory."""
    t.call(store_read_wait, unwrap(slots) * copies(unwrap(ctx.config)._plan.output))


def copies(tiles: Any) -> int:
    """TMA copies (bulk groups) that storing each of these tiles takes."""
    return sum(len(tile.pieces()) if isinstance(tile, st) else len(split(tile.length)) for _, tile in tiles)


@op
def _release(t: Trace, finished: Any, slot: Any, T: Any) -> Any:
    """Give a ring slot back, behind the hook that used it."""
    t.call(_give_back, t.call(finished.__getitem__, slot), T, bill().reads_ring is False)


@op
def _release_before(t: Trace, memory: Any, slot: Any, T: Any) -> Any:
    """Give back what is left of the slot of the iteration before: its trailing tiles, or all of it."""
    t.call(_release, memory.trailing_finished if memory.trailing.fields else memory.finished, slot, T)


@op
def _give_back(t: Trace, bar: Any, T: Any, unread: Any = False) -> Any:
    """Arrive at the semaphore of a slot, for the producers of all blocks of the cluster: each writes into the slots of all.

    Scope "cta" is enough in a cluster too: what reads a slot are the tensor cores, whose products were waited for, or threads, whose reads `arrive` fences,
    unless the slot is `unread` by any.
    """
    cluster = unwrap(T).cluster
    for rank in range(cluster):
        t.call(arrive, bar, per="warp", cta=rank if cluster > 1 else None, scope="cta", fenced=unwrap(T).fences_reads or unwrap(unread))


@op
def _call_finish(t: Trace, ctx: Any, state: Any, memory: Any) -> Any:
    hook = getattr(type(unwrap(ctx.config)), "finish", None)
    if hook is None:
        return
    staging = t.call(_staging, ctx, memory, ctx.worker)
    if unwrap(ctx.config)._plan.refill:
        staging = struct(**staging.fields, filled=t.call(memory.filled.__getitem__, unwrap(ctx.worker)))
    t.call(hook, ctx, state, staging)


@op
def _finish(t: Trace, ctx: Any, state: Any, memory: Any, turn: Any, more: Any) -> Any:
    """Stage and store the results. The staging tiles must be free: stores of the task before have read them, and over the ring all consumers are done.

    `staging_free` completes once a task, by an arrival of every consumer warp after its stores and one of the producer, which has then seen the completion
    of the task before. So nobody is two phases ahead, also where tasks of no iterations need nothing of each other. `more`: see `_another`.
    """
    config = unwrap(ctx.config)
    over_ring = config.placement(t.arch).over_ring is not None
    if config.placement(t.arch).over_working is not None:
        t.call(_leave_staging, ctx.config)
    elif over_ring:  # one consumer too: its warps leave the last slot at different times
        t.call(meet_at_end, ctx.config)
        t.call(wait, t.call(memory.staging_free.__getitem__, 0), t.method(t.method(turn, "__and__", 1), "__xor__", 1))
    elif config._plan.finish and not _fills_tiles(config):
        t.call(store_read_wait, 0)
    if config._plan.preload:
        t.call(wait, t.call(memory.preload_arrived.__getitem__, unwrap(ctx.worker)), t.method(turn, "__and__", 1))
    if config.splits:
        t.call(_finish_if_last, ctx, state, memory)
    elif config.sharers > 1:
        t.call(_call_finish, ctx, t.call(sum_in_cluster, ctx, t.call(settled, ctx, state), memory, turn, more), memory)
    else:
        t.call(_call_finish, ctx, state, memory)
    if over_ring:
        t.call(store_read_wait, 0)
        t.call(arrive, t.call(memory.staging_free.__getitem__, 0), per="warp")


@op
def _facts(t: Trace, T: Any) -> Any:
    """(stages, safe stages, over ring, pipelined, has scratch, has preload, output stages, independent, early slots, trailing, has common, draws) as constants.

    Early are the slots that nothing must be waited for to fill: not in a cluster, whose other blocks must have made their semaphores.
    """
    T = unwrap(T)
    placed, plan = T.placement(t.arch), T._plan
    over_ring = placed.over_ring is not None
    early = 0 if T.cluster > 1 or T.draws else min(EARLY_SLOTS, placed.safe_stages, placed.stages - bool(plan.preload))
    facts = (placed.stages, placed.safe_stages, over_ring, T.pipelined, bool(plan.scratch), bool(plan.preload), T.output_stages if plan.output else 0,
             T.consumers // T.team, early, bool(plan.trailing), bool(plan.common), T.draws)
    return tl.tuple([tl.constexpr(x) for x in facts])


# ---------------------------------------------------------------- device code


@triton.jit
def _finish_if_last(ctx, state, memory):
    """Finish a task that blocks share, where this one is the last of them."""
    state, last = sum_up(ctx, settled(ctx, state))
    if last:
        _call_finish(ctx, state, memory)


@triton.jit
def _remainder(number, divisor: tl.constexpr):
    return number % divisor


@triton.jit
def _phase_before(phases, slot):
    """The phase that a slot had before its bit was turned."""
    return ((phases >> slot) & 1) ^ 1


@triton.jit
def _next_slot(slot, phases, STAGES: tl.constexpr):
    """The slot behind `slot`, and the phases after it was used: one parity bit a slot."""
    return tl.where(slot + 1 == STAGES, 0, slot + 1), phases ^ (1 << slot)


@triton.jit
def _skip(slot, phases, count, STAGES: tl.constexpr):
    """The same after `count` slots."""
    ALL: tl.constexpr = (1 << STAGES) - 1
    rest = count % STAGES
    part = ((1 << rest) - 1) << slot
    part = (part | (part >> STAGES)) & ALL
    whole = tl.where((count // STAGES) % 2 == 1, ALL, 0)
    behind = slot + rest
    return tl.where(behind >= STAGES, behind - STAGES, behind), phases ^ whole ^ part


@triton.jit
def _first_work(ctx, A):
    """(unit, its work) that this block begins with."""
    unit = first_unit(ctx, A)
    return unit, work_of(ctx, A, unit)


@triton.jit
def _next_work(ctx, A, unit, work):
    """The same behind a unit."""
    following = next_unit(ctx, A, unit, work)
    return following, work_of(ctx, A, following)


@op
def _another(t: Trace, ctx: Any, A: Any, following: Any) -> Any:
    """Does this block begin another task, for which others wait to send it their sums?"""
    return t.call(work_of, ctx, A, following).valid if unwrap(ctx.config).sharers > 1 else tl.constexpr(False)


@triton.jit
def _leave_input(ctx, A, memory, following, WORKER: tl.constexpr, T: tl.constexpr):
    """A consumer has seen all input of its unit: the scratch tiles are free, and the ring is that of the consumer of the next unit, where there is one."""
    HAS_SCRATCH: tl.constexpr = _facts(T)[4]
    TEAMS: tl.constexpr = _facts(T)[7]
    if HAS_SCRATCH:
        arrive(memory.scratch_finished[WORKER], per="warp")
    if TEAMS > 1:
        if work_of(ctx, A, following).valid:
            hand_ring(WORKER, T)


@triton.jit
def _early_count(work, T: tl.constexpr):
    """How many slots of the block's first unit are filled before the roles begin; with preloaded tiles not its last, behind which the producer loads those."""
    LIMIT: tl.constexpr = _facts(T)[8]
    PRELOAD: tl.constexpr = _facts(T)[5]
    if PRELOAD:
        return tl.minimum(tl.maximum(work.count - 1, 0), LIMIT)
    else:
        return tl.minimum(work.count, LIMIT)


@triton.jit
def _load_early(G, A, memory, T: tl.constexpr):
    """Ask for the block's first input before the roles begin: starting them takes as long as the first bytes are under way."""
    LIMIT: tl.constexpr = _facts(T)[8]
    TRAILING: tl.constexpr = _facts(T)[9]
    if LIMIT > 0:
        ctx = _context(G, A, T)
        unit, work = _first_work(ctx, A)
        if work.valid:
            whole = _with(ctx, work)
            _load_for_task(whole, memory, 0)
            for i in range(_early_count(work, T)):
                _load(_at(whole, work.begin + i), memory, i)
                if TRAILING:
                    if i > 0:
                        _load_trailing(_at(whole, work.begin + i - 1), memory, i - 1)


@triton.jit
def _preload_at(count, STAGES: tl.constexpr):
    """The iteration behind whose input the producer loads for `finish`: not before the task's first slots are on their way, long before the last, and not in
    all blocks at once: memory would serve nothing else for so long that rings run empty (GEMM 4096³ with a residual on the H200: 293 thousand cycles,
    290 to 292 so)."""
    spare = tl.maximum(count - 2 * STAGES, 0)
    return tl.minimum(count, STAGES) - 1 + spare * (tl.program_id(0) % PRELOAD_SHARES) // PRELOAD_SHARES


@triton.jit
def _load_for_task(ctx, memory, turn):
    """Ask for the tiles that consumers keep for a whole task."""
    _load_scratch(ctx, memory, turn)
    _load_common(ctx, memory, turn)


@triton.jit
def _producer(G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = _facts(T)[0]
    SAFE: tl.constexpr = _facts(T)[1]
    OVER_RING: tl.constexpr = _facts(T)[2]
    HAS_SCRATCH: tl.constexpr = _facts(T)[4]
    HAS_COMMON: tl.constexpr = _facts(T)[10]
    PRELOAD: tl.constexpr = _facts(T)[5]
    EARLY: tl.constexpr = _facts(T)[8]
    TRAILING: tl.constexpr = _facts(T)[9]
    DRAWS: tl.constexpr = _facts(T)[11]
    slot = 0
    phases = -1  # one parity bit a slot: a fresh semaphore counts as released
    turn = 0
    begun = 0
    previous = 0
    _open(T)
    ctx = _context(G, A, T)
    unit, work = _first_work(ctx, A)
    if EARLY > 0:
        begun = tl.where(work.valid, _early_count(work, T), 0)
        slot, phases = _skip(slot, phases, begun, STAGES)
        previous = tl.maximum(begun - 1, 0)
    while work.valid:
        whole = _with(ctx, work)
        if HAS_SCRATCH or HAS_COMMON:
            if (work.count == 0) and (turn > 0 or EARLY == 0):
                _load_for_task(whole, memory, turn)
        if OVER_RING:
            slot = begun  # the tail of the ring must be the slots that are filled last
        for i in range(begun, work.count):
            if OVER_RING:
                if i == SAFE:
                    wait(memory.staging_free[0], (turn & 1) ^ 1)
                    arrive(memory.staging_free[0], per="warp")
            wait(memory.finished[slot], (phases >> slot) & 1)
            _load(_at(whole, work.begin + i), memory, slot)
            if HAS_SCRATCH or HAS_COMMON:  # behind the first input: consumers give these tiles back late, slots of the ring before
                if (i == 0) and (turn > 0 or EARLY == 0):
                    _load_for_task(whole, memory, turn)
            if TRAILING:  # used one iteration later, and so asked for
                if i > 0:
                    wait(memory.trailing_finished[previous], _phase_before(phases, previous))
                    _load_trailing(_at(whole, work.begin + i - 1), memory, previous)
                previous = slot
            slot, phases = _next_slot(slot, phases, STAGES)
            if PRELOAD:  # consumers give the staging tiles back once they are in the task: not before its first slots are on their way
                if i == _preload_at(work.count, STAGES):
                    _load_finish(whole, memory, turn)
        if TRAILING:
            if work.count > 0:
                wait(memory.trailing_finished[previous], _phase_before(phases, previous))
                _load_trailing(_at(whole, work.begin + work.count - 1), memory, previous)
        if PRELOAD:
            if work.count == 0:
                _load_finish(whole, memory, turn)
        if OVER_RING:
            if work.count <= SAFE:
                wait(memory.staging_free[0], (turn & 1) ^ 1)
                arrive(memory.staging_free[0], per="warp")
        if DRAWS:  # the ring is full: there is nothing to load before the answer is here
            unit = draw(ctx)
            tell(memory, unit, turn)
            work = work_of(ctx, A, unit)
        else:
            unit, work = _next_work(ctx, A, unit, work)
        turn += 1
        begun = 0
    if DRAWS:
        draw_no_more(ctx)
    _opened(T)
    _close(T)


@triton.jit
def _behind_edges(work, number):
    """How many iterations of a unit are edges, or among its first `number`."""
    EDGES: tl.constexpr = _marked(work)
    if EDGES is None or EDGES == 0 or EDGES == number:
        return number
    else:
        return tl.maximum(tl.minimum(work.edges - work.begin, work.count), number)


@triton.jit
def _pipelined(mine, memory, state, slot, phases, previous, i, EDGE: tl.constexpr, T: tl.constexpr):
    """An iteration behind the first: (state, next slot, phases, this slot)."""
    wait(memory.arrived[slot], (phases >> slot) & 1)
    state = _compute(_at(_anew(mine, memory, i), mine.begin + i, EDGE), state, _slot(memory, slot), _before(memory, previous, phases))
    _release_before(memory, previous, T)
    behind, phases = _next_slot(slot, phases, _facts(T)[0])
    return state, behind, phases, slot


@triton.jit
def _alone(mine, memory, state, slot, phases, out, out_phases, i, EDGE: tl.constexpr, T: tl.constexpr):
    """An iteration of a computation without `drain`: (state, next slot, phases, next output slot, their phases)."""
    OUTPUTS: tl.constexpr = _facts(T)[6]
    wait(memory.arrived[slot], (phases >> slot) & 1)
    here = _at(_anew(mine, memory, i), mine.begin + i, EDGE)
    if OUTPUTS > 0:
        wait(memory.stored[out], (out_phases >> out) & 1)
        state = _compute(here, state, _slot(memory, slot), _output(memory, out))
        fence_async()  # what was written to the output tiles, for TMA to read
        arrive(memory.written[out], per="warp")
        out, out_phases = _next_slot(out, out_phases, OUTPUTS)
    else:
        state = _compute(here, state, _slot(memory, slot))
    _release(memory.finished, slot, T)
    slot, phases = _next_slot(slot, phases, _facts(T)[0])
    return state, slot, phases, out, out_phases


@triton.jit
def _consumer(WORKER: tl.constexpr, G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = _facts(T)[0]
    OVER_RING: tl.constexpr = _facts(T)[2]
    PIPELINED: tl.constexpr = _facts(T)[3]
    HAS_SCRATCH: tl.constexpr = _facts(T)[4]
    TEAMS: tl.constexpr = _facts(T)[7]
    HAS_COMMON: tl.constexpr = _facts(T)[10]
    DRAWS: tl.constexpr = _facts(T)[11]
    slot = 0
    phases = 0
    turn = 0
    out = 0
    out_phases = -1
    _open(T)
    ctx = _context(G, A, T)
    unit, work = _first_work(ctx, A)
    if TEAMS > 1:
        for _ in tl.static_range(WORKER):
            slot, phases = _skip(slot, phases, work.count, STAGES)
            unit, work = _next_work(ctx, A, unit, work)
    open_turns(WORKER, T)
    while work.valid:
        mine = _mine(_with(ctx, work), memory, WORKER)
        if OVER_RING:
            slot = 0
        if HAS_SCRATCH:
            wait(memory.scratch_arrived[WORKER], turn & 1)
        if HAS_COMMON:
            wait(memory.common_arrived[0], turn & 1)
        mine = _fetch(mine)
        state = _start(mine)
        EDGES: tl.constexpr = _marked(work)
        following = unit if DRAWS else next_unit(ctx, A, unit, work)
        if TEAMS > 1:  # a parity tells a slot's last two phases apart: nobody looks at one before the consumer of the unit before has seen its own
            if turn > 0 or WORKER > 0:
                take_ring(WORKER)
        if PIPELINED:
            if work.count > 0:
                wait(memory.arrived[slot], (phases >> slot) & 1)
                state = _first(_at(_anew(mine, memory, work.count), work.begin, EDGES is None or EDGES != 0), state, _slot(memory, slot))
                _give_staging(memory, WORKER, T)
                previous = slot
                slot, phases = _next_slot(slot, phases, STAGES)
                inner = _behind_edges(work, 1)
                if EDGES == -1:
                    for i in range(1, inner):
                        state, slot, phases, previous = _pipelined(mine, memory, state, slot, phases, previous, i, True, T)
                for i in range(inner, work.count):
                    state, slot, phases, previous = _pipelined(mine, memory, state, slot, phases, previous, i, EDGES is None, T)
                _leave_input(ctx, A, memory, following, WORKER, T)
                state = _drain(_anew(_without(mine, "scratch"), memory, previous), state, _before(memory, previous, phases))
                _release_before(memory, previous, T)
            else:
                _give_staging(memory, WORKER, T)
                _leave_input(ctx, A, memory, following, WORKER, T)
        else:
            _give_staging(memory, WORKER, T)
            inner = _behind_edges(work, 0)
            if EDGES is not None and EDGES != 0:
                for i in range(inner):
                    state, slot, phases, out, out_phases = _alone(mine, memory, state, slot, phases, out, out_phases, i, True, T)
            for i in range(inner, work.count):
                state, slot, phases, out, out_phases = _alone(mine, memory, state, slot, phases, out, out_phases, i, EDGES is None, T)
            _leave_input(ctx, A, memory, following, WORKER, T)
        if HAS_COMMON:
            arrive(memory.common_finished[0], per="warp")
        _finish(_without(mine, "scratch", "common"), state, memory, turn, _another(ctx, A, following))
        unit = hear(memory, turn) if DRAWS else following
        turn += 1
        work = work_of(ctx, A, unit)
        if TEAMS > 1:
            for _ in tl.static_range(TEAMS - 1):
                slot, phases = _skip(slot, phases, work.count, STAGES)
                unit, work = _next_work(ctx, A, unit, work)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is
    if turn == 0:
        _opened(T)
    _close(T)


@triton.jit
def _storer(G, A, memory, T: tl.constexpr):
    """Stores output slots in the order in which consumers write them; a slot is free once the store after it is issued and this one has read it."""
    STAGES: tl.constexpr = _facts(T)[6]
    slot = 0
    phases = 0
    stores = 0
    _open(T)
    ctx = _context(G, A, T)
    unit, work = _first_work(ctx, A)
    while work.valid:
        whole = _with(ctx, work)
        for i in range(work.count):
            wait(memory.written[slot], (phases >> slot) & 1)
            _store(_at(whole, work.begin + i), _output(memory, slot))
            if STAGES > 1:
                if stores > 0:
                    _wait_for_stores(ctx, 1)
                    arrive(memory.stored[tl.where(slot == 0, STAGES - 1, slot - 1)], per="warp")
            else:
                _wait_for_stores(ctx, 0)
                arrive(memory.stored[slot], per="warp")
            stores += 1
            slot, phases = _next_slot(slot, phases, STAGES)
        unit, work = _next_work(ctx, A, unit, work)
    store_read_wait(0)  # the block's memory must outlive the reads; the writes are done when the kernel is
    _close(T)


@triton.jit
def _bystander(T: tl.constexpr):
    """The warps that fill up a warpgroup: the barrier of a cluster counts every warp that was launched."""
    _open(T)
    _opened(T)
    _close(T)


@kernel(num_warps=WARPS)
@triton.jit
def _template_kernel(G, A, T: tl.constexpr):
    _prefetch_descriptors(G, T)
    memory = _allocate(T)
    _load_early(G, A, memory, T)
    _run_roles(G, A, memory, T)
