"""Tiles whose rows are selected by number: by TMA on Blackwell (gather4 and scatter4), elsewhere by the role's threads
(cp.async and ordinary stores)."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.arch import WARP, chip_of
from tritonkittens.lang.core.backend import Trace, Traced, async_copy, blackwell, gl, op
from tritonkittens.lang.core.constants import BULK, unwrap
from tritonkittens.lang.core.dtypes import itemsize, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, axes_of, pieces_of
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.global_access import _frame, _same_type
from tritonkittens.lang.memory.shared_tiles import load_shared, shared
from tritonkittens.lang.register.construction import indices, memory_layout
from tritonkittens.lang.sync.semaphores import expect, semaphore
from tritonkittens.lang.types.global_layout import check_global, extents_of, is_even, rank_of, strides_of

AT_ONCE = 4  # rows of one copy, whose numbers a thread has


def gathers_by_tma(arch: int) -> bool:
    """Does TMA move selected rows on an architecture?"""
    return chip_of(arch).tcgen05


def numbers_for(t: Trace, rows: Traced, tile: Traced) -> Traced:
    """Return row numbers in the registers from which `load_rows_async` copies to a shared tile: it converts others at
    each call."""
    if gathers_by_tma(t.arch):
        layout = _tma_layout(t)
    else:
        layout = gl.SliceLayout(1, memory_layout(t, tile.axes[0][0], tile.axes[1][0], itemsize(tile.dtype)))
    return assemble(axes_of(rows), [t.convert(piece, layout) for piece in pieces_of(rows)])


def _tma_layout(t: Trace) -> Traced:
    return gl.SliceLayout(0, gl.BlockedLayout([1, AT_ONCE], [WARP, 1], [1, t.num_warps], [1, 0]))


def _check(t: Trace, tile: Traced, g: Traced, rows: Traced, what: str) -> None:
    t.require(what, "tma")
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


def _copies(
    t: Trace, tile: Traced, g: Traced, rows: Traced, col: Traced, what: str
) -> tuple[Traced, list[tuple[Traced, Traced, Traced]]]:
    """Return the row numbers as TMA takes them, and (descriptor, column, piece) of each copy of a shared tile."""
    numbers = t.convert(pieces_of(rows)[0], _tma_layout(t))
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


@triton.jit
def _zero(col):
    """A zero that compilers take for a number of the iteration."""
    return col >> 30


@triton.jit
def _first_column(col, COLS: tl.constexpr):
    return (col + _zero(col)) * COLS


@triton.jit
def _pointers(pointer, rows, cols, col, height, width, pitch, UNIT: tl.constexpr):
    """Addresses, and which are inside. A loop over columns computes them where it uses them: those of all rows would
    fill a thread's registers. Negative numbers are large ones without a sign."""
    zero, rows = _zero(col).to(tl.uint32, bitcast=True), rows.to(tl.uint32, bitcast=True)
    # divided and multiplied to show their divisibility
    pitch, width = (pitch.to(tl.uint32) + zero) // UNIT * UNIT, width.to(tl.uint32) // UNIT * UNIT
    inside = (rows < height.to(tl.uint32) + zero)[:, None] & (cols.to(tl.uint32, bitcast=True) < width)[None, :]
    return pointer + rows.to(tl.uint64)[:, None] * pitch.to(tl.uint64) + cols[None, :], inside


def _row_access(t: Trace, g: Traced, tile: Traced, rows: Traced, col: Traced, what: str) -> list[tuple[Traced, Traced]]:
    """Return pointers and mask of each piece of a tile, for threads that copy 16 bytes."""
    if not is_even(g):
        raise TileError(f"{what} by threads: rows of the tensor are no multiple of 16 bytes")
    height, width, pitch = (t.scalar(n) for n in (*extents_of(g), strides_of(g)[0]))
    col = t.scalar(col)
    first = t.call(_first_column, col, tl.constexpr(sum(axes_of(tile)[1])))
    unit = tl.constexpr(max(1, BULK // itemsize(g.pointer.dtype.element_ty)))
    found = []
    for piece, cols in zip(pieces_of(tile), indices(t, tile, 1, first), strict=True):
        numbers = t.vector(pieces_of(rows)[0], 0, piece)
        found.append(t.call(_pointers, g.pointer, numbers, cols, col, height, width, pitch, unit))
    return found


@op
def row_arrivals(t: Trace, warps: Traced) -> Traced:
    """Return how often `load_rows_async`, in a role of `warps` warps, arrives at its semaphore, a constant: once by
    TMA, which `expect_rows` does, and otherwise once for each thread."""
    return tl.constexpr(1 if gathers_by_tma(t.arch) else WARP * unwrap(warps))


@op
def expect_rows(t: Trace, sem: Traced, what: Traced) -> None:
    """Announce the copies of `load_rows_async` to the tile `what` at the semaphore `sem`: the bytes of TMA, as of
    `expect`. Threads that copy announce nothing: each arrives when its copies have landed."""
    if gathers_by_tma(t.arch):
        t.call(expect, sem, what)


@op
def load_rows_async(t: Trace, dst: Traced, src: Traced, rows: Traced, col: Traced, arrived: Traced) -> None:
    """Start copying rows of a matrix to a shared tile, without waiting: row i of the tile is row `rows[i]`.

    Args:
        dst: a shared tile whose rows are a power of two.
        src: a global layout of two dimensions. On sm_100a and sm_103a it needs a descriptor for single rows,
            `tk.gl(x, tk.by_rows(tile))`; elsewhere its rows are multiples of 16 bytes, as far apart.
        rows: a register vector with an int32 row number for each row of the tile. Rows outside the matrix are zeros.
        col: the coordinate along columns, in tiles.
        arrived: the semaphore on which the copies complete. It counts `tk.row_arrivals(warps)` arrivals for a role
            of `warps` warps, and `tk.expect_rows` announces the tile.

    Raises:
        TileError: for another tile, vector or layout.

    On sm_90a threads of the role copy, 16 bytes each at a time. Their copies are ordinary writes: after its wait, who
    reads the tile by a product or TMA calls `fence_async`.
    Source: PTX ISA, cp.async.bulk.tensor.2d.tile::gather4; cp.async, cp.async.mbarrier.arrive.noinc.

    Example::

        arrived = tk.semaphores(1, tk.row_arrivals(4))
        tk.expect_rows(arrived[0], tile)
        tk.load_rows_async(tile, X, tk.load(ROWS, tk.rv(tk.int32, 64), (block,)), 0, arrived[0])
    """
    if not isinstance(arrived, semaphore):
        raise TileError(f"load_rows_async(arrived={unwrap(arrived)!r}): needs a semaphore")
    _check(t, dst, src, rows, "load_rows_async")
    bill().copied += dst.nbytes
    if gathers_by_tma(t.arch):
        numbers, copies = _copies(t, dst, src, rows, col, "load_rows_async")
        for m, column, piece in copies:
            t.call(blackwell.tma.async_gather, m, numbers, column, arrived.barrier(t), piece)
        return
    _same_type(src, dst.dtype, f"load_rows_async of {dst.spec!r}")
    places = _row_access(t, src, _frame(t, dst), rows, col, f"load_rows_async of {dst.spec!r}")
    for piece, (pointers, mask) in zip(dst.pieces, places, strict=True):
        t.call(async_copy.async_load, piece, pointers, mask=mask)
    t.call(async_copy.mbarrier_arrive, arrived.barrier(t), increment_count=False)


@triton.jit
def _skipped(rows, extent):
    return tl.where(rows < 0, extent, rows)


@op
def store_rows_async(t: Trace, dst: Traced, src: Traced, rows: Traced, col: Traced) -> None:
    """Start copying a shared tile to rows of a matrix: row i of the tile to row `rows[i]`.

    Arguments and errors as in `load_rows_async`. Rows outside the matrix are skipped; `col` is not negative. Where two
    numbers are equal, either row may remain. If registers wrote the tile, call `fence_async` first. TMA commits each
    copy of four rows as a group; wait with `store_wait` or `store_read_wait`. Threads have read the tile when the
    function returns. Source: PTX ISA, cp.async.bulk.tensor.2d.tile::scatter4.
    """
    _check(t, src, dst, rows, "store_rows_async")
    if gathers_by_tma(t.arch):
        numbers, copies = _copies(t, src, dst, rows, col, "store_rows_async")
        numbers = t.call(_skipped, numbers, dst.maps[0].shape[-2])  # TMA takes no negative ones
        for m, column, piece in copies:
            t.call(blackwell.tma.async_scatter, m, numbers, column, piece)
            bill().stored += 1
        bill().stored_bytes += src.nbytes
        return
    _same_type(dst, src.dtype, f"store_rows_async of {src.spec!r}")
    value = load_shared(t, src, "memory", None)
    places = _row_access(t, dst, value, rows, col, f"store_rows_async of {src.spec!r}")
    for v, (pointers, mask) in zip(pieces_of(value), places, strict=True):
        t.call(gl.store, pointers, v, mask)


__all__ = ["expect_rows", "load_rows_async", "row_arrivals", "store_rows_async"]
