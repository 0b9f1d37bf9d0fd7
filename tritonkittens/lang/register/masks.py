"""Masks of register tiles: every mask keeps a region and sets the other elements to `fill`.

`row` and `col` are the global coordinates of the tile's first element, in elements. Tiles have any extents and dtype;
the result has the tile's.
`fill` is a number or a run-time scalar. A number that the dtype cannot hold (−∞ in an int32 or e4m3 tile) raises
`TileError`.
"""

from __future__ import annotations

from collections.abc import Callable

import triton

from tritonkittens.lang.core.backend import Callee, Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import constant, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, axes_of, pieces_of, shape_of
from tritonkittens.lang.register.accumulator_masks import has_row_a_thread, is_fragment, keep_between
from tritonkittens.lang.register.construction import index_tiles, indices

NEG_INFTY = float("-inf")


@triton.jit
def _keep_left(row, col, a, b):
    return col < a


@triton.jit
def _keep_right(row, col, a, b):
    return col >= a


@triton.jit
def _keep_top(row, col, a, b):
    return row < a


@triton.jit
def _keep_bottom(row, col, a, b):
    return row >= a


@triton.jit
def _keep_lower(row, col, a, b):
    return col - row <= a


@triton.jit
def _keep_upper(row, col, a, b):
    return col - row >= a


@triton.jit
def _keep_not_corner(row, col, a, b):
    return (row >= a) | (col < b)


@triton.jit
def _keep_window(row, col, a, b):
    return (col >= row - a) & (col <= row + b)


@triton.jit
def _keep_block(row, col, a, b):
    return row // a == col // a


def _fill(t: Trace, name: str, x: Traced, kept: list[Traced], fill: Traced) -> Traced:
    """Return `x` where `kept` (one predicate tile a piece), else `fill` in the tile's dtype."""
    dtype = pieces_of(x)[0].dtype
    fill = constant(unwrap(fill), dtype, f"{name}: fill of a tile of {name_of(dtype)}")
    pieces = []
    for keep, p in zip(kept, pieces_of(x), strict=True):
        other = t.full(tuple(int(unwrap(n)) for n in p.shape), fill, dtype, getattr(p.type, "layout", None))
        pieces.append(t.call("where", keep, p, other))
    return assemble(axes_of(x), pieces)


@triton.jit
def _left_of(row, col, a, b):
    return row * 0 + a - col


@triton.jit
def _on_diagonal(row, col, a, b):
    return row + a - col


@triton.jit
def _behind_diagonal(row, col, a, b):
    return row + a + 1 - col


@triton.jit
def _window_begin(row, col, a, b):
    return row - a - col


@triton.jit
def _window_end(row, col, a, b):
    return row + b + 1 - col


# The first column that a predicate keeps and the first that it drops again, relative to the tile's first column `col`
_BOUNDS = {
    _keep_left: (None, _left_of),
    _keep_right: (_left_of, None),
    _keep_lower: (None, _behind_diagonal),
    _keep_upper: (_on_diagonal, None),
    _keep_window: (_window_begin, _window_end),
}


def _mask(
    t: Trace, name: str, x: Traced, keep: Callee, fill: Traced, row: Traced, col: Traced, a: Traced = 0, b: Traced = 0
) -> Traced:
    if len(axes_of(x)) != 2:
        raise TileError(f"{name} of shape {list(shape_of(x))}: needs a register tile of two axes")
    if (
        keep in _BOUNDS
        and isinstance(unwrap(fill), (int, float))
        and t.explicit
        and all(is_fragment(p) or has_row_a_thread(t, p) for p in pieces_of(x))
    ):
        begins = [sum(axes_of(x)[1][:j]) for _ in axes_of(x)[0] for j in range(len(axes_of(x)[1]))]
        out = []
        for piece, rows, begin in zip(pieces_of(x), indices(t, x, 0, row), begins, strict=True):
            first = t.method(t.scalar(col), "__add__", begin)
            lower, upper = (
                None if f is None else t.call(f, rows, first, t.scalar(a), t.scalar(b)) for f in _BOUNDS[keep]
            )
            out.append(keep_between(t, piece, lower, upper, float(unwrap(fill))))
        return assemble(axes_of(x), out)
    rows, cols = index_tiles(t, x, row, col)
    return _fill(t, name, x, [t.call(keep, r, c, a, b) for r, c in zip(rows, cols, strict=True)], fill)


_ORIGIN = """

`row` and `col` are the global coordinates of the tile's first element, in elements. Returns a tile of the shape and
dtype of `x`."""


def _causal(name: str, keep: Callee, text: str) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced, fill: Traced = NEG_INFTY, row: Traced = 0, col: Traced = 0) -> Traced:
        return _mask(t, name, x, keep, fill, row, col)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = text + _ORIGIN
    return op(operation)


make_causal = _causal(
    "make_causal", _keep_lower, "Keep col ≤ row of a tile `x`; the rest becomes `fill`, −∞ by default."
)
make_causal_t = _causal(
    "make_causal_t", _keep_upper, "Keep col ≥ row of a tile `x`; the rest becomes `fill`, −∞ by default."
)


@op
def tril(t: Trace, x: Traced, diagonal: Traced = 0, fill: Traced = 0.0, row: Traced = 0, col: Traced = 0) -> Traced:
    """Keep the elements with col − row ≤ `diagonal`, as `torch.tril`; the rest becomes `fill`.

    `row` and `col` are the global coordinates of the first element of the tile `x` (rows × cols), in elements.
    Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "tril", x, _keep_lower, fill, row, col, diagonal)


@op
def triu(t: Trace, x: Traced, diagonal: Traced = 0, fill: Traced = 0.0, row: Traced = 0, col: Traced = 0) -> Traced:
    """Keep the elements with col − row ≥ `diagonal`, as `torch.triu`; the rest becomes `fill`.

    `row` and `col` are the global coordinates of the first element of the tile `x` (rows × cols), in elements.
    Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "triu", x, _keep_upper, fill, row, col, diagonal)


@op
def left_fill(t: Trace, x: Traced, index: Traced, fill: Traced = 0.0) -> Traced:
    """Set the columns < `index` of a tile `x` (rows × cols) to `fill`.

    `index` is a number or an int32 scalar. Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "left_fill", x, _keep_right, fill, 0, 0, index)


@op
def right_fill(t: Trace, x: Traced, index: Traced, fill: Traced = 0.0) -> Traced:
    """Set the columns ≥ `index` of a tile `x` (rows × cols) to `fill`. With −∞ this masks the last, partial key block
    of attention.

    `index` is a number or an int32 scalar. Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "right_fill", x, _keep_left, fill, 0, 0, index)


@op
def upper_fill(t: Trace, x: Traced, index: Traced, fill: Traced = 0.0) -> Traced:
    """Set the rows < `index` of a tile `x` (rows × cols) to `fill`.

    `index` is a number or an int32 scalar. Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "upper_fill", x, _keep_bottom, fill, 0, 0, index)


@op
def lower_fill(t: Trace, x: Traced, index: Traced, fill: Traced = 0.0) -> Traced:
    """Set the rows ≥ `index` of a tile `x` (rows × cols) to `fill`.

    `index` is a number or an int32 scalar. Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "lower_fill", x, _keep_top, fill, 0, 0, index)


@op
def upper_right_fill(t: Trace, x: Traced, row_index: Traced, col_index: Traced, fill: Traced = 0.0) -> Traced:
    """Set the elements with row < `row_index` and col ≥ `col_index` of a tile `x` (rows × cols) to `fill`.

    The indices are numbers or int32 scalars. Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "upper_right_fill", x, _keep_not_corner, fill, 0, 0, row_index, col_index)


@op
def sliding_window(
    t: Trace, x: Traced, left: Traced, right: Traced, fill: Traced = NEG_INFTY, row: Traced = 0, col: Traced = 0
) -> Traced:
    """Keep the elements with row − `left` ≤ col ≤ row + `right`; the rest becomes `fill`.

    `row` and `col` are the global coordinates of the first element of the tile `x` (rows × cols), in elements.
    Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "sliding_window", x, _keep_window, fill, row, col, left, right)


@op
def block_diagonal(
    t: Trace, x: Traced, block: Traced, fill: Traced = NEG_INFTY, row: Traced = 0, col: Traced = 0
) -> Traced:
    """Keep the elements whose row and column fall into the same block of `block` elements; the rest becomes `fill`.

    `row` and `col` are the global coordinates of the first element of the tile `x` (rows × cols), in elements.
    Returns a tile of the shape and dtype of `x`.
    """
    return _mask(t, "block_diagonal", x, _keep_block, fill, row, col, block)


@op
def mask(t: Trace, x: Traced, predicate: Traced, fill: Traced = NEG_INFTY, row: Traced = 0, col: Traced = 0) -> Traced:
    """Keep the elements where `predicate(row, col)` holds; the rest becomes `fill`.

    Args:
        x: a register tile (rows × cols) of any dtype.
        predicate: a `@triton.jit` function of int32 index tiles that broadcast (rows × 1 and 1 × cols).
        fill: a number or a run-time scalar, −∞ by default.
        row: the global row of the first element, in elements.
        col: the global column of the first element.

    Returns:
        A tile of the shape and dtype of `x`.

    Raises:
        TileError: for a vector, or a `fill` that the dtype cannot hold.
    """
    if len(axes_of(x)) != 2:
        raise TileError(f"mask of shape {list(shape_of(x))}: needs a register tile of two axes")
    rows, cols = index_tiles(t, x, row, col)
    return _fill(t, "mask", x, [t.call(unwrap(predicate), r, c) for r, c in zip(rows, cols, strict=True)], fill)
