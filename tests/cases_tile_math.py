"""The cases of tile math, written once for three places: Triton's interpreter, a plain Triton kernel, an explicit
kernel.

A case is an expression of the tiles `x`, `y`, `z`, the column vector `c` (one value per row), the row vector `r` (one
per column) and the run-time scalars `s` (element-like), `a` and `b` (int32), and the same in torch on float64 (int64).
The cases of a group and an element type become one `@triton.jit` function, which writes the result of case n to the
n-th tile of OUT, counted down its rows.
"""

from __future__ import annotations

import functools
import linecache
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tritonkittens.lang as tk
from tritonkittens.lang.core.dtypes import to_torch
from tritonkittens.lang.types.global_layout import GlobalLayout
from tritonkittens.launch.arguments import argument_types

from .util import poison

FLOATS = (tk.fp32, tk.bf16, tk.fp16)
NUMBERS = (*FLOATS, tk.int32)
FP8 = (tk.fp8e4m3, tk.fp8e5m2)
SHAPES = ((16, 16), (64, 128), (48, 80), (64, 176), (32, 96))
INF = float("inf")
NAMES = {
    tk.fp32: "tk.fp32",
    tk.bf16: "tk.bf16",
    tk.fp16: "tk.fp16",
    tk.fp8e4m3: "tk.fp8e4m3",
    tk.fp8e5m2: "tk.fp8e5m2",
    tk.int32: "tk.int32",
    tk.int8: "tk.int8",
    tl.int1: "tl.int1",
}


def same(dtype):
    return dtype


def unspecified(dtype):
    """Triton's operators on a tile and a run-time scalar: compiled they promote, interpreted they do not."""
    return None


def boolean(dtype):
    return tl.int1


def index(dtype):
    return tk.int32


def fp32(dtype):
    return tk.fp32


def wide(dtype):
    """What the library adds up in, and Triton divides into."""
    return tk.fp32 if dtype.is_floating() else tk.int32


@dataclass(frozen=True)
class Case:
    """`of` is what the result is: a "tile", a column vector "col", a row vector "row", a "scalar"; `dtype` maps the
    tile's element type to the result's.
    """

    code: str
    want: Callable[[Any], Any]
    of: str = "tile"
    dtype: Callable[[Any], Any] = same
    slack: float = 1.0
    native: bool = False  # Triton's own operators on whole tiles, which its interpreter does not support in bf16


@dataclass(frozen=True)
class Group:
    dtypes: tuple
    cases: tuple[Case, ...]
    special: bool = False  # inputs hold infinities and NaN


@triton.jit
def checkers(row, col, x):
    return tl.where((row + col) % 2 == 0, x, -x)


@triton.jit
def plus_index(i, x):
    return x + i % 4


@triton.jit
def larger(x, y):
    return tl.where(x > y, x, y)


@triton.jit
def on_stripes(row, col):
    return (row % 3 == 0) | (col % 5 == 1)


@triton.jit
def rising(i, x):
    return x + i


UNARY = Group(
    FLOATS,
    (
        Case("tk.exp(x)", lambda i: i.x.exp()),
        Case("tk.exp2(x)", lambda i: i.x.exp2()),
        Case("tk.log(tk.abs(x))", lambda i: i.x.abs().log(), slack=4),
        Case("tk.log2(tk.abs(x))", lambda i: i.x.abs().log2(), slack=4),
        Case("tk.sqrt(tk.abs(x))", lambda i: i.x.abs().sqrt()),
        Case("tk.rsqrt(tk.abs(x))", lambda i: i.x.abs().rsqrt(), slack=2),
        Case("tk.sin(x)", lambda i: i.x.sin()),
        Case("tk.cos(x)", lambda i: i.x.cos()),
        Case("tk.erf(x)", lambda i: i.x.erf()),
        Case("tk.tanh(x)", lambda i: i.x.tanh()),
        Case("tk.sigmoid(x)", lambda i: i.x.sigmoid()),
        Case("tk.silu(x)", lambda i: torch.nn.functional.silu(i.x)),
        Case("tk.gelu(x)", lambda i: torch.nn.functional.gelu(i.x)),
        Case("tk.gelu(x, approximate='tanh')", lambda i: torch.nn.functional.gelu(i.x, approximate="tanh")),
        Case("tk.reciprocal(x)", lambda i: 1 / i.x, slack=2),
        Case("tk.floor(x)", lambda i: i.x.floor()),
        Case("tk.ceil(x)", lambda i: i.x.ceil()),
        Case("tk.exp2(c)", lambda i: i.c.exp2(), of="col"),
        Case("tk.exp(r)", lambda i: i.r.exp(), of="row"),
        Case("tk.exp2(s)", lambda i: torch.tensor(2.0, dtype=torch.float64) ** i.s, of="scalar", dtype=fp32),
    ),
)

EXACT = Group(
    NUMBERS,
    (
        Case("tk.abs(x)", lambda i: i.x.abs()),
        Case("tk.neg(x)", lambda i: -i.x),
        Case("-x", lambda i: -i.x, native=True),
        Case("tk.relu(x)", lambda i: i.x.clamp(min=0)),
        Case("tk.copy(x)", lambda i: i.x),
        Case("tk.swap_layout(x)", lambda i: i.x),
        Case("tk.transpose(tk.transpose(x))", lambda i: i.x),
        Case("tk.transpose(tk.add_row(tk.transpose(x), tk.col_max(y)))", lambda i: i.x + i.y.amax(0)),
        Case("tk.maximum(x, y)", lambda i: torch.maximum(i.x, i.y)),
        Case("tk.minimum(x, 1)", lambda i: i.x.clamp(max=1)),
        Case("tk.lt(x, y)", lambda i: i.x < i.y, dtype=boolean),
        Case("tk.le(x, 0)", lambda i: i.x <= 0, dtype=boolean),
        Case("tk.gt(x, s)", lambda i: i.x > i.s, dtype=boolean),
        Case("tk.ge(x, y)", lambda i: i.x >= i.y, dtype=boolean),
        Case("tk.eq(x, y)", lambda i: i.x == i.y, dtype=boolean),
        Case("tk.ne(x, tk.maximum(x, y))", lambda i: i.x < i.y, dtype=boolean),
        Case("(x < y) & (x > 0)", lambda i: (i.x < i.y) & (i.x > 0), dtype=boolean, native=True),
        Case("~(x < y) | (x >= 1)", lambda i: (i.x >= i.y) | (i.x >= 1), dtype=boolean, native=True),
        Case("s < x", lambda i: i.x > i.s, dtype=boolean, native=True),
        Case("tk.where(tk.gt(x, y), x, y)", lambda i: torch.maximum(i.x, i.y)),
        Case("tk.where(tk.gt(x, 0), x, 0)", lambda i: i.x.clamp(min=0)),
        Case("tk.full_like(x, 3)", lambda i: torch.full_like(i.x, 3)),
        Case("tk.zero(T)", lambda i: torch.zeros_like(i.x)),
        Case("tk.one(T)", lambda i: torch.ones_like(i.x)),
        Case("tk.full(T, -7)", lambda i: torch.full_like(i.x, -7)),
        Case("tk.full(T, a)", lambda i: torch.full_like(i.x, i.a)),
        Case("tk.zero(tk.shape(x), T.dtype)", lambda i: torch.zeros_like(i.x)),
        Case("tk.iota(x, axis=0, start=a)", lambda i: i.rows + i.a, dtype=index),
        Case("tk.iota(T, axis=1)", lambda i: i.cols, dtype=index),
        Case("tk.iota(c)", lambda i: i.rows[:, 0], of="col", dtype=index),
        Case("tk.iota(tk.row_vec(T), start=b)", lambda i: i.cols[0] + i.b, of="row", dtype=index),
        Case(
            "tk.apply(x, checkers, row=a, col=b)",
            lambda i: torch.where((i.rows + i.cols + i.a + i.b) % 2 == 0, i.x, -i.x),
            native=True,
        ),
        Case(
            "tk.apply(c, plus_index, row=a)",
            lambda i: i.c + (i.rows[:, 0] + i.a) % 4,
            of="col",
            slack=2,
            dtype=unspecified,
            native=True,
        ),
        Case("tk.map(x, larger, tk.struct(y=y))", lambda i: torch.maximum(i.x, i.y), native=True),
        Case("tk.concat_cols(*tk.split_cols(x))", lambda i: i.x),
        Case("tk.concat_cols(*tk.split_cols(x, 16))", lambda i: i.x),
    ),
)

BINARY = Group(
    NUMBERS,
    (
        Case("tk.add(x, y)", lambda i: i.x + i.y, slack=2),
        Case("tk.sub(x, y)", lambda i: i.x - i.y, slack=2),
        Case("tk.mul(x, y)", lambda i: i.x * i.y),
        Case("tk.fma(x, y, x)", lambda i: i.x * i.y + i.x, slack=4),
        Case("tk.add(x, 2)", lambda i: i.x + 2, slack=2),
        Case("tk.add(2, x)", lambda i: i.x + 2, slack=2),
        Case("tk.mul(s, x)", lambda i: i.s * i.x),
        Case("x + y", lambda i: i.x + i.y, slack=2, native=True),
        Case("x - y * 2", lambda i: i.x - i.y * 2, slack=4, native=True),
        Case("2 - x", lambda i: 2 - i.x, slack=2, native=True),
        Case("x * s", lambda i: i.x * i.s, dtype=unspecified, native=True),
        Case("s * x", lambda i: i.x * i.s, dtype=unspecified, native=True),
        Case("s - x", lambda i: i.s - i.x, slack=2, dtype=unspecified, native=True),
        Case("c + c", lambda i: i.c + i.c, of="col", native=True),
        Case("s * c", lambda i: i.c * i.s, of="col", dtype=unspecified, native=True),
        Case("s + r", lambda i: i.r + i.s, of="row", slack=2, dtype=unspecified, native=True),
        Case("tk.maximum(c, tk.row_min(x))", lambda i: torch.maximum(i.c, i.x.amin(1)), of="col"),
    ),
)

DIVISION = Group(
    FLOATS,
    (
        Case("tk.div(x, y)", lambda i: i.x / i.y, slack=2),
        Case("x / 4", lambda i: i.x / 4, dtype=wide, native=True),
        Case("1 / y", lambda i: 1 / i.y, slack=2, dtype=wide, native=True),
        Case("s / y", lambda i: i.s / i.y, slack=2, dtype=unspecified, native=True),
        Case("tk.div_row(x, tk.one(tk.col_vec(T)) + tk.one(tk.col_vec(T)))", lambda i: i.x / 2, native=True),
        Case("tk.div_col(x, tk.full(tk.row_vec(T), 4))", lambda i: i.x / 4),
        Case(
            "tk.exp2_row(tk.cast(x, tk.fp32), s, tk.cast(c, tk.fp32))",
            lambda i: torch.exp2(i.x * i.s - i.c[:, None]),
            dtype=fp32,
            slack=4,
        ),
        Case(
            "tk.exp2_col(tk.cast(x, tk.fp32), s, tk.cast(r, tk.fp32))",
            lambda i: torch.exp2(i.x * i.s - i.r),
            dtype=fp32,
            slack=4,
        ),
    ),
)

INTEGERS = Group(
    (tk.int32,),
    (
        Case("x // 4 * 4 + x % 4", lambda i: i.x),
        Case("x & 7", lambda i: i.x & 7),
        Case("x | y", lambda i: i.x | i.y),
        Case("x ^ y", lambda i: i.x ^ i.y),
        Case("1 << (x & 7)", lambda i: 1 << (i.x & 7)),
        Case("(x << 3) >> 1", lambda i: (i.x << 3) >> 1),
        Case("~x", lambda i: ~i.x),
        Case("tk.relu(x * 65537 + 1)", lambda i: (i.x * 65537 + 1).clamp(min=0)),
        Case("tk.tril(x * 65537 + 1)", lambda i: torch.tril(i.x * 65537 + 1)),
    ),
)

VECTOR = Group(
    NUMBERS,
    (
        Case("tk.add_row(x, c)", lambda i: i.x + i.c[:, None], slack=2),
        Case("tk.sub_row(x, c)", lambda i: i.x - i.c[:, None], slack=2),
        Case("tk.mul_row(x, c)", lambda i: i.x * i.c[:, None]),
        Case("tk.max_row(x, c)", lambda i: torch.maximum(i.x, i.c[:, None])),
        Case("tk.min_row(x, c)", lambda i: torch.minimum(i.x, i.c[:, None])),
        Case("tk.add_col(x, r)", lambda i: i.x + i.r, slack=2),
        Case("tk.sub_col(x, r)", lambda i: i.x - i.r, slack=2),
        Case("tk.mul_col(x, r)", lambda i: i.x * i.r),
        Case("tk.max_col(x, r)", lambda i: torch.maximum(i.x, i.r)),
        Case("tk.min_col(x, r)", lambda i: torch.minimum(i.x, i.r)),
        Case("tk.lt_row(y, c)", lambda i: i.y < i.c[:, None], dtype=boolean),
        Case("tk.le_row(x, c)", lambda i: i.x <= i.c[:, None], dtype=boolean),
        Case("tk.gt_row(x, c)", lambda i: i.x > i.c[:, None], dtype=boolean),
        Case("tk.ge_row(y, c)", lambda i: i.y >= i.c[:, None], dtype=boolean),
        Case("tk.eq_row(y, c)", lambda i: i.y == i.c[:, None], dtype=boolean),
        Case("tk.ne_row(y, c)", lambda i: i.y != i.c[:, None], dtype=boolean),
        Case("tk.lt_col(x, r)", lambda i: i.x < i.r, dtype=boolean),
        Case("tk.le_col(y, r)", lambda i: i.y <= i.r, dtype=boolean),
        Case("tk.gt_col(y, r)", lambda i: i.y > i.r, dtype=boolean),
        Case("tk.ge_col(x, r)", lambda i: i.x >= i.r, dtype=boolean),
        Case("tk.eq_col(y, r)", lambda i: i.y == i.r, dtype=boolean),
        Case("tk.ne_col(y, r)", lambda i: i.y != i.r, dtype=boolean),
        Case("tk.broadcast_row(x, c)", lambda i: i.c[:, None].expand_as(i.x)),
        Case("tk.broadcast_col(x, tk.one(tk.row_vec(T, tk.int32)))", lambda i: torch.ones_like(i.x), dtype=index),
        Case("tk.full(tk.row_vec(T), 5)", lambda i: torch.full_like(i.r, 5), of="row"),
        Case("tk.zero(tk.col_vec(T, tk.fp32))", lambda i: torch.zeros_like(i.c), of="col", dtype=fp32),
    ),
)

REDUCTIONS = Group(
    NUMBERS,
    (
        Case("tk.row_max(x)", lambda i: i.x.amax(1), of="col"),
        Case("tk.col_max(x)", lambda i: i.x.amax(0), of="row"),
        Case("tk.row_min(x)", lambda i: i.x.amin(1), of="col"),
        Case("tk.col_min(x)", lambda i: i.x.amin(0), of="row"),
        Case("tk.row_sum(x)", lambda i: i.x.sum(1), of="col", dtype=wide, slack=16),
        Case("tk.col_sum(x)", lambda i: i.x.sum(0), of="row", dtype=wide, slack=16),
        Case("tk.row_prod(z)", lambda i: i.z.prod(1), of="col", dtype=wide),
        Case("tk.col_prod(z)", lambda i: i.z.prod(0), of="row", dtype=wide),
        Case("tk.row_max(x, accumulate=c)", lambda i: torch.maximum(i.x.amax(1), i.c), of="col"),
        Case("tk.col_min(x, accumulate=r)", lambda i: torch.minimum(i.x.amin(0), i.r), of="row"),
        Case("tk.row_sum(x, accumulate=tk.row_sum(y))", lambda i: (i.x + i.y).sum(1), of="col", dtype=wide, slack=16),
        Case("tk.col_prod(z, accumulate=tk.col_prod(z))", lambda i: i.z.prod(0) ** 2, of="row", dtype=wide),
        Case("tk.max(x)", lambda i: i.x.max(), of="scalar"),
        Case("tk.min(x)", lambda i: i.x.min(), of="scalar"),
        Case("tk.sum(x)", lambda i: i.x.sum(), of="scalar", dtype=wide, slack=64),
        Case("tk.max(c)", lambda i: i.c.max(), of="scalar"),
        Case("tk.sum(r)", lambda i: i.r.sum(), of="scalar", dtype=wide, slack=16),
        Case("tk.prod(tk.where(tk.lt(tk.iota(c), 5), c, 1))", lambda i: i.c[:5].prod(), of="scalar", dtype=wide),
        Case("tk.row_argmax(x)", lambda i: i.x.argmax(1), of="col", dtype=index),
        Case("tk.col_argmax(x)", lambda i: i.x.argmax(0), of="row", dtype=index),
        Case("tk.row_argmin(x)", lambda i: i.x.argmin(1), of="col", dtype=index),
        Case("tk.col_argmin(x)", lambda i: i.x.argmin(0), of="row", dtype=index),
        Case("tk.row_mean(x)", lambda i: i.x.double().mean(1), of="col", dtype=fp32),
        Case("tk.col_mean(x)", lambda i: i.x.double().mean(0), of="row", dtype=fp32),
        Case("tk.row_norm(x)", lambda i: i.x.double().norm(dim=1), of="col", dtype=fp32, slack=16),
        Case("tk.col_norm(x)", lambda i: i.x.double().norm(dim=0), of="row", dtype=fp32, slack=16),
        Case("tk.row_sum(tk.row_sum_by_quad(x))", lambda i: i.x.sum(1), of="col", dtype=wide, slack=16),
        Case(
            "tk.row_sum(tk.row_sum_by_quad(x, accumulate=tk.row_sum_by_quad(y)))",
            lambda i: (i.x + i.y).sum(1),
            of="col",
            dtype=wide,
            slack=16,
        ),
        Case("tk.row_sum(tk.gt(x, 0))", lambda i: (i.x > 0).sum(1), of="col", dtype=index),
    ),
)

SCANS = Group(
    NUMBERS,
    (
        Case("tk.row_cumsum(x)", lambda i: i.x.cumsum(1), dtype=wide, slack=16),
        Case("tk.col_cumsum(x)", lambda i: i.x.cumsum(0), dtype=wide, slack=16),
    ),
)


def _softmax(i, state):
    s2, m0, l0 = i.x, i.c, torch.ones_like(i.c)
    m = torch.maximum(m0, s2.amax(1))
    alpha = torch.exp2((m0 - m) * i.s)
    p = torch.exp2((s2 - m[:, None]) * i.s)
    return {"p": p, "m": m, "l": l0 * alpha + p.sum(1), "alpha": alpha}[state]


SOFTMAX = Group(
    (tk.fp32,),
    (
        *(
            Case(
                f"tk.softmax_step(x, c, tk.one(tk.col_vec(T)), s)[{n}]",
                functools.partial(_softmax, state=state),
                of="tile" if n == 0 else "col",
                slack=16,
            )
            for n, state in enumerate(("p", "m", "l", "alpha"))
        ),
        *(Case(f"tk.row_topk(x, 3)[0][{k}]", lambda i, k=k: i.x.topk(3, 1)[0][:, k], of="col") for k in range(3)),
        *(
            Case(
                f"tk.row_topk(x, 3)[1][{k}]",
                lambda i, k=k: i.x.sort(dim=1, descending=True, stable=True)[1][:, k],
                of="col",
                dtype=index,
            )
            for k in range(3)
        ),
    ),
)

MASKS = Group(
    NUMBERS,
    (
        Case("tk.make_causal(x, fill=7, row=a, col=b)", lambda i: torch.where(i.cols + i.b <= i.rows + i.a, i.x, 7)),
        Case("tk.make_causal_t(x, fill=7, row=a, col=b)", lambda i: torch.where(i.cols + i.b >= i.rows + i.a, i.x, 7)),
        Case("tk.tril(x)", lambda i: torch.tril(i.x)),
        Case("tk.tril(x, diagonal=-3)", lambda i: torch.tril(i.x, -3)),
        Case("tk.tril(x, diagonal=a)", lambda i: torch.tril(i.x, i.a)),
        Case("tk.triu(x)", lambda i: torch.triu(i.x)),
        Case("tk.triu(x, diagonal=b, fill=2, row=5)", lambda i: torch.where(i.cols - i.rows - 5 >= i.b, i.x, 2)),
        Case("tk.left_fill(x, a, 5)", lambda i: torch.where(i.cols < i.a, 5, i.x)),
        Case("tk.right_fill(x, b, 5)", lambda i: torch.where(i.cols >= i.b, 5, i.x)),
        Case("tk.upper_fill(x, a, 5)", lambda i: torch.where(i.rows < i.a, 5, i.x)),
        Case("tk.lower_fill(x, b, 5)", lambda i: torch.where(i.rows >= i.b, 5, i.x)),
        Case("tk.upper_right_fill(x, a, b, 5)", lambda i: torch.where((i.rows < i.a) & (i.cols >= i.b), 5, i.x)),
        Case(
            "tk.sliding_window(x, 6, 2, fill=-1, row=a, col=b)",
            lambda i: torch.where((i.cols + i.b >= i.rows + i.a - 6) & (i.cols + i.b <= i.rows + i.a + 2), i.x, -1),
        ),
        Case(
            "tk.block_diagonal(x, 24, fill=-1, row=a, col=b)",
            lambda i: torch.where((i.rows + i.a) // 24 == (i.cols + i.b) // 24, i.x, -1),
        ),
        Case(
            "tk.mask(x, on_stripes, fill=s, row=a, col=b)",
            lambda i: torch.where(((i.rows + i.a) % 3 == 0) | ((i.cols + i.b) % 5 == 1), i.x, i.s),
            slack=2,
        ),
    ),
)

SPECIAL = Group(
    FLOATS,
    (
        Case("tk.exp(x)", lambda i: i.x.exp()),
        Case("tk.exp2(tk.neg_infty(T))", lambda i: torch.zeros_like(i.x)),
        Case("tk.pos_infty(T)", lambda i: torch.full_like(i.x, INF)),
        Case("tk.neg_infty(tk.col_vec(T))", lambda i: torch.full_like(i.c, -INF), of="col"),
        Case("tk.abs(x)", lambda i: i.x.abs()),
        Case("tk.sigmoid(x)", lambda i: i.x.sigmoid()),
        Case("tk.tanh(x)", lambda i: i.x.tanh()),
        Case("x == x", lambda i: i.x == i.x, dtype=boolean, native=True),
        Case("tk.where(tk.eq(x, x), x, 0)", lambda i: torch.where(i.x.isnan(), 0, i.x)),
        Case("tk.maximum(x, y)", lambda i: torch.fmax(i.x, i.y)),
        Case("tk.minimum(x, y)", lambda i: torch.fmin(i.x, i.y)),
        Case("tk.relu(x)", lambda i: torch.fmax(i.x, torch.zeros_like(i.x))),
        Case("tk.row_max(x)", lambda i: torch.where(i.x.isnan(), -INF, i.x).amax(1), of="col"),
        Case("tk.col_min(x)", lambda i: torch.where(i.x.isnan(), INF, i.x).amin(0), of="row"),
        Case("tk.row_argmax(x)", lambda i: torch.where(i.x.isnan(), -INF, i.x).argmax(1), of="col", dtype=index),
        Case(
            "tk.make_causal(tk.where(tk.eq(x, x), x, 0))",
            lambda i: torch.where(i.cols <= i.rows, torch.where(i.x.isnan(), 0, i.x), -INF),
        ),
        Case("tk.right_fill(tk.one(T), a, float('-inf'))", lambda i: torch.where(i.cols >= i.a, -INF, 1.0)),
        Case("tk.hasnan(x)", lambda i: torch.tensor(1), of="scalar", dtype=index),
        Case("tk.hasnan(tk.where(tk.eq(x, x), x, 0))", lambda i: torch.tensor(0), of="scalar", dtype=index),
        # rows with fewer finite elements than k: −∞ counts, each column once
        *(
            Case(
                f"tk.row_topk(tk.right_fill(tk.cast(y, tk.fp32), 1, float('-inf')), 3)[1][{k}]",
                lambda i, k=k: torch.full_like(i.c, k),
                of="col",
                dtype=index,
            )
            for k in range(3)
        ),
        # a softmax of nothing but −∞ is 0, not NaN
        *(
            Case(
                f"tk.softmax_step(tk.neg_infty({t32}), tk.neg_infty(tk.col_vec({t32})), "
                f"tk.zero(tk.col_vec({t32})))[{n}]",
                lambda i, n=n: torch.zeros_like(i.x if n == 0 else i.c),
                of="tile" if n == 0 else "col",
                dtype=fp32,
            )
            for n in (0, 2)
            for t32 in ("tk.rt(tk.fp32, T.rows, T.cols)",)
        ),
    ),
    special=True,
)


def _cast(dtype, to):
    """float64 values rounded as the conversion does; beyond the range of fp8 the largest finite value."""

    def want(i):
        values = i.x * 40
        if to in FP8:
            values = values.clamp(-torch.finfo(to_torch(to)).max, torch.finfo(to_torch(to)).max)
        return values.to(torch.float32).to(to_torch(to)).double()

    return want


CASTS = {
    "casts from fp32": Group(
        (tk.fp32,),
        tuple(
            Case(f"tk.cast(x * 40, {NAMES[to]})", _cast(tk.fp32, to), dtype=lambda _, to=to: to, slack=0)
            for to in (tk.fp32, tk.bf16, tk.fp16, *FP8)
        )
        + (
            Case(
                "tk.cast(x * 40, tk.bf16, rounding='rtz')",
                lambda i: _toward_zero(i.x * 40, 16),
                dtype=lambda _: tk.bf16,
                slack=0,
            ),
            Case("tk.cast(x * 40, tk.int32)", lambda i: (i.x * 40).float().trunc(), dtype=lambda _: tk.int32, slack=0),
            Case(
                "tk.cast(c, tk.bf16)",
                lambda i: i.c.to(torch.bfloat16).double(),
                of="col",
                dtype=lambda _: tk.bf16,
                slack=0,
            ),
            Case("x.to(tk.fp16)", lambda i: i.x.to(torch.float16).double(), dtype=lambda _: tk.fp16, slack=0),
        ),
    ),
    "casts to fp32": Group(
        (tk.bf16, tk.fp16, *FP8, tk.int32),
        (
            Case("tk.cast(x, tk.fp32)", lambda i: i.x, dtype=fp32, slack=0),
            Case("tk.copy(x)", lambda i: i.x, slack=0),
            Case("tk.row_max(x)", lambda i: i.x.amax(1), of="col", slack=0),
            Case("tk.col_sum(x)", lambda i: i.x.sum(0), of="row", dtype=wide, slack=16),
            Case(
                "tk.where(tk.cast(x, tk.fp32) > 0, tk.cast(x, tk.fp32), 0)",
                lambda i: i.x.clamp(min=0),
                dtype=fp32,
                slack=0,
            ),
            Case("tk.tril(x)", lambda i: torch.tril(i.x), slack=0),
            Case("tk.transpose(tk.transpose(x))", lambda i: i.x, slack=0),
            Case("tk.full(T, 2)", lambda i: torch.full_like(i.x, 2), slack=0),
            Case("tk.broadcast_row(x, tk.row_max(x))", lambda i: i.x.amax(1)[:, None].expand_as(i.x), slack=0),
        ),
    ),
}


def _toward_zero(values, bits):
    """fp32 values with the low `bits` of their pattern cut off."""
    pattern = values.float().view(torch.int32)
    return (pattern >> bits << bits).view(torch.float32).double()


GROUPS: dict[str, Group] = {
    "unary": UNARY,
    "exact": EXACT,
    "binary": BINARY,
    "division": DIVISION,
    "integers": INTEGERS,
    "vector": VECTOR,
    "reductions": REDUCTIONS,
    "scans": SCANS,
    "softmax": SOFTMAX,
    "masks": MASKS,
    "special": SPECIAL,
    **CASTS,
}

AS_TILE = {
    "tile": "{}",
    "col": "tk.broadcast_row(x, {})",
    "row": "tk.broadcast_col(x, {})",
    "scalar": "tk.full(tk.rt({dtype}, T.rows, T.cols), {})",
}


VECTORS = ("computed", "loaded", "rows")  # where vectors come from; "rows": the tiles are taken row by row, as vectors
# what vectors alone do not have
OF_TILES = re.compile(r"\b[cr]\b|row|col|transpose|tri[lu]|causal|_fill|iota|apply|swap_layout|\brt\(")


def cases_of(name, dtype, interpreted, vectors="computed"):
    """The cases of a group that its kernel for this element type has."""
    cases = [case for case in GROUPS[name].cases if not (case.native and interpreted and dtype == tk.bf16)]
    return (
        [case for case in cases if case.of == "tile" and not OF_TILES.search(case.code)] if vectors == "rows" else cases
    )


def beginning_of(vectors):
    """The first lines of a kernel: where tiles and vectors come from."""
    if vectors == "rows":
        return [
            "def tile_math(X, Y, Z, OUT, s, a, b, T: tl.constexpr, ROWS: tl.constexpr):",
            "    i = tl.program_id(0)",
            *(f"    {t} = tk.load({t.upper()}, T, (i, 0))" for t in "xyz"),
        ]
    tiles = [f"    {t} = tk.load({t.upper()}, T, (0, 0))" for t in "xyz"]
    if vectors == "loaded":
        return [
            "def tile_math(X, Y, Z, OUT, s, a, b, C, R, T: tl.constexpr):",
            *tiles,
            "    c = tk.load(C, tk.col_vec(T), (1, 0))",
            "    r = tk.load(R, tk.row_vec(T), (0, 1, 0))",
        ]
    return [
        "def tile_math(X, Y, Z, OUT, s, a, b, T: tl.constexpr):",
        *tiles,
        "    c = tk.row_max(y)",
        "    r = tk.col_min(y)",
    ]


@functools.cache
def kernel_of(name, dtype, interpreted=False, vectors="computed"):
    """The `@triton.jit` function of a group for one element type."""
    lines = beginning_of(vectors)
    for n, case in enumerate(cases_of(name, dtype, interpreted, vectors)):
        result = case.dtype(dtype)
        lines.append(f"    v{n} = {case.code}")
        if result is not None:
            lines.append(f"    tl.static_assert(v{n}.dtype == {NAMES[result]}, {f'{case.code}: want {result}'!r})")
        value = AS_TILE[case.of].format(f"v{n}", dtype=NAMES.get(result))
        lines.append(f"    tk.store(OUT, {value}, ({f'{n} * ROWS + i' if vectors == 'rows' else n}, 0))")
    filename = f"<tile math {name} {dtype} {interpreted} {vectors}>"
    text = "\n".join(lines) + "\n"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space = {
        "tl": tl,
        "tk": tk,
        "checkers": checkers,
        "plus_index": plus_index,
        "larger": larger,
        "on_stripes": on_stripes,
        "__name__": __name__,
    }
    exec(compile(text, filename, "exec"), space)  # one line a case is what makes the table above readable
    return triton.jit(space["tile_math"])


def inputs_of(rng, group, dtype, shape, device="cpu", a=None, b=None):
    """Random inputs as the kernel takes them, and as the references do (`.x` … in float64 or int64)."""
    rows, cols = shape
    if dtype.is_floating():
        x, y = (torch.from_numpy(rng.standard_normal(shape) * 2) for _ in range(2))
        z = torch.from_numpy(rng.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], shape))
        y = torch.where(y.abs() < 0.1, 0.25, y)  # divisors
    else:
        x, y, z = (torch.from_numpy(rng.integers(-50, 50, shape)) for _ in range(3))
    x, y, z = (v.to(torch.float32 if dtype.is_floating() else torch.int32).to(to_torch(dtype)) for v in (x, y, z))
    if group.special:
        for value in (INF, -INF, float("nan")):
            for t in (x, y):
                at = rng.integers(0, rows * cols, max(1, rows * cols // 32))
                t.view(-1)[torch.from_numpy(at)] = value
        x[0, 0] = float("nan")
        x[:, 1] = 1.0  # every row and column has a number
        x[1] = 1.0
        y[:, 0] = torch.where(y[:, 0].isfinite(), y[:, 0], 1.0)
    s = float(rng.choice([0.25, 0.5, 1.5])) if dtype.is_floating() else int(rng.integers(1, 9))
    a, b = int(rng.integers(0, rows)) if a is None else a, int(rng.integers(0, cols)) if b is None else b
    exact = torch.float64 if dtype.is_floating() else torch.int64
    want = types.SimpleNamespace(x=x.to(exact), y=y.to(exact), z=z.to(exact), s=s, a=a, b=b)
    want.c, want.r = torch.where(want.y.isnan(), -INF, want.y).amax(1), torch.where(want.y.isnan(), INF, want.y).amin(0)
    if not dtype.is_floating():
        want.c, want.r = want.y.amax(1), want.y.amin(0)
    want.rows, want.cols = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    out = poison(
        torch.empty(
            len(group.cases) * rows, cols, dtype=torch.float32 if dtype.is_floating() else torch.int32, device=device
        )
    )
    return (x.to(device), y.to(device), z.to(device), out, s, a, b), want


EPSILON = {tk.fp32: 2.0**-20, tk.bf16: 2.0**-7, tk.fp16: 2.0**-10}


def vectors_of(want, dtype):
    """The vectors `c` and `r` in tensors of several dimensions, among poison."""
    c, r = (v.to(torch.float32 if dtype.is_floating() else torch.int32).to(to_torch(dtype)) for v in (want.c, want.r))
    held = poison(torch.empty(3, len(c), dtype=c.dtype)), poison(torch.empty(2, 2, len(r), dtype=r.dtype))
    held[0][1], held[1][0, 1] = c, r
    return held


def check(name, dtype, out, want, interpreted=False, vectors="computed"):
    """Compare every case of a group; all wrong ones are named at once."""
    wrong = []
    for n, case in enumerate(cases_of(name, dtype, interpreted, vectors)):
        expected = case.want(want)
        got = out[n * want.rows.shape[0] :][: want.rows.shape[0]].cpu()
        if case.of == "col":
            expected = expected[:, None].expand(got.shape)
        elif case.of in ("row", "scalar"):
            expected = expected.expand(got.shape)
        if out.dtype == torch.int32:
            expected = (
                expected.to(torch.int32)
                if not expected.is_floating_point() or case.slack == 0
                else expected.to(torch.float32).to(torch.int32)
            )
            ok = got == expected
        else:
            got, expected = got.double(), expected.double()
            result = case.dtype(dtype) or dtype
            epsilon = EPSILON.get(result, EPSILON[tk.fp32]) * case.slack
            # to infinity, as the result's type does
            overflowed = expected.to(tk.to_torch(result)).double() if result in EPSILON else expected
            ok = (
                (got == expected)
                | (got == overflowed)
                | (got.isnan() & expected.isnan())
                | ((got - expected).abs() <= epsilon * (1 + expected.abs()))
            )
        if not bool(ok.all()):
            at = tuple(int(v) for v in (~ok).nonzero()[0])
            wrong.append(
                f"{case.code}: {int((~ok).sum())} of {ok.numel()} wrong, first at {at}: got {got[at].item()}, want "
                f"{expected[at].item()}"
            )
    assert not wrong, f"{name} {dtype} {tuple(want.rows.shape)}:\n" + "\n".join(wrong)


def arguments(values):
    """Tensors as global layouts without descriptors, for plain kernels and the interpreter."""
    return [tk.gl(v).plain() if isinstance(v, torch.Tensor) else v for v in values]


def compile_plain(fn, values, constants, arch):
    """Compile a `@triton.jit` function as an ordinary Triton kernel, without a GPU; `values` are its run-time
    arguments, in order, before its constants.
    """

    def kind(v):
        if isinstance(v, GlobalLayout):
            return GlobalLayout(
                (),
                "*" + argument_types([v.pointer], ["p"])[0].type.removeprefix("*"),
                ("i32",) * len(v.shape),
                ("i32",) * len(v.strides),
            )
        return "fp32" if isinstance(v, float) else "i32"

    names = fn.arg_names
    signature = {**dict(zip(names, map(kind, values))), **dict.fromkeys(names[len(values) :], "constexpr")}
    constexprs = {(len(values) + n,): c for n, c in enumerate(constants)}
    source = ASTSource(fn, signature, constexprs)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    )


def compile_explicit(fn, values, constant, arch):
    """Compile a `@triton.jit` function as an explicit kernel, without a GPU."""
    return tk.kernel(fn).compile(*(tk.gl(v) if isinstance(v, torch.Tensor) else v for v in values), constant, arch=arch)
