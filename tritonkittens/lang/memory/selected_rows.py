"""Tiles whose rows are selected by number, moved by TMA (gather4 and scatter4, Blackwell)."""

from __future__ import annotations

import triton.language as tl

from tritonkittens.arch import WARP
from tritonkittens.lang.core.backend import Trace, Traced, blackwell, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import axes_of, pieces_of
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.sync.semaphores import semaphore
from tritonkittens.lang.types.global_layout import check_global, rank_of

AT_ONCE = 4  # rows of one copy, whose numbers a thread has


def _copies(
    t: Trace, tile: Traced, g: Traced, rows: Traced, col: Traced, what: str
) -> tuple[Traced, list[tuple[Traced, Traced, Traced]]]:
    """Return the row numbers as TMA takes them, and (descriptor, column, piece) of each copy of a shared tile."""
    t.require(f"{what} (TMA gather and scatter)", "tcgen05")
    if not isinstance(tile, shared) or len(tile.axes) != 2 or tile.stages is not None or tile.together:
        raise TileError(f"{what} of {getattr(tile, 'spec', tile)!r}: takes a shared tile (st), no ring and no vector")
    check_global(g, what)
    if len(tile.axes[0]) != 1 or rank_of(g) != 2:
        raise TileError(
            f"{what} of {tile.spec!r}: the rows of the tile must be a power of two, and the tensor a matrix; it has "
            f"{rank_of(g)} dimensions"
        )
    count = tile.axes[0][0]
    if axes_of(rows) != ((count,),) or rows.dtype != tl.int32:
        have = f"shape {[sum(a) for a in axes_of(rows)]} of {name_of(rows.dtype)}" if axes_of(rows) else repr(rows)
        raise TileError(f"{what} of {tile.spec!r}: needs a vector of {count} int32 row numbers, got {have}")
    layout = gl.SliceLayout(0, gl.BlockedLayout([1, AT_ONCE], [WARP, 1], [1, t.num_warps], [1, 0]))
    numbers = t.convert(pieces_of(rows)[0], layout)
    maps = {(tuple(int(unwrap(s)) for s in m.block_shape), m.layout.swizzle_byte_width): m for m in g.maps}
    start, found = t.method(t.scalar(col), "__mul__", sum(tile.axes[1])), []
    for width, piece in zip(tile.axes[1], tile.pieces, strict=True):
        key = (1, width), piece.layout.swizzle_byte_width
        if key not in maps:
            raise TileError(
                f"{what} of {tile.spec!r}: the global layout has no descriptor for its rows; make it by "
                f"tk.gl(tensor, tk.by_rows({tile.spec!r}))"
            )
        found.append((maps[key], start, piece))
        start = t.method(start, "__add__", width)
    return numbers, found


@op
def load_rows_async(t: Trace, dst: Traced, src: Traced, rows: Traced, col: Traced, arrived: Traced) -> None:
    """Start copying rows of a matrix to a shared tile, without waiting: row i of the tile is row `rows[i]`.

    Args:
        dst: a shared tile whose rows are a power of two.
        src: a global layout of two dimensions with a descriptor for single rows, `tk.gl(x, tk.by_rows(tile))`.
        rows: a register vector with an int32 row number for each row of the tile. Rows outside the matrix are zeros.
        col: the coordinate along columns, in tiles.
        arrived: the semaphore on which the copies complete. It must `expect` the tile's bytes.

    Raises:
        TileError: for another tile, vector or layout; ArchitectureError for another chip than sm_100a and sm_103a.

    Source: PTX ISA, cp.async.bulk.tensor.2d.tile::gather4.
    """
    if not isinstance(arrived, semaphore):
        raise TileError(f"load_rows_async(arrived={unwrap(arrived)!r}): needs a semaphore")
    numbers, copies = _copies(t, dst, src, rows, col, "load_rows_async")
    bill().copied += dst.nbytes
    for m, column, piece in copies:
        t.call(blackwell.tma.async_gather, m, numbers, column, arrived.barrier(t), piece)


@op
def store_rows_async(t: Trace, dst: Traced, src: Traced, rows: Traced, col: Traced) -> None:
    """Start copying a shared tile to rows of a matrix: row i of the tile to row `rows[i]`, each copy of four rows
    committed as a group.

    Arguments and errors as in `load_rows_async`. Row numbers and `col` are not negative; rows beyond the last are
    skipped. Where two numbers are equal, either row may remain. If registers wrote the tile, call `fence_async` first.
    Wait with `store_wait` or `store_read_wait`. Source: PTX ISA, cp.async.bulk.tensor.2d.tile::scatter4.
    """
    numbers, copies = _copies(t, src, dst, rows, col, "store_rows_async")
    for m, column, piece in copies:
        t.call(blackwell.tma.async_scatter, m, numbers, column, piece)
        bill().stored += 1


__all__ = ["load_rows_async", "store_rows_async"]
