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
    X, Y, size, inner, at, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """PARTS: parts of COLS columns that cover a row; 0: a loop over chunks does."""
    row, n, xs, powers = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), size[1] * UNIT, (), ()
    if PARTS == 0:
        highest, total = stats(X, at[0], row, size, inner, COLS, GROUP, UNIT, STAGES)
        for first in tl.range(0, n, COLS, num_stages=STAGES):
            t = tile(row, first, size, inner, COLS, UNIT)
            store(Y, exp(load(X, at[0], t) - highest[:, None]) * (1 / total)[:, None], t)
    else:
        top, sums = tl.full((ROWS, COLS), LOWEST, tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        for j in tl.static_range(PARTS):
            xs += (beyond(load(X, at[0], tile(row, j * COLS, size, inner, COLS, UNIT)), n - j * COLS),)
            top = tl.maximum(top, xs[j])
        highest = tl.max(top, 1)[:, None]
        for j in tl.static_range(PARTS):
            powers += (exp(xs[j] - highest),)
            sums += powers[j]
        share = (1 / tl.sum(sums, 1))[:, None]
        for j in tl.static_range(PARTS):
            store(Y, powers[j] * share, tile(row, j * COLS, size, inner, COLS, UNIT))


@plain_kernel
@triton.jit
def softmax_backward(
    DY, Y, DX, size, inner, at, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """DX = y · (dy - sum of y · dy). PARTS: as of the forward."""
    row, parts = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), ()
    products = tl.zeros((ROWS, COLS), tl.float32)
    if PARTS == 0:
        for first in tl.range(0, size[1] * UNIT, COLS, num_stages=STAGES):
            t = tile(row, first, size, inner, COLS, UNIT)
            products += load(DY, at[0], t) * load(Y, at[1], t)
        along = tl.sum(products, 1)[:, None]
        for first in tl.range(0, size[1] * UNIT, COLS, num_stages=STAGES):
            t = tile(row, first, size, inner, COLS, UNIT)
            store(DX, load(Y, at[1], t) * (load(DY, at[0], t) - along), t)
    else:
        for j in tl.static_range(PARTS):
            t = tile(row, j * COLS, size, inner, COLS, UNIT)
            parts += ((load(DY, at[0], t), load(Y, at[1], t)),)
            products += parts[j][0] * parts[j][1]
        along = tl.sum(products, 1)[:, None]
        for j in tl.static_range(PARTS):
            store(DX, parts[j][1] * (parts[j][0] - along), tile(row, j * COLS, size, inner, COLS, UNIT))
