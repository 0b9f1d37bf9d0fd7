"""The last step of a backward: gradients from accumulation buffers, or from the parts of groups."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel

HALF = tl.constexpr(64 * 64)  # of a block's dQ: what one consumer computes
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
    """Write 64 columns, number `across`, of rows `first` … `behind` − 1 of a gradient: factor · its accumulated values.

    accum: tiles of 64 rows and SUMMED columns; this is tile number `tile`. MAY_BE_EMPTY: a half whose word in `words`
    is 0 counts as zeros. home: a pointer to row 0, `stride_s` between rows, WIDTH columns.
    """
    initialized = tl.load(words + tile * ((SUMMED + 63) // 64) + across) != 0 if MAY_BE_EMPTY else True
    row, col = first + tl.arange(0, 64)[:, None], across * 64 + tl.arange(0, 64)[None, :]
    place = tile * (64 * SUMMED) + across * HALF + tl.arange(0, HALF)
    # the last columns may be half as many
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
    """Write this program's 64 columns of a tile of a gradient's head number `number`; see `postprocess`.

    `tiles`: of a head in `accum`. gradient: (B, heads, rows, WIDTH).
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
    """dQ = factor · dQ_accum; and with PARTS dK and dV of several parts, whose buffers were zeroed and are never empty.

    Grid: columns, 64 at a time, of all tiles of 64 rows; B · heads, and with PARTS twice B · kv_heads for dK and dV.
    The last comes first, because it is still in L2. Accumulation buffers: see `AttentionBackward`; of a head they have
    `q_tiles` or `k_tiles` tiles. Gradients: (B, H, rows, WIDTH) with these strides, the last 1. `launch_pdl`: it starts
    early and waits.
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
    """Write this program's rows of a gradient: the sum of `parts` heads of `source`. COLS: the power of two from WIDTH
    on; see `sum_parts`."""
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
    """dK and dV from the parts of each key head's group, which lie one after the other along the heads.

    Grid: ROWS_SUMMED keys at a time; key heads; twice the batch, dK first. dK_parts, dV_parts: (B, H_kv · parts, S_kv,
    WIDTH or VALUE_WIDTH), dK, dV: (B, H_kv, S_kv, …), with these strides, the last 1. Sums are fp32. `launch_pdl`: it
    starts early and waits.
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
