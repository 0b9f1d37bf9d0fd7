"""Forward: z = dropout(rowscale · x) + dropout(x1) + residual, and its norm.

A program has rows, in parts of columns, and keeps them in registers. The CTAs of a cluster share a wide row: each has
some columns of each part, and the compiler exchanges their sums through distributed shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._row_tiles import load, load_columns, load_rows, store, tile
from tritonkittens.kernels.norm.device.dropout import dropout
from tritonkittens.launch import plain_kernel


@triton.jit
def _summed(X, R, X1, S, RNG, Z, at, p, t, HAS: tl.constexpr):
    """z in fp32, rounded as it is stored."""
    z = load(X, at[0], t)
    if HAS.rowscale:
        z *= load_rows(S, t.row, t.m)[:, None]
    if HAS.dropout:
        z = dropout(z, RNG, p, t, 0)
    if HAS.residual:
        z += load(R, at[1], t)
    if HAS.x1:
        z1 = load(X1, at[2], t)
        z += dropout(z1, RNG, p, t, 1) if HAS.dropout else z1
    if HAS.z:
        z = tk.cast(z, Z.dtype.element_ty)
        store(Z, z, t)
    return tk.cast(z, tk.fp32)


@triton.jit
def _store_scaled(Y, z, W, B, t, WEIGHT: tl.constexpr, CENTRE: tl.constexpr, BIAS: tl.constexpr):
    """Store z · (W + CENTRE) + B."""
    if WEIGHT:
        z *= load_columns(W, t.col, t.n)[None, :] + CENTRE
    if BIAS:
        z += load_columns(B, t.col, t.n)[None, :]
    store(Y, z, t)


@plain_kernel
@triton.jit
def norm_forward(
    X, R, X1, W, B, W1, B1, S, RNG, Y, Y1, Z, MEAN, RSTD, size, inner, at, eps, p,
    HAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Y, Y1: norms of z. Z: z itself, with HAS.z. `at`: strides of x, residual and x1. HAS: `config.Parts`."""
    row, n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), size[1] * UNIT
    ts, zs, total, square, mean = (), (), 0.0, 0.0, 0.0
    for j in tl.static_range(PARTS):
        ts += (tile(row, j * COLS, size, inner, COLS, UNIT),)
        zs += (_summed(X, R, X1, S, RNG, Z, at, p, ts[j], HAS),)
        total = zs[j] if j == 0 else total + zs[j]
    if not HAS.rms:
        average = tk.row_sum(total) / n
        tl.store(MEAN + row, average, mask=row < size[0])
        mean = average[:, None]
    for j in tl.static_range(PARTS):
        centred = tl.where(ts[j].inside, zs[j] - mean, 0)
        square = centred * centred if j == 0 else square + centred * centred
    rstd = tk.rsqrt(tk.row_sum(square) / n + eps)
    tl.store(RSTD + row, rstd, mask=row < size[0])
    for j in tl.static_range(PARTS):
        normal = (zs[j] - mean) * rstd[:, None]
        _store_scaled(Y, normal, W, B, ts[j], HAS.weight, HAS.centre, HAS.bias)
        if HAS.weight1:
            _store_scaled(Y1, normal, W1, B1, ts[j], True, HAS.centre, HAS.bias1)
