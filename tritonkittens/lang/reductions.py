"""Reductions and scans of register tiles: along rows (a column vector comes out), along columns (a row vector), or of everything (a scalar)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang._backend import Trace, op
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.maps import _add, _mul
from tritonkittens.lang.tiles import index_tiles
from tritonkittens.lang.types import unwrap
from tritonkittens.lang.values import apply_pieces, assemble, axes_of, pieces_of, shape_of
from tritonkittens.lang.vectors import combine, exp2_row


@triton.jit
def _reduce_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _mul)


_JOIN: dict[str, tuple[Any, Any]] = {"max": ("max", "maximum"), "min": ("min", "minimum"), "sum": ("sum", _add), "prod": (_reduce_prod, _mul)}


def _lines(x: Any, axis: int) -> list[list[Any]]:
    """The pieces of a tile grouped by what they share after reducing over `axis` (1: along a row)."""
    axes, pieces = axes_of(x), pieces_of(x)
    down, across = len(axes[0]), len(axes[1])
    if axis == 1:
        return [[pieces[i * across + j] for j in range(across)] for i in range(down)]
    return [[pieces[i * across + j] for i in range(down)] for j in range(across)]


def reduce_axis(t: Trace, x: Any, kind: str, axis: int) -> Any:
    """Reduce a tile over `axis` to a vector."""
    if len(axes_of(x)) != 2:
        raise TileError(f"{'row' if axis else 'col'}_{kind} of shape {list(shape_of(x))}: needs a tile of two axes")
    reduce, join = _JOIN[kind]
    vectors = []
    for line in _lines(x, axis):
        total = t.call(reduce, line[0], axis)
        for piece in line[1:]:
            total = t.call(join, total, t.relayout(t.call(reduce, piece, axis), total))
        vectors.append(total)
    return assemble((axes_of(x)[1 - axis],), vectors)


def _reduction(name: str, kind: str, axis: int) -> Callable[..., Any]:
    def operation(t: Trace, x: Any, accumulate: Any = None) -> Any:
        out = reduce_axis(t, x, kind, axis)
        if unwrap(accumulate) is None:
            return out
        return apply_pieces(t, lambda a, b: t.call(_JOIN[kind][1], a, b), out, accumulate)

    operation.__name__ = operation.__qualname__ = name
    what = ("each row", "column vector (rows)") if axis == 1 else ("each column", "row vector (cols)")
    operation.__doc__ = f"The {kind} of {what[0]} of a tile (rows × cols), a {what[1]}; joined with the vector `accumulate` where given."
    return op(operation)


row_max, col_max = _reduction("row_max", "max", 1), _reduction("col_max", "max", 0)
row_min, col_min = _reduction("row_min", "min", 1), _reduction("col_min", "min", 0)
row_sum, col_sum = _reduction("row_sum", "sum", 1), _reduction("col_sum", "sum", 0)
row_prod, col_prod = _reduction("row_prod", "prod", 1), _reduction("col_prod", "prod", 0)


@triton.jit
def _quad_sum(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.sum(tl.sum(tl.reshape(x, [ROWS, COLS // 8, 4, 2]), 3), 1)


@op
def row_sum_by_quad(t: Trace, x: Any) -> Any:
    """Partial row sums (rows × 4): element q of a row sums the columns c with (c // 2) % 4 = q. `row_sum` of it completes them.

    In an accumulator's layout those are the columns that one lane of a quad holds, so that a sum over many tiles needs its shuffles only once, at the end.
    """
    axes = axes_of(x)
    out = []
    for i, line in enumerate(_lines(x, 1)):
        total = t.call(_quad_sum, line[0], axes[0][i], axes[1][0])
        for piece, cols in zip(line[1:], axes[1][1:], strict=True):
            total = t.call(_add, total, t.relayout(t.call(_quad_sum, piece, axes[0][i], cols), total))
        out.append(total)
    return assemble((axes[0], (4,)), out)


def _to_scalar(name: str) -> Callable[..., Any]:
    def operation(t: Trace, x: Any) -> Any:
        reduce, join = _JOIN[name]
        v = reduce_axis(t, x, name, 1) if len(axes_of(x)) == 2 else x
        parts = [t.call(reduce, p, 0) for p in pieces_of(v)]
        total = parts[0]
        for part in parts[1:]:
            total = t.call(join, total, part)
        return total

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"The {name} of all elements of a tile or vector, a scalar."
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


def _mean_or_norm(name: str, axis: int, norm: bool) -> Callable[..., Any]:
    def operation(t: Trace, x: Any) -> Any:
        if norm:
            squares = reduce_axis(t, apply_pieces(t, lambda p: t.call(_square, t.method(p, "to", tl.float32)), x), "sum", axis)
            return apply_pieces(t, lambda p: t.call("sqrt", p), squares)
        total = reduce_axis(t, apply_pieces(t, lambda p: t.method(p, "to", tl.float32), x), "sum", axis)
        return apply_pieces(t, lambda p: t.call(_scale, p, 1.0 / shape_of(x)[axis]), total)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"The {'Euclidean norm' if norm else 'mean'} of each {'row' if axis else 'column'}, in fp32."
    return op(operation)


row_mean, col_mean = _mean_or_norm("row_mean", 1, False), _mean_or_norm("col_mean", 0, False)
row_norm, col_norm = _mean_or_norm("row_norm", 1, True), _mean_or_norm("col_norm", 0, True)


@triton.jit
def _index_where(x, extreme, index, none):
    return tl.where(x == extreme, index, none)


def _arg(name: str, kind: str, axis: int) -> Callable[..., Any]:
    def operation(t: Trace, x: Any) -> Any:
        extreme = reduce_axis(t, x, kind, axis)
        where = iter(index_tiles(t, x, 0, 0)[axis])
        hits = combine(t, name, lambda p, v: t.call(_index_where, p, v, next(where), 2**31 - 1), x, extreme, 1 - axis)
        return reduce_axis(t, hits, "min", axis)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"The index (int32) of the first {kind}imum of each {'row' if axis else 'column'}."
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


def _scan(name: str, axis: int) -> Callable[..., Any]:
    def operation(t: Trace, x: Any) -> Any:
        axes = axes_of(x)
        if len(axes) != 2:
            raise TileError(f"{name} of shape {list(shape_of(x))}: needs a tile of two axes")
        scanned = []
        for line in _lines(x, axis):
            done: list[Any] = []
            carry = None
            for piece in line:
                out = t.call(_cumsum, piece, axis)
                if carry is not None:
                    out = t.call(_add_column if axis else _add_row_vector, out, t.vector(carry, 1 - axis, out))
                total = t.call("sum", piece, axis)
                carry = total if carry is None else t.call(_add, carry, t.relayout(total, carry))
                done.append(out)
            scanned.append(done)
        rows = scanned if axis == 1 else [list(r) for r in zip(*scanned, strict=True)]
        return assemble(axes, [p for r in rows for p in r])

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"Running sum along each {'row' if axis else 'column'}; shape and dtype of `x`."
    return op(operation)


row_cumsum, col_cumsum = _scan("row_cumsum", 1), _scan("col_cumsum", 0)


@op
def row_topk(t: Trace, x: Any, k: Any) -> Any:
    """The `k` largest values of each row in descending order and their columns: two tuples of k column vectors (values in x's dtype, int32 columns)."""
    k = unwrap(k)
    if not isinstance(k, int) or not 0 < k <= shape_of(x)[1]:
        raise TileError(f"row_topk(k={k!r}): must be between 1 and the {shape_of(x)[1]} columns of the tile")
    if not pieces_of(x)[0].dtype.is_floating():
        raise TileError(f"row_topk: needs floating-point elements, got {pieces_of(x)[0].dtype}")
    values, columns = [], []
    for _ in range(k):
        column = t.call(row_argmax, x)
        values.append(reduce_axis(t, x, "max", 1))
        columns.append(column)
        index = iter(index_tiles(t, x, 0, 0)[1])
        x = combine(t, "row_topk", lambda p, v, index=index: t.call("where", t.method(next(index), "__ne__", v), p, float("-inf")), x, column, 0)
    return tl.tuple([tl.tuple(values), tl.tuple(columns)]) if not t.interpreted else (tuple(values), tuple(columns))


@triton.jit
def _rescale(m_old, m_new, scale):
    # rows that are masked so far have m = −∞; −∞ − (−∞) would be NaN
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2((m_old - safe) * scale), safe * scale


@op
def softmax_step(t: Trace, s: Any, m: Any, l: Any, scale: Any = 1.0) -> Any:  # noqa: E741
    """One step of the online softmax in base 2: returns (p, m', l', alpha) for scores `s` (rows × cols), running max `m` and sum `l` (rows).

    p = exp2(s·scale − m'·scale) with m' = max(m, row_max(s)); alpha = exp2((m − m')·scale) rescales what was accumulated so far; l' = l·alpha + row_sum(p).
    `scale` includes log2(e) for a natural softmax. Rows whose scores are all −∞ so far give p = 0. Source: FlashAttention-2, algorithm 1.
    """
    m_new = apply_pieces(t, lambda a, b: t.call("maximum", a, b), m, reduce_axis(t, s, "max", 1))
    pairs = [t.call(_rescale, a, t.relayout(b, a), scale) for a, b in zip(pieces_of(m), pieces_of(m_new), strict=True)]
    alpha, shift = assemble(axes_of(m), [p[0] for p in pairs]), assemble(axes_of(m), [p[1] for p in pairs])
    p = t.call(exp2_row, s, scale, shift)
    total = reduce_axis(t, p, "sum", 1)
    l_new = apply_pieces(t, lambda a, b, c: t.method(t.method(a, "__mul__", b), "__add__", c), l, alpha, total)
    return p, m_new, l_new, alpha


@op
def hasnan(t: Trace, x: Any) -> Any:
    """1 (int32) if any element of the tile is NaN, else 0. For debugging."""
    flags = apply_pieces(t, lambda p: t.method(t.method(p, "__ne__", p), "to", tl.int32), x)
    return t.call(max, flags)
