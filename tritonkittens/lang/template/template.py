"""`lcf` and `lcsf`: load / compute / (store) / finish. Write the hooks; the template writes the ring, the barriers and
their phases, the roles, and the loop over the tasks.

One producer warp loads tiles into a ring of pipeline stages in shared memory; consumer warpgroups compute on them; each
finishes its task by storing results, while the producer already fills the ring for the next task. Source:
ThunderKittens (Spector et al., 2024), section 3.2, and its `lcf` and `lcsf` templates.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from dataclasses import replace
from typing import Any, ClassVar

import triton.language as tl

from tritonkittens.arch import CHIPS, REGISTERS, capability_of, chip_of
from tritonkittens.lang.core.backend import JITFunction, library_hash
from tritonkittens.lang.core.configuration import Configuration
from tritonkittens.lang.core.constants import GROUP
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.interning import Interned
from tritonkittens.lang.core.resources import tensor_columns
from tritonkittens.lang.memory.multicast import slices_of
from tritonkittens.lang.schedule.cluster_split_k import received_bytes
from tritonkittens.lang.schedule.dynamic_scheduler import BYTES
from tritonkittens.lang.schedule.index import Knob
from tritonkittens.lang.schedule.raster import Order, RowMajor
from tritonkittens.lang.schedule.tile_scheduler import Persistent, Schedule
from tritonkittens.lang.sync.warp_specialize import consumer_registers, producer_registers
from tritonkittens.lang.template.call import UNKNOWN_TASKS, Call
from tritonkittens.lang.template.checks import check_knobs, check_layout, error_of
from tritonkittens.lang.template.explain import explained
from tritonkittens.lang.template.extension import Extension, extensions_of
from tritonkittens.lang.template.extensions import EXTENSIONS
from tritonkittens.lang.template.hook_table import check_hooks, hooks_of, reference
from tritonkittens.lang.template.kernel import _template_kernel
from tritonkittens.lang.template.layout import layout
from tritonkittens.lang.template.layout import layout as Layout  # a method of templates has this name
from tritonkittens.lang.template.pair import Part, pair_parts
from tritonkittens.lang.template.renamed import refuse_old
from tritonkittens.lang.template.smem_plan import ALIGNMENT, Placement, place
from tritonkittens.lang.template.storage import tensor_home
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import TENSOR_ROWS, TileType, rt
from tritonkittens.launch import simulated_facts

MAX_REGISTERS = 255  # of a thread
WORKING_REGISTERS = 96  # addresses, a tile on its way to memory
MAX_CALLS = 4096  # shapes that a template remembers
CUTTING = 4096  # bytes that the compiler takes of a consumer to cut the columns of an accumulator
KNOBS = (int, float, str, tuple, type(None), tl.dtype, TileType, Knob)  # class attributes of these types are knobs


class lcf(Configuration, Interned):
    """Base class of load / compute / finish kernels. Guide: docs/concepts/templates.md. Reference: docs/hooks.md.

    Subclass it, declare `layout`, and write the hooks as `@triton.jit` functions without `self`. `tasks`, `blocks` and
    `needed_registers` may be overridden too. `tk.SplitTask`, `tk.DeferredEpilogue`, `tk.ReduceStoreWarp`,
    `tk.IndexPrefetch` and `tk.GatherWarps` add hooks. Hooks count rows by `ctx.config.team`, the consumers that share a
    task.

    Call: `kernel(*tensors, **args)`, `kernel.compile`, `kernel.explain`. A template is a constant: `MyKernel(stages=4)`
    with equal knobs is the same object. What its methods return depends on its knobs and their arguments only. A class
    attribute of a type such as int, bool, str or a dtype is a knob of the kernel's own: `ctx.config.NAME`. Built-in:

    - `consumers` (2): consumer warpgroups of a CTA. They share a task, or with `pingpong` take one each.
    - `stages` (None: as many as fit): stages of the ring. `explain()` says what None became, and why.
    - `blocks_per_sm` (1): CTAs that share an SM.
    - `cluster` (1): CTAs that compute neighbouring sub-tiles (`ctx.rank`) of a task and share `multicast` tiles.
    - `schedule` (`Persistent()`): the tile scheduler.
    - `order` (`RowMajor()`): the raster order, for `tk.tile_at(ctx.config.order, …)` in `setup`.
    - `pingpong` (False): consumers take a task each. One computes while another runs its epilogue.
    - `warp_scheduler_barrier` (False): consumers take turns (`tk.warp_scheduler_sync`, `tk.warp_scheduler_arrive`).
    - `staggered_epilogue` (False): consumers end a long task in turn, so that epilogues run beside products.
    - `one_tile_per_block` (False): the kernel has no loop over tasks. A launch raises where a CTA has two work tiles.
    - `broadcast_tile` (False): the producer computes a work tile for all roles. It pays where `setup` reads memory.
    - `lagged_producer` (False): a warp of its own loads lagged tiles, where one warp cannot issue all copies in time.
    - `launch_pdl` (False): a CTA may start before the previous kernel ends. It waits for that before its first load
      (True) or after its last one ("overlap").
    - `consumer_registers`, `producer_registers` (None: by the register budget): registers of a thread.
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
    launch_pdl: bool | str = False
    consumer_registers: int | None = None
    producer_registers: int | None = None

    _stores: ClassVar[bool] = False  # output tiles, in every iteration

    def __init__(self, **knobs: Any):
        own = repr(sorted(self.__dict__.items()))  # what a constructor of a derived class has set
        self._take_knobs(knobs)
        derived = extensions_of(type(self))
        self.pipelined = check_hooks(
            type(self), self._stores, derived, [e for e in EXTENSIONS if not issubclass(type(self), e)], KNOBS
        )
        self.one_tile_per_block = self.one_tile_per_block or self.schedule.one_tile_per_block
        self.team = 1 if self.pingpong else self.consumers  # consumers that share a task
        self.splits, self.dynamic = self.schedule.splits, self.schedule.dynamic
        self.sharers = self.schedule.cluster_parts  # blocks of a cluster that share a task's iterations
        self.cluster_size = self.cluster * self.sharers
        self._plan = self.layout()
        self.extensions = tuple(
            e
            for e in derived
            if not e.added_fields or any(getattr(self._plan, field, None) for field in e.added_fields)
        )
        check_layout(self, derived)
        self.received = received_bytes(
            self._plan, self.consumers, self.sharers, f"{type(self).__name__}(schedule={self.schedule!r})"
        )
        self.extension_warps = sum(e.role_warps * len(e.added_warps(self)) for e in self.extensions)
        self.merges = bool(self._plan.merged)
        self._placements: dict[int, Placement] = {}
        self._conceded = 0  # bytes that the ring leaves to the compiler, beside the layout's `spare`
        # by architecture: the same with fewer stages, where more did not leave the compiler what it takes
        self._fitted: dict[int, lcf] = {}
        self._fallbacks: dict[int, tuple[str, ...]] = {}  # by architecture: what runs on mma.sync, once compiled
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._tiles = [(name, self._moved(tiles)) for name, tiles in self._plan.globals]
        self._share_registers()
        self._key = self._make_key(own)
        self.__dict__.update(self._knobs())  # also where the default of a class changes

    def _take_knobs(self, knobs: dict[str, Any]) -> None:
        refuse_old(type(self).__name__, "knob", knobs)
        for name, value in knobs.items():
            if name not in self._knobs():
                known = ", ".join(sorted(self._knobs()))
                raise TileError(f"{type(self).__name__}({name}={value!r}): no such knob; it has {known}")
            setattr(self, name, value)
        self._check_knobs()

    def _share_registers(self) -> None:
        """How many warps a CTA has, and how its registers are shared between the roles."""
        mma_warp = any(self.has_mma_warp(arch) for arch in CHIPS)
        busy = 1 + self.lagged_producer + int(bool(self._plan.output)) + self.extension_warps + mma_warp
        self._helpers = -(-busy // 4)  # warpgroups beside the consumers
        threads = (self.consumers + self._helpers) * GROUP
        share = self.launch_registers = REGISTERS // (self.blocks_per_sm * threads) // 8 * 8  # of a thread
        self._pool = threads * share  # what the block starts with: setmaxnreg only moves registers inside it
        # Moving registers between roles makes a block's start longer: not where an equal share is enough (measured:
        # docs/notes/gemm.md)
        needed = self.needed_registers
        self.reallocates = bool(
            self.consumer_registers or self.producer_registers or needed is None or needed > min(share, MAX_REGISTERS)
        )
        # The launch allocates registers: with several blocks on a multiprocessor each must request its share
        mine = ("maxnreg", share) if self.reallocates else ("minnctapersm", self.blocks_per_sm)
        self._options = (mine,) if self.blocks_per_sm > 1 else ()
        if self.cluster_size > 1:
            self._options = (*self._options, ("cluster_size", self.cluster_size))
        if self.launch_pdl:
            self._options = (*self._options, ("launch_pdl", True))
        for wanted in {self.registers(arch) for arch in CHIPS}:
            asked = (sum(wanted[: self.consumers]) + wanted[-1] * self._helpers) * GROUP
            if asked > self._pool:
                raise self._error(
                    f"registers over budget: {wanted} a thread of {self.consumers + self._helpers} warpgroups are "
                    f"{asked} of {self._pool}, "
                    f"what a block of {threads} threads, {self.blocks_per_sm} an SM, starts with"
                )

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
        """Registers that a consumer's thread needs, where that is known: the accumulators that the layout names, and
        what works on them."""
        held = (
            sum(
                tile.rows * tile.cols
                for _, tile in self._plan.merged or self._plan.accumulators
                if isinstance(tile, rt)
            )
            // GROUP
        )
        return held + WORKING_REGISTERS if held else None

    def _error(self, message: str) -> TileError:
        return error_of(self, message)

    def _check_knobs(self) -> None:
        check_knobs(self)

    def _moved(self, tiles: tuple[Any, ...]) -> tuple[Any, ...]:
        """The tile types that TMA moves of a tensor: with a tile that the cluster loads together, also the parts that
        each CTA loads."""
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
        """How many tasks there are for tensors of these shapes. Override it to launch no more CTAs than tasks; by
        default it is unknown, and a launch has as many CTAs as run at once."""
        return UNKNOWN_TASKS

    def blocks(self, slots: int, *shapes: Any) -> int:
        """How many CTAs (clusters) a launch has on a device that runs `slots` of them at once."""
        return self.schedule.blocks(self.work_tiles(slots, *shapes), slots)

    def work_tiles(self, slots: int, *shapes: Any) -> int:
        """How many work tiles there are for tensors of these shapes on a device that runs `slots` CTAs at once."""
        return self.schedule.work_tiles(self.tasks(*shapes), slots, self.blocks_per_sm)

    def _knobs(self) -> dict[str, Any]:
        names = [n for c in type(self).__mro__ if c is not object for n, v in vars(c).items() if isinstance(v, KNOBS)]
        return {n: getattr(self, n) for n in names if not n.startswith("_") and n not in vars(Extension)}

    def _properties(self) -> dict[str, Any]:
        """What properties of classes derived from these say: constants that hooks may read, by code which no hash of
        hooks or knobs covers."""
        classes = [c for c in type(self).__mro__ if not c.__module__.startswith("tritonkittens.lang.")]
        return {n: getattr(self, n) for c in classes for n, v in vars(c).items() if isinstance(v, property)}

    def _make_key(self, own: str) -> str:
        # and the helpers that they call by `ctx.config`
        hooks = [h for h in (getattr(type(self), n) for n in dir(type(self))) if isinstance(h, JITFunction)]
        constants = sorted((n, getattr(v, "cache_key", v)) for n, v in (self._knobs() | self._properties()).items())
        added = [(name, point) for e in self.extensions for name, point in e.points.items()]
        added += [(str(number), role) for e in self.extensions for role, number in e.added_warps(self)]
        parts = [
            type(self).__qualname__,
            library_hash(),
            own,
            repr(constants),
            repr(self._plan),
            repr([self.registers(arch) for arch in CHIPS]),
            *(h.cache_key for h in hooks),
            *(f"{name} {getattr(f, 'cache_key', f.__qualname__)}" for name, f in added),
        ]
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
            together = not (
                self.pingpong
                or self.splits
                or self.cluster_size > 1
                or plan.output
                or plan.epilogue_loads
                or plan.epilogue_reloads
                or plan.deferred_results
                or plan.gathered
                or self.has_mma_warp(arch)
            )
            # Where accumulators lie in tensor memory, the compiler cuts their columns through shared memory
            task = self.consumers * CUTTING if self.received and chip_of(arch).tcgen05 else 0
            numbers = BYTES if self.dynamic else 0
            self._placements[arch] = place(
                self.stored(arch),
                self.consumers,
                self.blocks_per_sm,
                self.stages,
                arch,
                type(self).__name__,
                self.pipelined,
                getattr(self, "output_stages", 0),
                together,
                self.received + task + numbers + self._conceded,
            )
        return self._placements[arch]

    def with_less_memory(self, arch: int, excess: int) -> lcf | None:
        """The same with fewer stages, for the compiler takes `excess` bytes of shared memory more than these leave it;
        None where they are given or no fewer fit."""
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

    def note_fallbacks(self, arch: int, products: tuple[str, ...]) -> None:
        """Remember what `explain` says of products that run on mma.sync, once they have been compiled."""
        self._fallbacks[arch] = products

    @property
    def memory_advice(self) -> tuple[str, str]:
        """What a message calls this template, and what to do where its shared memory is over budget."""
        given = "" if self.stages is None else f"(stages={self.stages})"
        return (
            type(self).__name__ + given,
            "; take fewer `stages` (None: as many as fit) or smaller tiles; `spare` in the layout keeps bytes for the "
            "compiler",
        )

    def staggers(self, arch: int) -> bool:
        """Do consumers end tasks one after the other on an architecture? Not where they must meet before they stage
        results, or take turns anyway."""
        placed = self.placement(arch)
        apart = placed.over_ring is None and placed.over_scratch is None
        together = self.staggered_epilogue and self.pipelined and self.team > 1 and not self.has_mma_warp(arch)
        return together and not self.dynamic and apart

    def has_mma_warp(self, arch: int) -> bool:
        """Does a warp of its own run `compute` on an architecture? It does where products accumulate in tensor memory,
        so that they run beside the previous task's epilogue. Accumulators of other heights are in registers."""
        sums = self._plan.accumulators
        return chip_of(arch).tcgen05 and bool(sums) and not self._stores and all(s.rows in TENSOR_ROWS for _, s in sums)

    def pairs(self, arch: int) -> bool:
        """Do the CTAs of a cluster multiply as a pair on an architecture? They do where two share a tile of B, each
        loads half of its columns, and each has 128 rows of every accumulator."""
        return self.has_mma_warp(arch) and self.cluster == 2 and bool(self._pair_parts[0])

    @functools.cached_property
    def _pair_parts(self) -> tuple[dict[str, Part], str]:
        return pair_parts(self._plan)

    def stored(self, arch: int) -> Layout:
        """The layout of what a CTA has in memory on an architecture: of a pair's tile of B its half."""
        if not self.pairs(arch):
            return self._plan
        halves = {name: half for name, (part, half) in self._pair_parts[0].items() if part != "own"}
        return replace(self._plan, input=dict(self._plan.input) | halves)

    def pair_part(self, name: str, arch: int) -> str | None:
        """What a CTA of a pair has of input tile `name` (`shared.pair`); None without pairs."""
        return self._pair_parts[0][name][0] if self.pairs(arch) else None

    @property
    def accumulator_slots(self) -> int:
        """Tiles of each accumulator in tensor memory: the sums of a task are read from one while the next task's
        products go to the other, where there is room for two. With `pingpong` each consumer has one."""
        if self.pingpong:
            return self.consumers
        columns = self.team * sum(tensor_home(s).columns for _, s in self._plan.accumulators)
        return 2 if 2 * columns <= tensor_columns(self.blocks_per_sm) - self._scale_columns else 1

    @property
    def _scale_columns(self) -> int:
        """Columns of tensor memory for the scales of all stages."""
        columns = sum(tile.columns for _, tile in self._plan.ring if isinstance(tile, scale_tile))
        return columns and columns * self.placement(min(arch for arch, chip in CHIPS.items() if chip.tcgen05)).stages

    def registers(self, arch: str | int = "sm_90a") -> tuple[int, ...]:
        """Registers a thread of each role on an architecture, consumers first, where they are reallocated; else all
        have the same."""
        if not self.reallocates:
            return (min(self.launch_registers, MAX_REGISTERS),) * (self.consumers + 1 + bool(self._plan.output))
        least = max((e.role_registers(capability_of(arch)) for e in self.extensions), default=0)
        producer = self.producer_registers or max(producer_registers(self.consumers), least)
        fit = (self._pool // GROUP - producer * self._helpers) // self.consumers // 8 * 8
        mine = self.consumer_registers or min(fit, consumer_registers(self.consumers, self.blocks_per_sm))
        return (mine,) * self.consumers + (producer,) * (1 + bool(self._plan.output))

    def explain(self, arch: str | int = "sm_90a") -> str:
        """What was chosen for this template on an architecture, a line each, with the reason. `arch` as in `compile`.

        Whether the compiler needs shared memory of the ring, and which products tcgen05 cannot compute, is known once
        the template has been compiled."""
        capability = capability_of(arch)
        return explained(self, self._fitted.get(capability, self), capability)

    def call(self, *tensors: Any) -> Call:
        """What a call with tensors of these shapes on their device needs beside the tensors; found by shapes, made
        once."""
        try:
            key = (
                *[t.shape for t in tensors],
                *[t.dtype for t in tensors],
                tensors[0].get_device() if tensors else -1,
                simulated_facts(),
            )
        except AttributeError:
            kinds = ", ".join(type(t).__name__ for t in tensors)
            raise TypeError(
                f"{type(self).__name__}({kinds}): it takes the tensors {', '.join(n for n, _ in self._plan.globals)}; "
                "numbers go by name"
            ) from None
        found = self._calls.get(key)
        if found is None:
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            found = self._calls[key] = Call(self, tensors)
        return found

    def __call__(self, *tensors: Any, blocks: int | None = None, debug: bool = False, **args: Any) -> None:
        """Run on tensors (in the order of `layout.globals`) and numbers (`layout.args`).

        `blocks` overrides the size of the persistent grid (in clusters); `debug` makes a wait that never ends trap
        after two seconds.
        """
        self.call(*tensors)(*tensors, blocks=blocks, debug=debug, **args)

    def compile(self, *tensors: Any, arch: str | int = "sm_90a", **args: Any) -> Any:
        """Compile for tensors of these types without a GPU; returns Triton's CompiledKernel.

        Raises `ArchitectureError` for an `arch` that is none of `tritonkittens.arch.ARCHITECTURES`.
        """
        described, numbers = self.call(*tensors).arguments(tensors, args)
        return _template_kernel.compile(described, numbers, self, arch=arch, **dict(self._options))


class lcsf(lcf):
    """Base class of load / compute / store / finish kernels: like `lcf`, and every iteration writes tiles that a storer
    warp moves to global memory while the next are computed.

    `layout(output=…)` declares the tiles of a stage of the output ring (`output_stages`, 2). Hooks beside those of
    `lcf`:

    - `compute(ctx, state, input, output)` → state: writes the output tiles with `tk.store`;
    - `store(ctx, output)` (storer, once an iteration): `tk.store_async` of every output tile, once;
    - `finish` may be missing. There is no `compute_last`: a stage of either ring is released as soon as `compute`
      returns.
    """

    output_stages: int = 2

    _stores = True

    def _check_knobs(self) -> None:
        super()._check_knobs()
        if not isinstance(self.output_stages, int) or not 1 <= self.output_stages <= 32:
            raise self._error(f"(output_stages={self.output_stages!r}): must be 1 to 32")
        if not self.schedule.whole_tasks:
            raise self._error(
                f"(schedule={self.schedule!r}): an lcsf template stores in every iteration; its tasks cannot be split"
            )
        if self.schedule.dynamic:
            raise self._error(f"(schedule={self.schedule!r}): only an lcf template fetches its tasks")


for _template in (lcf, lcsf):
    _hooks = reference(list(hooks_of(_template._stores).values()), _template._stores)
    _template.__doc__ = f"{inspect.cleandoc(_template.__doc__ or '')}\n\nHooks:\n\n{_hooks}"
for _extension in EXTENSIONS:
    _extension.__doc__ = (
        f"{inspect.cleandoc(_extension.__doc__ or '')}\n\nHooks:\n\n{reference(_extension.added_hooks)}"
    )
