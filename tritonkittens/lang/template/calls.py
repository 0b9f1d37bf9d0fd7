"""What the hooks of a template see, and how the engine calls them: what each must do is checked when the kernel is compiled."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import shape_of, struct
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.tma import store_read_wait
from tritonkittens.lang.register.compiler_hints import opaque_zero
from tritonkittens.lang.register.construction import zero
from tritonkittens.lang.schedule.cluster_split_k import join_in_cluster
from tritonkittens.lang.schedule.split_k import join_parts, own_part
from tritonkittens.lang.schedule.tile_scheduler import extra
from tritonkittens.lang.sync.cluster import cluster_rank
from tritonkittens.lang.sync.semaphores import arrive, expect, sync, wait
from tritonkittens.lang.template.consumer_barriers import meet_at_end
from tritonkittens.lang.template.reduce_warp import await_last_sent, check_calls
from tritonkittens.lang.template.smem_plan import nbytes
from tritonkittens.lang.template.storage import KEPT, in_slot, kept_tiles, slot_tiles, staging_tiles
from tritonkittens.lang.types.tiles import split, st

# ---------------------------------------------------------------- contexts


@op
def new_context(t: Trace, G: Any, A: Any, T: Any) -> Any:
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
def extended(t: Trace, ctx: Any, more: Any) -> Any:
    """The context plus the fields of the work of a unit."""
    scalars = {n: t.scalar(v) if isinstance(unwrap(v), int) and n != "edges" else v for n, v in more.fields.items()}
    return struct(**{**ctx.fields, **scalars})


@op
def at_iteration(t: Trace, ctx: Any, i: Any, edge: Any = None) -> Any:
    """The context of an iteration; for consumers also whether it is an `edge`."""
    return struct(**{**ctx.fields, "iter": i, **({} if edge is None else {"edge": edge})})


@op
def marked_edges(t: Trace, work: Any) -> Any:
    """Which iterations of a unit are edges, as a constant: None where any may be, 0 or 1 where none or the first one is, −1 where the task tells."""
    edges = unwrap(work.edges)
    return tl.constexpr(edges if edges is None or isinstance(edges, int) else -1)


@op
def addressed_anew(t: Trace, ctx: Any, memory: Any) -> Any:
    """The context with the tiles that consumers share addressed anew: their slot is zero, but the compiler cannot tell. Else it computes the descriptors of all
    their parts once, and keeps them in registers that accumulators need."""
    kept = [ctx.fields[group] for group in KEPT if ctx.fields[group].fields]
    return struct(**{**ctx.fields, **kept_tiles(t, memory, t.call(opaque_zero), kept[0].phase)}) if kept else ctx


@op
def of_consumer(t: Trace, ctx: Any, memory: Any, worker: Any, turn: Any) -> Any:
    """The context of one consumer in its block's task number `turn`: its number among those that share the task, its tiles and accumulators."""
    config, c = unwrap(ctx.config), unwrap(worker)
    tiles = {name: struct(**in_slot(t, memory.fields[name], c)) for name in ("scratch", "working")} | {"exchange": memory.exchange}
    tiles |= kept_tiles(t, memory, 0, t.method(turn, "__and__", 1))
    place_of = {n: memory.fields.get(f"accumulator_{n}_{c}", tl.constexpr(s)) for n, s in config._plan.accumulators}
    number = tl.constexpr(c % config.team)
    return struct(**{**ctx.fields, "consumer": number, "worker": tl.constexpr(c), **tiles, "accumulators": struct(**place_of)})


@op
def without(t: Trace, ctx: Any, *names: Any) -> Any:
    """The context after these tiles were given back."""
    gone = [unwrap(name) for name in names]
    return struct(**{n: v for n, v in ctx.fields.items() if n not in gone})


# ---------------------------------------------------------------- loads


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
def load_input(t: Trace, ctx: Any, memory: Any, slot: Any) -> Any:
    """Ask for the input tiles of an iteration."""
    config = unwrap(ctx.config)
    expected = nbytes(config._plan.input)
    t.call(expect, t.call(memory.arrived.__getitem__, slot), expected)
    _checked_load(t, type(config).load, "load", None, expected, ctx, t.call(slot_tiles, memory, slot, True))


@op
def load_lagged(t: Trace, ctx: Any, memory: Any, slot: Any) -> Any:
    """Ask for the lagged tiles of an iteration."""
    config = unwrap(ctx.config)
    expected, bar = nbytes(config._plan.lagged), t.call(memory.lagged_full.__getitem__, slot)
    t.call(expect, bar, expected)
    tiles = struct(**in_slot(t, memory.lagged, slot), arrived=bar)
    _checked_load(t, type(config).load_lagged, "load_lagged", None, expected, ctx, tiles)


@triton.jit
def _remainder(number, divisor: tl.constexpr):
    return number % divisor


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
def load_task(t: Trace, ctx: Any, memory: Any, turn: Any) -> Any:
    """Fill the tiles that each consumer keeps for a task, once it has given back those of the task before."""
    plan = unwrap(ctx.config)._plan
    if plan.task:
        free = t.method(turn, "__add__", 1)  # fresh scratch is free
        _load_for_consumers(t, ctx, "load_task", memory.scratch.fields, plan.task, memory.scratch_arrived, memory.scratch_finished, free)


@op
def load_block_task(t: Trace, ctx: Any, memory: Any, turn: Any) -> Any:
    """Fill the tiles that the consumers of a task share, once all have given back those of the task before."""
    config = unwrap(ctx.config)
    for group in KEPT:
        if not getattr(config._plan, group):
            continue
        bar, expected = t.call(memory.fields[f"{group}_arrived"].__getitem__, 0), nbytes(getattr(config._plan, group))
        t.call(wait, t.call(memory.fields[f"{group}_finished"].__getitem__, 0), t.method(t.method(turn, "__add__", 1), "__and__", 1))
        t.call(expect, bar, expected)
        tiles = struct(**in_slot(t, memory.fields[group], 0), arrived=bar)
        _checked_load(t, getattr(type(config), f"load_{group}"), f"load_{group}", None, expected, ctx, tiles)


@op
def load_epilogue(t: Trace, ctx: Any, memory: Any, turn: Any) -> Any:
    """Load what `finish` reads into the epilogue tiles of each consumer, once it has let go of them."""
    plan = unwrap(ctx.config)._plan
    chosen = tuple((n, s) for n, s in plan.epilogue if n in plan.epilogue_loads)
    _load_for_consumers(t, ctx, "load_epilogue", memory.epilogue.fields, chosen, memory.preload_arrived, memory.preload_free, turn)


# ---------------------------------------------------------------- epilogue


def _fills_tiles(config: Any) -> bool:
    """Are tiles among what is loaded for `finish`, which stores may still be reading, and not only vectors?"""
    return any(isinstance(tile, st) for n, tile in config._plan.finish if n in config._plan.epilogue_loads)


@op
def give_staging(t: Trace, memory: Any, worker: Any, T: Any) -> Any:
    """Let the producer load for `finish`, or consumers work where the results of the task before were staged. Called in the first iteration: then the stores of
    the task before have been read while products were under way."""
    config = unwrap(T)
    if config.placement(t.arch).over_working is not None:
        t.call(_leave_staging, T)
    if not config._plan.epilogue_loads:
        return
    if _fills_tiles(config):
        t.call(store_read_wait, 0)
    t.call(arrive, t.call(memory.preload_free.__getitem__, worker), per="warp")


@op
def _leave_staging(t: Trace, T: Any) -> Any:
    """The stores, results' and those from working tiles, have read shared memory, and products are done: of all consumers whose tiles lie over one another."""
    t.call(store_read_wait, 0)
    if unwrap(T).placement(t.arch).over_own:
        t.call(sync)
    else:
        t.call(meet_at_end, T)


# ---------------------------------------------------------------- tiles kept for a task


@op
def await_kept(t: Trace, tiles: Any) -> Any:
    """Wait until a task's common tiles have arrived, when it begins, or its deferred ones, behind the first iteration or where there is none: a parity tells
    two phases apart, so nobody may miss one."""
    if tiles.fields:
        t.call(wait, tiles.full, tiles.phase)


@op
def give_kept_back(t: Trace, ctx: Any, drained: Any = False) -> Any:
    """Give back what hook `compute_last`, where it was called, has not."""
    compute_last = f"compute_last: {type(unwrap(ctx.config)).drain.cache_key}" if unwrap(drained) else ""
    for group in KEPT:
        if ctx.fields[group].fields and not bill().by_hook.get(f"{group}_released {compute_last}", 0):
            t.call(arrive, ctx.fields[group].finished, per="warp")


# ---------------------------------------------------------------- computation


@op
def call_start(t: Trace, ctx: Any) -> Any:
    """The state that a consumer begins a task with."""
    hook = getattr(type(unwrap(ctx.config)), "start", None)
    return struct() if hook is None else _state(t, ctx, "start", t.call(hook, ctx), None)


@op
def call_fetch(t: Trace, ctx: Any) -> Any:
    """The context plus what hook `fetch` reads."""
    hook = getattr(type(unwrap(ctx.config)), "fetch", None)
    return ctx if hook is None else struct(**{**ctx.fields, "params": t.call(hook, ctx)})


@op
def call_send(t: Trace, ctx: Any, memory: Any, sends: Any) -> Any:
    """Send a consumer's working tiles, of its call number `sends`, and give them back."""
    config = unwrap(ctx.config)
    hook = type(config).send
    sending = struct(given=t.call(memory.given.__getitem__, ctx.worker), parity=t.method(sends, "__and__", 1))
    value, (awaited,) = _counted(t, hook, f"send: {hook.cache_key}", ("calls_awaited",), struct(**{**ctx.fields, "sending": sending}), ctx.reduce_buffer)
    if awaited != 1:
        raise TileError(f"{type(config).__name__}.send calls tk.reduce_wait {awaited} times; it does so once, in the hook itself, before it reads working tiles")
    t.call(store_read_wait, 0)
    t.call(arrive, t.call(memory.sent.__getitem__, ctx.worker), per="warp")
    if hasattr(type(config), "sent"):
        t.call(type(config).sent, ctx, value)


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
        counters = ("released", "awaited") if config._plan.lagged else ()
        sending = ("senders_called", "senders_awaited") if config.sends else ()
        counted = (*counters, *sending, *(f"{group}_released" for group in KEPT))
        new, counts = _counted(t, hook, f"{what}: {hook.cache_key}", counted, ctx, state, *inputs)
        found = dict(zip(counted, counts, strict=True))
        if counters:
            _check_trailing(config, what, found["released"], found["awaited"])
        if sending:
            check_calls(config, what, found["senders_called"], found["senders_awaited"])
        for group in KEPT:
            _check_given_back(config, what, group, found[f"{group}_released"])
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
    """Refuse a hook that does not give its input back once or does not wait for its lagged tiles once. What a helper function does is not seen where the same
    function was called before."""
    name = type(config).__name__
    if released != (what != "compute_last"):
        raise TileError(f"{name}.{what} calls tk.release {released} times; 'compute_first' and 'compute' give their input back once, in the hook itself, "
                        "'compute_last' has none")
    if awaited != (what != "compute_first"):
        raise TileError(f"{name}.{what} calls tk.wait_for {awaited} times; 'compute' and 'compute_last' wait once, in the hook itself, for their lagged tiles, "
                        "'compute_first' has none")


def _check_given_back(config: Any, what: str, group: str, times: int) -> None:
    if times > (what == "compute_last"):
        raise TileError(f"{type(config).__name__}.{what} calls tk.release(ctx, ctx.{group}) {times} times; 'compute_last' may give {group} tiles back, once")


call_compute, call_drain = _hook("compute"), _hook("compute_last")


_first_hook = _hook("compute_first")


@op
def call_first(t: Trace, ctx: Any, state: Any, input: Any) -> Any:
    """Iteration 0 of a pipelined computation."""
    return t.call(_first_hook, ctx, state, input) if hasattr(type(unwrap(ctx.config)), "compute_first") else t.call(call_compute, ctx, state, input, input)


# ---------------------------------------------------------------- ring slots given back


@op
def release(t: Trace, ctx: Any, tiles: Any) -> Any:
    """Give the input tiles of this iteration back to the producer: `compute_first` and `compute` of a template with lagged tiles do so once, as soon as nothing reads
    them any more. Or `compute_last` its task's `ctx.task` or `ctx.late_task` tiles, in the hook itself: stores that read them have been waited for
    (`tk.store_read_wait`)."""
    account, group = bill(), unwrap(tiles.fields.get("group"))
    if group is not None:
        setattr(account, f"{group}_released", getattr(account, f"{group}_released") + 1)
        t.call(arrive, tiles.finished, per="warp")
        return
    account.released += 1
    t.call(_give_back, tiles.finished, ctx.config)


@op
def wait_for(t: Trace, tiles: Any) -> Any:
    """Wait until lagged tiles have arrived: `compute` and `compute_last` do so once, before they use them and behind what needs the input only. Or, in `compute_first`,
    until `ctx.late_task` tiles have, wherever it uses them; behind it they are there."""
    group = unwrap(tiles.fields.get("group"))
    if group == "common":
        raise TileError("wait_for(ctx.task): common tiles are there when a task begins; those that `compute_first` waits for itself are deferred tiles")
    bill().awaited += group is None
    t.call(wait, tiles.full, tiles.phase)


@op
def release_slot(t: Trace, finished: Any, slot: Any, T: Any) -> Any:
    """Give a ring slot back, behind the hook that used it."""
    t.call(_give_back, t.call(finished.__getitem__, slot), T, bill().reads_ring is False)


@op
def release_before(t: Trace, memory: Any, slot: Any, T: Any) -> Any:
    """Give back what is left of the slot of the iteration before: its lagged tiles, or all of it."""
    t.call(release_slot, memory.lagged_empty if memory.lagged.fields else memory.finished, slot, T)


@op
def _give_back(t: Trace, bar: Any, T: Any, unread: Any = False) -> Any:
    """Arrive at the semaphore of a slot, for the producers of all blocks of the cluster: each writes into the slots of all.

    Scope "cta" is enough in a cluster too: what reads a slot are the tensor cores, whose products were waited for, or threads, whose reads `arrive` fences,
    unless the slot is `unread` by any.
    """
    cluster = unwrap(T).cluster
    for rank in range(cluster):
        t.call(arrive, bar, per="warp", cta=rank if cluster > 1 else None, scope="cta", fenced=unread)


# ---------------------------------------------------------------- stores and the end of a task


@op
def call_store(t: Trace, ctx: Any, output: Any) -> Any:
    """Call the store hook, which must store every output tile once: it is waited for by the number of copies."""
    config = unwrap(ctx.config)
    expected = copies(config._plan.output)
    _, (stored,) = _counted(t, type(config).store, f"store: {type(config).store.cache_key}", ("stored",), ctx, output)
    if stored != expected:
        raise TileError(f"hook 'store' makes {stored} copies, but its output tiles are {expected}: store every tile of the argument exactly once")


@op
def wait_for_stores(t: Trace, ctx: Any, slots: Any) -> Any:
    """Wait until at most the stores of the newest `slots` slots still read shared memory."""
    t.call(store_read_wait, unwrap(slots) * copies(unwrap(ctx.config)._plan.output))


def copies(tiles: Any) -> int:
    """TMA copies (bulk groups) that storing each of these tiles takes."""
    return sum(len(tile.pieces()) if isinstance(tile, st) else len(split(tile.length)) for _, tile in tiles)


def _staging(t: Trace, ctx: Any, memory: Any) -> Any:
    """The tiles in which this consumer stages results, and the semaphore on which it fills them itself, if it does."""
    epilogue = t.call(staging_tiles, ctx, memory, ctx.worker)
    if unwrap(ctx.config)._plan.epilogue_reloads:
        epilogue = struct(**epilogue.fields, filled=t.call(memory.filled.__getitem__, unwrap(ctx.worker)))
    return epilogue


@op
def _call_finish(t: Trace, ctx: Any, state: Any, memory: Any) -> Any:
    hook = getattr(type(unwrap(ctx.config)), "finish", None)
    if hook is not None:
        t.call(hook, ctx, state, _staging(t, ctx, memory))


@op
def nothing_packed(t: Trace, T: Any) -> Any:
    """Packed tiles before the first task has ended."""
    return struct(**{n: t.call(zero, tile) for n, tile in unwrap(T)._plan.packed})


@op
def _call_pack(t: Trace, ctx: Any, state: Any, memory: Any) -> Any:
    config = unwrap(ctx.config)
    packed = t.call(type(config).pack, ctx, state, _staging(t, ctx, memory))
    declared = {n: (tile.shape, tile.dtype) for n, tile in config._plan.packed}
    if not isinstance(packed, struct) or {n: (shape_of(v), v.dtype) for n, v in packed.fields.items()} != declared:
        have = ", ".join(f"{n} {list(shape_of(v))} of {name_of(v.dtype)}" for n, v in packed.fields.items()) if isinstance(packed, struct) else repr(packed)
        raise TileError(f"{type(config).__name__}.pack: must return a tk.struct as layout(packed={dict(config._plan.packed)}) says, not {have}")
    return struct(**{n: packed.fields[n] for n in declared})


@triton.jit
def _pack_joined(ctx, state, memory):
    """What is packed of a task that blocks share, and whether this block is the last of them. Where it is not, what it packs is of no use; but a branch would
    keep the results of the task before in registers."""
    state, last = join_parts(ctx, own_part(ctx, state))
    return _call_pack(ctx, state, memory), tl.where(last, 1, 0)


@op
def pack_results(t: Trace, ctx: Any, state: Any, memory: Any, turn: Any) -> Any:
    """(what hook `defer_results` makes of a task's state, 1 or 0 where another block ends the task)."""
    config = unwrap(ctx.config)
    if config._plan.epilogue_loads:
        t.call(wait, t.call(memory.preload_arrived.__getitem__, unwrap(ctx.worker)), t.method(turn, "__and__", 1))
    if config.splits:
        return t.call(_pack_joined, ctx, state, memory)
    return tl.tuple([t.call(_call_pack, ctx, state, memory), 1])


@op
def store_deferred(t: Trace, ctx: Any, packed: Any, memory: Any, n: Any) -> Any:
    """Stage tile number n of packed results."""
    config, n = unwrap(ctx.config), unwrap(n)
    t.call(type(config).store_deferred, ctx, packed.fields[config._plan.packed[n][0]], _staging_of_packed(t, ctx, memory), tl.constexpr(n))


@op
def finish_deferred(t: Trace, ctx: Any, memory: Any, n: Any, step: Any, steps: Any) -> Any:
    """What is done with tile number n, which is staged: a step of so many, or all at once."""
    hook = getattr(type(unwrap(ctx.config)), "finish_deferred", None)
    if hook is not None:
        t.call(hook, ctx, _staging_of_packed(t, ctx, memory), n, step, tl.constexpr(unwrap(steps)))


@op
def prefetch_deferred(t: Trace, ctx: Any, memory: Any) -> Any:
    """What is asked for in advance where packed results are staged, which those of the task before have left."""
    hook = getattr(type(unwrap(ctx.config)), "prefetch_deferred", None)
    if hook is not None and unwrap(ctx.config)._plan.epilogue_reloads:
        t.call(hook, ctx, _staging_of_packed(t, ctx, memory))


def _staging_of_packed(t: Trace, ctx: Any, memory: Any) -> Any:
    """Where packed results are staged. The producer fills what is loaded for `defer_results` already for the next task."""
    return t.call(without, _staging(t, ctx, memory), *unwrap(ctx.config)._plan.epilogue_loads)


@triton.jit
def _finish_if_last(ctx, state, memory):
    """Finish a task that blocks share, where this one is the last of them."""
    state, last = join_parts(ctx, own_part(ctx, state))
    if last:
        _call_finish(ctx, state, memory)


@op
def finish_task(t: Trace, ctx: Any, state: Any, memory: Any, turn: Any, phases: Any, more: Any) -> Any:
    """Stage and store the results. The epilogue tiles must be free: stores of the task before have read them, and over the ring all consumers are done.

    `staging_free` completes once a task, by an arrival of every consumer warp after its stores and one of each producer, which has then seen the completion
    of the task before. So nobody is two phases ahead, also where tasks of no iterations need nothing of each other. `more`: does this block begin another
    task? Blocks that share tasks wait for that to send it their sums.
    """
    config = unwrap(ctx.config)
    over_ring = config.placement(t.arch).over_ring is not None
    if config.placement(t.arch).over_working is not None:
        t.call(await_last_sent, memory, ctx.worker, phases, ctx.config)
        t.call(_leave_staging, ctx.config)
    elif over_ring:  # one consumer too: its warps leave the last slot at different times
        t.call(meet_at_end, ctx.config)
        t.call(wait, t.call(memory.staging_free.__getitem__, 0), t.method(t.method(turn, "__and__", 1), "__xor__", 1))
    elif config._plan.finish and not _fills_tiles(config):
        t.call(store_read_wait, 0)
    if config._plan.epilogue_loads:
        t.call(wait, t.call(memory.preload_arrived.__getitem__, unwrap(ctx.worker)), t.method(turn, "__and__", 1))
    if config.splits:
        t.call(_finish_if_last, ctx, state, memory)
    elif config.sharers > 1:
        t.call(_call_finish, ctx, t.call(join_in_cluster, ctx, state, memory, turn, more), memory)
    else:
        t.call(_call_finish, ctx, state, memory)
    if over_ring:
        t.call(store_read_wait, 0)
        t.call(arrive, t.call(memory.staging_free.__getitem__, 0), per="warp")
