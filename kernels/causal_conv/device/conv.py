"""A causal convolution of each channel, a block of rows and channels a program."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel


@plain_kernel(num_warps=4)
@triton.jit
def causal_conv(
    X, WEIGHT, BIAS, STATE, ENDS, Y, rows, channels, sequences,
    x_batch, x_channel, x_row, y_batch, y_channel, y_row, w_channel, w_tap, s_batch, s_channel, s_row,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Y = X ∗ WEIGHT with these strides. Grid: blocks of rows, blocks of channels, batches.

    STATE: (sequences, channels, WIDTH - 1), the rows before each sequence (`BEGINS`). ENDS: of packed sequences.
    """
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    batch, exists = tl.program_id(2).to(tl.int64), channel < channels
    inside = (row < rows)[:, None] & exists[None, :]
    begin, number = tl.zeros((ROWS,), tl.int32), batch + tl.zeros((ROWS,), tl.int32)
    if PACKED:
        n = tl.arange(0, MOST)
        ends = tl.load(ENDS + n, mask=n < sequences, other=0)
        before = (ends[None, :] <= row[:, None]) & (n < sequences)[None, :]
        begin = tl.max(tl.where(before, ends[None, :], 0), 1)
        number = tl.sum(before.to(tl.int64), 1)
        inside &= (number < sequences)[:, None]
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    if BIASED:
        sums += tk.cast(tl.load(BIAS + channel, mask=exists, other=0), tk.fp32)[None, :]
    for tap in tl.static_range(WIDTH):
        at = row + (tap - (WIDTH - 1))
        place = batch * x_batch + at.to(tl.int64)[:, None] * x_row + channel.to(tl.int64)[None, :] * x_channel
        x = tk.cast(tl.load(X + place, mask=inside & (at >= begin)[:, None], other=0), tk.fp32)
        if BEGINS:
            of_row = number * s_batch + (at - begin + (WIDTH - 1)) * s_row
            earlier = STATE + of_row[:, None] + channel.to(tl.int64)[None, :] * s_channel
            x += tk.cast(tl.load(earlier, mask=inside & (at < begin)[:, None], other=0), tk.fp32)
        weight = tl.load(WEIGHT + channel * w_channel + tap * w_tap, mask=exists, other=0)
        sums += x * tk.cast(weight, tk.fp32)[None, :]
    if SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    place = batch * y_batch + row.to(tl.int64)[:, None] * y_row + channel.to(tl.int64)[None, :] * y_channel
    tl.store(Y + place, tk.cast(sums, Y.dtype.element_ty), mask=inside)
