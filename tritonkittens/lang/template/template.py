"""`lcf` and `lcsf`: load / compute / (store) / finish. Write the hooks; the template writes the ring, the semaphores and their phases, the roles, and the loop
over the tasks.

One producer warp loads tiles into a ring of shared-memory slots; consumer warpgroups compute on them; each finishes its task by storing results, while the
producer already fills the ring for the next task. Source: ThunderKittens (Spector et al., 2024), section 3.2, and its `lcf` and `lcsf` templates.
"""
from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import triton.language as tl

from tritonkittens.arch import REGISTERS, capability_of, chip_of
from tritonkittens.lang.core.backend import JITFunction, library_hash
from tritonkittens.lang.core.configuration import Configuration
from tritonkittens.lang.core.constants import GROUP
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.interning import Interned
from tritonkittens.lang.kernel import CLUSTER_SIZES, prepare
from tritonkittens.lang.memory.multicast import slices_of
from tritonkittens.lang.schedule.cluster_split_k import received_bytes
from tritonkittens.lang.schedule.dynamic_scheduler import BYTES, COUNTERS
from tritonkittens.lang.schedule.index import Knob
from tritonkittens.lang.schedule.raster import Order, RowMajor
from tritonkittens.lang.schedule.split_k import elements
from tritonkittens.lang.schedule.tile_scheduler import Persistent, Schedule
from tritonkittens.lang.sync.warp_specialize import consumer_registers, producer_registers
from tritonkittens.lang.template.hook_table import check_hooks, hooks_of, reference
from tritonkittens.lang.template.index_prefetch import MOST_ENTRIES, WINDOW
from tritonkittens.lang.template.kernel import _template_kernel
from tritonkittens.lang.template.renamed import refuse_old
from tritonkittens.lang.template.smem_plan import ALIGNMENT, MANY_STAGES, Placement, layout, place
from tritonkittens.lang.types.global_layout import gl, map_specs
from tritonkittens.lang.types.tiles import TileType, rt
from tritonkittens.launch import GlobalArg, multiprocessor_count, simulated_facts, simulator, workspace

MAX_CONSUMERS = 4
MAX_REGISTERS = 255  # of a thread
WORKING_REGISTERS = 96  # addresses, a tile on its way to memory
MAX_CALLS = 4096  # shapes that a template remembers
UNKNOWN_TASKS = 1 << 30
CUTTING = 4096  # bytes that the compiler takes of a consumer to cut the columns of an accumulator
CLUSTERED = 0.92  # of a device's multiprocessors that clusters of more than two blocks fill
_new = tuple.__new__
DEBUG_MODES = (False, True, "report")
KNOBS = (int, float, str, tuple, type(None), tl.dtype, TileType, Knob)  # class attributes of these types are knobs


class TileArgument(NamedTuple):
    """What a kernel gets for a tensor that TMA moves: its descriptors, its pointer, and the number of the parameter that the first descriptor is."""

    maps: Any
    pointer: Any
    parameter: Any = None

    @property
    def of_one_tensor(self) -> bool:
        """Messages name the tensor, not a field."""
        return True


class lcf(Configuration, Interned):
    """Base class of load / compute / finish kernels. Subclass it, declare `layout`, write the hooks as `@triton.jit` functions without `self`.

    An object is a constant: `MyKernel(stages=4)` with equal knobs is the same object, found again in less than a microsecond, and its knobs are fixed. What
    its methods return (`layout`, `tasks`, `registers`) depends on its knobs and their arguments only.

    The hooks stand in the table of `lang/template/hook_table.py`; help() shows them below. Rules that concern several:

    - With `compute_last` the computation is pipelined by one iteration. The layout's `lagged` tiles are those that are used one iteration later anyway: `previous`
      (and `compute_last`'s argument) holds just them, to be waited for with `tk.wait_for(previous)`, and `compute_first` and `compute` release their input with
      `tk.release(ctx, input)`.
    - Consumers that share a task write `ctx.exchange` tiles for each other, `ctx.exchange.X[i]` in two slots: in turns, and all see them after
      `tk.sync_consumers(ctx)`; or one for each of two consumers, with `tk.exchange_commit`, `tk.exchange_wait`, `tk.exchange_release` and `tk.exchange_acquire`, which let them drift.
    - Scratch tiles are released before `compute_last`: products that read them must have been waited for. Copies of the load hooks are counted where they are
      written, once for each helper function and its argument types.

    `ctx` has the coordinates of the task and `globals`, `args`, `config` (the template object), `task`, `iterations`, `rank` (of the block in its cluster),
    `part` (of the task, where blocks share it);
    where it makes sense also `iter`, `consumer` (its number among those that share a task, of `config.team`), `scratch`, `common`, `deferred`, `working`,
    `exchange`, `accumulators`; consumers also have `edge`, a constant: may this iteration be one of the task's `edges`? They run in a loop of their own, so
    that the others have no branch for what only edges need. Where `setup` does not tell their number any iteration may be one, and where it does so at run time
    the first of a pipelined computation may.

    Knobs (class attributes, overridden by keyword at construction; `explain()` tells what was chosen for those that are None, and why):

    - `consumers` warpgroups (2), which share a task, or with `pingpong` take a task each, so that one computes while another finishes;
      `warp_scheduler_barrier`: `tk.warp_scheduler_sync` / `tk.warp_scheduler_arrive` alternate them; `staggered_epilogue`: those that share a task of a pipelined computation end it one behind the other, so
      that one's last products hide what the other does behind its own (in tasks of at least eight rings of iterations, behind which others come; not where
      tasks are drawn);
    - `lagged_producer`: a warp of its own loads lagged tiles; where slots take many copies, one warp is as long about them as memory is;
    - `stages` of the ring (None: as many as fit); `blocks_per_sm` (1);
    - `cluster` (1): so many blocks take neighbouring parts (`ctx.rank`) of one task together, and load what the layout names in `multicast` once for all;
    - `schedule`: `Persistent()`, `Dynamic()`, `OnePerBlock()`, `SplitK(parts)`, `ClusterSplitK(parts)`, `SplitTail()`, `SplitRest()`, `StreamK()`;
    - `one_tile_per_block` (`OnePerBlock` always): no block has more than one task, or part of one, as every launch checks; without the loop over them starts and ends are
      shorter (0.1 to 0.4 µs of decoding with attention on the H200);
    - `broadcast_tile`: is a task that is drawn (`Dynamic`), or a block's first, worked out once for all roles, or by each? Better once where `setup` reads from
      memory. What is told of drawn tasks stays in registers for a task;
    - `order`, for `tk.tile_at(ctx.config.order, …)` in `setup`;
    - `consumer_registers`, `producer_registers` a thread (None: an equal share where that is at least `needed_registers`, a property, otherwise by table).
    """

    consumers: int = 2
    lagged_producer: bool = False
    pingpong: bool = False
    stages: int | None = None
    blocks_per_sm: int = 1
    cluster: int = 1
    warp_scheduler_barrier: bool = False
    staggered_epilogue: bool = False
    schedule: Schedule = Persistent()
    broadcast_tile: bool = False
    one_tile_per_block: bool = False
    order: Order = RowMajor()
    consumer_registers: int | None = None
    producer_registers: int | None = None

    _stores: ClassVar[bool] = False  # output tiles, in every iteration

    def __init__(self, **knobs: Any):
        own = repr(sorted(self.__dict__.items()))  # what a constructor of a derived class has set
        refuse_old(type(self).__name__, "knob", knobs)
        for name, value in knobs.items():
            if name not in self._knobs():
                known = ", ".join(sorted(n for n in self._knobs()))
                raise TileError(f"{type(self).__name__}({name}={value!r}): no such knob; it has {known}")
            setattr(self, name, value)
        self._check_knobs()
        self.pipelined = check_hooks(type(self), self._stores, KNOBS)
        self.one_tile_per_block = self.one_tile_per_block or self.schedule.one_tile_per_block
        self.team = 1 if self.pingpong else self.consumers  # consumers that share a task
        self.splits, self.dynamic = self.schedule.splits, self.schedule.dynamic
        self.sends = hasattr(type(self), "reduce_store")
        self.senders = self.consumers if self.sends else 0  # a warp each
        self.sharers = self.schedule.cluster_parts  # blocks of a cluster that share a task's iterations
        self.cluster_size = self.cluster * self.sharers
        self._plan = self.layout()
        self._check_plan()
        self.merges = bool(self._plan.merged)
        self._placements: dict[int, Placement] = {}
        self._conceded = 0  # bytes that the ring leaves to the compiler, beside the layout's `spare`
        self._fitted: dict[int, lcf] = {}  # by architecture: the same with fewer stages, where more did not leave the compiler what it takes
        self._calls: dict[tuple, Call] = {}
        self._tiles = [(name, self._moved(tiles)) for name, tiles in self._plan.globals]
        busy = 1 + self.lagged_producer + int(bool(self._plan.output)) + self.senders
        self._helpers = -(-busy // 4)  # warpgroups beside the consumers
        self.idle_warps = 4 * self._helpers - busy
        threads = (self.consumers + self._helpers) * GROUP
        share = self.launch_registers = REGISTERS // (self.blocks_per_sm * threads) // 8 * 8  # of a thread
        self._pool = threads * share  # what the block starts with: setmaxnreg only moves registers inside it
        # Moving registers between roles costs a block's start 0.1 to 0.5 µs: not where an equal share is enough
        needed = self.needed_registers
        self.reallocates = bool(self.consumer_registers or self.producer_registers or needed is None or needed > min(share, MAX_REGISTERS))
        # Registers are handed out by the launch: with several blocks on a multiprocessor each must ask for its share
        mine = ("maxnreg", share) if self.reallocates else ("minnctapersm", self.blocks_per_sm)
        self._options = (mine,) if self.blocks_per_sm > 1 else ()
        if self.cluster_size > 1:
            self._options = (*self._options, ("cluster_size", self.cluster_size))
        wanted = self.registers()
        asked = (sum(wanted[:self.consumers]) + wanted[-1] * self._helpers) * GROUP
        if asked > self._pool:
            raise self._error(f"registers over budget: {wanted} a thread of {self.consumers + self._helpers} warpgroups are {asked} of {self._pool}, "
                              f"what a block of {threads} threads, {self.blocks_per_sm} an SM, starts with")
        self._key = self._make_key(own)
        self.__dict__.update(self._knobs())  # also where the default of a class changes

    @property
    def _identity(self) -> str | int:
        """The key, but for classes with a constructor of their own: what that does is not all in the key."""
        return self._key if type(self).__init__ is lcf.__init__ else id(self)

    def _described_change(self, name: str) -> str:
        if name not in self._knobs():
            return "a template is a constant of its kernel, which is not changed; construct another"
        return f"the knobs of a template are fixed; construct another, {type(self).__name__}({name}=…)"

    @property
    def needed_registers(self) -> int | None:
        """Registers that a consumer's thread needs, where that is known: the accumulators that the layout names, and what works on them."""
        held = sum(tile.rows * tile.cols for _, tile in self._plan.merged or self._plan.accumulators if isinstance(tile, rt)) // GROUP
        return held + WORKING_REGISTERS if held else None

    def _error(self, message: str) -> TileError:
        return TileError(f"{type(self).__name__}{message if message.startswith(('(', '.')) else ': ' + message}")

    def _check_knobs(self) -> None:
        if not isinstance(self.consumers, int) or not 1 <= self.consumers <= MAX_CONSUMERS:
            raise self._error(f"(consumers={self.consumers!r}): must be 1 to {MAX_CONSUMERS} warpgroups")
        if not isinstance(self.blocks_per_sm, int) or self.blocks_per_sm < 1:
            raise self._error(f"(blocks_per_sm={self.blocks_per_sm!r}): must be at least 1")
        if self.cluster not in CLUSTER_SIZES[:-1]:
            raise self._error(f"(cluster={self.cluster!r}): must be one of {', '.join(map(str, CLUSTER_SIZES[:-1]))} blocks")
        if not isinstance(self.lagged_producer, bool) or (self.lagged_producer and self.cluster > 1):
            raise self._error(f"(lagged_producer={self.lagged_producer!r}, cluster={self.cluster}): must be False, or True where blocks load alone")
        for name, kind in (("schedule", Schedule), ("order", Order)):
            if not isinstance(getattr(self, name), kind):
                raise self._error(f"({name}={getattr(self, name)!r}): must be a tk.{kind.__name__}")
        if conflict := self.schedule.conflict(self.cluster, self.pingpong):
            raise self._error(f"(schedule={self.schedule!r}, cluster={self.cluster}, pingpong={self.pingpong}): {conflict}")
        if self.one_tile_per_block and (self.pingpong or not self.schedule.may_have_one_tile_per_block):
            raise self._error(f"(one_tile_per_block=True, schedule={self.schedule!r}, pingpong={self.pingpong}): a block of one task neither draws it nor "
                              "enters it in the middle, and its consumers share it; that needs another schedule and pingpong=False")
        if hasattr(type(self), "reduce_store") and (self.cluster > 1 or self.pingpong or not self.schedule.whole_tasks):
            raise self._error(f"(schedule={self.schedule!r}, cluster={self.cluster}, pingpong={self.pingpong}): hook 'reduce_store' is for whole tasks that the "
                              "consumers of a block share; that needs cluster=1, pingpong=False and a schedule that splits none")
        if self.staggered_epilogue and self.warp_scheduler_barrier:
            raise self._error("(staggered_epilogue=True, warp_scheduler_barrier=True): consumers that alternate end together")
        if self.pingpong and self.warp_scheduler_barrier:
            raise self._error("(pingpong=True, warp_scheduler_barrier=True): consumers with tasks of their own have no turns")

    def _check_plan(self) -> None:
        plan = self._plan
        if not isinstance(plan, layout):
            raise self._error(f".layout must return tk.layout(…), got {plan!r}")
        for hook in hooks_of(self._stores).values():
            if hook.layout and getattr(plan, hook.layout) and not hasattr(type(self), hook.name):
                raise self._error(f"its layout has {hook.layout}=…, but hook {hook.name!r} is missing")
        if self.sends and not plan.reduce_buffer:
            raise self._error("hook 'reduce_store' sends working tiles; its layout has none")
        if self.sends and self.pipelined and not hasattr(type(self), "compute_first"):
            raise self._error("hook 'reduce_store' of a pipelined computation needs hook 'compute_first': what an iteration gives is sent one later")
        if not isinstance(plan.page_indices, int) or not 0 <= plan.page_indices <= MOST_ENTRIES:
            raise self._error(f"its layout has page_indices={plan.page_indices!r}; an iteration has 0 to {MOST_ENTRIES}")
        if not plan.page_indices and hasattr(type(self), "entry"):
            raise self._error("hook 'page_index' is for a layout with entries")
        if self.lagged_producer and not plan.lagged:
            raise self._error("(lagged_producer=True): its layout has no lagged tiles")
        if plan.lagged and not self.pipelined:
            raise self._error("its layout has lagged tiles, which are used one iteration later: that needs hook 'compute_last'")
        if plan.late_task and not hasattr(type(self), "compute_first"):
            raise self._error("its layout has deferred tiles, which hook 'compute_first' of a pipelined computation waits for; hook 'compute_first' is missing")
        if self.pingpong and (plan.task or plan.output or plan.common or plan.late_task or plan.exchange):
            raise self._error("(pingpong=True): consumers with tasks of their own have neither scratch, common, deferred, exchange nor output tiles")
        if self.staggered_epilogue and plan.exchange:
            raise self._error("(staggered_epilogue=True): consumers that write exchange tiles for each other end together")
        self._check_packed()
        if (self.splits or self.sharers > 1) and not (plan.merged or plan.accumulators):
            raise self._error(f"(schedule={self.schedule!r}): tasks that are split are summed up by their accumulators; declare them in the layout")
        self.received = received_bytes(plan, self.consumers, self.sharers, f"{type(self).__name__}(schedule={self.schedule!r})")
        if bool(plan.output) != self._stores:
            raise self._error("output tiles are for the store hook of an lcsf template" if plan.output else "its layout has no output tiles to store")

    def _check_packed(self) -> None:
        if not self._plan.packed:
            if not self._stores and not hasattr(type(self), "finish"):
                raise self._error("hook 'finish' is missing; its layout has no packed tiles")
            return
        if not self.pipelined or self.sharers > 1 or self._plan.working:
            raise self._error(f"(schedule={self.schedule!r}): packed results are stored under products of the next task; that needs hook 'compute_last', whole tasks "
                              "of a block, and no working tiles")
        if self._plan.epilogue_reloads and self.splits:
            raise self._error(f"(schedule={self.schedule!r}): of a task that blocks share only one stores packed results; none can fill finish tiles itself "
                              f"(epilogue_reloads={self._plan.epilogue_reloads})")

    def _moved(self, tiles: tuple) -> tuple:
        """The tile types that TMA moves of a tensor: beside a tile that the cluster loads together, the blocks' parts."""
        if self.cluster == 1:
            return tiles
        together = [tile for name, tile in self._plan.ring if name in self._plan.multicast]
        slices = [slices_of(tile, self.cluster, type(self).__name__) for tile in tiles if tile in together]
        return tiles + tuple(dict.fromkeys(part for parts in itertools.chain(*slices) for part in parts))

    def layout(self) -> layout:
        """The tiles of this template (`tk.layout(globals=…, input=…, …)`)."""
        raise TileError(f"{type(self).__name__}: hook 'layout' is missing")

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors of a call, in order."""
        return tuple(name for name, _ in self._plan.globals)

    @functools.cached_property
    def described(self) -> tuple[str, dict[str, Any]]:
        """What messages call this template, its tensors and its numbers."""
        return type(self).__name__, {"G": self.tensors, "A": self._plan.args}

    def tasks(self, *shapes: Any) -> int:
        """How many tasks tensors of these shapes make, to launch no more blocks than that; by default unknown (one block for every slot of the device)."""
        return UNKNOWN_TASKS

    def blocks(self, slots: int, *shapes: Any) -> int:
        """How many blocks (clusters) of the device's `slots` a launch takes."""
        return self.schedule.blocks(self.units(slots, *shapes), slots)

    def units(self, slots: int, *shapes: Any) -> int:
        """How many tasks, or parts of tasks where the schedule fixes these, tensors of these shapes make for so many `slots`."""
        return self.schedule.units(self.tasks(*shapes), slots, self.blocks_per_sm)

    def _knobs(self) -> dict[str, Any]:
        names = [n for c in type(self).__mro__ if c is not object for n, v in vars(c).items() if isinstance(v, KNOBS)]
        return {n: getattr(self, n) for n in names if not n.startswith("_")}

    def _properties(self) -> dict[str, Any]:
        """What properties of classes derived from these say: constants that hooks may read, by code which no hash of hooks or knobs covers."""
        classes = [c for c in type(self).__mro__ if not c.__module__.startswith("tritonkittens.lang.")]
        return {n: getattr(self, n) for c in classes for n, v in vars(c).items() if isinstance(v, property)}

    def _make_key(self, own: str) -> str:
        hooks = [h for h in (getattr(type(self), n) for n in dir(type(self))) if isinstance(h, JITFunction)]  # and the helpers that they call by `ctx.config`
        constants = sorted((n, getattr(v, "cache_key", v)) for n, v in (self._knobs() | self._properties()).items())
        parts = [type(self).__qualname__, library_hash(), own, repr(constants), repr(self._plan), repr(self.registers()), *(h.cache_key for h in hooks)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def cache_key(self) -> str:
        """Hash of hooks, knobs, properties, layout and this library: what the compiled code depends on."""
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
            # Finish tiles over the ring need all consumers of the block, and only them, to be at the end of a task
            plan = self._plan
            together = not (self.pingpong or self.splits or self.cluster_size > 1 or plan.epilogue_loads or plan.epilogue_reloads or plan.output or plan.packed)
            # Where accumulators lie in tensor memory, the compiler cuts their columns through shared memory
            scratch = self.consumers * CUTTING if self.received and chip_of(arch).tcgen05 else 0
            numbers = BYTES if self.dynamic else 0
            self._placements[arch] = place(self._plan, self.consumers, self.blocks_per_sm, self.stages, arch, type(self).__name__, self.pipelined,
                                           getattr(self, "output_stages", 0), together, self.received + scratch + numbers + self._conceded)
        return self._placements[arch]

    def with_less_memory(self, arch: int, excess: int) -> lcf | None:
        """The same with fewer stages, for the compiler takes `excess` bytes of shared memory more than these leave it; None where they are given or no fewer
        fit."""
        if self.stages is not None:
            return None
        placed, conceded = self.placement(arch), self._conceded + excess
        while True:
            key = hashlib.sha256(f"{self._key}, {conceded} bytes for the compiler".encode()).hexdigest()
            smaller = object.__new__(type(self))
            smaller.__dict__.update(self.__dict__, _conceded=conceded, _placements={}, _key=key)
            try:
                if smaller.placement(arch) != placed:
                    break
            except TileError:
                return None
            conceded += ALIGNMENT
        self._fitted[arch] = smaller
        return smaller

    @property
    def memory_advice(self) -> tuple[str, str]:
        """What a message calls this template, and what to do where its shared memory is over budget."""
        given = "" if self.stages is None else f"(stages={self.stages})"
        return type(self).__name__ + given, "; take fewer `stages` (None: as many as fit) or smaller tiles; `spare` in the layout keeps bytes for the compiler"

    def staggers(self, arch: int) -> bool:
        """Do consumers end tasks one behind the other on an architecture? Not where they must meet before they stage results, or take turns anyway."""
        placed = self.placement(arch)
        apart = placed.over_ring is None and placed.over_working is None
        return self.staggered_epilogue and self.pipelined and self.team > 1 and not self.dynamic and apart

    def registers(self) -> tuple[int, ...]:
        """Registers a thread of each role, consumers first, where they are reallocated; else all have the same."""
        if not self.reallocates:
            return (min(self.launch_registers, MAX_REGISTERS),) * (self.consumers + 1 + bool(self._plan.output))
        producer = self.producer_registers or producer_registers(self.consumers)
        fit = (self._pool // GROUP - producer * self._helpers) // self.consumers // 8 * 8
        mine = self.consumer_registers or min(fit, consumer_registers(self.consumers, self.blocks_per_sm))
        return (mine,) * self.consumers + (producer,) * (1 + bool(self._plan.output))

    def explain(self, arch: str | int = "sm_90a") -> str:
        """What was chosen for this template on an architecture, a line each, with the reason. `arch` as in `compile`.

        Whether the compiler needs shared memory of the ring is known once the template has been compiled."""
        arch = capability_of(arch)
        placed, plan, registers = self._fitted.get(arch, self).placement(arch), self._plan, self.registers()
        slot = ", ".join(f"{n} {tile!r}" for n, tile in plan.ring)
        why = "given" if self.stages is not None else f"as many as fit beside the other tiles, at most {MANY_STAGES}"
        if arch in self._fitted:
            first = self.placement(arch)
            tried = f"{first.stages}" if first.stages != placed.stages else f"{first.stages} beside the finish tiles"
            why = f"{tried} did not compile: the compiler exchanges values between threads through shared memory; `spare` in the layout keeps bytes for that"
        lines = [f"{type(self).__name__} on sm_{arch}", f"  stages {placed.stages} ({why}): a slot is {slot}"]
        if plan.epilogue:
            place = "over what the consumers worked in" if placed.over_working is not None else (
                "beside the ring, so that their stores overlap with the next task") if placed.over_ring is None else (
                f"over the ring behind slot {placed.safe_stages}: beside it there is room for too few stages")
            lines.append(f"  finish tiles {place}: {', '.join(f'{n} {tile!r}' for n, tile in plan.epilogue)} for each of {self.consumers} consumers")
        given = "given" if self.consumer_registers else "what the block's share of the register file leaves" if self.reallocates else (
            "an equal share is enough, and spares moving them")
        lines.append(f"  registers {registers[0]} a consumer thread ({given}), {registers[-1]} of the other roles; {self.blocks_per_sm} block(s) an SM")
        share = "a task each" if self.pingpong else "one task together"
        once = ", no loop over tasks" if self.one_tile_per_block else ""
        lines.append(f"  {self.consumers} consumer warpgroup(s) take {share}; {self.schedule!r}, {self.order!r}{once}")
        if self.lagged_producer:
            lines.append("  a warp of its own loads lagged tiles")
        if plan.page_indices:
            lines.append(f"  {plan.page_indices} entries of tables an iteration, read ahead, {WINDOW} at a time")
        if self.sends:
            lines.append("  working tiles leave by a warp of their own for each consumer")
        if self.staggers(arch):
            lines.append(f"  each lets the one ahead end a long task first, {placed.stages - 1} iterations before its own end; those hide its results")
        if plan.packed:
            tiles = ", ".join(f"{n} {tile!r}" for n, tile in plan.packed)
            often = "an iteration" if plan.deferred_steps == 0 else f"in {1 + plan.deferred_steps} iterations"
            lines.append(f"  results wait in registers ({tiles}) and leave under the next task, a tile {often}, behind its first {placed.stages - 1}")
        if self.cluster > 1:
            lines.append(f"  clusters of {self.cluster} blocks load {', '.join(plan.multicast) or 'nothing'} together")
        if self.sharers > 1:
            what = "parts" if plan.merged else "sums"
            lines.append(f"  clusters of {self.sharers} blocks share a task's iterations; {self.received} bytes for the {what} that they send each other")
        return "\n".join(lines)

    def call(self, *tensors: Any) -> Call:
        """What a call with tensors of these shapes on their device needs beside the tensors; found by shapes, made once."""
        try:
            key = (*[t.shape for t in tensors], *[t.dtype for t in tensors], tensors[0].get_device() if tensors else -1, simulated_facts())
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

        `blocks` overrides the size of the persistent grid (in clusters); `debug` makes a wait that never ends trap after two seconds.
        """
        self.call(*tensors)(*tensors, blocks=blocks, debug=debug, **args)

    def compile(self, *tensors: Any, arch: str | int = "sm_90a", **args: Any) -> Any:
        """Compile for tensors of these types without a GPU; returns Triton's CompiledKernel.

        Raises `ArchitectureError` for an `arch` that is none of `tritonkittens.arch.ARCHITECTURES`.
        """
        described, numbers = self.call(*tensors).arguments(tensors, args)
        return _template_kernel.compile(described, numbers, self, arch=arch, **dict(self._options))


class lcsf(lcf):
    """Base class of load / compute / store / finish kernels: like `lcf`, and every iteration writes tiles that a store role moves to global memory while the
    next are computed.

    `layout(output=…)` declares the tiles of a slot of the output ring (`output_stages` slots, 2). Hooks beside those of `lcf`:

    - `compute(ctx, state, input, output)` → state: writes the output tiles with `tk.store`;
    - `store(ctx, output)` (store role, once an iteration): `tk.store_async` of every output tile, once;
    - `finish` may be missing. There is no `compute_last`: a slot of either ring is given back as soon as `compute` returns.
    """

    output_stages: int = 2

    _stores = True

    def _check_knobs(self) -> None:
        super()._check_knobs()
        if not isinstance(self.output_stages, int) or not 1 <= self.output_stages <= 32:
            raise self._error(f"(output_stages={self.output_stages!r}): must be 1 to 32")
        if not self.schedule.whole_tasks:
            raise self._error(f"(schedule={self.schedule!r}): an lcsf template stores in every iteration; its tasks cannot be split")
        if self.schedule.dynamic:
            raise self._error(f"(schedule={self.schedule!r}): only an lcf template draws its tasks")


def cluster_slots(multiprocessors: int, size: int) -> int:
    """Clusters of `size` blocks, one a multiprocessor, that run at once: those of more than two do not use up the GPCs, which differ in multiprocessors (an
    H200 of 132, by cuOccupancyMaxActiveClusters: 66 of 2, 30 of 4, 15 of 8)."""
    return int(multiprocessors * (CLUSTERED if size > 2 else 1)) // size


class Call:
    """A template bound to the shapes of its tensors: `call(*tensors, **args)` launches with as little work as possible."""

    def __init__(self, template: lcf, tensors: tuple):
        plan, name = template._plan, type(template).__name__
        if len(tensors) != len(plan.globals):
            raise TypeError(f"{name}: {len(tensors)} tensors; it takes {', '.join(n for n, _ in plan.globals)}")
        for t, (tensor_name, tiles) in zip(tensors, plan.globals, strict=True):
            try:
                gl(t, *tiles, ragged=tensor_name in plan.ragged)  # checks dtypes and ranks
            except TileError as error:
                raise TileError(f"{name}: {tensor_name}: {error}") from None
        self.name, self.args, self.splits, self.dynamic = name, plan.args, template.splits, template.dynamic
        self.specs = tuple([map_specs(tiles, t.ndim, "zero", n in plan.ragged) for (n, tiles), t in zip(template._tiles, tensors, strict=True)])
        device = tensors[0].get_device() if tensors else -1
        on_device = device >= 0 or simulator.get() is not None
        slots = max(1, cluster_slots(multiprocessor_count(device), template.cluster_size) * template.blocks_per_sm) if on_device else 1
        shapes = [t.shape for t in tensors]
        self.keys = {debug: (((template,), ()), (("debug", debug), *template._options) if debug else template._options) for debug in DEBUG_MODES}
        self.key = self.keys[False]
        if (template.one_tile_per_block or not template.schedule.whole_tasks) and template.tasks(*shapes) == UNKNOWN_TASKS:
            single = "one_tile_per_block=True, " if template.one_tile_per_block and not template.schedule.one_tile_per_block else ""
            raise TileError(f"{name}({single}schedule={template.schedule!r}): write method 'tasks', which says how many tasks tensors of given shapes make")
        self.grid = (template.blocks(slots, *shapes),)
        self.fewest = template.units(slots, *shapes) if template.one_tile_per_block and on_device else 0
        self.numbers: tuple[int, ...] = ()  # what the kernel has to know of how tasks are split
        self._check_blocks(self.grid[0])
        if self.splits:
            tasks, copies = template.tasks(*shapes), template.cluster * template.team
            self.numbers, parts = template.schedule.plan(tasks, self.grid[0], slots, template.blocks_per_sm)
            self.room = parts * copies * elements(plan), tasks * copies
            self.room_of_block = template.schedule.sums_per_block * copies * elements(plan)

    def _check_blocks(self, blocks: int) -> None:
        if blocks < self.fewest:
            raise TileError(f"{self.name}: {self.fewest} tasks, or parts of tasks, for {blocks} blocks; each has one at most (one_tile_per_block=True, or OnePerBlock())")

    def _workspace(self, tensors: tuple, blocks: int = 0) -> tuple:
        """What blocks share, of the current stream: nothing, the counters that tasks are drawn from, or partial sums and their counters."""
        if self.splits:
            floats, counters = self.room
            return workspace(tensors[0].device, max(floats, blocks * self.room_of_block), counters)
        return workspace(tensors[0].device, 0, COUNTERS)[1:] if self.dynamic else ()

    def arguments(self, tensors: tuple, args: dict[str, Any], blocks: int | None = None) -> tuple:
        """The kernel's run-time arguments, for a grid of `blocks` where that is given."""
        if len(args) != len(self.args) or any(n not in args for n in self.args):
            raise TypeError(f"{self.name}: arguments {sorted(args)}; it takes {sorted(self.args)}")
        # straight to tuple: a named tuple's own constructor takes twice as long
        described = tuple([_new(TileArgument, (_new(GlobalArg, (t, s)), t, None)) if s else prepare(gl(t)) for t, s in zip(tensors, self.specs)])
        return described, (*[args[n] for n in self.args], *self._workspace(tensors, blocks or 0), *self.numbers)

    def __call__(self, *tensors: Any, blocks: int | None = None, debug: bool = False, **args: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        if blocks is not None:
            self._check_blocks(blocks)
        _template_kernel.launcher(self.grid if blocks is None else (blocks,), self.arguments(tensors, args, blocks), self.keys[debug])

    def bind(self, *tensors: Any, **args: Any) -> Callable[..., None]:
        """The same with these numbers as a function of tensors alone, in as few steps as possible: of tensors like these, which have their strides, too, or of
        others of such memory, whatever dimensions they have."""
        kinds = [(t.shape, t.stride()) for t in tensors]

        def fallback(*given: Any) -> None:
            self(*(t if (t.shape, t.stride()) == kind else t.as_strided(*kind) for t, kind in zip(given, kinds, strict=True)), **args)

        owners = [i for i, specs in enumerate(self.specs) for _ in range(2 if specs else 1)]  # TMA's descriptors have the address, and the pointer beside them
        bind = functools.partial(_template_kernel.launcher.bind, self.grid, self.arguments(tensors, args), self.key)
        shared = len(self._workspace(tensors))
        if not shared:
            return bind(tuple(owners), fallback)
        launch = bind((*owners, *range(len(tensors), len(tensors) + shared)), lambda *given: fallback(*given[:-shared]))
        return lambda *given: launch(*given, *self._workspace(given))


for _template in (lcf, lcsf):
    _template.__doc__ = f"{inspect.cleandoc(_template.__doc__ or '')}\n\nHooks:\n\n{reference(_template._stores)}"
