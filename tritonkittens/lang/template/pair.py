"""Which templates multiply in CTA pairs (`tcgen05`, cta_group::2), and what each CTA of a pair loads of their tiles."""

from __future__ import annotations

from tritonkittens.lang.core.dtypes import itemsize
from tritonkittens.lang.memory.multicast import slices_of
from tritonkittens.lang.template.layout import layout
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import TileType, st

ROWS = 128  # of a CTA
COLUMNS = 32  # the columns of a pair's product are a multiple of


def pair_parts(plan: layout) -> dict[str, tuple[str, TileType]]:
    """For each input tile of a layout, what a CTA of a pair has of it: ("own", the tile), or ("rows" or "cols", half of
    the tile) where the CTAs load it together. Empty where they cannot be a pair.

    The products have as many columns, N, as the accumulators. B is the shared tile with one axis of N. If B is square,
    the function cannot tell N from K, and the CTAs are no pair. 8-bit tiles have K along their columns. Each CTA loads
    scales alone: those of B's columns are needed in both.
    """
    sums = [tile for _, tile in plan.accumulators]
    cols = {tile.cols for tile in sums}
    if any(tile.rows != ROWS for tile in sums) or len(cols) != 1 or plan.task or plan.late_task or plan.lagged:
        return {}
    (n,) = cols
    parts: dict[str, tuple[str, TileType]] = {}
    for name, tile in plan.input:
        half = _half(tile, n) if name in plan.multicast else ("own", tile)
        if half is None or not isinstance(tile, (st, scale_tile)) or (isinstance(tile, st) and len(tile.pieces()) > 1):
            return {}
        parts[name] = half
    return parts if n % COLUMNS == 0 and n & (n - 1) == 0 and any(part != "own" for part, _ in parts.values()) else {}


def _half(tile: st, n: int) -> tuple[str, TileType] | None:
    """The half of a tile's `n` columns of the product, if the CTAs of a cluster of two load such parts."""
    regions = slices_of(tile, 2, "")
    if len(regions) != 1 or len(set(regions[0])) != 1:
        return None
    half = regions[0][0]
    if tile.rows == tile.cols and (itemsize(tile.dtype) > 1 or half.rows == tile.rows):
        return None
    part, whole = ("rows", tile.rows) if half.rows < tile.rows else ("cols", tile.cols)
    return (part, half) if whole == n else None
