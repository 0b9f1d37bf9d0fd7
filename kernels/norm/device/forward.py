"""Forward: z = dropout(rowscale · x) + dropout(x1) + residual, and its norm.

A program has rows. It keeps them in registers where one chunk of columns covers them. Otherwise it reads z twice, the
second time from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.norm.device.rows import dropout, load, load_cols, load_rows, store, tile


@triton.jit
def _summed(X, R, X1, S, RNG, Z, x_at, r_at, x1_at, p, t, HAS: tl.constexpr):
    """z in fp32, rounded as it is stored."""
    z = load(X, x_at, t)
    if HAS.rowscale:
        z *= load_rows(S, t)
    if HAS.dropout:
        z = dropout(z, RNG, p, t, 0)
    if HAS.x1:
        z1 = load(X1, x1_at, t)
        z += dropout(z1, RNG, p, t, 1) if HAS.dropout else z1
    if HAS.residual:
        z += load(R, r_at, t)
    if HAS.z:
        z = tk.cast(z, Z.dtype.element_ty)
        store(Z, z, t)
    return tk.cast(z, tk.fp32)


@triton.jit
def _statistics(z, t, RMS: tl.constexpr):
    """Of the columns of a chunk: their number, their means, and sums of squared differences from these; of RMS, from
    zero."""
    count = tl.minimum(t.n - t.first, z.shape[1]).to(tl.float32)
    mean = tl.zeros((z.shape[0],), tl.float32) if RMS else tk.row_sum(z) / count
    z = tl.where(t.inside, z - mean[:, None], 0)
    return count, mean, tk.row_sum(z * z)


@triton.jit
def _normalised(z, mean, rstd, W, B, Y, W1, B1, Y1, t, HAS: tl.constexpr):
    """Store y and y1 of a tile."""
    z = (z - mean[:, None]) * rstd[:, None]
    y = z
    if HAS.weight:
        y = z * (load_cols(W, t) + HAS.centre)
    if HAS.bias:
        y += load_cols(B, t)
    store(Y, y, t)
    if HAS.weight1:
        y = z * (load_cols(W1, t) + HAS.centre)
        if HAS.bias1:
            y += load_cols(B1, t)
        store(Y1, y, t)


@triton.jit
def norm_forward(
    X, R, X1, W, B, W1, B1, S, RNG, Y, Y1, Z, MEAN, RSTD, size, inner, at, eps, p,
    HAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Y, Y1: norms of z. Z: z itself, with HAS.z. `at`: strides of x, residual and x1. HAS: `config.Parts`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t = tile(row, 0, size[0], size[1], inner, COLS, UNIT)
    z = _summed(X, R, X1, S, RNG, Z, at[0], at[1], at[2], p, t, HAS)
    count, mean, m2 = _statistics(z, t, HAS.rms)
    for i in tl.static_range(1, CHUNKS):
        t = tile(row, i * COLS, size[0], size[1], inner, COLS, UNIT)
        z = _summed(X, R, X1, S, RNG, Z, at[0], at[1], at[2], p, t, HAS)
        more, mean_of_more, m2_of_more = _statistics(z, t, HAS.rms)
        delta, share = mean_of_more - mean, more / (count + more)
        mean += delta * share
        m2 += m2_of_more + delta * delta * (count * share)
        count += more
    rstd = tk.rsqrt(m2 / count + eps)
    tl.store(RSTD + row, rstd, mask=row < size[0])
    if not HAS.rms:
        tl.store(MEAN + row, mean, mask=row < size[0])
    if CHUNKS == 1:
        _normalised(z, mean, rstd, W, B, Y, W1, B1, Y1, t, HAS)
    else:
        tl.debug_barrier()  # Z is read by other threads than those that wrote it
        for i in tl.static_range(CHUNKS):
            t = tile(row, i * COLS, size[0], size[1], inner, COLS, UNIT)
            z = load(Z, (inner * size[1], size[1]), t) if HAS.z else load(X, at[0], t)
            _normalised(z, mean, rstd, W, B, Y, W1, B1, Y1, t, HAS)
