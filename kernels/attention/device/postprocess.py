"""The last kernels of a backward: `postprocess` reads accumulation buffers, `sum_parts` sums the parts of groups."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel

HALF = tl.constexpr(64 * 64)  # elements of a half: 64 rows and 64 columns of dQ, as one consumer accumulates
ROWS_SUMMED = tl.constexpr(16)  # keys of a program of `sum_parts`
SUMMED_AT_ONCE = tl.constexpr(8)  # parts whose loads are in flight


@triton.jit
def write_half(
    accum,
    words,
    tile,
    home,
    stride_s,
    first,
    behind,
    across,
    factor,
    SUMMED: tl.constexpr,
    WIDTH: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr,
):
    """Write a half, 64 rows and 64 columns, of a gradient: factor · its accumulated values.

    Args:
        accum: accumulation buffer, tiles of 64 rows and SUMMED columns, fp32. `tile` is the number of this half's tile.
        words: int32, one for each half. With MAY_BE_EMPTY, a half whose word is 0 was never written: it is zero.
        home: pointer to row 0 of the gradient, with `stride_s` elements between rows and WIDTH columns.
        first, behind: the half's rows are `first` to `first` + 63, but no row from `behind` on is written.
        across: the half's columns are 64 · `across` to 64 · `across` + 63.
    """
    initialized = tl.load(words + tile * ((SUMMED + 63) // 64) + across) != 0 if MAY_BE_EMPTY else True
    row, col = first + tl.arange(0, 64)[:, None], across * 64 + tl.arange(0, 64)[None, :]
    place = tile * (64 * SUMMED) + across * HALF + tl.arange(0, HALF)
    # the last half may have 32 columns only
    there = tl.multiple_of(tl.minimum(HALF, 64 * SUMMED - across * HALF), 64 * 32)
    x = tl.load(accum + place, mask=(tl.arange(0, HALF) < there) & initialized, other=0.0)
    # the order in memory is 32 columns, 16 rows, 8 columns, a row, 2 columns, 8 rows, a column: `tk.fragment_place`
    x = tl.reshape(tl.permute(tl.reshape(x, (2, 4, 4, 8, 4, 2, 2)), (1, 5, 3, 0, 2, 4, 6)), (64, 64))
    tl.store(
        home + row.to(tl.int64) * stride_s + col,
        (x * factor).to(home.dtype.element_ty),
        mask=(row < behind) & (col < WIDTH),
    )


@triton.jit
def write_tile(
    accum, words, gradient, number, tiles, heads, stride_b, stride_h, stride_s, factor, rows,
    SUMMED: tl.constexpr, WIDTH: tl.constexpr, MAY_BE_EMPTY: tl.constexpr,
):  # fmt: skip
    """Write this program's half of head number `number` of a gradient, (B, heads, rows, WIDTH); see `postprocess`.

    `tiles`: tiles of a head in `accum`.
    """
    ACROSS: tl.constexpr = (SUMMED + 63) // 64
    part = tl.program_id(0)
    if part < ACROSS * tiles:
        write_half(
            accum,
            words,
            number * tiles + part // ACROSS,
            gradient + number // heads * stride_b + number % heads * stride_h,
            stride_s,
            part // ACROSS * 64,
            rows,
            part % ACROSS,
            factor,
            SUMMED,
            WIDTH,
            MAY_BE_EMPTY,
        )


@plain_kernel(launch_pdl=True)
@triton.jit
def postprocess(
    dQ_accum, words, dQ, dK_accum, dV_accum, dK, dV,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    factor, batch, queries, heads, keys, kv_heads, q_tiles, k_tiles,
    SUMMED: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dQ = factor · dQ_accum. With PARTS, also dK = factor · dK_accum and dV = dV_accum.

    Grid: halves of a head, which are 64 columns of a tile of 64 rows; heads of all batches, B · heads of dQ and, with
    PARTS, B · kv_heads of dK and of dV. The last heads come first, because they are still in L2.

    Accumulation buffers are those of `AttentionBackward`, with `q_tiles` or `k_tiles` tiles a head. Those of dK and dV
    were zeroed, so none of their halves is empty. Gradients: (B, H, rows, WIDTH) with these strides, the last 1.
    `launch_pdl`: it starts early, and waits for the previous kernel before it loads.
    """
    tk.dependency_wait()
    number = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    if PARTS and number >= batch * heads:
        number -= batch * heads
        if number < batch * kv_heads:
            write_tile(
                dK_accum, words, dK, number, k_tiles, kv_heads, k_batch, k_head, k_row, factor, keys,
                SUMMED, WIDTH, False,
            )  # fmt: skip
        else:
            write_tile(
                dV_accum, words, dV, number - batch * kv_heads, k_tiles, kv_heads, v_batch, v_head, v_row, 1.0, keys,
                SUMMED, WIDTH, False,
            )  # fmt: skip
    else:
        write_tile(
            dQ_accum, words, dQ, number, q_tiles, heads, q_batch, q_head, q_row, factor, queries, SUMMED, WIDTH, True
        )


@triton.jit
def write_sum(
    source, gradient, parts, batch, head, s_batch, s_head, s_row, stride_b, stride_h, stride_s, rows,
    WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write this program's rows of a gradient: the sum of `parts` heads of `source`; see `sum_parts`.

    COLS: WIDTH rounded up to a power of two.
    """
    row, col = tl.program_id(0) * ROWS_SUMMED + tl.arange(0, ROWS_SUMMED)[:, None], tl.arange(0, COLS)[None, :]
    here = (row < rows) & (col < WIDTH)
    first = source + batch.to(tl.int64) * s_batch + row.to(tl.int64) * s_row + col
    total = tl.zeros((ROWS_SUMMED, COLS), tl.float32)
    for begin in range(0, parts, SUMMED_AT_ONCE):
        for i in tl.static_range(SUMMED_AT_ONCE):
            place = first + (head * parts + begin + i).to(tl.int64) * s_head
            total += tl.load(place, mask=here & (begin + i < parts), other=0.0).to(tl.float32)
    home = gradient + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s + col
    tl.store(home, total.to(gradient.dtype.element_ty), mask=here)


@plain_kernel(launch_pdl=True)
@triton.jit
def sum_parts(
    dK_parts, dV_parts, dK, dV, parts,
    kp_batch, kp_head, kp_row, vp_batch, vp_head, vp_row, k_batch, k_head, k_row, v_batch, v_head, v_row, keys,
    WIDTH: tl.constexpr, COLS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_COLS: tl.constexpr,
):  # fmt: skip
    """dK and dV: the sums, in fp32, of the parts of each key head's group. These are neighbouring heads of dK_parts.

    Grid: blocks of ROWS_SUMMED keys; key heads; twice the batch, dK first. dK_parts: (B, H_kv · parts, S_kv, WIDTH),
    dV_parts: (B, H_kv · parts, S_kv, VALUE_WIDTH); dK, dV: (B, H_kv, S_kv, …); with these strides, the last 1. COLS,
    VALUE_COLS: both widths rounded up to a power of two. `launch_pdl`: it starts early, and waits for the previous
    kernel before it loads.
    """
    tk.dependency_wait()
    head, number, batch = tl.program_id(1), tl.program_id(2), tl.num_programs(2) // 2
    if number < batch:
        write_sum(
            dK_parts, dK, parts, number, head, kp_batch, kp_head, kp_row, k_batch, k_head, k_row, keys, WIDTH, COLS
        )
    else:
        write_sum(
            dV_parts, dV, parts, number - batch, head, vp_batch, vp_head, vp_row, v_batch, v_head, v_row, keys,
            VALUE_WIDTH, VALUE_COLS,
        )  # fmt: skip
