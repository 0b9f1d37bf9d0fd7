"""Reductions and scans of register tiles: along rows (to a column vector), along columns (to a row vector), or to a
scalar.

A maximum or minimum keeps the tile's dtype. Sums, products, means, norms and cumulative sums are computed and
returned in fp32 for every float, and in int32 for integers of up to 32 bits.
Maxima and minima ignore NaN, as PTX `max` and `min` do.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Callee, Trace, Traced, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import itemsize, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.interpreter import in_fp32
from tritonkittens.lang.core.records import apply_pieces, assemble, axes_of, dtype_of, pieces_of, shape_of
from tritonkittens.lang.register.broadcast import combine, exp2_row
from tritonkittens.lang.register.construction import index_tiles, iota, is_accumulator, memory_layout
from tritonkittens.lang.register.elementwise import _add, _mul

NO_INDEX = 2**31 - 1  # larger than every index


@triton.jit
def _reduce_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _mul)


_JOIN: dict[str, tuple[Callee, Callee]] = {
    "max": ("max", "maximum"),
    "min": ("min", "minimum"),
    "sum": ("sum", _add),
    "prod": (_reduce_prod, _mul),
}


def _widened(t: Trace, x: Traced) -> Traced:
    """Convert a tile to the dtype in which it is summed."""
    dtype = dtype_of(x)
    if dtype.is_floating():
        wide = tl.float32
    else:
        wide = dtype if dtype.primitive_bitwidth >= 32 else tl.int32
    return x if dtype == wide else apply_pieces(t, lambda p: t.method(p, "to", wide), x)


def _lines(x: Traced, axis: int) -> list[list[Traced]]:
    """Group the pieces of a tile by their result of a reduction over `axis` (1: along a row)."""
    axes, pieces = axes_of(x), pieces_of(x)
    down, across = len(axes[0]), len(axes[1])
    if axis == 1:
        return [[pieces[i * across + j] for j in range(across)] for i in range(down)]
    return [[pieces[i * across + j] for i in range(down)] for j in range(across)]


@triton.jit
def _with_first(pairs, more, index):
    return tl.where(index[None, :, None] == 0, pairs + more[:, None, :], pairs)


def _by_quad(t: Trace, reduce: Callee, piece: Traced, before: Traced = None) -> Traced:
    """Reduce an accumulator's rows within each lane of a quad, to rows × 4. The first element of each chain also adds
    the sums `before`.
    """
    rows, cols = (int(unwrap(extent)) for extent in piece.shape)
    pairs = t.call(reduce, t.call("reshape", piece, (rows, cols // 8, 4, 2)), 3)
    if before is not None:
        if t.explicit:
            layout = pairs.type.layout
            before = t.convert(before, gl.SliceLayout(1, layout))
            index = t.semantic.arange(0, cols // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        else:
            index = t.call("arange", 0, cols // 8)
        pairs = t.call(_with_first, pairs, before, index)
    return t.call(reduce, pairs, 1)


def _joined(t: Trace, join: Callee, parts: list[Traced]) -> Traced:
    """Combine tensors of one shape, whose layouts may differ."""
    total = parts[0]
    for part in parts[1:]:
        total = t.call(join, total, t.relayout(part, total))
    return total


def reduce_axis(t: Trace, x: Traced, kind: str, axis: int) -> Traced:
    """Reduce a tile over `axis` to a vector, in the dtypes of this module's rule."""
    if len(axes_of(x)) != 2:
        raise TileError(
            f"{'row' if axis else 'col'}_{kind} of shape {list(shape_of(x))}: needs a register tile of two axes"
        )
    (reduce, join), dtype = _JOIN[kind], dtype_of(x)
    x = _widened(t, x)
    vectors = []
    for line in _lines(x, axis):
        if axis == 1 and len(line) > 1 and all(is_accumulator(t, piece) for piece in line):
            # so that lanes exchange the values of all pieces once
            quads = _joined(t, join, [_by_quad(t, reduce, piece) for piece in line])
            total = t.convert(t.call(reduce, quads, 1), gl.SliceLayout(1, line[0].type.layout))
        else:
            total = _joined(t, join, [t.call(reduce, piece, axis) for piece in line])
        vectors.append(t.method(total, "to", dtype) if kind in ("max", "min") and total.dtype != dtype else total)
    return assemble((axes_of(x)[1 - axis],), vectors)


_MEANING = {"max": "The largest element", "min": "The smallest element", "sum": "The sum", "prod": "The product"}


def _reduction_doc(name: str, kind: str, axis: int) -> str:
    line, vector, length = (
        ("row", "column vector (`col_vec`)", "rows") if axis == 1 else ("column", "row vector (`row_vec`)", "cols")
    )
    keeps = kind in ("max", "min")
    dtype = (
        "of the tile's dtype; NaN elements are ignored" if keeps else "fp32 for a tile of floats, int32 for integers"
    )
    return (
        f"{_MEANING[kind]} of each {line} of a tile.\n\n`x` is a register tile (rows × cols) of any extents. Returns "
        f"a {vector}\n"
        f"of `{length}` elements, {dtype}.\n"
        f"`accumulate` is a vector of the result's length and type to join with: `m = tk.{name}(x, accumulate=m)`.\n"
        "Raises `TileError` for anything but a tile of two axes, or where `accumulate` does not fit."
    )


def _reduction(name: str, kind: str, axis: int) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced, accumulate: Traced = None) -> Traced:
        out = reduce_axis(t, x, kind, axis)
        accumulate = unwrap(accumulate)
        if accumulate is None:
            return out
        if axes_of(accumulate) != axes_of(out) or dtype_of(accumulate) != dtype_of(out):
            raise TileError(
                f"{name}(accumulate): a tile of {name_of(dtype_of(x))} and shape {list(shape_of(x))} needs a vector of "
                f"{shape_of(out)[0]} elements of {dtype_of(out)}, got {dtype_of(accumulate)} of shape "
                f"{list(shape_of(accumulate))}"
            )
        return apply_pieces(t, in_fp32(t, lambda a, b: t.call(_JOIN[kind][1], a, b)), out, accumulate)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = _reduction_doc(name, kind, axis)
    return op(operation)


row_max, col_max = _reduction("row_max", "max", 1), _reduction("col_max", "max", 0)
row_min, col_min = _reduction("row_min", "min", 1), _reduction("col_min", "min", 0)
row_sum, col_sum = _reduction("row_sum", "sum", 1), _reduction("col_sum", "sum", 0)
row_prod, col_prod = _reduction("row_prod", "prod", 1), _reduction("col_prod", "prod", 0)


@op
def row_sum_by_quad(t: Trace, x: Traced, accumulate: Traced = None) -> Traced:
    """Compute partial row sums: element q of a row sums the columns c with (c // 2) % 4 = q.

    Args:
        x: a register tile (rows × cols).
        accumulate: earlier partial sums (rows × 4), to which the new ones are added.

    Returns:
        A tile (rows × 4) in the dtype of `row_sum`. Its `row_sum` is the row sum of `x`.

    Raises:
        TileError: for a vector, or where `accumulate` does not fit.

    In an accumulator's layout, one lane of a quad holds these columns. So a sum over many tiles needs its shuffles
    only once, at the end.
    Earlier sums are the first operand of the chain of additions. ptxas then rescales them early, in parallel with the
    exponentials.
    """
    axes, accumulate = axes_of(x), unwrap(accumulate)
    if len(axes) != 2:
        raise TileError(f"row_sum_by_quad of shape {list(shape_of(x))}: needs a register tile of two axes")
    x = _widened(t, x)
    if accumulate is not None and (axes_of(accumulate) != (axes[0], (4,)) or dtype_of(accumulate) != dtype_of(x)):
        raise TileError(
            f"row_sum_by_quad(accumulate) of shape {list(shape_of(x))}: needs sums of {name_of(dtype_of(x))} and shape "
            f"[{shape_of(x)[0]}, 4], got {dtype_of(accumulate)} of shape {list(shape_of(accumulate))}"
        )
    (reduce, join), lines = _JOIN["sum"], _lines(x, 1)
    before = [None] * len(lines) if accumulate is None else pieces_of(accumulate)
    out = [
        _joined(t, join, [_by_quad(t, reduce, piece, sums if i == 0 else None) for i, piece in enumerate(line)])
        for line, sums in zip(lines, before, strict=True)
    ]
    return assemble((axes[0], (4,)), out)


def _to_scalar(name: str) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced) -> Traced:
        if len(axes_of(x)) not in (1, 2):
            raise TileError(f"{name} of {unwrap(x)!r}: needs a register tile or vector")
        (reduce, join), dtype = _JOIN[name], dtype_of(x)
        v = reduce_axis(t, _widened(t, x), name, 1) if len(axes_of(x)) == 2 else _widened(t, x)
        parts = [t.call(reduce, p, 0) for p in pieces_of(v)]
        total = parts[0]
        for part in parts[1:]:
            total = t.call(join, total, part)
        return t.method(total, "to", dtype) if name in ("max", "min") else total

    operation.__name__ = operation.__qualname__ = name
    dtype = (
        "of its dtype (NaN elements are ignored)" if name in ("max", "min") else "fp32 for floats, int32 for integers"
    )
    operation.__doc__ = (
        f"{_MEANING[name]} of all elements of a register tile or vector `x`: a scalar, "
        f"{dtype}.\n\nRaises `TileError` for anything else."
    )
    return op(operation)


max = _to_scalar("max")
min = _to_scalar("min")
sum = _to_scalar("sum")
prod = _to_scalar("prod")


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _scale(x, factor):
    return x * factor


def _mean_or_norm(name: str, axis: int, norm: bool) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced) -> Traced:
        if len(axes_of(x)) != 2:
            raise TileError(f"{name} of shape {list(shape_of(x))}: needs a register tile of two axes")
        x = apply_pieces(t, lambda p: t.method(p, "to", tl.float32), x)
        if norm:
            squares = reduce_axis(t, apply_pieces(t, lambda p: t.call(_square, p), x), "sum", axis)
            return apply_pieces(t, lambda p: t.call("sqrt", p), squares)
        total = reduce_axis(t, x, "sum", axis)
        return apply_pieces(t, lambda p: t.call(_scale, p, 1.0 / shape_of(x)[axis]), total)

    operation.__name__ = operation.__qualname__ = name
    line, vector = ("row", "column vector (rows)") if axis else ("column", "row vector (cols)")
    what = "Euclidean norm" if norm else "mean"
    operation.__doc__ = (
        f"The {what} of each {line} of a tile `x` (rows × cols) of any dtype: an fp32 "
        f"{vector}.\n\nRaises `TileError` for a vector."
    )
    return op(operation)


row_mean, col_mean = _mean_or_norm("row_mean", 1, False), _mean_or_norm("col_mean", 0, False)
row_norm, col_norm = _mean_or_norm("row_norm", 1, True), _mean_or_norm("col_norm", 0, True)


@triton.jit
def _index_where(x, extreme, index, none):
    return tl.where(x == extreme, index, none)


def _arg(name: str, kind: str, axis: int) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced) -> Traced:
        if len(axes_of(x)) != 2:
            raise TileError(f"{name} of shape {list(shape_of(x))}: needs a register tile of two axes")
        x = _widened(t, x)
        extreme = reduce_axis(t, x, kind, axis)
        where = iter(index_tiles(t, x, 0, 0)[axis])
        hits = combine(t, name, lambda p, v: t.call(_index_where, p, v, next(where), NO_INDEX), x, extreme, 1 - axis)
        return reduce_axis(t, hits, "min", axis)

    operation.__name__ = operation.__qualname__ = name
    line, vector, index = ("row", "column vector (rows)", "column") if axis else ("column", "row vector (cols)", "row")
    operation.__doc__ = (
        f"The {index} of the first {kind}imum of each {line} of a tile `x` (rows × cols): an int32 {vector}.\n\n"
        f"NaN elements are ignored; a {line} of NaN only gives 2³¹ − 1. Raises `TileError` for a vector."
    )
    return op(operation)


row_argmax, col_argmax = _arg("row_argmax", "max", 1), _arg("col_argmax", "max", 0)
row_argmin, col_argmin = _arg("row_argmin", "min", 1), _arg("col_argmin", "min", 0)


@triton.jit
def _cumsum(x, axis: tl.constexpr):
    return tl.cumsum(x, axis)


@triton.jit
def _add_column(x, v):
    return x + v[:, None]


@triton.jit
def _add_row_vector(x, v):
    return x + v[None, :]


def _scan_piece(t: Trace, piece: Traced, axis: int) -> Traced:
    if not t.explicit:
        return t.call(_cumsum, piece, axis)
    # Triton has no scan of tensor-core layouts, so the scan converts to the row layout and back
    rows, cols = (int(unwrap(n)) for n in piece.shape)
    blocked = t.convert(piece, memory_layout(t, rows, cols, itemsize(piece.dtype)))
    return t.convert(t.call(_cumsum, blocked, axis), piece.type.layout)


def _scan(name: str, axis: int) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced) -> Traced:
        axes = axes_of(x)
        if len(axes) != 2:
            raise TileError(f"{name} of shape {list(shape_of(x))}: needs a register tile of two axes")
        x, scanned = _widened(t, x), []
        for line in _lines(x, axis):
            done: list[Traced] = []
            carry = None
            for piece in line:
                out = _scan_piece(t, piece, axis)
                if carry is not None:
                    out = t.call(_add_column if axis else _add_row_vector, out, t.vector(carry, 1 - axis, out))
                total = t.call("sum", piece, axis)
                carry = total if carry is None else t.call(_add, carry, t.relayout(total, carry))
                done.append(out)
            scanned.append(done)
        rows = scanned if axis == 1 else [list(r) for r in zip(*scanned, strict=True)]
        return assemble(axes, [p for r in rows for p in r])

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = (
        f"Running sum along each {'row' if axis else 'column'} of a tile `x` (rows × cols).\n\n"
        "Returns a tile of its shape, fp32 for floats, int32 for integers. Raises `TileError` for a vector."
    )
    return op(operation)


row_cumsum, col_cumsum = _scan("row_cumsum", 1), _scan("col_cumsum", 0)


@triton.jit
def _where_differs(index, column, value, other):
    return tl.where(index != column, value, other)


@op
def row_topk(t: Trace, x: Traced, k: Traced) -> Traced:
    """Return the `k` largest values of each row, in descending order, and their columns.

    Args:
        x: a register tile (rows × cols) of floats. NaN elements are ignored.
        k: a compile-time integer, 1 … cols. The operation makes `k` passes over the tile.

    Returns:
        Two tuples of `k` column vectors (rows), values in the dtype of `x` and int32 columns. Equal values come from
        left to right.

    Raises:
        TileError: for another `k`, a vector or integer elements.
    """
    k = unwrap(k)
    if len(axes_of(x)) != 2:
        raise TileError(f"row_topk of shape {list(shape_of(x))}: needs a register tile of two axes")
    if not isinstance(k, int) or not 0 < k <= shape_of(x)[1]:
        raise TileError(f"row_topk(k={k!r}): must be between 1 and the {shape_of(x)[1]} columns of the tile")
    if not dtype_of(x).is_floating():
        raise TileError(f"row_topk: needs floating-point elements, got {name_of(dtype_of(x))}")
    dtype, x = dtype_of(x), _widened(t, x)
    free, values, columns = t.call(iota, x), [], []
    for _ in range(k):
        best = reduce_axis(t, x, "max", 1)
        rest = iter(pieces_of(free))
        # only unused columns count: where fewer than k elements are finite, −∞ is selected column by column
        hits = combine(
            t, "row_topk", lambda p, v, rest=rest: t.call(_index_where, p, v, next(rest), NO_INDEX), x, best, 0
        )
        column = reduce_axis(t, hits, "min", 1)
        rest = iter(pieces_of(free))
        x = combine(
            t, "row_topk", lambda p, v, rest=rest: t.call(_where_differs, next(rest), v, p, float("-inf")), x, column, 0
        )
        free = combine(t, "row_topk", lambda p, v: t.call(_where_differs, p, v, p, NO_INDEX), free, column, 0)
        values.append(best if dtype == tl.float32 else apply_pieces(t, lambda p: t.method(p, "to", dtype), best))
        columns.append(column)
    return tl.tuple([tl.tuple(values), tl.tuple(columns)]) if not t.interpreted else (tuple(values), tuple(columns))


@triton.jit
def _rescale(m_old, m_new, scale):
    # fully masked rows have m = −∞, and −∞ − (−∞) would be NaN
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2((m_old - safe) * scale), safe * scale


@op
def softmax_step(t: Trace, s: Traced, m: Traced, l: Traced, scale: Traced = 1.0) -> Traced:  # noqa: E741
    """Compute one step of the online softmax in base 2.

    Args:
        s: scores (rows × cols), fp32.
        m: the running maximum (column vector, rows), fp32.
        l: the running sum (column vector, rows), fp32.
        scale: a number or scalar; it includes log2(e) for a natural softmax.

    Returns:
        (p, m', l', alpha), all fp32. m' = max(m, row_max(s)), p = exp2(s·scale − m'·scale), alpha = exp2((m −
        m')·scale), l' = l·alpha + row_sum(p). Multiply the earlier output by alpha. A row whose scores are all −∞ so
        far has p = 0.

    Example::

        p, m, l, alpha = tk.softmax_step(s, m, l, scale=LOG2E * sm_scale)
        o = tk.mul_row(o, alpha)

    Source: FlashAttention-2, algorithm 1.
    """
    m_new = apply_pieces(t, lambda a, b: t.call("maximum", a, b), m, reduce_axis(t, s, "max", 1))
    pairs = [t.call(_rescale, a, t.relayout(b, a), scale) for a, b in zip(pieces_of(m), pieces_of(m_new), strict=True)]
    alpha, shift = assemble(axes_of(m), [p[0] for p in pairs]), assemble(axes_of(m), [p[1] for p in pairs])
    p = t.call(exp2_row, s, scale, shift)
    total = reduce_axis(t, p, "sum", 1)
    l_new = apply_pieces(t, lambda a, b, c: t.method(t.method(a, "__mul__", b), "__add__", c), l, alpha, total)
    return p, m_new, l_new, alpha


@op
def hasnan(t: Trace, x: Traced) -> Traced:
    """Return 1 (int32 scalar) if any element of a float tile or vector `x` is NaN, else 0. For debugging."""
    flags = apply_pieces(t, in_fp32(t, lambda p: t.method(t.method(p, "__ne__", p), "to", tl.int32)), x)
    return t.call(max, flags)
