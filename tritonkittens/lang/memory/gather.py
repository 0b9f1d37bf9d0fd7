"""Rows of a matrix, selected by row numbers in a register vector."""

from __future__ import annotations

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import axes_of, pieces_of, shape_of
from tritonkittens.lang.memory.global_access import _access, _load_global, _register_type
from tritonkittens.lang.types.global_layout import check_global, rank_of
from tritonkittens.lang.types.tiles import rt, split


def _row_numbers(
    t: Trace, g: Traced, rows: Traced, extent: int, cuts: tuple[int, ...], col: Traced, name: str
) -> list[Traced]:
    """Check a gather or scatter. Return its coordinates, with a placeholder for the rows."""
    t.require_explicit(name)
    if rank_of(g) < 2:
        raise TileError(f"{name}: the tensor has one dimension; rows need two")
    if axes_of(rows) != (cuts,) or not rows.dtype.is_int():
        have = f"shape {list(shape_of(rows))} of {name_of(rows.dtype)}" if axes_of(rows) else repr(rows)
        raise TileError(
            f"{name}: needs a vector of {extent} integer row numbers, one for each row of the tile, got {have}"
        )
    col = unwrap(col)
    col = list(col) if isinstance(col, (tuple, list, tl.tuple)) else [col]
    if len(col) != rank_of(g) - 1:
        raise TileError(
            f"{name}: {len(col)} coordinates besides the rows for a tensor of {rank_of(g)} dimensions; give one for "
            "each other dimension"
        )
    return [*col[:-1], 0, col[-1]]


@op
def gather_rows(t: Trace, src: Traced, what: Traced, rows: Traced, col: Traced = 0, fill: Traced = 0.0) -> Traced:
    """Load a register tile whose row i is row `rows[i]` of a global layout.

    Args:
        src: a global layout of two or more dimensions.
        what: the register tile type (`rt`).
        rows: an integer vector with one row number per row of the tile.
        col: the coordinate along columns, in tiles. With more than two dimensions, a tuple of the leading coordinates
            and this one.
        fill: the value of rows and columns outside the tensor.

    Returns:
        A register tile of type `what`.

    Raises:
        TileError: for another type, vector or number of coordinates.
    """
    check_global(src, "gather_rows")
    spec = _register_type(what, "gather_rows")
    if not isinstance(spec, rt):
        raise TileError(f"gather_rows of {spec!r}: gathers the rows of a register tile (rt)")
    coord = _row_numbers(t, src, rows, spec.rows, split(spec.rows), col, "gather_rows")
    return _load_global(t, src, tuple(coord), spec, unwrap(fill), rows, "gather_rows")


@op
def scatter_rows(t: Trace, dst: Traced, value: Traced, rows: Traced, col: Traced = 0) -> None:
    """Store row i of a register tile to row `rows[i]` of a global layout. Rows and columns outside the tensor are
    skipped.

    Arguments and errors as in `gather_rows`. Where two rows have the same number, either one may remain.
    """
    check_global(dst, "scatter_rows")
    if len(axes_of(value)) != 2:
        raise TileError(f"scatter_rows of {value!r}: needs a register tile")
    coord = _row_numbers(t, dst, rows, shape_of(value)[0], axes_of(value)[0], col, "scatter_rows")
    for v, (pointers, mask) in zip(pieces_of(value), _access(t, dst, value, coord, rows), strict=True):
        t.call(gl.store, pointers, t.method(v, "to", dst.pointer.dtype.element_ty), mask)
