"""A causal convolution of each channel and its gradients.

A thread has a few channels of some rows. It reads a row once, for all taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel

NEAREST = tl.constexpr(32)  # a power of two, at least the rows of a block and those around it


@triton.jit
def _sequences(ENDS, first, sequences, batch, PACKED: tl.constexpr, MOST: tl.constexpr):
    """(first row, number) of the sequence: if `PACKED`, of each of the NEAREST rows from `first` on."""
    if PACKED:
        row, n = first + tl.arange(0, NEAREST), tl.arange(0, MOST)
        ends = tl.load(ENDS + n, mask=n < sequences, other=0)[None, :]
        before = (ends <= row[:, None]) & (n < sequences)[None, :]
        return tl.max(tl.where(before, ends, 0), 1), tl.sum(before.to(tl.int64), 1)
    else:
        return first * 0, batch


@triton.jit
def _of_row(of_rows, i: tl.constexpr, PACKED: tl.constexpr):
    """What `_sequences` found for row number i."""
    return tl.sum(tl.where(tl.arange(0, NEAREST) == i, of_rows, 0)) if PACKED else of_rows


@triton.jit
def _rows_of(X, first, rows, exists, row_step, COUNT: tl.constexpr):
    """COUNT rows from `first` on, in their dtype; zeros before row 0 and from row `rows` on."""
    found = ()
    for i in tl.static_range(COUNT):
        row = first + i
        found += (tl.load(X + row.to(tl.int64) * row_step, mask=exists & (row >= 0) & (row < rows), other=0),)
    return found


@triton.jit
def _filter_of(
    WEIGHT, BIAS, channel, exists, w_channel, w_tap, WIDTH: tl.constexpr, BIASED: tl.constexpr, CHANNELS: tl.constexpr
):
    """(the weights of all taps, the bias or zeros) in fp32."""
    taps, bias, home = (), tl.zeros((CHANNELS,), tl.float32), channel.to(tl.int64) * w_channel
    for tap in tl.static_range(WIDTH):
        taps += (tk.cast(tl.load(WEIGHT + home + tap * w_tap, mask=exists, other=0), tk.fp32),)
    if BIASED:
        bias += tk.cast(tl.load(BIAS + channel, mask=exists, other=0), tk.fp32)
    return taps, bias


@triton.jit
def _inputs(
    x, STATE, first, begins, numbers, sequences, exists, s_batch, s_row, i: tl.constexpr,
    WIDTH: tl.constexpr, BEGINS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What the taps of row `first` + i multiply, in fp32: of x, whose first row is `first` - WIDTH + 1, the rows of the
    same sequence, and of STATE those before it."""
    found, begin = (), _of_row(begins, i, PACKED)
    for tap in tl.static_range(WIDTH):
        value = tk.cast(x[i + tap], tk.fp32)
        row = first + (i + tap - (WIDTH - 1))
        if PACKED:
            value = tl.where(row >= begin, value, 0.0)
        if BEGINS and tap < WIDTH - 1 and (PACKED or i + tap < WIDTH - 1):
            number, column = _of_row(numbers, i, PACKED), row - begin + (WIDTH - 1)
            is_state = exists & (row < begin) & (number < sequences)
            earlier = tl.load(STATE + number * s_batch + column * s_row, mask=is_state, other=0)
            value += tk.cast(earlier, tk.fp32)
        found += (value,)
    return found


@triton.jit
def _convolved(inputs, taps, bias, WIDTH: tl.constexpr):
    """The sum of a row, in fp32."""
    found = bias
    for tap in tl.static_range(WIDTH):
        found += inputs[tap] * taps[tap]
    return found


@triton.jit
def _correlated(ds, taps, first, begins, i: tl.constexpr, tap: tl.constexpr, PACKED: tl.constexpr):
    """The gradient of what tap number `tap` multiplies in row `first` + i and earlier taps in the rows after it, of the
    gradients `ds` of the sums of rows from `first` on. Rows of other sequences do not count."""
    found = ds[i] * taps[tap]
    for later in tl.static_range(1, tap + 1):
        d = ds[i + later]
        if PACKED:
            d = tl.where(first + i >= _of_row(begins, i + later, PACKED), d, 0.0)
        found += d * taps[tap - later]
    return found


@plain_kernel(num_warps=4)
@triton.jit
def causal_conv(
    X, WEIGHT, BIAS, STATE, ENDS, Y, rows, channels, sequences,
    x_batch, x_channel, x_row, y_batch, y_channel, y_row, w_channel, w_tap, s_batch, s_channel, s_row,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Y = X ∗ WEIGHT + BIAS with these strides. Grid: blocks of rows, blocks of channels, batches.

    STATE: (sequences, channels, WIDTH - 1), the rows before each sequence (`BEGINS`). ENDS: of packed sequences.
    """
    first, batch = tl.program_id(0) * ROWS, tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists, home = channel < channels, channel.to(tl.int64)
    x = _rows_of(X + batch * x_batch + home * x_channel, first - (WIDTH - 1), rows, exists, x_row, ROWS + WIDTH - 1)
    taps, bias = _filter_of(WEIGHT, BIAS, channel, exists, w_channel, w_tap, WIDTH, BIASED, CHANNELS)
    begins, numbers = _sequences(ENDS, first, sequences, batch, PACKED, MOST)
    Y += batch * y_batch + home * y_channel
    for i in tl.static_range(ROWS):
        inputs = _inputs(
            x, STATE + home * s_channel, first, begins, numbers, sequences, exists, s_batch, s_row, i,
            WIDTH, BEGINS, PACKED,
        )  # fmt: skip
        y = _convolved(inputs, taps, bias, WIDTH)
        if SILU:
            y = tk.silu(y, fast=Y.dtype.element_ty)
        if PACKED:
            y = tl.where(_of_row(numbers, i, PACKED) < sequences, y, 0.0)
        tl.store(Y + (first + i).to(tl.int64) * y_row, tk.cast(y, Y.dtype.element_ty), mask=exists & (first + i < rows))


@plain_kernel(num_warps=4)
@triton.jit
def causal_conv_gradients(
    DY, X, WEIGHT, BIAS, STATE, ENDS, DX, PARTS, DSTATE, rows, channels, sequences, d_batch, d_channel, d_row,
    x_batch, x_channel, x_row, y_batch, y_channel, y_row, w_channel, w_tap, s_batch, s_channel, s_row, span,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, BEGINS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """DX; PARTS (batches, spans, WIDTH + 1, channels), sums over a span of gradients of taps and, last, of the bias;
    and with `BEGINS` DSTATE, contiguous, which is 0 where a sequence has no rows. Strides y are those of DX. Grid:
    spans of so many rows, a multiple of ROWS; blocks of channels; batches."""
    batch, channel = tl.program_id(2).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists, home, end = channel < channels, channel.to(tl.int64), rows
    if PACKED:
        end = tl.minimum(rows, tl.load(ENDS + sequences - 1))
    X += batch * x_batch + home * x_channel
    DY += batch * d_batch + home * d_channel
    DX += batch * y_batch + home * y_channel
    DSTATE += home * (WIDTH - 1)
    taps, bias = _filter_of(WEIGHT, BIAS, channel, exists, w_channel, w_tap, WIDTH, BIASED, CHANNELS)
    of_taps, of_bias = (), tl.zeros((CHANNELS,), tl.float32)
    for _ in tl.static_range(WIDTH):
        of_taps += (tl.zeros((CHANNELS,), tl.float32),)
    begun = tl.program_id(0) * span
    for first in range(begun, tl.minimum(begun + span, rows), ROWS):
        x = _rows_of(X, first - (WIDTH - 1), end, exists, x_row, ROWS + 2 * (WIDTH - 1))
        dy = _rows_of(DY, first, end, exists, d_row, ROWS + WIDTH - 1)
        begins, numbers = _sequences(ENDS, first, sequences, batch, PACKED, MOST)
        ds = ()
        for i in tl.static_range(ROWS + WIDTH - 1):
            inputs = _inputs(
                x, STATE + home * s_channel, first, begins, numbers, sequences, exists, s_batch, s_row, i,
                WIDTH, BEGINS, PACKED,
            )  # fmt: skip
            d = tk.cast(dy[i], tk.fp32)
            if SILU:
                sums = _convolved(inputs, taps, bias, WIDTH)
                gate = tk.sigmoid(sums, fast=DX.dtype.element_ty)
                d *= gate + (sums - sums * gate) * gate
            ds += (d,)
            if i < ROWS:
                of_bias += d
                summed = ()
                for tap in tl.static_range(WIDTH):
                    summed += (of_taps[tap] + d * inputs[tap],)
                of_taps = summed
        for i in tl.static_range(ROWS):
            dx = _correlated(ds, taps, first, begins, i, WIDTH - 1, PACKED)
            home_of_row = DX + (first + i).to(tl.int64) * y_row
            tl.store(home_of_row, tk.cast(dx, DX.dtype.element_ty), mask=exists & (first + i < rows))
            if BEGINS and (PACKED or i == 0):
                is_first = exists & (first + i == _of_row(begins, i, PACKED)) & (first + i < end)
                of_state = DSTATE + _of_row(numbers, i, PACKED) * channels * (WIDTH - 1)
                for column in tl.static_range(WIDTH - 1):
                    dstate = _correlated(ds, taps, first, begins, i, column, PACKED)
                    tl.store(of_state + column, tk.cast(dstate, DSTATE.dtype.element_ty), mask=is_first)
    part = PARTS + ((batch * tl.num_programs(0) + tl.program_id(0)) * (WIDTH + 1)) * channels + channel
    for tap in tl.static_range(WIDTH):
        tl.store(part + tap * channels, of_taps[tap], mask=exists)
    tl.store(part + WIDTH * channels, of_bias, mask=exists)
