"""Device code that kernels of rows share: tiles of rows, their loads and stores."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk


@triton.jit
def tile(row, first, size, inner, COLS: tl.constexpr, UNIT: tl.constexpr):
    """A tile of a tensor of size[0] rows and size[1] · UNIT columns: rows `row`, columns from `first` on."""
    col, m, n = first + tl.arange(0, COLS), size[0], size[1] * UNIT
    inside = (row < m)[:, None] & (col < n)[None, :]
    return tk.struct(row=row, first=first, col=col, m=m, n=n, inner=inner, unit=UNIT, inside=inside)


@triton.jit
def places(at, row, inner, UNIT: tl.constexpr):
    """Where rows of a tensor begin, whose strides are the `at` of `load`."""
    outer, inner = tl.cast(row // inner, tl.int64), tl.cast(row % inner, tl.int64)
    return (outer * at[0] + inner * at[1]) * UNIT


@triton.jit
def load(P, at, t):
    """The tile of a tensor in fp32, zero beyond the edges. `at`: its strides from outer row to outer row, of `inner`
    rows each, and from row to row in there, in units of UNIT elements. So the compiler knows what divides them. None:
    the tensor is contiguous."""
    place = tl.cast(t.row, tl.int64) * t.n if at is None else places(at, t.row, t.inner, t.unit)
    x = tl.load(P + (place[:, None] + t.col[None, :]), mask=t.inside, other=0)
    return tk.cast_pairs(x, tk.fp32) if t.unit > 1 else tk.cast(x, tk.fp32)


@triton.jit
def store(P, values, t, at=None):
    """Store a tile to a tensor; strides as of `load`."""
    place = tl.cast(t.row, tl.int64) * t.n if at is None else places(at, t.row, t.inner, t.unit)
    tl.store(P + (place[:, None] + t.col[None, :]), tk.cast(values, P.dtype.element_ty), mask=t.inside)


@triton.jit
def load_rows(P, row, extent):
    """Numbers of rows in fp32."""
    return tk.cast(tl.load(P + row, mask=row < extent, other=0), tk.fp32)


@triton.jit
def load_columns(P, col, extent):
    """Numbers of columns in fp32. A thread has pairs of columns, as of rows it need not."""
    return tk.cast_pairs(tl.load(P + col, mask=col < extent, other=0), tk.fp32)
