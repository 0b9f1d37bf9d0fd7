"""The shared memory of a template: which tiles live when, and where they go.

Three lifetimes share the block's memory: scratch (loaded once a task, for each consumer), the input ring (one slot an iteration), and the finish tiles (staged
results, for each consumer). Where memory is short the finish tiles lie over the tail of the ring, and the slots in front of them, the safe stages, are what
the producer may already fill for the next task while the results leave.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tritonkittens.lang.budget import SHARED_LIMIT
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.types import rt, split, st, sv

ALIGNMENT = 1024  # bytes: the period of the 128-byte swizzle
RESERVE = 1024  # bytes for semaphores and what the compiler keeps for itself
ENOUGH_STAGES = 3  # from here on results in a place of their own gain more than one more stage (GEMM on the H200: 3 apart beats 4 over the ring by 1 to 10 %)


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
    - `input`: the tiles of one ring slot; `scratch`: tiles that each consumer gets once a task; `finish`: tiles in which each consumer stages results;
    - `accumulators`: register tile types (`rt`) that live in tensor memory where the architecture has it;
    - `args`: names of run-time numbers of the call.
    """

    globals: Any
    input: Any = field(default_factory=dict)
    scratch: Any = field(default_factory=dict)
    finish: Any = field(default_factory=dict)
    accumulators: Any = field(default_factory=dict)
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        tensors = []
        for name, tiles in dict(self.globals).items():
            tiles = () if tiles is None else tiles if isinstance(tiles, tuple) else (tiles,)
            tensors.append((name, tuple(tile for _, tile in _named("globals", [(name, t) for t in tiles], (st, sv)))))
        object.__setattr__(self, "globals", tuple(tensors))
        for name in ("input", "scratch", "finish"):
            object.__setattr__(self, name, _named(name, getattr(self, name), (st, sv)))
        object.__setattr__(self, "accumulators", _named("accumulators", self.accumulators, (rt,)))
        object.__setattr__(self, "args", tuple(self.args))


def nbytes(tiles: tuple[tuple[str, Any], ...]) -> int:
    """Bytes of one set of tiles as TMA counts them."""
    return sum(tile.nbytes for _, tile in tiles)


def _padded(tiles: tuple[tuple[str, Any], ...]) -> int:
    return sum(-(-tile.nbytes // ALIGNMENT) * ALIGNMENT for _, tile in tiles)


@dataclass(frozen=True)
class Placement:
    """`stages` of the ring, and for each finish tile either None (memory of its own) or, for each consumer, (input tile, stage, part, parts) over the ring."""

    stages: int
    safe_stages: int
    over_ring: tuple[tuple[tuple[str, int, int, int], ...], ...] | None


def place(plan: layout, consumers: int, blocks_per_sm: int, stages: int | None, arch: int, name: str) -> Placement:
    """Choose the number of stages and where the finish tiles go; `stages` fixes the number. Raises `TileError` with the bill where nothing fits."""
    limit = SHARED_LIMIT.get(arch, min(SHARED_LIMIT.values())) // blocks_per_sm - RESERVE
    stage, scratch, finish = _padded(plan.input), consumers * _padded(plan.scratch), consumers * _padded(plan.finish)
    bill = f"scratch {scratch} bytes, input {stage} bytes a stage, finish {finish} bytes, of {limit} for one of {blocks_per_sm} blocks an SM on sm_{arch}"
    if not stage:
        if scratch + finish > limit:
            raise TileError(f"{name}: shared memory over budget: {bill}")
        return Placement(1, 1, None)
    apart = (limit - scratch - finish) // stage
    shared = (limit - scratch) // stage
    if stages is not None:
        if stages < 1:
            raise TileError(f"{name}(stages={stages}): a ring has at least one stage")
        if stages <= apart:
            return Placement(stages, stages, None)
        over = _over_ring(plan, consumers, stages)
        if stages > shared or over is None:
            raise TileError(f"{name}(stages={stages}): shared memory over budget: {bill}")
        return Placement(stages, *over)
    if apart >= ENOUGH_STAGES or apart == shared:
        if apart < 1:
            raise TileError(f"{name}: shared memory over budget: {bill}")
        return Placement(min(apart, 2 * ENOUGH_STAGES), min(apart, 2 * ENOUGH_STAGES), None)
    over = _over_ring(plan, consumers, min(shared, ENOUGH_STAGES)) if shared >= 1 else None
    if over is not None:
        return Placement(min(shared, ENOUGH_STAGES), *over)
    if apart < 1:
        raise TileError(f"{name}: shared memory over budget: {bill}")
    return Placement(apart, apart, None)


def _over_ring(plan: layout, consumers: int, stages: int) -> tuple[int, tuple] | None:
    """(safe stages, places) of the finish tiles over the last slots of the ring, None where a tile fits nowhere."""
    if not all(isinstance(tile, st) and len(tile.pieces()) == 1 for _, tile in (*plan.finish, *plan.input)):
        return None
    slots = [(stage, name, tile.nbytes) for stage in reversed(range(stages)) for name, tile in sorted(plan.input, key=lambda item: -item[1].nbytes)]
    used: dict[tuple[str, int], int] = {}
    size: dict[tuple[str, int], int] = {}
    places, lowest = [], stages
    for _, tile in plan.finish:
        mine = []
        for _ in range(consumers):
            for stage, name, capacity in slots:
                key = (name, stage)
                if size.setdefault(key, tile.nbytes) == tile.nbytes and (used.get(key, 0) + 1) * tile.nbytes <= capacity:
                    mine.append((name, stage, used.get(key, 0), capacity // tile.nbytes))
                    used[key] = used.get(key, 0) + 1
                    lowest = min(lowest, stage)
                    break
                if not used.get(key):
                    size.pop(key)
            else:
                return None
        places.append(tuple(mine))
    return lowest, tuple(places)


def power_of_two_pieces(tile: st | sv) -> int:
    """Pieces that a tile is made of."""
    return len(tile.pieces()) if isinstance(tile, st) else len(split(tile.length))
