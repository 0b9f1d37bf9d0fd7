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
    x = tk.cast_pairs(tl.load(X + place, mask=inside[:, None] & exists[None, :], other=0), tk.fp32)
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
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, REVERSE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Rows of X ∗ WEIGHT + BIAS in fp32. `REVERSE`: time runs from the last row to the first."""
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    if BIASED:
        sums += tk.cast(tl.load(BIAS + channel, mask=exists, other=0), tk.fp32)[None, :]
    for tap in tl.static_range(WIDTH):
        x = _rows_of(
            X, STATE, row + (WIDTH - 1 - tap) * (1 if REVERSE else -1), begin, end, number, batch, channel, exists,
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
    MOST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, REVERSE: tl.constexpr, OF_STATES: tl.constexpr,
):  # fmt: skip
    """Y = X ∗ WEIGHT with these strides. Grid: blocks of rows, blocks of channels, batches.

    STATE: (sequences, channels, WIDTH - 1), the rows before each sequence (`BEGINS`). ENDS: of packed sequences.
    `REVERSE`: of X, the gradients of sums, Y has those of the convolved rows, or with `OF_STATES`, (sequences,
    channels, WIDTH - 1), of the rows before each sequence, which is one program.
    """
    i, channel = tl.arange(0, ROWS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    block, batch, exists = tl.program_id(0), tl.program_id(2).to(tl.int64), channel < channels
    if OF_STATES:
        begin, number, of_batch = i * 0, block + i * 0, block.to(tl.int64)
        end, of_row, written = begin + rows, i, i < WIDTH - 1
        if PACKED:
            begin += tl.load(ENDS + block - 1, mask=block > 0, other=0)
            end = i * 0 + tl.load(ENDS + block)
        else:
            batch = of_batch
        row = begin + i - (WIDTH - 1)
    else:
        row, of_batch = block * ROWS + i, batch
        begin, end, number = _sequences(ENDS, row, rows, sequences, batch, PACKED, MOST)
        of_row, written = row, row < (rows if REVERSE else end)
    sums = _convolved(
        X, WEIGHT, BIAS, STATE, row, begin, end, number, batch, channel, exists, x_batch, x_channel, x_row,
        w_channel, w_tap, s_batch, s_channel, s_row, WIDTH, BIASED, BEGINS, REVERSE, ROWS, CHANNELS,
    )  # fmt: skip
    if SILU:
        sums = tk.silu(sums, fast=Y.dtype.element_ty)
    place = of_batch * y_batch + of_row.to(tl.int64)[:, None] * y_row + channel.to(tl.int64)[None, :] * y_channel
    tl.store(Y + place, tk.cast(sums, Y.dtype.element_ty), mask=written[:, None] & exists[None, :])


@plain_kernel(num_warps=4)
@triton.jit
def gradients_of_sums(
    DY, X, WEIGHT, BIAS, STATE, ENDS, DS, PARTS, rows, channels, sequences, d_batch, d_channel, d_row,
    x_batch, x_channel, x_row, y_batch, y_channel, y_row, w_channel, w_tap, s_batch, s_channel, s_row,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """DS, the gradients of rows before the activation, whose sums are computed again, and PARTS (batches, blocks of
    rows, WIDTH + 1, channels) of those of taps and, last, of the bias. Strides y are those of DS. Grid: blocks of rows,
    blocks of channels, batches."""
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    batch, exists = tl.program_id(2).to(tl.int64), channel < channels
    begin, end, number = _sequences(ENDS, row, rows, sequences, batch, PACKED, MOST)
    place = batch * d_batch + row.to(tl.int64)[:, None] * d_row + channel.to(tl.int64)[None, :] * d_channel
    ds = tk.cast_pairs(
        tl.load(DY + place, mask=((row >= begin) & (row < end))[:, None] & exists[None, :], other=0), tk.fp32
    )
    if SILU:
        sums = _convolved(
            X, WEIGHT, BIAS, STATE, row, begin, end, number, batch, channel, exists, x_batch, x_channel, x_row,
            w_channel, w_tap, s_batch, s_channel, s_row, WIDTH, BIASED, BEGINS, False, ROWS, CHANNELS,
        )  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-sums))
        ds *= gate + gate * (1.0 - gate) * sums
    place = batch * y_batch + row.to(tl.int64)[:, None] * y_row + channel.to(tl.int64)[None, :] * y_channel
    tl.store(DS + place, tk.cast(ds, DS.dtype.element_ty), mask=(row < rows)[:, None] & exists[None, :])
    part = PARTS + ((batch * tl.num_programs(0) + tl.program_id(0)) * (WIDTH + 1)) * channels + channel
    tl.store(part + WIDTH * channels, tl.sum(ds, 0), mask=exists)
    for tap in tl.static_range(WIDTH):
        x = _rows_of(
            X, STATE, row + (tap - (WIDTH - 1)), begin, end, number, batch, channel, exists,
            x_batch, x_channel, x_row, s_batch, s_channel, s_row, WIDTH, BEGINS,
        )  # fmt: skip
        tl.store(part + tap * channels, tl.sum(ds * x, 0), mask=exists)
