"""A causal convolution of each channel and its gradients, a block of rows and channels a program."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel


@triton.jit
def _sequences(ENDS, row, rows, sequences, batch, PACKED: tl.constexpr, MOST: tl.constexpr):
    """(first row, end, number) of the sequence of each row; a row of none is at or after the end."""
    begin, number = row * 0, batch + row * 0
    end = begin + rows
    if PACKED:
        n = tl.arange(0, MOST)
        ends = tl.load(ENDS + n, mask=n < sequences, other=0)[None, :]
        exists = (n < sequences)[None, :]
        before = (ends <= row[:, None]) & exists
        begin, number = tl.max(tl.where(before, ends, 0), 1), tl.sum(before.to(tl.int64), 1)
        end = tl.min(tl.where(before | ~exists, rows, ends), 1)
        end = tl.where(number < sequences, end, 0)
    return begin, end, number


@triton.jit
def _rows_of(
    X, STATE, row, begin, end, number, batch, channel, exists, x_batch, x_channel, x_row, s_batch, s_channel, s_row,
    WIDTH: tl.constexpr, BEGINS: tl.constexpr,
):  # fmt: skip
    """Rows of X in fp32, those of STATE (sequences, channels, WIDTH - 1) before a sequence begins, and else zeros."""
    place = batch * x_batch + row.to(tl.int64)[:, None] * x_row + channel.to(tl.int64)[None, :] * x_channel
    inside = (row >= begin) & (row < end)
    x = tk.cast(tl.load(X + place, mask=inside[:, None] & exists[None, :], other=0), tk.fp32)
    if BEGINS:
        of_row = number * s_batch + (row - begin + (WIDTH - 1)) * s_row
        earlier = (row < begin) & (row > begin - WIDTH) & (begin < end)
        place = of_row[:, None] + channel.to(tl.int64)[None, :] * s_channel
        x += tk.cast(tl.load(STATE + place, mask=earlier[:, None] & exists[None, :], other=0), tk.fp32)
    return x


@triton.jit
def _tap(WEIGHT, tap, channel, exists, w_channel, w_tap):
    """The weights of a tap in fp32."""
    return tk.cast(tl.load(WEIGHT + channel * w_channel + tap * w_tap, mask=exists, other=0), tk.fp32)[None, :]


@triton.jit
def _convolved(
    X, WEIGHT, BIAS, STATE, row, begin, end, number, batch, channel, exists,
    x_batch, x_channel, x_row, w_channel, w_tap, s_batch, s_channel, s_row,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Rows of X ∗ WEIGHT + BIAS in fp32."""
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    if BIASED:
        sums += tk.cast(tl.load(BIAS + channel, mask=exists, other=0), tk.fp32)[None, :]
    for tap in tl.static_range(WIDTH):
        x = _rows_of(
            X, STATE, row + (tap - (WIDTH - 1)), begin, end, number, batch, channel, exists,
            x_batch, x_channel, x_row, s_batch, s_channel, s_row, WIDTH, BEGINS,
        )  # fmt: skip
        sums += x * _tap(WEIGHT, tap, channel, exists, w_channel, w_tap)
    return sums


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
    begin, end, number = _sequences(ENDS, row, rows, sequences, batch, PACKED, MOST)
    sums = _convolved(
        X, WEIGHT, BIAS, STATE, row, begin, end, number, batch, channel, exists,
        x_batch, x_channel, x_row, w_channel, w_tap, s_batch, s_channel, s_row, WIDTH, BIASED, BEGINS, ROWS, CHANNELS,
    )  # fmt: skip
    if SILU:
        sums = sums / (1.0 + tl.exp(-sums))
    place = batch * y_batch + row.to(tl.int64)[:, None] * y_row + channel.to(tl.int64)[None, :] * y_channel
    tl.store(Y + place, tk.cast(sums, Y.dtype.element_ty), mask=(row < end)[:, None] & exists[None, :])


@triton.jit
def _of_sums(
    DY, X, WEIGHT, BIAS, STATE, row, begin, end, number, batch, channel, exists, d_batch, d_channel, d_row,
    x_batch, x_channel, x_row, w_channel, w_tap, s_batch, s_channel, s_row,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of rows before the activation, whose sums are computed again."""
    place = batch * d_batch + row.to(tl.int64)[:, None] * d_row + channel.to(tl.int64)[None, :] * d_channel
    inside = ((row >= begin) & (row < end))[:, None] & exists[None, :]
    dy = tk.cast(tl.load(DY + place, mask=inside, other=0), tk.fp32)
    if SILU:
        sums = _convolved(
            X, WEIGHT, BIAS, STATE, row, begin, end, number, batch, channel, exists,
            x_batch, x_channel, x_row, w_channel, w_tap, s_batch, s_channel, s_row,
            WIDTH, BIASED, BEGINS, ROWS, CHANNELS,
        )  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-sums))
        dy *= gate + gate * (1.0 - gate) * sums
    return dy


@plain_kernel(num_warps=4)
@triton.jit
def causal_conv_backward(
    DY, X, WEIGHT, BIAS, STATE, ENDS, DX, PARTS, rows, channels, sequences, d_batch, d_channel, d_row,
    x_batch, x_channel, x_row, y_batch, y_channel, y_row, w_channel, w_tap, s_batch, s_channel, s_row,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, OF_STATES: tl.constexpr,
):  # fmt: skip
    """Gradients DX, and PARTS (batches, blocks of rows, WIDTH + 1, channels) of those of taps and, last, of the bias.

    `OF_STATES`: rows of a program are instead those of a state, and DX (sequences, channels, WIDTH - 1) its gradient;
    there are no parts. Strides y are those of DX. Grid: blocks of rows or sequences, blocks of channels, batches.
    """
    i, channel = tl.arange(0, ROWS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    batch, exists = tl.program_id(2).to(tl.int64), channel < channels
    row = tl.program_id(0) * ROWS + i
    begin, end, number = _sequences(ENDS, row, rows, sequences, batch, PACKED, MOST)
    if OF_STATES:
        number = tl.program_id(0).to(tl.int64) + i * 0
        begin, end = i * 0, i * 0 + rows
        if PACKED:
            begin += tl.load(ENDS + tl.program_id(0) - 1, mask=tl.program_id(0) > 0, other=0)
            end = i * 0 + tl.load(ENDS + tl.program_id(0))
        else:
            batch = tl.program_id(0).to(tl.int64)
        row = begin + i - (WIDTH - 1)
    dx = tl.zeros((ROWS, CHANNELS), tl.float32)
    part = PARTS + ((batch * tl.num_programs(0) + tl.program_id(0)) * (WIDTH + 1)) * channels + channel
    for after in tl.static_range(WIDTH):
        of_sums = _of_sums(
            DY, X, WEIGHT, BIAS, STATE, row + after, begin, end, number, batch, channel, exists,
            d_batch, d_channel, d_row, x_batch, x_channel, x_row, w_channel, w_tap, s_batch, s_channel, s_row,
            WIDTH, BIASED, BEGINS, SILU, ROWS, CHANNELS,
        )  # fmt: skip
        dx += of_sums * _tap(WEIGHT, WIDTH - 1 - after, channel, exists, w_channel, w_tap)
        if after == 0 and not OF_STATES:
            tl.store(part + WIDTH * channels, tl.sum(of_sums, 0), mask=exists)
            for tap in tl.static_range(WIDTH):
                x = _rows_of(
                    X, STATE, row + (tap - (WIDTH - 1)), begin, end, number, batch, channel, exists,
                    x_batch, x_channel, x_row, s_batch, s_channel, s_row, WIDTH, BEGINS,
                )  # fmt: skip
                tl.store(part + tap * channels, tl.sum(of_sums * x, 0), mask=exists)
    written, of_batch = row < rows, batch
    if OF_STATES:
        row, written, of_batch = i, i < WIDTH - 1, tl.program_id(0).to(tl.int64)
    place = of_batch * y_batch + row.to(tl.int64)[:, None] * y_row + channel.to(tl.int64)[None, :] * y_channel
    tl.store(DX + place, tk.cast(dx, DX.dtype.element_ty), mask=written[:, None] & exists[None, :])
