"""Which templates multiply in CTA pairs (`tcgen05`, cta_group::2), and what each CTA of a pair loads of their tiles."""

from __future__ import annotations

from typing import TypeAlias

from tritonkittens.lang.core.dtypes import itemsize
from tritonkittens.lang.memory.multicast import slices_of
from tritonkittens.lang.template.layout import layout
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import TileType, st

ROWS = 128  # of a CTA
COLUMNS = 32  # the columns of a pair's product are a multiple of

Part: TypeAlias = tuple[str, TileType]


def pair_parts(plan: layout) -> tuple[dict[str, Part], str]:
    """For each input tile of a layout, what a CTA of a pair has of it: ("own", the tile), or ("rows" or "cols", half of
    the tile) where the CTAs load it together; and "". Where they cannot be a pair: {}, and what it needs.

    The products have as many columns, N, as the accumulators. B is the shared tile with one axis of N. If B is square,
    the function cannot tell N from K, and the CTAs are no pair. 8-bit tiles have K along their columns. Each CTA loads
    scales alone: those of B's columns are needed in both.
    """
    if others := [f"{name} {tile!r}" for name, tile in plan.accumulators if tile.rows != ROWS]:
        return {}, f"accumulators of {ROWS} rows in each CTA, not {', '.join(others)}"
    columns = {tile.cols for _, tile in plan.accumulators}
    n = max(columns)
    if len(columns) > 1 or n % COLUMNS or n & (n - 1):
        found = " and ".join(map(str, sorted(columns)))
        return {}, f"one number of columns of all accumulators, a power of two from {COLUMNS} on, not {found}"
    if kinds := [kind for kind in ("task", "late_task", "lagged") if getattr(plan, kind)]:
        return {}, f"a layout without {' and '.join(kinds)} tiles"
    parts: dict[str, Part] = {}
    for name, tile in plan.input:
        if isinstance(tile, st) and len(tile.pieces()) > 1:
            return {}, f"input tiles whose columns are a power of two, unlike {name} {tile!r}"
        if not isinstance(tile, (st, scale_tile)):
            return {}, f"input tiles that are no vectors, unlike {name} {tile!r}"
        half = _half(tile, n) if name in plan.multicast else ("own", tile)
        if half is None:
            return {}, f"multicast tiles with one axis of {n}, the accumulators' columns, unlike {name} {tile!r}"
        parts[name] = half
    if all(part == "own" for part, _ in parts.values()):
        return {}, "the tile of B among those of `multicast`"
    return parts, ""


def _half(tile: st, n: int) -> Part | None:
    """The half of a tile's `n` columns of the product, if the CTAs of a cluster of two load such parts."""
    regions = slices_of(tile, 2, "")
    if len(regions) != 1 or len(set(regions[0])) != 1:
        return None
    half = regions[0][0]
    if tile.rows == tile.cols and (itemsize(tile.dtype) > 1 or half.rows == tile.rows):
        return None
    part, whole = ("rows", tile.rows) if half.rows < tile.rows else ("cols", tile.cols)
    return (part, half) if whole == n else None
