"""`lcf`: load / compute / finish. Write the hooks; the template writes the ring, the semaphores and their phases, the roles, and the persistent task loop.

One producer warp loads tiles into a ring of shared-memory slots; consumer warpgroups compute on them; each finishes its task by storing results, while the
producer already fills the ring for the next task. Source: ThunderKittens (Spector et al., 2024), section 3.2, and its `lcf` template.
"""
from __future__ import annotations

import hashlib
import inspect
from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang._backend import InterpretedFunction, JITFunction, Trace, library_hash, op
from tritonkittens.lang.budget import bill
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.globals import gl, map_specs
from tritonkittens.lang.kernel import kernel, prepare
from tritonkittens.lang.layout import Placement, layout, nbytes, place
from tritonkittens.lang.memory import store_read_wait, store_wait
from tritonkittens.lang.roles import REGISTERS, consumer_registers, producer_registers, specialize
from tritonkittens.lang.shared import allocate_pieces, piece_shared_layout, shared
from tritonkittens.lang.sync import HOPPER_AND_BLACKWELL, arrive, expect, named_arrive, named_sync, semaphores, wait
from tritonkittens.lang.tensor_memory import tensor_allocator
from tritonkittens.lang.types import TileType, tt, unwrap
from tritonkittens.lang.values import struct
from tritonkittens.launch import GlobalArg, multiprocessor_count, simulator

WARPS = 4  # of a consumer warpgroup
GROUP = WARPS * 32  # its threads; the producer warp takes a warpgroup too
TURN_BARRIER = 8  # named barriers 8 … 11: the turns of up to four consumers
FINISH_BARRIER = 15
MAX_CONSUMERS = 4
MAX_CALLS = 4096  # shapes that a template remembers
_new = tuple.__new__
DEBUG_MODES = (False, True, "report")

REQUIRED = ("setup", "load", "compute", "finish")
OPTIONAL = ("load_scratch", "start", "first", "drain")
PARAMETERS = {
    "setup": ("ctx",), "load_scratch": ("ctx", "scratch"), "load": ("ctx", "input"), "start": ("ctx",), "first": ("ctx", "state", "input"),
    "compute": ("ctx", "state", "input"), "drain": ("ctx", "state", "input"), "finish": ("ctx", "state", "staging"),
}
KNOBS = (int, float, str, tuple, type(None), tl.dtype, TileType)  # class attributes of these types are knobs


class lcf:
    """Base class of load / compute / finish kernels. Subclass it, declare `layout`, write the hooks as `@triton.jit` functions without `self`.

    Hooks (required: setup, load, compute, finish):

    - `setup(ctx)` → `tk.task(iterations, when=…, **coordinates)`: what task number `ctx.task` is; the loop over tasks ends at the first whose `when` is false;
    - `load_scratch(ctx, scratch)` (producer, once a task for each consumer `ctx.consumer`): copies into the scratch tiles on `scratch.arrived`;
    - `load(ctx, input)` (producer, once an iteration `ctx.iter`): copies into every tile of `input` on `input.arrived`; their bytes are checked;
    - `start(ctx)` → state (consumer, once a task), a `tk.struct`; without it the state is empty;
    - `compute(ctx, state, input)` → state (consumer, once an iteration);
    - `finish(ctx, state, staging)` (consumer, once a task): store the results through the `staging` tiles.

    With the hook `drain(ctx, state, input)` the computation is pipelined by one iteration: a slot is given back one iteration later, so that products that read
    it may still be under way; `compute(ctx, state, input, previous)` sees the slot of the iteration before as well, and `drain` ends the work on the last one.
    Scratch tiles are given back before `drain`: products that read them must have been waited for. Without `drain` a slot is given back as soon as
    `compute` returns: it must leave no product under way. Copies of `load` and `load_scratch` are counted where they are written, once for each helper
    function and its argument types.
    In iteration 0 there is no slot before: `first(ctx, state, input)` replaces `compute`, or `compute` gets the same slot twice.

    `ctx` has the coordinates of the task and `globals`, `args`, `config` (the template object), `task`, `iterations`; where it makes sense also `iter`,
    `consumer`, `scratch`, `accumulators`.

    Knobs (class attributes, overridden by keyword at construction): `consumers` warpgroups (2), `stages` (None: as many as fit), `blocks_per_sm` (1),
    `ordered` (False: consumers run freely; True: `tk.my_turn` / `tk.pass_turn` alternate them), `consumer_registers`, `producer_registers` (None: by table).
    """

    consumers: int = 2
    stages: int | None = None
    blocks_per_sm: int = 1
    ordered: bool = False
    consumer_registers: int | None = None
    producer_registers: int | None = None

    def __init__(self, **knobs: Any):
        for name, value in knobs.items():
            if name not in self._knobs():
                known = ", ".join(sorted(n for n in self._knobs()))
                raise TileError(f"{type(self).__name__}({name}={value!r}): no such knob; it has {known}")
            setattr(self, name, value)
        if not isinstance(self.consumers, int) or not 1 <= self.consumers <= MAX_CONSUMERS:
            raise TileError(f"{type(self).__name__}(consumers={self.consumers!r}): must be 1 to {MAX_CONSUMERS} warpgroups")
        if not isinstance(self.blocks_per_sm, int) or self.blocks_per_sm < 1:
            raise TileError(f"{type(self).__name__}(blocks_per_sm={self.blocks_per_sm!r}): must be at least 1")
        self.pipelined = _check_hooks(type(self))
        self._plan = self.layout()
        if not isinstance(self._plan, layout):
            raise TileError(f"{type(self).__name__}.layout must return tk.layout(…), got {self._plan!r}")
        self._key = self._make_key()
        self._placements: dict[int, Placement] = {}
        self._calls: dict[tuple, Call] = {}
        # Registers are handed out by the launch: with several blocks on a multiprocessor each must ask for its share
        threads = (self.consumers + 1) * GROUP
        share = REGISTERS // (self.blocks_per_sm * threads) // 8 * 8
        self._options = (("maxnreg", share),) if self.blocks_per_sm > 1 else ()
        self._pool = threads * share  # what the block starts with: setmaxnreg only moves registers inside it
        asked = sum(self.registers()) * GROUP
        if asked > self._pool:
            raise TileError(f"{type(self).__name__}: registers over budget: {self.registers()} a thread of {self.consumers + 1} warpgroups "
                            f"are {asked} of {self._pool}, "
                            f"what a block of {threads} threads, {self.blocks_per_sm} an SM, starts with")

    def layout(self) -> layout:
        """The tiles of this template (`tk.layout(globals=…, input=…, …)`)."""
        raise TileError(f"{type(self).__name__}: hook 'layout' is missing")

    def tasks(self, *shapes: Any) -> int:
        """How many tasks tensors of these shapes make, to launch no more blocks than that; by default unknown (one block for every slot of the device)."""
        return 1 << 30

    def blocks(self, slots: int, *shapes: Any) -> int:
        """How many blocks of the device's `slots` a launch takes: only as many as keep the number of rounds, so that every round is equally full.

        On a power-limited card that is faster than a full start and a half-empty end (1 % for a GEMM of 512 tasks on 132 multiprocessors of the H200).
        """
        tasks = self.tasks(*shapes)
        rounds = max(1, -(-tasks // slots))
        return -(-tasks // rounds)

    def _knobs(self) -> dict[str, Any]:
        names = [n for c in type(self).__mro__ if c is not object for n, v in vars(c).items() if isinstance(v, KNOBS)]
        return {n: getattr(self, n) for n in names if not n.startswith("_")}

    def _make_key(self) -> str:
        hooks = [getattr(type(self), h) for h in (*REQUIRED, *OPTIONAL) if hasattr(type(self), h)]
        knobs = sorted((n, getattr(v, "cache_key", v)) for n, v in self._knobs().items())
        parts = [type(self).__qualname__, library_hash(), repr(knobs), repr(self._plan), *(h.cache_key for h in hooks)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def cache_key(self) -> str:
        """Hash of hooks, knobs, layout and this library: what the compiled code depends on."""
        return self._key

    def mangle(self) -> str:
        return f"{type(self).__name__}_{self._key[:16]}"

    def __repr__(self) -> str:
        return self.mangle()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, lcf) and self._key == other._key

    def placement(self, arch: int) -> Placement:
        """Stages and shared-memory placement on an architecture (compute capability as an integer)."""
        if arch not in self._placements:
            self._placements[arch] = place(self._plan, self.consumers, self.blocks_per_sm, self.stages, arch, type(self).__name__, self.pipelined)
        return self._placements[arch]

    def registers(self) -> tuple[int, ...]:
        """Registers a thread of each role, consumers first."""
        producer = self.producer_registers or producer_registers(self.consumers)
        fit = (self._pool // GROUP - producer) // self.consumers // 8 * 8
        mine = self.consumer_registers or min(fit, consumer_registers(self.consumers, self.blocks_per_sm))
        return (mine,) * self.consumers + (producer,)

    def call(self, *tensors: Any) -> Call:
        """What a call with tensors of these shapes on their device needs beside the tensors; found by shapes, made once."""
        try:
            key = (*[t.shape for t in tensors], *[t.dtype for t in tensors], tensors[0].get_device() if tensors else -1)
        except AttributeError:
            kinds = ", ".join(type(t).__name__ for t in tensors)
            raise TypeError(f"{type(self).__name__}({kinds}): it takes the tensors {', '.join(n for n, _ in self._plan.globals)}; numbers go by name") from None
        found = self._calls.get(key)
        if found is None:
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            found = self._calls[key] = Call(self, tensors)
        return found

    def __call__(self, *tensors: Any, blocks: int | None = None, debug: bool = False, **args: Any) -> None:
        """Run on tensors (in the order of `layout.globals`) and numbers (`layout.args`).

        `blocks` overrides the size of the persistent grid; `debug` makes a wait that never ends trap after two seconds.
        """
        self.call(*tensors)(*tensors, blocks=blocks, debug=debug, **args)

    def compile(self, *tensors: Any, arch: str = "sm_90a", **args: Any) -> Any:
        """Compile for tensors of these types without a GPU; returns Triton's CompiledKernel."""
        described, numbers = self.call(*tensors).arguments(tensors, args)
        return _lcf_kernel.compile(described, numbers, self, arch=arch, **dict(self._options))


class Call:
    """A template bound to the shapes of its tensors: `call(*tensors, **args)` launches with as little work as possible."""

    def __init__(self, template: lcf, tensors: tuple):
        plan, name = template._plan, type(template).__name__
        if len(tensors) != len(plan.globals):
            raise TypeError(f"{name}: {len(tensors)} tensors; it takes {', '.join(n for n, _ in plan.globals)}")
        for t, (_, tiles) in zip(tensors, plan.globals, strict=True):
            gl(t, *tiles)  # checks dtypes and ranks
        self.name, self.args = name, plan.args
        self.specs = tuple([map_specs(tiles, t.ndim, "zero") for (_, tiles), t in zip(plan.globals, tensors, strict=True)])
        device = tensors[0].get_device() if tensors else -1
        slots = multiprocessor_count(device) * template.blocks_per_sm if device >= 0 or simulator.get() is not None else 1
        self.grid = (template.blocks(slots, *[t.shape for t in tensors]),)
        self.keys = {debug: (((template,), ()), (("debug", debug), *template._options) if debug else template._options) for debug in DEBUG_MODES}

    def arguments(self, tensors: tuple, args: dict[str, Any]) -> tuple:
        """The kernel's run-time arguments."""
        if len(args) != len(self.args) or any(n not in args for n in self.args):
            raise TypeError(f"{self.name}: arguments {sorted(args)}; it takes {sorted(self.args)}")
        # straight to tuple: a named tuple's own constructor takes twice as long
        described = tuple([(_new(GlobalArg, (t, s)), t) if s else prepare(gl(t)) for t, s in zip(tensors, self.specs)])
        return described, tuple([args[n] for n in self.args])

    def __call__(self, *tensors: Any, blocks: int | None = None, debug: bool = False, **args: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        _lcf_kernel.launcher(self.grid if blocks is None else (blocks,), self.arguments(tensors, args), self.keys[debug])


def _check_hooks(cls: type) -> bool:
    """Refuse missing, misspelt and malformed hooks. Returns whether the computation is pipelined by one iteration."""
    known = (*REQUIRED, *OPTIONAL)
    for c in cls.__mro__:
        for name, value in vars(c).items():
            if isinstance(value, InterpretedFunction):
                raise TileError(f"{cls.__name__}.{name}: templates are explicit kernels and do not run in Triton's interpreter (TRITON_INTERPRET=1)")
            if isinstance(value, JITFunction) and name not in known and not name.startswith("_"):
                raise TileError(f"{cls.__name__}: unknown hook {name!r}; hooks are {', '.join(known)} (start a helper's name with an underscore)")
    for name in REQUIRED:
        if not hasattr(cls, name):
            raise TileError(f"{cls.__name__}: hook {name!r} is missing; a template needs {', '.join(REQUIRED)}")
    pipelined = hasattr(cls, "drain")
    if hasattr(cls, "first") and not pipelined:
        raise TileError(f"{cls.__name__}: hook 'first' is for a pipelined computation, which needs hook 'drain' too")
    for name in known:
        hook = getattr(cls, name, None)
        if hook is None:
            continue
        if not isinstance(hook, JITFunction):
            raise TileError(f"{cls.__name__}.{name}: put @triton.jit over the hook")
        wanted = PARAMETERS[name] + (("previous",) if name == "compute" and pipelined else ())
        if len(inspect.signature(hook.fn).parameters) != len(wanted):
            raise TileError(f"{cls.__name__}.{name}({', '.join(inspect.signature(hook.fn).parameters)}): must take ({', '.join(wanted)})")
    return pipelined


@op
def task(t: Trace, iterations: Any, when: Any = None, **coordinates: Any) -> Any:
    """What `setup` returns: the number of `iterations` (0 or more) of this task and its coordinates. A false `when` ends the loop over tasks."""
    if unwrap(when) is None:
        raise TileError("task(iterations): give `when`, false past the last task; without it the loop over tasks never ends")
    clash = set(coordinates) & {"globals", "args", "config", "task", "iterations", "valid", "iter", "consumer", "scratch", "accumulators"}
    if clash:
        raise TileError(f"task({', '.join(clash)}=…): reserved names of the context")
    scalars = {n: t.scalar(v) for n, v in coordinates.items()}
    return struct(iterations=t.scalar(iterations), valid=t.method(t.scalar(when), "to", tl.int1), **scalars)


@op
def my_turn(t: Trace, ctx: Any) -> Any:
    """Wait for this consumer's turn (templates with `ordered = True` and several consumers; otherwise nothing). FlashAttention-3's ping-pong."""
    config, consumer = unwrap(ctx.config), unwrap(ctx.consumer)
    if config.ordered and config.consumers > 1:
        t.call(named_sync, TURN_BARRIER + consumer, 2 * GROUP)


@op
def pass_turn(t: Trace, ctx: Any) -> Any:
    """Hand the turn to the next consumer; see `my_turn`. Each consumer calls both equally often."""
    config, consumer = unwrap(ctx.config), unwrap(ctx.consumer)
    if config.ordered and config.consumers > 1:
        t.call(named_arrive, TURN_BARRIER + (consumer + 1) % config.consumers, 2 * GROUP)


# ---------------------------------------------------------------- the engine, trace-time parts


@op
def _allocate(t: Trace, T: Any) -> Any:
    """All shared and tensor memory of the template and its semaphores, as one record."""
    T = unwrap(T)
    t.require(f"{type(T).__name__} (TMA, warp roles)", *HOPPER_AND_BLACKWELL)
    plan, placed = T._plan, T.placement(t.arch)
    fields: dict[str, Any] = {}

    def named(what: str, tiles: dict[str, Any]) -> struct:
        for n, tile in tiles.items():
            tile._set_name(t.builder, f"{what}.{n}")  # what `inspect` calls the buffer
        return struct(**tiles)

    ring = {n: allocate_pieces(t, s, placed.stages, f"input {n}: {s!r} × {placed.stages} stages") for n, s in plan.input}
    scratch = {n: allocate_pieces(t, s, T.consumers, f"scratch {n}: {s!r} × {T.consumers} consumers") for n, s in plan.scratch}
    if placed.over_ring is None:
        staging = {n: allocate_pieces(t, s, T.consumers, f"finish {n}: {s!r} × {T.consumers} consumers") for n, s in plan.finish}
        fields["staging"] = named("finish", staging)
    fields |= {"ring": named("input", ring), "scratch": named("scratch", scratch)}
    if plan.input:
        fields["arrived"] = t.call(semaphores, placed.stages, 1)
        fields["finished"] = t.call(semaphores, placed.stages, T.consumers * WARPS)
    if plan.scratch:
        fields["scratch_arrived"] = t.call(semaphores, T.consumers, 1)
        fields["scratch_finished"] = t.call(semaphores, T.consumers, WARPS)
    if placed.over_ring is not None:
        fields["staging_free"] = t.call(semaphores, 1, T.consumers * WARPS + 1)
    if t.arch >= 100:
        for n, s in plan.accumulators:
            for c in range(T.consumers):
                fields[f"accumulator_{n}_{c}"] = t.call(tensor_allocator, tt(s.dtype, s.rows, s.cols))
    for name, field in fields.items():
        if name not in ("ring", "scratch", "staging"):
            field._set_name(t.builder, name)
    return struct(**fields)


@op
def _run_roles(t: Trace, G: Any, A: Any, memory: Any, T: Any) -> Any:
    config = unwrap(T)
    roles: list[tuple[Any, tuple]] = [(_consumer, (tl.constexpr(c), G, A, memory, T)) for c in range(config.consumers)]
    roles.append((_producer, (G, A, memory, T)))
    t.call(specialize, roles, (WARPS,) * config.consumers + (1,), config.registers())


@op
def _context(t: Trace, G: Any, A: Any, index: Any, T: Any) -> Any:
    """The shared context of task number `index`, before `setup` has said what it is."""
    plan = unwrap(T)._plan
    tensors = {}
    for (name, tiles), g in zip(plan.globals, G, strict=True):
        maps, pointer = g[tl.constexpr(0)], g[tl.constexpr(1)]
        tensors[name] = struct(maps=maps, pointer=pointer, shape=tl.tuple([]), strides=tl.tuple([])) if tiles else g
    return struct(globals=struct(**tensors), args=struct(**dict(zip(plan.args, A, strict=True))), config=T, task=index)


@op
def _with(t: Trace, ctx: Any, more: Any) -> Any:
    """The context plus the fields of another record."""
    return struct(**{**ctx.fields, **more.fields})


@op
def _at(t: Trace, ctx: Any, i: Any) -> Any:
    return struct(**{**ctx.fields, "iter": i})


@op
def _mine(t: Trace, ctx: Any, memory: Any, consumer: Any) -> Any:
    """The context of one consumer: its number, scratch tiles and accumulators."""
    config, c = unwrap(ctx.config), unwrap(consumer)
    scratch = struct(**{n: t.call(s.__getitem__, c) for n, s in memory.scratch.fields.items()})
    place_of = {n: memory.fields.get(f"accumulator_{n}_{c}", tl.constexpr(s)) for n, s in config._plan.accumulators}
    return struct(**{**ctx.fields, "consumer": tl.constexpr(c), "scratch": scratch, "accumulators": struct(**place_of)})


@op
def _without_scratch(t: Trace, ctx: Any) -> Any:
    """The context after the scratch tiles were given back."""
    return struct(**{n: v for n, v in ctx.fields.items() if n != "scratch"})


@op
def _slot(t: Trace, memory: Any, slot: Any, producer: Any = False) -> Any:
    """The tiles of a ring slot; for the producer also the semaphore that they arrive on."""
    tiles = {n: t.call(r.__getitem__, slot) for n, r in memory.ring.fields.items()}
    if unwrap(producer):
        tiles["arrived"] = t.call(memory.arrived.__getitem__, slot)
    return struct(**tiles)


def _checked_load(t: Trace, hook: Any, what: str, consumer: int | None, expected: int, *args: Any) -> None:
    """Call a load hook (for one consumer) and compare the bytes that it copies with those its barrier expects."""
    account, key = bill(), f"{what} for {consumer}: {hook.cache_key}"
    before = account.copied
    t.call(hook, *args)
    copied = account.copied - before
    if copied or key not in account.load_bytes:  # a hook that is already in the module is not traced again
        account.load_bytes[key] = copied
    if account.load_bytes[key] != expected:
        raise TileError(f"hook {what!r} copies {account.load_bytes[key]} bytes, but its barrier expects {expected}, the bytes of all its tiles: load every "
                        "tile of the argument exactly once, on its `arrived`")


@op
def _load(t: Trace, ctx: Any, memory: Any, slot: Any) -> Any:
    config = unwrap(ctx.config)
    expected = nbytes(config._plan.input)
    t.call(expect, t.call(memory.arrived.__getitem__, slot), expected)
    _checked_load(t, type(config).load, "load", None, expected, ctx, t.call(_slot, memory, slot, True))


@op
def _load_scratch(t: Trace, ctx: Any, memory: Any, phase: Any) -> Any:
    config = unwrap(ctx.config)
    if not config._plan.scratch:
        return
    if not hasattr(type(config), "load_scratch"):
        raise TileError(f"{type(config).__name__}: its layout has scratch tiles, but hook 'load_scratch' is missing")
    expected = nbytes(config._plan.scratch)
    for c in range(config.consumers):
        arrived = t.call(memory.scratch_arrived.__getitem__, c)
        t.call(wait, t.call(memory.scratch_finished.__getitem__, c), phase)
        t.call(expect, arrived, expected)
        tiles = {n: t.call(s.__getitem__, c) for n, s in memory.scratch.fields.items()}
        mine = struct(**{**ctx.fields, "consumer": tl.constexpr(c)})
        _checked_load(t, type(config).load_scratch, "load_scratch", c, expected, mine, struct(**tiles, arrived=arrived))


@op
def _staging(t: Trace, ctx: Any, memory: Any) -> Any:
    """The staging tiles of a consumer: memory of its own, or views over the tail of the ring."""
    config, c = unwrap(ctx.config), unwrap(ctx.consumer)
    placed = config.placement(t.arch)
    if placed.over_ring is None:
        return struct(**{n: t.call(s.__getitem__, c) for n, s in memory.staging.fields.items()})
    tiles = {}
    for (name, spec), places in zip(config._plan.finish, placed.over_ring, strict=True):
        source, stage, part, parts = places[c]
        piece = t.call(getattr(memory.ring, source).__getitem__, stage).pieces[0]
        home = piece_shared_layout(spec.dtype, spec.piece_swizzle(spec.cols), 2)
        view = t.call(piece.reinterpret, spec.dtype, [parts, spec.rows, spec.cols], home)
        tiles[name] = shared(spec, ((spec.rows,), (spec.cols,)), None, (t.call(view.index, part),))
    return struct(**tiles)


@op
def _setup(t: Trace, ctx: Any) -> Any:
    info = t.call(type(unwrap(ctx.config)).setup, ctx)
    if not isinstance(info, struct) or "iterations" not in info.fields:
        raise TileError(f"{type(unwrap(ctx.config)).__name__}.setup must return tk.task(iterations, …)")
    return info


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
        return _state(t, ctx, what, t.call(getattr(type(unwrap(ctx.config)), what), ctx, state, *inputs), state)

    call.__name__ = f"_{what}"
    return op(call)


_compute, _drain = _hook("compute"), _hook("drain")
_first_hook = _hook("first")


@op
def _first(t: Trace, ctx: Any, state: Any, input: Any) -> Any:
    """Iteration 0 of a pipelined computation."""
    return t.call(_first_hook, ctx, state, input) if hasattr(type(unwrap(ctx.config)), "first") else t.call(_compute, ctx, state, input, input)


@op
def _finish(t: Trace, ctx: Any, state: Any, memory: Any, turn: Any) -> Any:
    """Stage and store the results. The staging tiles must be free: stores of the task before have read them, and over the ring all consumers are done.

    `staging_free` completes once a task, by an arrival of every consumer warp after its stores and one of the producer, which has then seen the completion
    of the task before. So nobody is two phases ahead, also where tasks of no iterations need nothing of each other.
    """
    config = unwrap(ctx.config)
    over_ring = config.placement(t.arch).over_ring is not None
    if over_ring:  # one consumer too: its warps leave the last slot at different times
        t.call(named_sync, FINISH_BARRIER, config.consumers * GROUP)
        t.call(wait, t.call(memory.staging_free.__getitem__, 0), t.method(t.method(turn, "__and__", 1), "__xor__", 1))
    else:
        t.call(store_read_wait, 0)
    t.call(type(config).finish, ctx, state, t.call(_staging, ctx, memory))
    if over_ring:
        t.call(store_read_wait, 0)
        t.call(arrive, t.call(memory.staging_free.__getitem__, 0), per="warp")


@op
def _facts(t: Trace, T: Any) -> Any:
    """(stages, safe stages, over ring, pipelined, has scratch) as constants."""
    T = unwrap(T)
    placed = T.placement(t.arch)
    return tl.tuple([tl.constexpr(x) for x in (placed.stages, placed.safe_stages, placed.over_ring is not None, T.pipelined, bool(T._plan.scratch))])


@op
def _open_turns(t: Trace, consumer: Any, T: Any) -> Any:
    """The last consumer gives the first turn to consumer 0."""
    T = unwrap(T)
    if T.ordered and T.consumers > 1 and unwrap(consumer) == T.consumers - 1:
        t.call(named_arrive, TURN_BARRIER, 2 * GROUP)


# ---------------------------------------------------------------- the engine, device code


@triton.jit
def _producer(G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = _facts(T)[0]
    SAFE: tl.constexpr = _facts(T)[1]
    OVER_RING: tl.constexpr = _facts(T)[2]
    slot = 0
    phases = -1  # one parity bit a slot: a fresh semaphore counts as released
    turn = 0
    index = tl.program_id(0)
    info = _setup(_context(G, A, index, T))
    while info.valid:
        whole = _with(_context(G, A, index, T), info)
        _load_scratch(whole, memory, (turn & 1) ^ 1)
        if OVER_RING:
            slot = 0  # the tail of the ring must be the slots that are filled last
        for i in range(info.iterations):
            if OVER_RING:
                if i == SAFE:
                    wait(memory.staging_free[0], (turn & 1) ^ 1)
                    arrive(memory.staging_free[0], per="warp")
            wait(memory.finished[slot], (phases >> slot) & 1)
            _load(_at(whole, i), memory, slot)
            phases = phases ^ (1 << slot)
            slot = tl.where(slot + 1 == STAGES, 0, slot + 1)
        if OVER_RING:
            if info.iterations <= SAFE:
                wait(memory.staging_free[0], (turn & 1) ^ 1)
                arrive(memory.staging_free[0], per="warp")
        turn += 1
        index += tl.num_programs(0)
        info = _setup(_context(G, A, index, T))


@triton.jit
def _consumer(CONSUMER: tl.constexpr, G, A, memory, T: tl.constexpr):
    STAGES: tl.constexpr = _facts(T)[0]
    OVER_RING: tl.constexpr = _facts(T)[2]
    PIPELINED: tl.constexpr = _facts(T)[3]
    HAS_SCRATCH: tl.constexpr = _facts(T)[4]
    slot = 0
    phases = 0
    turn = 0
    index = tl.program_id(0)
    info = _setup(_context(G, A, index, T))
    _open_turns(CONSUMER, T)
    while info.valid:
        mine = _mine(_with(_context(G, A, index, T), info), memory, CONSUMER)
        if OVER_RING:
            slot = 0
        if HAS_SCRATCH:
            wait(memory.scratch_arrived[CONSUMER], turn & 1)
        state = _start(mine)
        if PIPELINED:
            if info.iterations > 0:
                wait(memory.arrived[slot], (phases >> slot) & 1)
                state = _first(_at(mine, 0), state, _slot(memory, slot))
                previous = slot
                phases = phases ^ (1 << slot)
                slot = tl.where(slot + 1 == STAGES, 0, slot + 1)
                for i in range(1, info.iterations):
                    wait(memory.arrived[slot], (phases >> slot) & 1)
                    state = _compute(_at(mine, i), state, _slot(memory, slot), _slot(memory, previous))
                    arrive(memory.finished[previous], per="warp")
                    previous = slot
                    phases = phases ^ (1 << slot)
                    slot = tl.where(slot + 1 == STAGES, 0, slot + 1)
                if HAS_SCRATCH:
                    arrive(memory.scratch_finished[CONSUMER], per="warp")
                state = _drain(_without_scratch(mine), state, _slot(memory, previous))
                arrive(memory.finished[previous], per="warp")
            else:
                if HAS_SCRATCH:
                    arrive(memory.scratch_finished[CONSUMER], per="warp")
        else:
            for i in range(info.iterations):
                wait(memory.arrived[slot], (phases >> slot) & 1)
                state = _compute(_at(mine, i), state, _slot(memory, slot))
                arrive(memory.finished[slot], per="warp")
                phases = phases ^ (1 << slot)
                slot = tl.where(slot + 1 == STAGES, 0, slot + 1)
            if HAS_SCRATCH:
                arrive(memory.scratch_finished[CONSUMER], per="warp")
        _finish(_without_scratch(mine), state, memory, turn)
        turn += 1
        index += tl.num_programs(0)
        info = _setup(_context(G, A, index, T))
    store_wait(0)


@kernel(num_warps=WARPS)
@triton.jit
def _lcf_kernel(G, A, T: tl.constexpr):
    memory = _allocate(T)
    _run_roles(G, A, memory, T)
