"""The shared memory of a template: which tiles live when, and where they go.

Three lifetimes share the block's memory: scratch, common and deferred tiles (loaded once a task, for each consumer or for all), the input ring (one slot an
iteration), and the finish tiles (staged results, for each consumer). Finish tiles lie over what consumers work in during the task, where that is large enough.
Else, where memory is short, they lie over the tail of the ring, and the slots in front of them, the safe stages, are what the producer may already fill for the
next task while the results leave.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tritonkittens.arch import chip_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.template.renamed import refuse_old
from tritonkittens.lang.types.tiles import rt, rv, st, sv

ALIGNMENT = 1024  # bytes: the period of the 128-byte swizzle
VECTOR_ALIGNMENT = 128  # bytes: what TMA asks of a row without a swizzle
RESERVE = 1024  # bytes for semaphores, what the compiler keeps for itself, and the few of a block's first task and of entries
SEMAPHORES = {"arrived": "the semaphore that the tiles arrive on", "finished": "the semaphore that gives them back", "phase": "the phase of their semaphore",
              "group": "what they are tiles of",
              "filled": "the semaphore that `finish` fills tiles on"}
MAX_STAGES = 32  # the phases of a ring are the bits of one register
# From here on results in a place of their own gain more than one more stage (GEMM on the H200: 3 apart beats 4 over the ring by 1 to 10 %)
ENOUGH_STAGES = 3
# What hides the latency of memory are bytes under way, not slots: with tiles of 64×128 a GEMM of 512×2048×7168 takes 33.3 µs on the H200 with 6 slots, 29.8
# with 8. More than these, with slots below 14 KB, only make the start longer, which sets up their semaphores.
MANY_STAGES = 16
EXCHANGE_SLOTS = 2  # so that one meeting an iteration is enough: who writes a slot again has met the others since they read it


def _named(what: str, tiles: Any, kinds: tuple[type, ...]) -> tuple[tuple[str, Any], ...]:
    items = tuple(tiles.items()) if isinstance(tiles, dict) else tuple(tiles)
    for name, tile in items:
        if not isinstance(tile, kinds):
            raise TileError(f"layout({what}={{{name!r}: {tile!r}}}): must be {' or '.join(k.__name__ for k in kinds)}")
    return items


@dataclass(frozen=True)
class layout:
    """What a template moves and keeps.

    - `globals`: for each tensor of the call, in order, the tile type (or tuple of them, or None for pointer access only) that TMA moves;
    - `input`: the tiles of one ring slot (at least one);
    - `lagged`: those of a second ring of as many slots, which are used one iteration later (attention: K is input, V lagged);
    - `multicast`: names of input and lagged tiles that all blocks of a cluster need alike: they load them together, each block a part for all;
    - `scratch`: tiles that each consumer gets once a task; `common`: tiles that all consumers of a task get together once; `deferred`: the same, but they wait
      for these themselves, where hook `compute_first` needs them (`tk.wait_for(ctx.late_task)`). The template gives them back behind a task; hook `compute_last` may do so
      before, as soon as nothing reads them any more (`tk.release(ctx, ctx.task)`, `tk.release(ctx, ctx.late_task)`);
    - `working`: tiles that each consumer writes and reads itself, from the second iteration on (the results of the task before may lie there), or gives its
      sender (hook `reduce_store`);
      `exchange`: tiles, two of each, that the consumers of a task write for each other; nothing is in either when a task begins;
    - `finish`: tiles in which each consumer stages results;
    - `epilogue_loads`: names of finish tiles that hook `load_epilogue` fills before `finish` (a residual that the result is added to);
    - `epilogue_reloads`: names of finish tiles that hook `finish` fills itself, on the semaphore `epilogue.reload_full`, an even number of times (so that its parity is 0 at
      the beginning of each); of packed results, `prefetch_deferred` and the hooks behind it together;
    - `output`: the tiles of one slot of the output ring (`lcsf`);
    - `accumulators`: register tile types (`rt`) that live in tensor memory where the architecture has it;
    - `merged`: what hook `part` returns, of fp32: tiles (`rt`), of which each block of a cluster that shares a task (`ClusterSplitK`) gets its columns, and
      vectors (`rv`, a value for every row), which it gets whole;
    - `packed`: what hook `defer_results` returns, register tiles (`rt`) in which the results of a task wait for the products of the next; `deferred_steps` (0): iterations
      between the one in which one of them is staged and that of the next, in each of which hook `finish_deferred` is called, if there is one;
    - `ragged`: names of globals of sequences packed end to end along the rows, whose tiles TMA moves by `tk.sequence` (two or three dimensions);
    - `args`: names of run-time numbers of the call;
    - `entries`: how many int32 of tables in global memory the copies of an iteration need (see hook `page_index` of `lcf`);
    - `spare`: bytes of shared memory that stay the compiler's, which exchanges values between threads there where a hook changes a tile's register layout
      (without it a ring of as many stages as fit is compiled again with fewer, where these bytes are missing).
    """

    globals: Any
    input: Any = field(default_factory=dict)
    scratch: Any = field(default_factory=dict)
    finish: Any = field(default_factory=dict)
    accumulators: Any = field(default_factory=dict)
    merged: Any = field(default_factory=dict)
    packed: Any = field(default_factory=dict)
    deferred_steps: int = 0
    args: tuple[str, ...] = ()
    multicast: tuple[str, ...] = ()
    epilogue_loads: tuple[str, ...] = ()
    epilogue_reloads: tuple[str, ...] = ()
    output: Any = field(default_factory=dict)
    lagged: Any = field(default_factory=dict)
    common: Any = field(default_factory=dict)
    deferred: Any = field(default_factory=dict)
    working: Any = field(default_factory=dict)
    exchange: Any = field(default_factory=dict)
    ragged: tuple[str, ...] = ()
    entries: int = 0
    spare: int = 0

    def __new__(cls, *given: Any, **fields: Any) -> layout:
        refuse_old("layout", "field", fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        tensors = []
        for name, tiles in dict(self.globals).items():
            tiles = () if tiles is None else tiles if isinstance(tiles, tuple) else (tiles,)
            tensors.append((name, tuple(tile for _, tile in _named("globals", [(name, t) for t in tiles], (st, sv)))))
        object.__setattr__(self, "globals", tuple(tensors))
        for name in ("input", "lagged", "scratch", "common", "deferred", "working", "exchange", "finish", "output"):
            tiles = _named(name, getattr(self, name), (st, sv))
            if taken := [n for n, _ in tiles if n in SEMAPHORES]:
                raise TileError(f"layout({name}={{{taken[0]!r}: …}}): the name is taken by {SEMAPHORES[taken[0]]}")
            object.__setattr__(self, name, tiles)
        if not self.input:
            raise TileError("layout(input={}): a template streams at least one tile through its ring; without a stream write a @tk.kernel")
        object.__setattr__(self, "accumulators", _named("accumulators", self.accumulators, (rt,)))
        object.__setattr__(self, "merged", _named("merged", self.merged, (rt, rv)))
        object.__setattr__(self, "packed", _named("packed", self.packed, (rt,)))
        if not isinstance(self.deferred_steps, int) or self.deferred_steps < 0 or (self.deferred_steps and not self.packed):
            raise TileError(f"layout(deferred_steps={self.deferred_steps!r}): must be a number of iterations, and 0 where no tiles are packed")
        if both := [n for n, _ in self.input if n in dict(self.lagged)]:
            raise TileError(f"layout: {both[0]!r} is an input and a lagged tile; names of ring tiles are different")
        if both := [n for n, _ in self.working if n in dict(self.exchange)]:
            raise TileError(f"layout: {both[0]!r} is a working and an exchange tile; their names are different")
        for name, tiles in (("multicast", self.ring), ("epilogue_loads", self.finish), ("epilogue_reloads", self.finish)):
            chosen = tuple(getattr(self, name))
            if unknown := [n for n in chosen if n not in dict(tiles)]:
                where = "input" if name == "multicast" else "finish"
                raise TileError(f"layout({name}={chosen!r}): {unknown[0]!r} is no {where} tile; there are {', '.join(n for n, _ in tiles) or 'none'}")
            object.__setattr__(self, name, chosen)
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "ragged", tuple(self.ragged))
        if unknown := [n for n in self.ragged if n not in dict(self.globals)]:
            raise TileError(f"layout(ragged={self.ragged!r}): {unknown[0]!r} is no global; there are {', '.join(n for n, _ in self.globals)}")

    @property
    def ring(self) -> tuple[tuple[str, Any], ...]:
        """The tiles of a slot of both rings."""
        return (*self.input, *self.lagged)


def nbytes(tiles: tuple[tuple[str, Any], ...]) -> int:
    """Bytes of one set of tiles as TMA counts them."""
    return sum(tile.nbytes for _, tile in tiles)


def _padded(tiles: tuple[tuple[str, Any], ...]) -> int:
    return sum(_room(tile) for _, tile in tiles)


def _room(tile: Any) -> int:
    alignment = ALIGNMENT if isinstance(tile, st) else VECTOR_ALIGNMENT
    return -(-tile.nbytes // alignment) * alignment


Places = tuple[tuple[tuple[str, int, int, int], ...], ...]


@dataclass(frozen=True)
class Placement:
    """Slots of the ring and where the finish tiles lie.

    `over_ring` and `over_working` are None where they have memory of their own, else one has for each finish tile and consumer (tile, slot, part, parts) in the
    ring, or in the working tiles (slots are consumers), of the same consumer where there is room. The stages before `safe_stages` lie under none of them.
    """

    stages: int
    safe_stages: int
    over_ring: Places | None
    over_working: Places | None = None

    @property
    def over_own(self) -> bool:
        """Do the finish tiles of each consumer lie over what nobody else works in?"""
        return self.over_working is not None and all(slot == consumer for places in self.over_working for consumer, (_, slot, _, _) in enumerate(places))


def place(
    plan: layout, consumers: int, blocks_per_sm: int, stages: int | None, arch: int, name: str, pipelined: bool = False, output_stages: int = 0,
    may_overlap: bool = True, others: int = 0,
) -> Placement:
    """Choose the number of stages and where the finish tiles go; `stages` fixes the number.

    A `pipelined` computation holds the slot before while it waits for the next: it needs two stages. `may_overlap`: may the finish tiles lie
    over the ring? `others`: bytes for what is no tile (what other blocks send, numbers of tasks). Raises `TileError` with the bill where nothing fits.
    """
    limit = chip_of(arch).shared_for(blocks_per_sm) - RESERVE - plan.spare
    stage, finish = _padded(plan.ring), consumers * _padded(plan.epilogue)
    scratch = consumers * _padded(plan.task) + _padded(plan.common) + _padded(plan.late_task)
    work = consumers * _padded(plan.reduce_buffer) + EXCHANGE_SLOTS * _padded(plan.exchange) + others
    over_working = _over_working(plan, consumers) if may_overlap and plan.epilogue and plan.reduce_buffer else None
    limit -= output_stages * _padded(plan.output) + work
    of = f"of {limit} for one of {blocks_per_sm} blocks an SM on sm_{arch}"
    bill = f"scratch {scratch} bytes, input {stage} bytes a stage, finish {finish} bytes, {of}"
    least = 2 if pipelined else 1
    apart = min((limit - scratch - (0 if over_working else finish)) // stage, MAX_STAGES)
    shared = min((limit - scratch) // stage, MAX_STAGES) if may_overlap and not over_working else 0
    if stages is not None:
        if not isinstance(stages, int) or not least <= stages <= MAX_STAGES:
            why = " (pipelined: a slot is given back one iteration later)" if pipelined else ""
            raise TileError(f"{name}(stages={stages!r}): a ring has {least} to {MAX_STAGES} stages{why}")
        if stages <= apart:
            return Placement(stages, stages, None, over_working)
        over = _over_ring(plan, consumers, stages) if stages <= shared else None
        if over is None:
            raise TileError(f"{name}(stages={stages}): shared memory over budget: {bill}")
        return Placement(stages, *over)
    if apart < ENOUGH_STAGES and shared > apart:
        chosen = min(shared, ENOUGH_STAGES)
        over = _over_ring(plan, consumers, chosen) if chosen >= least else None
        if over is not None:
            return Placement(chosen, *over)
    if apart < least:
        raise TileError(f"{name}: shared memory over budget: {bill}; it needs {least} stage{'s' if pipelined else ''}")
    chosen = min(apart, MANY_STAGES)
    return Placement(chosen, chosen, None, over_working)


def _over_ring(plan: layout, consumers: int, stages: int) -> tuple[int, Places] | None:
    """(safe stages, places) of the finish tiles over the last slots of the ring, None where a tile fits nowhere."""
    tiles = tuple((name, tile) for name, tile in plan.ring if isinstance(tile, st))
    largest_first = sorted(tiles, key=lambda item: -item[1].nbytes)
    slots = [(stage, name, tile.nbytes) for stage in reversed(range(stages)) for name, tile in largest_first]
    places = _over(plan, tiles, [slots] * consumers)
    return None if places is None else (min((stage for mine in places for _, stage, _, _ in mine), default=stages), places)


def _over_working(plan: layout, consumers: int) -> Places | None:
    """The places of the finish tiles over the working tiles, None where a tile fits nowhere."""
    slots = [(c, name, tile.nbytes) for name, tile in plan.reduce_buffer for c in range(consumers)]
    return _over(plan, plan.reduce_buffer, [sorted(slots, key=lambda slot: slot[0] != c) for c in range(consumers)])


def _over(plan: layout, homes: tuple[tuple[str, Any], ...], slots: list[list[tuple[int, str, int]]]) -> Places | None:
    """For each finish tile and consumer the first of its `slots` (number, tile, bytes), which are of the tiles `homes`, with room left."""
    if not all(isinstance(tile, st) and len(tile.pieces()) == 1 for _, tile in (*plan.epilogue, *homes)):
        return None
    used: dict[tuple[str, int], int] = {}
    size: dict[tuple[str, int], int] = {}
    places = []
    for _, tile in plan.epilogue:
        mine = []
        for slots_of_consumer in slots:
            for slot, name, capacity in slots_of_consumer:
                key = (name, slot)
                if size.setdefault(key, tile.nbytes) == tile.nbytes and (used.get(key, 0) + 1) * tile.nbytes <= capacity:
                    mine.append((name, slot, used.get(key, 0), capacity // tile.nbytes))
                    used[key] = used.get(key, 0) + 1
                    break
                if not used.get(key):
                    size.pop(key)
            else:
                return None
        places.append(tuple(mine))
    return tuple(places)
