"""The kernels of the quantisers.

A program quantises a tile of SIDE rows and SIDE columns along its rows, its columns or both. It loads the tile once for
each, the second time from L1. For rows, a thread has 16 columns of a row. For columns, it has 32 rows of two columns,
so that a block's maximum and the packing of its values stay in a thread's registers, and values are stored transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.quantize.device.formats import (
    amax,
    e4m3_scale,
    e8m0_scale,
    to_e2m1_pairs,
    to_fp8,
)
from tritonkittens.launch import plain_kernel

SIDE = tl.constexpr(128)  # of a tile: as many lines as a block of scales has
COLUMNS = tl.constexpr(2)  # neighbouring columns of a thread that has blocks of columns
MX, NV = tl.constexpr(32), tl.constexpr(16)  # numbers that share a scale


# ---------------------------------------------------------------- tiles


@triton.jit
def _place(WIDE: tl.constexpr):
    """Numbers of rows or columns in a tile, in the integers that its offsets need."""
    return tl.arange(0, SIDE).to(tl.int64) if WIDE else tl.arange(0, SIDE)


@triton.jit
def load_rows(x, m0, k0, WHOLE: tl.constexpr, WIDE: tl.constexpr):
    """The tile of x from row m0 and column k0, zero beyond the edges. `x`: base, strides and extents of a matrix."""
    m, k = _place(WIDE)[:, None], _place(WIDE)[None, :]
    place = x.base + (m0.to(tl.int64) * x.stride_m + k0.to(tl.int64) * x.stride_k) + (m * x.stride_m + k * x.stride_k)
    if WHOLE:
        return tl.load(place)
    return tl.load(place, mask=(m0 + m < x.M) & (k0 + k < x.K), other=0)


@triton.jit
def load_columns(x, m0, k0, WHOLE: tl.constexpr, WIDE: tl.constexpr):
    """As `load_rows`, transposed: (SIDE columns, SIDE / 32, 32 rows)."""
    r = tl.arange(0, 32).to(tl.int64) if WIDE else tl.arange(0, 32)
    m = (tl.arange(0, SIDE // 32)[None, :] * 32 + r[:, None])[:, :, None]
    k = tl.max_contiguous(_place(WIDE), COLUMNS)[None, None, :]
    place = x.base + (m0.to(tl.int64) * x.stride_m + k0.to(tl.int64) * x.stride_k) + (m * x.stride_m + k * x.stride_k)
    if WHOLE:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=(m0 + m < x.M) & (k0 + k < x.K), other=0)
    return tl.permute(found, (2, 1, 0))


@triton.jit
def store_values(Q, values, line, first, lines, length, WHOLE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Store bytes (SIDE, N) from a line and a byte in it on. `lines`, `length`: of the matrix. A thread stores AT_ONCE
    neighbouring bytes."""
    i = tl.arange(0, SIDE)[:, None]
    j = tl.max_contiguous(tl.arange(0, values.shape[1]), AT_ONCE)[None, :]
    place = Q + (line.to(tl.int64) * length + first) + (i * length + j)
    if WHOLE:
        tl.store(place, values)
    else:
        tl.store(place, values, mask=(line + i < lines) & (first + j < length))


@triton.jit
def store_scales(S, scales, line, first, lines, across, BLOCKED: tl.constexpr, WHOLE: tl.constexpr):
    """Store scales (SIDE, N) from a line and a scale in it on; a line has `across`.

    With BLOCKED, 128 lines of 4 scales are 512 bytes: 32 rows of 4 × 4, where scale j of line i is byte
    16 · (i mod 32) + 4 · (i div 32) + j (PTX ISA 9.7.16.7.2, the layout that `tcgen05.cp.32x128b.warpx4` copies).
    """
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, scales.shape[1])[None, :]
    inside = (line + i < lines) & (first + j < across)
    if BLOCKED:
        wide = tl.cdiv(across, 4)
        place = S + (line // SIDE * wide + first // 4).to(tl.int64) * 512
        place += ((i % 32) * 16 + i // 32 * 4) + (j // 4 * 512 + j % 4)
        if not WHOLE:
            scales = tl.where(inside, scales, 0)
        tl.store(place, scales, mask=(first + j < 4 * wide) & (i >= 0))
    else:
        tl.store(S + (line.to(tl.int64) * across + first) + (i * across + j), scales, mask=inside)


@triton.jit
def _tile_of_program(K):
    """(first row, first column) of this program's tile. Grid: tiles, those of a row first; matrices."""
    across = tl.cdiv(K, SIDE)
    return tl.program_id(0) // across * SIDE, tl.program_id(0) % across * SIDE


@triton.jit
def _blocks(y, SIZE: tl.constexpr):
    """A tile in fp32 as (SIDE, blocks, SIZE)."""
    return tl.reshape(y.to(tl.float32), (SIDE, SIDE // SIZE, SIZE))


# ---------------------------------------------------------------- MXFP8


@triton.jit
def _mxfp8(y, MANTISSA: tl.constexpr, UP: tl.constexpr, CONVERT: tl.constexpr):
    """(values, scales) of blocks (SIDE, blocks, 32), as bytes (SIDE, SIDE) and (SIDE, blocks)."""
    scales, inverse = e8m0_scale(amax(y), 8 if MANTISSA == 3 else 15, UP)
    return to_fp8(tl.reshape(y * inverse[:, :, None], (SIDE, SIDE)), MANTISSA, CONVERT), scales


@plain_kernel(num_warps=8, enable_fp_fusion=False)
@triton.jit
def mxfp8_tiles(
    X, Q, S, QT, ST, M, K, x_batch, x_row, x_column, s_batch, st_batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, MANTISSA: tl.constexpr, UP: tl.constexpr, BLOCKED: tl.constexpr,
    CONVERT: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Q, S: values and scales of the rows of X; QT, ST: of its columns, transposed. Grid: tiles of a matrix, matrices.

    x_batch, s_batch, st_batch: elements from matrix to matrix of X and of the scales. WHOLE: M and K are multiples of
    SIDE. WIDE: offsets in a tile of X need 64 bits.
    """
    m0, k0 = _tile_of_program(K)
    b = tl.program_id(1).to(tl.int64)
    x = tk.struct(base=X + b * x_batch, stride_m=x_row, stride_k=x_column, M=M, K=K)
    values = b * M * K
    if ROWS:
        found, scales = _mxfp8(_blocks(load_rows(x, m0, k0, WHOLE, WIDE), MX), MANTISSA, UP, CONVERT)
        store_values(Q + values, found, m0, k0, M, K, WHOLE, 16)
        store_scales(S + b * s_batch, scales, m0, k0 // MX, M, tl.cdiv(K, MX), BLOCKED, WHOLE)
    if COLS:
        found, scales = _mxfp8(_blocks(load_columns(x, m0, k0, WHOLE, WIDE), MX), MANTISSA, UP, CONVERT)
        store_values(QT + values, found, k0, m0, K, M, WHOLE, 16)
        store_scales(ST + b * st_batch, scales, k0, m0 // MX, K, tl.cdiv(M, MX), BLOCKED, WHOLE)


# ---------------------------------------------------------------- NVFP4


@triton.jit
def hadamard(y, signs):
    """Blocks of 16 along the last axis of (SIDE, blocks, 16), times signs, times the Hadamard matrix of 16, times 1/4.

    Sums are in fp32: of neighbours, then of numbers two, four and eight places apart.
    """
    y = y * (tl.load(signs + tl.arange(0, 16)).to(tl.float32) * 0.25)[None, None, :]
    y = tl.reshape(y, (SIDE, SIDE // 16, 2, 2, 2, 2))
    for _ in tl.static_range(4):
        a, b = tl.split(y)
        y = tl.permute(tl.join(a + b, a - b), (0, 1, 5, 2, 3, 4))
    return tl.reshape(y, (SIDE, SIDE // 16, 16))


@triton.jit
def _nvfp4(y, random, signs, reciprocal, TRANSFORM: tl.constexpr, CONVERT: tl.constexpr):
    """(values, scales) of blocks (SIDE, blocks, 16), as bytes (SIDE, SIDE / 2) and (SIDE, blocks)."""
    if TRANSFORM:
        y = hadamard(y, signs)
    scales, inverse = e4m3_scale(amax(y), tl.div_rn(reciprocal, 6.0), reciprocal, CONVERT)
    y = tl.reshape(y * inverse[:, :, None], (SIDE, SIDE // 2, 2))
    if random is not None:
        random = tl.reshape(random, (SIDE, SIDE // 2, 2))
    return to_e2m1_pairs(y, random, CONVERT), scales


@plain_kernel(num_warps=8, enable_fp_fusion=False)
@triton.jit
def nvfp4_tiles(
    X, T, random_bytes, signs, Q, S, QT, ST,
    M, K, x_batch, x_row, x_column, r_batch, r_row, r_column, s_batch, st_batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, STOCHASTIC: tl.constexpr, TRANSFORM: tl.constexpr, BLOCKED: tl.constexpr,
    CONVERT: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `mxfp8_tiles`. T: the tensor scale. random_bytes: with STOCHASTIC, a byte for each element of X. signs: with
    TRANSFORM, 16 numbers."""
    m0, k0 = _tile_of_program(K)
    b = tl.program_id(1).to(tl.int64)
    x = tk.struct(base=X + b * x_batch, stride_m=x_row, stride_k=x_column, M=M, K=K)
    reciprocal = tl.div_rn(1.0, tl.load(T))
    r = tk.struct(base=random_bytes + b * r_batch, stride_m=r_row, stride_k=r_column, M=M, K=K)
    random = None
    if ROWS:
        if STOCHASTIC:
            random = load_rows(r, m0, k0, WHOLE, WIDE)
        y = _blocks(load_rows(x, m0, k0, WHOLE, WIDE), NV)
        found, scales = _nvfp4(y, random, signs, reciprocal, TRANSFORM, CONVERT)
        store_values(Q + b * M * (K // 2), found, m0, k0 // 2, M, K // 2, WHOLE, 8)
        store_scales(S + b * s_batch, scales, m0, k0 // NV, M, tl.cdiv(K, NV), BLOCKED, WHOLE)
    if COLS:
        if STOCHASTIC:
            random = load_columns(r, m0, k0, WHOLE, WIDE)
        y = _blocks(load_columns(x, m0, k0, WHOLE, WIDE), NV)
        found, scales = _nvfp4(y, random, signs, reciprocal, TRANSFORM, CONVERT)
        store_values(QT + b * K * (M // 2), found, k0, m0 // 2, K, M // 2, WHOLE, 16)
        store_scales(ST + b * st_batch, scales, k0, m0 // NV, K, tl.cdiv(M, NV), BLOCKED, WHOLE)


# ---------------------------------------------------------------- the scale of a tensor

PARTS = tl.constexpr(1024)  # numbers that `tensor_scale` reads at once


@plain_kernel(num_warps=8, enable_fp_fusion=False)
@triton.jit
def tile_amax(
    X, signs, P, M, K, x_batch, x_row, x_column,
    ROWS: tl.constexpr, COLS: tl.constexpr, TRANSFORM: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """P: bits of the largest magnitude of each tile, with TRANSFORM of its transformed rows or columns. Grid: tiles of
    a matrix, matrices."""
    m0, k0 = _tile_of_program(K)
    x = tk.struct(base=X + tl.program_id(1).to(tl.int64) * x_batch, stride_m=x_row, stride_k=x_column, M=M, K=K)
    largest = 0
    if ROWS or not TRANSFORM:
        y = _blocks(load_rows(x, m0, k0, WHOLE, WIDE), NV)
        if TRANSFORM:
            y = hadamard(y, signs)
        largest = tl.max(amax(y))
    if COLS and TRANSFORM:
        y = hadamard(_blocks(load_columns(x, m0, k0, WHOLE, WIDE), NV), signs)
        largest = tl.maximum(largest, tl.max(amax(y)))
    tl.store(P + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)), largest)


@plain_kernel(num_warps=8, enable_fp_fusion=False)
@triton.jit
def tensor_scale(P, T, parts):
    """T = largest magnitude / (448 · 6), at least the smallest normal number; `parts`: of `tile_amax`. One program."""
    i = tl.arange(0, PARTS)
    largest = tl.zeros((PARTS,), tl.int32)
    for begin in range(0, parts, PARTS):
        largest = tl.maximum(largest, tl.load(P + begin + i, mask=begin + i < parts, other=0))
    bits = tl.max(largest)
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 2688.0)
    # by their bits, since a maximum would drop NaN
    tl.store(T, tl.maximum(scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x00800000).to(tl.float32, bitcast=True))
