"""Operations on a tile and a vector. `*_row` takes a column vector (one value per row), `*_col` a row vector (one
value per column).
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from tritonkittens.inline_ptx import math as ptx_math
from tritonkittens.lang.core.backend import Callee, Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.interpreter import in_fp32
from tritonkittens.lang.core.records import assemble, axes_of, dtype_of, pieces_of, shape_of
from tritonkittens.lang.register.construction import _column, _row
from tritonkittens.lang.register.elementwise import _add, _div, _eq, _ge, _gt, _le, _lt, _mul, _ne, _sub, refuse_fp8
from tritonkittens.lang.register.exponential import check_share, exp2_piece


def _check(name: str, x: Traced, v: Traced, axis: int) -> None:
    if len(axes_of(x)) != 2:
        raise TileError(f"{name}: the first operand has shape {list(shape_of(x))}; it must be a tile of two axes")
    if axes_of(v) != (axes_of(x)[axis],):
        kind = "one value per row" if axis == 0 else "one value per column"
        raise TileError(
            f"{name}: a tile of shape {list(shape_of(x))} needs a vector of {shape_of(x)[axis]} elements ({kind}), "
            f"got {list(shape_of(v))}"
        )


def combine(t: Trace, name: str, fn: Callable[..., Traced], x: Traced, v: Traced, axis: int) -> Traced:
    """Apply `fn(piece, vector broadcast along the other axis)` to every piece. Axis 0: one value per row, 1: one
    value per column.
    """
    _check(name, x, v, axis)
    axes, pieces, vectors = axes_of(x), pieces_of(x), pieces_of(v)
    across = len(axes[1])
    out = []
    for i in range(len(axes[0])):
        for j in range(across):
            piece = pieces[i * across + j]
            vector = t.vector(vectors[j if axis else i], axis, piece)
            out.append(fn(piece, t.call(_row if axis else _column, vector)))
    return assemble(axes, out)


def _broadcast_op(name: str, fn: Callee, symbol: str, axis: int) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced, v: Traced) -> Traced:
        refuse_fp8(name, x, v)
        return combine(t, name, in_fp32(t, lambda p, w: t.call(fn, p, w)), x, v, axis)

    operation.__name__ = operation.__qualname__ = name
    kind = (
        "one value per row (a column vector, `rows` elements)"
        if axis == 0
        else "one value per column (a row vector, `cols` elements)"
    )
    operation.__doc__ = (
        f"Compute x {symbol} v for a tile `x` (rows × cols) and a vector `v` with {kind}.\n\n"
        "Returns a tile of the shape of `x`. Raises `TileError` where the lengths do not fit or elements are fp8."
    )
    return op(operation)


add_row, add_col = _broadcast_op("add_row", _add, "+", 0), _broadcast_op("add_col", _add, "+", 1)
sub_row, sub_col = _broadcast_op("sub_row", _sub, "−", 0), _broadcast_op("sub_col", _sub, "−", 1)
mul_row, mul_col = _broadcast_op("mul_row", _mul, "·", 0), _broadcast_op("mul_col", _mul, "·", 1)
div_row, div_col = _broadcast_op("div_row", _div, "/", 0), _broadcast_op("div_col", _div, "/", 1)
max_row, max_col = _broadcast_op("max_row", "maximum", "max", 0), _broadcast_op("max_col", "maximum", "max", 1)
min_row, min_col = _broadcast_op("min_row", "minimum", "min", 0), _broadcast_op("min_col", "minimum", "min", 1)
lt_row, lt_col = _broadcast_op("lt_row", _lt, "<", 0), _broadcast_op("lt_col", _lt, "<", 1)
le_row, le_col = _broadcast_op("le_row", _le, "≤", 0), _broadcast_op("le_col", _le, "≤", 1)
gt_row, gt_col = _broadcast_op("gt_row", _gt, ">", 0), _broadcast_op("gt_col", _gt, ">", 1)
ge_row, ge_col = _broadcast_op("ge_row", _ge, "≥", 0), _broadcast_op("ge_col", _ge, "≥", 1)
eq_row, eq_col = _broadcast_op("eq_row", _eq, "=", 0), _broadcast_op("eq_col", _eq, "=", 1)
ne_row, ne_col = _broadcast_op("ne_row", _ne, "≠", 0), _broadcast_op("ne_col", _ne, "≠", 1)


def _spread(t: Trace, piece: Traced, vector: Traced) -> Traced:
    return t.call("broadcast_to", vector, tuple(int(unwrap(n)) for n in piece.shape))


@op
def broadcast_row(t: Trace, x: Traced, v: Traced) -> Traced:
    """Repeat a column vector `v` (rows) along the columns of a tile `x` (rows × cols).

    Returns a tile of the shape and layout of `x` and the dtype of `v`. Raises `TileError` where the lengths differ.
    """
    return combine(t, "broadcast_row", lambda p, w: _spread(t, p, w), x, v, 0)


@op
def broadcast_col(t: Trace, x: Traced, v: Traced) -> Traced:
    """Repeat a row vector `v` (cols) along the rows of a tile `x` (rows × cols).

    Returns a tile of the shape and layout of `x` and the dtype of `v`. Raises `TileError` where the lengths differ.
    """
    return combine(t, "broadcast_col", lambda p, w: _spread(t, p, w), x, v, 1)


@triton.jit
def _affine(x, v, scale):
    return x * scale - v


@triton.jit
def _affine_pairs(x, v, scale):
    return ptx_math.fma_f32x2(x, scale, 0 - v)


def _exp2_op(name: str, axis: int) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced, scale: Traced, v: Traced, fma_share: Traced = 0) -> Traced:
        if dtype_of(x) != tl.float32:
            raise TileError(f"{name}: needs an fp32 tile, got {name_of(dtype_of(x))}")
        number = check_share(name, fma_share)
        affine = _affine_pairs if not t.interpreted and t.chip.f32x2 else _affine
        return combine(t, name, lambda p, w: exp2_piece(t, t.call(affine, p, w, scale), number), x, v, axis)

    operation.__name__ = operation.__qualname__ = name
    line, length, tail = ("column", "cols", " over columns") if axis else ("row", "rows", "")
    operation.__doc__ = (
        f"Compute exp2(x · scale − v) with one `v` per {line}: one fused multiply-add and one MUFU.EX2 an element.\n\n"
        f"`x` is an fp32 tile (rows × cols), `scale` a scalar, `v` an fp32 vector ({length}). This is a step of "
        f"softmax{tail}.\n`fma_share` is as in `exp2`.\n"
        "Returns an fp32 tile of the shape of `x`. Raises `TileError` for another dtype."
    )
    return op(operation)


exp2_row, exp2_col = _exp2_op("exp2_row", 0), _exp2_op("exp2_col", 1)
