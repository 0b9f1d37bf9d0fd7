"""`tk.layout`: the tiles of a template, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.template.renamed import refuse_old
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import by_rows, rt, rv, st, sv

# Names that a hook's record of tiles uses for something else
RESERVED = {
    "full": "the full barrier of the tiles",
    "empty": "the empty barrier of the tiles",
    "phase": "the phase of their barriers",
    "group": "what they are tiles of",
    "reload_full": "the barrier on which `finish` loads tiles",
}
TILES = ("input", "lagged", "task", "late_task", "scratch", "exchange", "epilogue", "output")
PER = ("consumer", "block")
MOVED = (st, sv, scale_tile)  # types of tiles that TMA moves


def _named(what: str, tiles: Any, kinds: tuple[type, ...]) -> tuple[tuple[str, Any], ...]:
    items = tuple(tiles.items()) if isinstance(tiles, dict) else tuple(tiles)
    for name, tile in items:
        if not isinstance(tile, kinds):
            why = "; chips that have tensor memory keep them there" if what == "accumulators" else ""
            must = " or ".join(k.__name__ for k in kinds)
            raise TileError(f"layout({what}={{{name!r}: {tile!r}}}): must be {must}{why}")
    return items


@dataclass(frozen=True)
class layout:
    """The tiles of a template: dicts of tile types by name, unless a field says otherwise. More in docs/hooks.md.

    Args:
        globals: for each tensor of the call, in order: the tile type that TMA moves, a tuple of them, or None for a
            tensor that hooks only access through registers, such as by `tk.load`, `tk.store` and `tk.load_scalar`.
        input: the tiles of one pipeline stage, at least one.
        lagged: tiles of a second ring, which are used one iteration later (attention: K is input, V is lagged).
        multicast: names of input and lagged tiles that the CTAs of a cluster load together, each a part for all.
        task: tiles that are loaded once a task.
        per: "consumer" or "block": each consumer has task tiles of its own, or the CTA has them once.
        late_task: task tiles of the CTA for which hook `compute_first` waits itself.
        scratch: tiles that each consumer writes and reads itself, or passes to its reduce-store warp.
        exchange: tiles, two of each, that the consumers of a task write for each other.
        epilogue: tiles in which each consumer stages results.
        epilogue_loads: names of epilogue tiles that hook `load_epilogue` fills before `finish`, such as a residual.
        epilogue_reloads: names of epilogue tiles that hook `finish` loads itself, an even number of times.
        output: the tiles of one stage of the output ring (`lcsf`).
        accumulators: register tile types (`rt`) to which `compute` only adds products. On chips with tensor memory,
            those of 64 or 128 rows lie there.
        ragged: names of globals of sequences packed end to end along the rows; `tk.sequence` bounds their copies.
        args: names of run-time numbers of the call.
        spare: bytes of shared memory left to the compiler.
        merged: tiles (`rt`) and vectors (`rv`) of fp32 that hook `part` returns (`tk.SplitTask`).
        deferred_results: register tiles (`rt`) that hook `defer_results` returns (`tk.DeferredEpilogue`).
        deferred_steps: iterations, after the one that stages a result tile, that call hook `finish_deferred`.
        gathered: names of input tiles whose rows hook `load_gathered` selects (`tk.GatherWarps`).
        page_indices: how many int32 of a table in global memory an iteration needs (`tk.IndexPrefetch`).

    Raises:
        TileError: for other tile types, unknown or clashing names, unknown fields, no globals, and no input.
    """

    globals: Any
    input: Any = field(default_factory=dict)
    task: Any = field(default_factory=dict)
    per: str = "consumer"
    epilogue: Any = field(default_factory=dict)
    accumulators: Any = field(default_factory=dict)
    merged: Any = field(default_factory=dict)
    deferred_results: Any = field(default_factory=dict)
    deferred_steps: int = 0
    args: tuple[str, ...] = ()
    multicast: tuple[str, ...] = ()
    epilogue_loads: tuple[str, ...] = ()
    epilogue_reloads: tuple[str, ...] = ()
    output: Any = field(default_factory=dict)
    lagged: Any = field(default_factory=dict)
    late_task: Any = field(default_factory=dict)
    scratch: Any = field(default_factory=dict)
    exchange: Any = field(default_factory=dict)
    ragged: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    page_indices: int = 0
    spare: int = 0

    def __new__(cls, *given: Any, **fields: Any) -> layout:
        refuse_old("layout", "field", fields)
        known = cls.__dataclass_fields__
        for name in fields:
            if name not in known:
                nearest = get_close_matches(name, known, 1)
                meant = f"the nearest is {nearest[0]!r}; " if nearest else ""
                raise TileError(f"layout({name}=…): no such field; {meant}fields are {', '.join(known)}")
        if not given and "globals" not in fields:
            raise TileError("layout(): give globals=…, the tile types of each tensor of the call, in order")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        tensors = []
        for name, tiles in dict(self.globals).items():
            tiles = () if tiles is None else tiles if isinstance(tiles, tuple) else (tiles,)
            moved = _named("globals", [(name, t) for t in tiles], (*MOVED, by_rows))
            tensors.append((name, tuple(tile for _, tile in moved)))
        self._set("globals", tuple(tensors))
        for name in TILES:
            held = MOVED if name in ("input", "lagged") else (st, sv)
            tiles = _named(name, getattr(self, name), held)
            if taken := [n for n, _ in tiles if n in RESERVED]:
                raise TileError(f"layout({name}={{{taken[0]!r}: …}}): the name is taken by {RESERVED[taken[0]]}")
            self._set(name, tiles)
        if not self.input:
            raise TileError(
                "layout(input={}): a template streams at least one tile through its ring; without a stream write a "
                "@tk.kernel"
            )
        if self.per not in PER:
            raise TileError(f"layout(per={self.per!r}): must be one of {', '.join(map(repr, PER))}")
        for name, kinds in (("accumulators", (rt,)), ("merged", (rt, rv)), ("deferred_results", (rt,))):
            self._set(name, _named(name, getattr(self, name), kinds))
        if (
            not isinstance(self.deferred_steps, int)
            or self.deferred_steps < 0
            or (self.deferred_steps and not self.deferred_results)
        ):
            raise TileError(
                f"layout(deferred_steps={self.deferred_steps!r}): must be a number of iterations, and 0 without "
                "deferred_results"
            )
        if both := [n for n, _ in self.input if n in dict(self.lagged)]:
            raise TileError(f"layout: {both[0]!r} is an input and a lagged tile; names of ring tiles are different")
        if both := [n for n, _ in self.scratch if n in dict(self.exchange)]:
            raise TileError(f"layout: {both[0]!r} is a scratch and an exchange tile; their names are different")
        self._check_names()

    def _check_names(self) -> None:
        for name, tiles in (
            ("multicast", self.ring),
            ("epilogue_loads", self.epilogue),
            ("epilogue_reloads", self.epilogue),
        ):
            chosen = tuple(getattr(self, name))
            if unknown := [n for n in chosen if n not in dict(tiles)]:
                where = "input" if name == "multicast" else "epilogue"
                raise TileError(
                    f"layout({name}={chosen!r}): {unknown[0]!r} is no {where} tile; there are "
                    f"{', '.join(n for n, _ in tiles) or 'none'}"
                )
            self._set(name, chosen)
        self._set("args", tuple(self.args))
        self._set("gathered", tuple(self.gathered))
        self._set("ragged", tuple(self.ragged))
        if unknown := [n for n in self.ragged if n not in dict(self.globals)]:
            raise TileError(
                f"layout(ragged={self.ragged!r}): {unknown[0]!r} is no global; there are "
                f"{', '.join(n for n, _ in self.globals)}"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def ring(self) -> tuple[tuple[str, Any], ...]:
        """The tiles of a stage of both rings."""
        return (*self.input, *self.lagged)
