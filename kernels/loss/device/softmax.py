"""Softmax of rows, forward and backward.

A program has rows. It keeps them in registers where one chunk of columns covers them. Otherwise it reads them twice,
the second time from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.kernels._row_tiles import load, store, tile
from tritonkittens.launch import plain_kernel

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # a maximum of nothing, from which -inf is far


@triton.jit
def exp(x):
    """e^x by the instruction for 2^x that flushes subnormal numbers, which takes a quarter of what others take."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def beyond(x, end):
    """A tile of logits, -inf from column `end` on. A mask of loads in flight would take registers."""
    return tl.where(tl.arange(0, x.shape[1])[None, :] < end, x, float("-inf"))


@triton.jit
def online(x, peak, total, GROUP: tl.constexpr):
    """Maxima and sums of exponentials of groups of columns, after those of x. GROUP columns of x, which one thread has,
    belong to a group, so no two threads wait for each other."""
    groups = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    higher = tl.maximum(peak, tl.max(groups, 2))
    return higher, total * exp(peak - higher) + tl.sum(exp(groups - tl.expand_dims(higher, 2)), 2)


@triton.jit
def of_rows(peak, total):
    """Maxima and sums of exponentials of rows, from those of groups."""
    highest = tl.max(peak, 1)
    return highest, tl.sum(total * exp(peak - highest[:, None]), 1)


@triton.jit
def stats(X, at, row, size, inner, COLS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr):
    """Maxima and sums of exponentials of rows, by a loop over chunks of COLS columns."""
    peak = tl.full((row.shape[0], COLS // GROUP), LOWEST, tl.float32)
    total = tl.zeros_like(peak)
    for first in tl.range(0, size[1] * UNIT, COLS, num_stages=STAGES):
        x = load(X, at, tile(row, first, size, inner, COLS, UNIT))
        peak, total = online(beyond(x, size[1] * UNIT - first), peak, total, GROUP)
    return of_rows(peak, total)


@plain_kernel
@triton.jit
def softmax_forward(
    X, Y, size, inner, at,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if CHUNKS == 1:
        t = tile(row, 0, size, inner, COLS, UNIT)
        x = beyond(load(X, at[0], t), t.n)
        highest = tl.maximum(tl.max(x, 1), LOWEST)
        powers = exp(x - highest[:, None])
        store(Y, powers * (1 / tl.sum(powers, 1))[:, None], t)
    else:
        highest, total = stats(X, at[0], row, size, inner, COLS, GROUP, UNIT, STAGES)
        for first in tl.range(0, size[1] * UNIT, COLS, num_stages=STAGES):
            t = tile(row, first, size, inner, COLS, UNIT)
            store(Y, exp(load(X, at[0], t) - highest[:, None]) * (1 / total)[:, None], t)


@plain_kernel
@triton.jit
def softmax_backward(
    DY, Y, DX, size, inner, at,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DX = y · (dy - sum of y · dy)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if CHUNKS == 1:
        t = tile(row, 0, size, inner, COLS, UNIT)
        dy, y = load(DY, at[0], t), load(Y, at[1], t)
        store(DX, y * (dy - tl.sum(dy * y, 1)[:, None]), t)
    else:
        products = tl.zeros((ROWS, COLS), tl.float32)
        for first in tl.range(0, size[1] * UNIT, COLS, num_stages=STAGES):
            t = tile(row, first, size, inner, COLS, UNIT)
            products += load(DY, at[0], t) * load(Y, at[1], t)
        along = tl.sum(products, 1)[:, None]
        for first in tl.range(0, size[1] * UNIT, COLS, num_stages=STAGES):
            t = tile(row, first, size, inner, COLS, UNIT)
            store(DX, load(Y, at[1], t) * (load(DY, at[0], t) - along), t)
