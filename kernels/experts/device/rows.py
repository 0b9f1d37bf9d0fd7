"""Rows of tokens, sorted by expert, and their weighted sums.

Row i of the sorted matrix is choice CHOICES[i], which is choice i mod K of token i // K. PLACES has the row of each
choice. Rows from the last of ENDS on belong to choices of experts that are elsewhere; their places are -1.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._row_tiles import load, store, tile
from tritonkittens.launch import plain_kernel


@triton.jit
def _choices(CHOICES, ENDS, row, rows, experts, K: tl.constexpr):
    """Whether rows belong to an expert that is here, their choices, and their tokens."""
    here = row < tl.load(ENDS + experts - 1)
    choice = tl.load(CHOICES + row, mask=row < rows, other=0)
    return here, choice, choice // K


@plain_kernel(num_warps=4)
@triton.jit
def gather_rows(
    X, CHOICES, ENDS, Y, tokens, rows, experts, width,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Y: rows of X by expert, zeros after the last. Grid: rows, parts of COLS columns."""
    row, first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS
    here, _, token = _choices(CHOICES, ENDS, row, rows, experts, K)
    x = load(X, None, tile(tl.where(here, token, tokens), first, (tokens, width), 1, COLS, UNIT))
    store(Y, x, tile(row, first, (rows, width), 1, COLS, UNIT))


@plain_kernel(num_warps=4)
@triton.jit
def combine_rows(
    Y, W, PLACES, OUT, tokens, rows, width,
    HAS_W: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """OUT: for each token the sum of W · Y over its choices. Grid: tokens, parts of COLS columns."""
    token, first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS
    total = tl.zeros((ROWS, COLS), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(PLACES + token * K + j, mask=token < tokens, other=-1).to(tl.int64)
        y = load(Y, None, tile(tl.where(place < 0, rows, place), first, (rows, width), 1, COLS, UNIT))
        if HAS_W:
            y *= tk.cast(tl.load(W + token * K + j, mask=place >= 0, other=0), tk.fp32)[:, None]
        total += y
    store(OUT, total, tile(token, first, (tokens, width), 1, COLS, UNIT))


@plain_kernel(num_warps=4)
@triton.jit
def combine_rows_backward(
    DOUT, Y, W, CHOICES, ENDS, DY, DW, tokens, rows, experts, width,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """DY, DW: gradients of Y and W; zeros for choices of experts that are elsewhere. Grid: rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here, choice, token = _choices(CHOICES, ENDS, row, rows, experts, K)
    token, read = tl.where(here, token, tokens), tl.where(here, row, rows)
    w = tk.cast(tl.load(W + choice, mask=here, other=0), tk.fp32)[:, None]
    along = tl.zeros((ROWS, COLS), tl.float32)
    for first in tl.range(0, width * UNIT, COLS):
        dy = load(DOUT, None, tile(token, first, (tokens, width), 1, COLS, UNIT))
        along += dy * load(Y, None, tile(read, first, (rows, width), 1, COLS, UNIT))
        store(DY, dy * w, tile(row, first, (rows, width), 1, COLS, UNIT))
    tl.store(DW + choice, tk.cast(tk.row_sum(along), DW.dtype.element_ty), mask=row < rows)
