"""Raster orders: which tile of the output a task number is."""
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
    """Base of the orders: which tile of a grid of tiles a task is."""


@dataclass(frozen=True)
class RowMajor(Order):
    """Row by row."""


@dataclass(frozen=True)
class ColumnMajor(Order):
    """Column by column."""


@dataclass(frozen=True)
class Supergroup(Order):
    """In bands of `rows` rows, column by column within a band (TK's SUPER_M): see `supergroup`."""

    rows: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or self.rows < 1:
            raise TileError(f"Supergroup(rows={self.rows!r}): must be at least 1")


@dataclass(frozen=True)
class LongestFirst(Order):
    """The last row first, for work that grows with the row: see `longest_first`. With `rounds` of as few columns at a time as make a task for every block, and
    at the end of as many as make that many: L2 then holds what the tasks of a column read, and with `Dynamic()` all blocks still end at nearly the same time.
    """

    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and (not isinstance(self.rounds, int) or self.rounds < 1):
            raise TileError(f"LongestFirst(rounds={self.rounds!r}): must be at least 1, or None")


@op
def tile_at(t: Trace, order: Traced, task: Traced, rows: Traced, cols: Traced) -> Traced:
    """(row, col) of task number `task` of a `rows` × `cols` grid of tiles, in an `Order`. Past the last task, row or col lies outside."""
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
    size = tl.maximum(size, 1)  # past the last task
    inside = task % per_group
    return first + inside % size, inside // size


@op
def supergroup(t: Trace, task: Traced, rows: Traced, cols: Traced, group: Traced) -> Traced:
    """(row, col) of tile number `task` of a `rows` × `cols` grid, walked in bands of `group` rows, column by column within a band.

    Blocks that run at the same time then share rows of A and columns of B in L2. Source: Triton matmul tutorial, "L2 cache optimizations".
    """
    return t.call(_supergroup, task, rows, cols, group)


@triton.jit
def _longest_first(task, tiles, others):
    others = tl.maximum(others, 1)
    return tiles - 1 - task // others, task % others


@triton.jit
def _longest_of_few(task, tiles, others, blocks, ROUNDS: tl.constexpr):
    tiles = tl.maximum(tiles, 1)
    each = tl.maximum(blocks // tiles, 1)  # others of a band
    bands = tl.maximum(others - _ceil_div(ROUNDS * blocks, tiles), 0) // each  # before the last, which has all that are left
    band = tl.minimum(task // (tiles * each), bands)
    inside = task - band * tiles * each
    few = tl.maximum(tl.where(band < bands, each, others - bands * each), 1)
    return tiles - 1 - inside // few, band * each + inside % few


@op
def longest_first(t: Trace, task: Traced, tiles: Traced, others: Traced = 1) -> Traced:
    """(tile, other) of task number `task`, longest first, where the work of tile i grows with i, as under a causal mask.

    There are `tiles` tiles for each of `others` (heads · batches); the last tiles of all others come first. Blocks ending on short tasks
    end at nearly the same time. Past the last task, tile < 0. Source: Graham (1969), "Bounds on multiprocessing timing anomalies".
    """
    return t.call(_longest_first, task, tiles, others)


def supergroup_rows(rows: int, cols: int, depth: int, tile: tuple[int, int], itemsize: int, l2_bytes: int) -> int:
    """Row tiles a band of `supergroup` should have (host side): C is `rows` × `cols` in tiles of `tile`, A and B are `depth` deep.

    A band reads B once, so bands should be few; its rows of A must stay in L2 with the column tile of B that passes, and half of L2 is left
    to what streams through. Bands come out even. `itemsize` in bytes; `l2_bytes`: `tritonkittens.launch.l2_bytes(device)`. Raises
    `ValueError` for numbers that are not positive.
    """
    if min(rows, cols, depth, *tile, itemsize, l2_bytes) <= 0:
        raise ValueError(f"supergroup_rows({rows}, {cols}, {depth}, {tile}, {itemsize}, {l2_bytes}): all must be positive")
    tiles = -(-rows // tile[0])
    column, row = min(cols, tile[1]) * depth * itemsize, tile[0] * depth * itemsize
    fit = max(1, min(tiles, (l2_bytes // 2 - column) // row))
    return -(-tiles // -(-tiles // fit))
