"""Forward: z = dropout(rowscale · x) + dropout(x1) + residual, and its norm.

A program has rows, in parts of columns. It keeps them in registers where one chunk of parts covers them. Otherwise it
reads z twice, the second time from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._row_tiles import load, load_vector, store, tile
from tritonkittens.kernels.norm.device.dropout import dropout
from tritonkittens.launch import plain_kernel


@triton.jit
def _summed(X, R, X1, S, RNG, Z, at, p, t, HAS: tl.constexpr):
    """z in fp32, rounded as it is stored."""
    z = load(X, at[0], t)
    if HAS.rowscale:
        z *= load_vector(S, t.row, t.m)[:, None]
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
        z *= load_vector(W, t.col, t.n)[None, :] + CENTRE
    if BIAS:
        z += load_vector(B, t.col, t.n)[None, :]
    store(Y, z, t)


@plain_kernel
@triton.jit
def norm_forward(
    X, R, X1, W, B, W1, B1, S, RNG, Y, Y1, Z, MEAN, RSTD, size, inner, at, eps, p,
    HAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Y, Y1: norms of z. Z: z itself, with HAS.z. `at`: strides of x, residual and x1. HAS: `config.Parts`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    zs, count, mean, m2 = (), 0.0, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(CHUNKS):
        zs, total, square = (), 0.0, 0.0
        for j in tl.static_range(PARTS):
            z = _summed(X, R, X1, S, RNG, Z, at, p, tile(row, (i * PARTS + j) * COLS, size, inner, COLS, UNIT), HAS)
            zs, total = zs + (z,), z if j == 0 else total + z
        # sums of squared differences from the mean of a chunk, then from the mean of both (Chan, Golub, LeVeque 1979)
        more = tl.minimum(size[1] * UNIT - i * PARTS * COLS, PARTS * COLS).to(tl.float32)
        delta = mean if HAS.rms else tk.row_sum(total) / more - mean
        for j in tl.static_range(PARTS):
            inside = tile(row, (i * PARTS + j) * COLS, size, inner, COLS, UNIT).inside
            z = tl.where(inside, zs[j] - (mean + delta)[:, None], 0)
            square = z * z if j == 0 else square + z * z
        share = more / (count + more)
        m2 += tk.row_sum(square) + delta * delta * (count * share)
        count, mean = count + more, mean + delta * share
    rstd = tk.rsqrt(m2 / count + eps)
    tl.store(RSTD + row, rstd, mask=row < size[0])
    if not HAS.rms:
        tl.store(MEAN + row, mean, mask=row < size[0])
    if CHUNKS > 1:
        tl.debug_barrier()  # other threads may read Z than those that wrote it
    for j in tl.static_range(CHUNKS * PARTS):
        t = tile(row, j * COLS, size, inner, COLS, UNIT)
        if CHUNKS == 1:
            z = zs[j]
        else:
            z = load(Z, (inner * size[1], size[1]), t) if HAS.z else load(X, at[0], t)
        normal = (z - mean[:, None]) * rstd[:, None]
        _store_scaled(Y, normal, W, B, t, HAS.weight, HAS.centre, HAS.bias)
        if HAS.weight1:
            _store_scaled(Y1, normal, W1, B1, t, True, HAS.centre, HAS.bias1)
