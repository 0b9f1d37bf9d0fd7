"""Raster orders: they map a task number to a tile of the output."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.schedule.index import Knob, _ceil_div, _unravel


@dataclass(frozen=True)
class Order(Knob):
    """Base of the raster orders."""


@dataclass(frozen=True)
class RowMajor(Order):
    """Row by row."""


@dataclass(frozen=True)
class ColumnMajor(Order):
    """Column by column."""


@dataclass(frozen=True)
class Supergroup(Order):
    """In bands of `rows` rows of tiles, column by column within a band (ThunderKittens' SUPER_M); see `supergroup`."""

    rows: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or self.rows < 1:
            raise TileError(f"Supergroup(rows={self.rows!r}): must be at least 1")


@dataclass(frozen=True)
class LongestFirst(Order):
    """The last row first, for work that grows with the row; see `longest_first`.

    With `rounds`, each band of columns gives every CTA one task, and the last band gives it at least `rounds`
    tasks. L2 then holds the data that the tasks of a column share. With `Dynamic()`, all CTAs still end at nearly the
    same time.
    """

    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and (not isinstance(self.rounds, int) or self.rounds < 1):
            raise TileError(f"LongestFirst(rounds={self.rounds!r}): must be at least 1, or None")


@op
def tile_at(t: Trace, order: Traced, task: Traced, rows: Traced, cols: Traced) -> Traced:
    """Map task number `task` to (row, col) of a `rows` × `cols` grid of tiles, two int32 scalars.

    `order` is a raster order. After the last task, row or col lies outside the grid. Raises `TileError` for another
    order.
    """
    order = unwrap(order)
    if isinstance(order, Supergroup):
        return t.call(_supergroup, task, rows, cols, order.rows)
    if isinstance(order, RowMajor):
        return t.call(_unravel, task, cols)
    if isinstance(order, ColumnMajor):
        return t.call(_column_major, task, rows)
    if isinstance(order, LongestFirst):
        if order.rounds is None:
            return t.call(_longest_first, task, rows, cols)
        return t.call(_longest_of_few, task, rows, cols, t.call("num_programs", 0), order.rounds)
    raise TileError(f"tile_at(order={order!r}): must be RowMajor(), ColumnMajor(), Supergroup(rows) or LongestFirst()")


@triton.jit
def _column_major(task, rows):
    return task % rows, task // rows


@triton.jit
def _supergroup(task, rows, cols, GROUP: tl.constexpr):
    per_group = GROUP * cols
    first = (task // per_group) * GROUP
    size = tl.minimum(rows - first, GROUP)
    size = tl.maximum(size, 1)  # after the last task
    inside = task % per_group
    return first + inside % size, inside // size


@op
def supergroup(t: Trace, task: Traced, rows: Traced, cols: Traced, group: Traced) -> Traced:
    """Map tile number `task` to (row, col) of a `rows` × `cols` grid, in bands of `group` rows, column by column
    within a band.

    Concurrent CTAs then share rows of A and columns of B in L2. Returns two int32 scalars. Source: Triton
    matmul tutorial, "L2 cache optimizations".
    """
    return t.call(_supergroup, task, rows, cols, group)


@triton.jit
def _longest_first(task, tiles, others):
    others = tl.maximum(others, 1)
    return tiles - 1 - task // others, task % others


@triton.jit
def _longest_of_few(task, tiles, others, blocks, ROUNDS: tl.constexpr):
    tiles = tl.maximum(tiles, 1)
    each = tl.maximum(blocks // tiles, 1)  # others in a band
    # bands before the last one, which has all remaining columns
    bands = tl.maximum(others - _ceil_div(ROUNDS * blocks, tiles), 0) // each
    band = tl.minimum(task // (tiles * each), bands)
    inside = task - band * tiles * each
    few = tl.maximum(tl.where(band < bands, each, others - bands * each), 1)
    return tiles - 1 - inside // few, band * each + inside % few


@op
def longest_first(t: Trace, task: Traced, tiles: Traced, others: Traced = 1) -> Traced:
    """Map task number `task` to (tile, other), longest first, where the work of tile i grows with i, as under a
    causal mask.

    Each of `others` (heads · batches) has `tiles` tiles; the last tiles of all others come first. CTAs end
    on short tasks, so they end at nearly the same time. After the last task, tile < 0. Returns two int32 scalars.
    Source: Graham (1969), "Bounds on multiprocessing timing anomalies".
    """
    return t.call(_longest_first, task, tiles, others)


def supergroup_rows(m: int, n: int, k: int, tile: tuple[int, int], itemsize: int, l2_bytes: int) -> int:
    """Choose the band height for `supergroup`, in row tiles (host side).

    A band reads B once, so fewer bands are better. A band's rows of A and the current column tile of B must stay in
    L2. Half of L2 is left for streamed data. Bands have equal heights.

    Args:
        m: M, the rows of C and A.
        n: N, the columns of C and B.
        k: K, the columns of A and rows of B.
        tile: (rows, cols) of a tile of C.
        itemsize: bytes of an operand's element.
        l2_bytes: bytes of L2, `tritonkittens.launch.l2_bytes(device)`.

    Raises:
        ValueError: for numbers that are not positive.
    """
    if min(m, n, k, *tile, itemsize, l2_bytes) <= 0:
        raise ValueError(f"supergroup_rows({m}, {n}, {k}, {tile}, {itemsize}, {l2_bytes}): all must be positive")
    tiles = -(-m // tile[0])
    column, row = min(n, tile[1]) * k * itemsize, tile[0] * k * itemsize
    fit = max(1, min(tiles, (l2_bytes // 2 - column) // row))
    return -(-tiles // -(-tiles // fit))
