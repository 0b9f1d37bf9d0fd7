"""The kernels of the quantisers.

A program quantises a tile of SIDE rows and SIDE columns along its rows, its columns or both. It loads the tile once for
each, the second time from L1. For rows, a thread has 16 columns of a row. For columns, it has a block of rows of two or
four columns, so that a block's maximum and the packing of its values stay in a thread's registers, and values are
stored transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.quantize.device.formats import (
    amax,
    conversions,
    e4m3_scale,
    e8m0_scale,
    to_e2m1_words,
    to_fp8,
    to_fp32,
)
from tritonkittens.launch import plain_kernel

SIDE = tl.constexpr(128)  # of a tile: as many lines as a block of scales has
NUMBERS = tl.constexpr(64)  # of a thread


# ---------------------------------------------------------------- tiles


@triton.jit
def _load(x, m0, k0, m, k, i, RIGHT: tl.constexpr, WHOLE: tl.constexpr):
    """The numbers of x in rows m0 + m and columns k0 + k, zero beyond the edges. `x`: base, strides and extents of a
    matrix. `i`, numbers that are the same in all threads, is added to k if RIGHT, otherwise to m: a 64-bit
    multiply-add for each address."""
    place = x.base + (m0.to(tl.int64) * x.stride_m + k0.to(tl.int64) * x.stride_k) + (m * x.stride_m + k * x.stride_k)
    place += i.to(tl.int64) * tl.cast(x.stride_k if RIGHT else x.stride_m, tl.int64)
    if WHOLE:
        return tl.load(place)
    elif RIGHT:
        return tl.load(place, mask=(m0 + m < x.M) & (k0 + k + i < x.K), other=0)
    else:
        return tl.load(place, mask=(m0 + m + i < x.M) & (k0 + k < x.K), other=0)


@triton.jit
def _range(COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of rows or columns in a tile, in the integers that its offsets need."""
    return tl.arange(0, COUNT).to(tl.int64) if WIDE else tl.arange(0, COUNT)


@triton.jit
def load_rows(x, m0, k0, WHOLE: tl.constexpr, WIDE: tl.constexpr):
    """The tile of x from row m0 and column k0, (SIDE rows, SIDE / 16, 16 columns)."""
    # The first axis is in a thread's registers: 16 columns in several loads of 16 bytes.
    ONCE: tl.constexpr = 128 // x.base.dtype.element_ty.primitive_bitwidth
    i, m = tl.arange(0, 16 // ONCE)[:, None, None, None], _range(SIDE, WIDE)[None, :, None, None]
    b, j = _range(SIDE // 16, WIDE)[None, None, :, None], _range(ONCE, WIDE)[None, None, None, :]
    found = _load(x, m0, k0, m, b * 16 + j, i * ONCE, True, WHOLE)
    return tl.reshape(tl.permute(found, (1, 2, 0, 3)), (SIDE, SIDE // 16, 16))


@triton.jit
def load_columns(x, m0, k0, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr):
    """As `load_rows`, transposed: (SIDE columns, SIDE / BLOCK, BLOCK rows)."""
    # The first axis is in a thread's registers: a block of rows of the columns that it loads at once.
    i, b = tl.arange(0, BLOCK)[:, None, None], _range(SIDE // BLOCK, WIDE)[None, :, None]
    k = tl.max_contiguous(_range(SIDE, WIDE), NUMBERS // BLOCK)[None, None, :]
    return tl.permute(_load(x, m0, k0, b * BLOCK, k, i, False, WHOLE), (2, 1, 0))


@triton.jit
def store_values(Q, values, line, first, lines, length, ONCE: tl.constexpr, WHOLE: tl.constexpr):
    """Store bytes (SIDE, N) from a line and a byte in it on. `lines`, `length`: of the matrix. A thread stores 16
    neighbouring bytes, which is why it loads 16 numbers of a row."""
    i, j = tl.arange(0, SIDE)[:, None], tl.max_contiguous(tl.arange(0, values.shape[1]), ONCE)[None, :]
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


# ---------------------------------------------------------------- MXFP8


@triton.jit
def _scaled(x, inverse, CONVERT: tl.constexpr):
    """Blocks (SIDE, blocks, size) in fp32, times a number for each."""
    return inverse[:, :, None] * to_fp32(x, CONVERT)  # of two NaN, a CPU takes the first; that of a GPU has no sign


@triton.jit
def _mxfp8(x, MANTISSA: tl.constexpr, UP: tl.constexpr, CONVERT: tl.constexpr):
    """(values, scales) of a tile, as bytes (SIDE, SIDE) and (SIDE, SIDE / 32)."""
    x = tl.reshape(x, (SIDE, SIDE // 32, 32))
    scales, inverse = e8m0_scale(amax(x, CONVERT), 8 if MANTISSA == 3 else 15, UP)
    return to_fp8(tl.reshape(_scaled(x, inverse, CONVERT), (SIDE, SIDE)), MANTISSA, CONVERT), scales


@plain_kernel(num_warps=8, enable_fp_fusion=False)
@triton.jit
def mxfp8_tiles(
    X, Q, S, QT, ST, M, K, x_batch, x_row, x_column, s_batch, st_batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, MANTISSA: tl.constexpr, UP: tl.constexpr, BLOCKED: tl.constexpr,
    CONVERT: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Q, S: values and scales of the rows of X; QT, ST: of its columns, transposed. Grid: tiles of a row,
    tiles of a column, matrices.

    x_batch, s_batch, st_batch: elements from matrix to matrix of X and of the scales. WHOLE: M and K are multiples of
    SIDE. WIDE: offsets in a tile of X need 64 bits.
    """
    k0, m0 = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    b = tl.program_id(2).to(tl.int64)
    x = tk.struct(base=X + b * x_batch, stride_m=x_row, stride_k=x_column, M=M, K=K)
    values = b * M * K
    how: tl.constexpr = conversions(CONVERT)
    if ROWS:
        found, scales = _mxfp8(load_rows(x, m0, k0, WHOLE, WIDE), MANTISSA, UP, how)
        store_values(Q + values, found, m0, k0, M, K, 16, WHOLE)
        store_scales(S + b * s_batch, scales, m0, k0 // 32, M, tl.cdiv(K, 32), BLOCKED, WHOLE)
    if COLS:
        found, scales = _mxfp8(load_columns(x, m0, k0, 32, WHOLE, WIDE), MANTISSA, UP, how)
        store_values(QT + values, found, k0, m0, K, M, 16, WHOLE)
        store_scales(ST + b * st_batch, scales, k0, m0 // 32, K, tl.cdiv(M, 32), BLOCKED, WHOLE)


# ---------------------------------------------------------------- NVFP4


@triton.jit
def hadamard(x, signs, CONVERT: tl.constexpr):
    """A tile in blocks of 16 along its last axis, (SIDE, SIDE / 16, 16), times signs, times the Hadamard matrix of 16,
    times 1/4, in fp32. Sums are of neighbours first, then of numbers two, four and eight places apart."""
    y = to_fp32(tl.reshape(x, (SIDE, SIDE // 16, 16)), CONVERT)
    y = y * (tl.load(signs + tl.arange(0, 16)).to(tl.float32) * 0.25)[None, None, :]
    y = tl.reshape(y, (SIDE, SIDE // 16, 2, 2, 2, 2))
    for _ in tl.static_range(4):
        a, b = tl.split(y)
        y = tl.permute(tl.join(a + b, a - b), (0, 1, 5, 2, 3, 4))
    return tl.reshape(y, (SIDE, SIDE // 16, 16))


@triton.jit
def _nvfp4(x, random, signs, reciprocal, TRANSFORM: tl.constexpr, CONVERT: tl.constexpr):
    """(values, scales) of a tile, as words (SIDE, SIDE / 8) and as bytes (SIDE, SIDE / 16)."""
    x = hadamard(x, signs, CONVERT) if TRANSFORM else tl.reshape(x, (SIDE, SIDE // 16, 16))
    scales, inverse = e4m3_scale(amax(x, CONVERT), reciprocal * 0.16666667163372040, reciprocal, CONVERT)
    y = _scaled(x, inverse, CONVERT)
    if random is not None:
        random = tl.reshape(random, (SIDE, SIDE // 8, 8))
    return to_e2m1_words(tl.reshape(y, (SIDE, SIDE // 8, 8)), random, CONVERT), scales


@triton.jit
def _store_words(Q, words, line, first, lines, units, ONCE: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr):
    """Store e2m1, (SIDE, SIDE / 8) words, from a line and a number in it on. A line of the matrix has `units` elements
    of UNIT numbers each: words of 8, or bytes of 2 where words do not fill it."""
    if UNIT == 8:
        store_values(Q.to(tl.pointer_type(tl.uint32), bitcast=True), words, line, first // 8, lines, units, ONCE, WHOLE)
    else:
        found = (words[:, :, None] >> (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, :]).to(tl.uint8)
        store_values(Q, tl.reshape(found, (SIDE, SIDE // 2)), line, first // 2, lines, units, 4 * ONCE, WHOLE)


@plain_kernel(num_warps=8, enable_fp_fusion=False)
@triton.jit
def nvfp4_tiles(
    X, T, random_bytes, signs, Q, S, QT, ST,
    M, K, x_batch, x_row, x_column, r_batch, r_row, r_column, row_units, column_units, s_batch, st_batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROW_UNIT: tl.constexpr, COLUMN_UNIT: tl.constexpr,
    STOCHASTIC: tl.constexpr, TRANSFORM: tl.constexpr, BLOCKED: tl.constexpr, CONVERT: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `mxfp8_tiles`. T: the tensor scale. random_bytes: with STOCHASTIC, a byte for each element of X. signs: with
    TRANSFORM, 16 numbers. row_units, ROW_UNIT and those of columns: `_store_words`."""
    k0, m0 = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    b = tl.program_id(2).to(tl.int64)
    x = tk.struct(base=X + b * x_batch, stride_m=x_row, stride_k=x_column, M=M, K=K)
    r = tk.struct(base=random_bytes + b * r_batch, stride_m=r_row, stride_k=r_column, M=M, K=K)
    how: tl.constexpr = conversions(CONVERT)
    reciprocal = tl.div_rn(1.0, tl.load(T))
    values = b * M * (K // 2)
    random = None
    if ROWS:
        if STOCHASTIC:
            random = load_rows(r, m0, k0, WHOLE, WIDE)
        tile = load_rows(x, m0, k0, WHOLE, WIDE)
        found, scales = _nvfp4(tile, random, signs, reciprocal, TRANSFORM, how)
        _store_words(Q + values, found, m0, k0, M, row_units, 2, ROW_UNIT, WHOLE)
        store_scales(S + b * s_batch, scales, m0, k0 // 16, M, tl.cdiv(K, 16), BLOCKED, WHOLE)
    if COLS:
        if STOCHASTIC:
            random = load_columns(r, m0, k0, 16, WHOLE, WIDE)
        tile = load_columns(x, m0, k0, 16, WHOLE, WIDE)
        found, scales = _nvfp4(tile, random, signs, reciprocal, TRANSFORM, how)
        _store_words(QT + b * K * (M // 2), found, k0, m0, K, column_units, 4, COLUMN_UNIT, WHOLE)
        store_scales(ST + b * st_batch, scales, k0, m0 // 16, K, tl.cdiv(M, 16), BLOCKED, WHOLE)


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
    k0, m0 = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    x = tk.struct(base=X + tl.program_id(2).to(tl.int64) * x_batch, stride_m=x_row, stride_k=x_column, M=M, K=K)
    how: tl.constexpr = conversions("fastest")
    largest = 0
    if ROWS or not TRANSFORM:
        tile = load_rows(x, m0, k0, WHOLE, WIDE)
        largest = tl.max(amax(hadamard(tile, signs, how) if TRANSFORM else tile, how))
    if COLS and TRANSFORM:
        tile = load_columns(x, m0, k0, 16, WHOLE, WIDE)
        largest = tl.maximum(largest, tl.max(amax(hadamard(tile, signs, how), how)))
    place = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(P + place, largest)


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
