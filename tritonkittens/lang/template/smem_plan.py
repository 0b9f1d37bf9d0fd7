"""The shared memory of a template: which tiles live when, and where they go.

Three lifetimes share the CTA's memory: task tiles (loaded once a task), the input ring (one stage an iteration), and
the epilogue tiles (staged results, for each consumer). Epilogue tiles lie over the scratch tiles of consumers, where
these are large enough. Otherwise, where memory is short, they lie over the tail of the ring; the stages before them,
the safe stages, are those that the producer may already fill for the next task while the results leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tritonkittens.arch import chip_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.template.layout import layout
from tritonkittens.lang.types.tiles import st

ALIGNMENT = 1024  # bytes: the period of the 128-byte swizzle
VECTOR_ALIGNMENT = 128  # bytes: what TMA asks of a row without a swizzle
# bytes for barriers, what the compiler keeps for itself, and the few of a block's first task and of page indices
RESERVE = 1024
MAX_STAGES = 32  # the phases of a ring are the bits of one register
# from here on epilogue tiles in memory of their own gain more than one more stage (measured: docs/notes/gemm.md)
ENOUGH_STAGES = 3
# Bytes in flight hide the latency of memory, so small stages need to be many. More only make the start longer, which
# sets up their barriers (docs/notes/gemm.md)
MANY_STAGES = 16
# so that one synchronisation an iteration is enough: who writes a slot again has met the others since they read it
EXCHANGE_SLOTS = 2


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
    """Stages of the ring and where the epilogue tiles lie.

    `over_ring` and `over_scratch` are None where these have memory of their own. Otherwise one of them has, for each
    epilogue tile and consumer, (tile, slot, part, parts) in the ring, or in the scratch tiles (slots are consumers), of
    the same consumer where there is room. No epilogue tile lies over the stages before `safe_stages`.
    """

    stages: int
    safe_stages: int
    over_ring: Places | None
    over_scratch: Places | None = None

    @property
    def over_own(self) -> bool:
        """Do the epilogue tiles of each consumer lie over scratch tiles of its own?"""
        return self.over_scratch is not None and all(
            slot == consumer for places in self.over_scratch for consumer, (_, slot, _, _) in enumerate(places)
        )


def place(
    plan: layout,
    consumers: int,
    blocks_per_sm: int,
    stages: int | None,
    arch: int,
    name: str,
    pipelined: bool = False,
    output_stages: int = 0,
    may_overlap: bool = True,
    others: int = 0,
) -> Placement:
    """Choose the number of stages and where the epilogue tiles go; `stages` fixes the number.

    A `pipelined` computation holds the previous stage while it waits for the next: it needs two stages. `may_overlap`:
    may the epilogue tiles lie over the ring? `others`: bytes for what is no tile (what other CTAs send, numbers of
    tasks). Raises `TileError` with the bill where nothing fits.
    """
    limit = chip_of(arch).shared_for(blocks_per_sm) - RESERVE - plan.spare
    stage, finish = _padded(plan.ring), consumers * _padded(plan.epilogue)
    task = (consumers if plan.per == "consumer" else 1) * _padded(plan.task) + _padded(plan.late_task)
    work = consumers * _padded(plan.scratch) + EXCHANGE_SLOTS * _padded(plan.exchange) + others
    over_scratch = _over_scratch(plan, consumers) if may_overlap and plan.epilogue and plan.scratch else None
    limit -= output_stages * _padded(plan.output) + work
    of = f"of {limit} for one of {blocks_per_sm} blocks an SM on sm_{arch}"
    bill = f"task {task} bytes, input {stage} bytes a stage, epilogue {finish} bytes, {of}"
    least = 2 if pipelined else 1
    apart = min((limit - task - (0 if over_scratch else finish)) // stage, MAX_STAGES)
    shared = min((limit - task) // stage, MAX_STAGES) if may_overlap and not over_scratch else 0
    if stages is not None:
        if not isinstance(stages, int) or not least <= stages <= MAX_STAGES:
            why = " (pipelined: a stage is released one iteration later)" if pipelined else ""
            raise TileError(f"{name}(stages={stages!r}): a ring has {least} to {MAX_STAGES} stages{why}")
        if stages <= apart:
            return Placement(stages, stages, None, over_scratch)
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
    return Placement(chosen, chosen, None, over_scratch)


def _over_ring(plan: layout, consumers: int, stages: int) -> tuple[int, Places] | None:
    """(safe stages, places) of the epilogue tiles over the last stages of the ring, None where a tile fits nowhere."""
    tiles = tuple((name, tile) for name, tile in plan.ring if isinstance(tile, st))
    largest_first = sorted(tiles, key=lambda item: -item[1].nbytes)
    slots = [(stage, name, tile.nbytes) for stage in reversed(range(stages)) for name, tile in largest_first]
    places = _over(plan, tiles, [slots] * consumers)
    return (
        None if places is None else (min((stage for mine in places for _, stage, _, _ in mine), default=stages), places)
    )


def _over_scratch(plan: layout, consumers: int) -> Places | None:
    """The places of the epilogue tiles over the scratch tiles, None where a tile fits nowhere."""
    slots = [(c, name, tile.nbytes) for name, tile in plan.scratch for c in range(consumers)]
    return _over(plan, plan.scratch, [sorted(slots, key=lambda slot: slot[0] != c) for c in range(consumers)])


def _over(plan: layout, homes: tuple[tuple[str, Any], ...], slots: list[list[tuple[int, str, int]]]) -> Places | None:
    """For each epilogue tile and consumer the first of its `slots` (number, tile, bytes), which are of the tiles
    `homes`, that it fits into."""
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
                if (
                    size.setdefault(key, tile.nbytes) == tile.nbytes
                    and (used.get(key, 0) + 1) * tile.nbytes <= capacity
                ):
                    mine.append((name, slot, used.get(key, 0), capacity // tile.nbytes))
                    used[key] = used.get(key, 0) + 1
                    break
                if not used.get(key):
                    size.pop(key)
            else:
                return None
        places.append(tuple(mine))
    return tuple(places)
