"""Rotary embedding of q and k in one launch, with an optional RMS norm of each head before it. The inverse rotation is
the same kernel with the other sign of sin.

A program has some tokens and some heads, those of k behind those of q. It loads cos and sin once, and loops over heads.
A head has three parts: the first elements of all pairs, the second elements, and the columns that do not rotate.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._row_tiles import load, store, tile
from tritonkittens.launch import plain_kernel


@triton.jit
def _part(rows, COLS: tl.constexpr, HEAD: tl.constexpr):
    return tile(rows.at, 0, (rows.count, COLS // HEAD.unit), rows.inner, triton.next_power_of_2(COLS), HEAD.unit)


@triton.jit
def load_head(P, strides, rows, HEAD: tl.constexpr):
    """The three parts of a head in fp32."""
    if HEAD.interleaved:
        x = load(P, strides, _part(rows, 2 * HEAD.half, HEAD))
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    else:
        half = _part(rows, HEAD.half, HEAD)
        x1, x2 = load(P, strides, half), load(P + HEAD.half, strides, half)
    return x1, x2, load(P + 2 * HEAD.half, strides, _part(rows, HEAD.rest, HEAD)) if HEAD.rest else 0.0


@triton.jit
def store_head(P, x1, x2, rest, strides, rows, HEAD: tl.constexpr):
    if HEAD.interleaved:
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], 2 * x1.shape[1]))
        store(P, x, _part(rows, 2 * HEAD.half, HEAD), strides)
    else:
        store(P, x1, _part(rows, HEAD.half, HEAD), strides)
        store(P + HEAD.half, x2, _part(rows, HEAD.half, HEAD), strides)
    if HEAD.rest:
        store(P + 2 * HEAD.half, rest, _part(rows, HEAD.rest, HEAD), strides)


@triton.jit
def load_angles(C, S, PLACES, CU, rows, n, strides, HEAD: tl.constexpr):
    """cos and sin of tokens; cos is NaN at positions outside of the table."""
    sequence = rows.at // rows.inner
    position = rows.at % rows.inner + sequence * n.batch_angles
    if HEAD.packed:
        sequence = tl.zeros_like(rows.at)
        for first in range(1, n.sequences, 32):
            i = first + tl.arange(0, 32)
            begin = tl.load(CU + i, mask=i < n.sequences, other=2147483647)
            sequence += tl.sum((begin[None, :] <= rows.at[:, None]).to(tl.int64), 1)
        position = rows.at - tl.load(CU + sequence)
    if HEAD.placed:
        place = tl.load(PLACES + sequence * n.steps[0] + position * n.steps[1], mask=rows.at < rows.count, other=0)
        position = position * n.steps[2] + place
    angles = tk.struct(at=position.to(tl.uint32).to(tl.int64), count=n.angles, inner=1)
    t = _part(angles, HEAD.half, HEAD)
    return tl.where((angles.at < n.angles)[:, None], load(C, strides, t), float("nan")), load(S, strides, t) * n.sign


@triton.jit
def mean_product(x1, x2, x3, y1, y2, y3, HEAD: tl.constexpr):
    """The mean of products of two heads, for each token."""
    total = tk.row_sum(x1 * y1 + x2 * y2)
    if HEAD.rest:
        total += tk.row_sum(x3 * y3)
    return (total / (2 * HEAD.half + HEAD.rest))[:, None]


@triton.jit
def _rotate(X, Y, W, cos, sin, first, count, at_x, at_y, rows, n, HEAD: tl.constexpr):
    w1, w2, w3 = load_head(W, (0, 0), rows, HEAD) if HEAD.norm else (1.0, 1.0, 1.0)
    for i in range(max(first, 0), min(first + n.heads, count)):
        head = tl.cast(i, tl.int64) * HEAD.unit
        x1, x2, x3 = load_head(X + head * at_x[2], at_x, rows, HEAD)
        if HEAD.norm:
            scale = tk.rsqrt(mean_product(x1, x2, x3, x1, x2, x3, HEAD) + n.eps)
            x1, x2, x3 = x1 * scale * w1, x2 * scale * w2, x3 * scale * w3
        store_head(Y + head * at_y[2], x1 * cos - x2 * sin, x2 * cos + x1 * sin, x3, at_y, rows, HEAD)


@plain_kernel(num_warps=4)
@triton.jit
def rotary_heads(Q, K, YQ, YK, WQ, WK, C, S, PLACES, CU, n, at, HEAD: tl.constexpr, TOKENS: tl.constexpr):
    """YQ, YK: Q and K rotated by the angles of which C and S are cos and sin. n: `call_plan.Numbers`. at: strides of
    Q, K, YQ, YK, and of C and S. HEAD: `config.Head`."""
    first = tl.program_id(0) % n.groups * n.heads
    token = (tl.program_id(0) // n.groups).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = tk.struct(at=token, count=n.tokens, inner=n.length)
    cos, sin = load_angles(C, S, PLACES, CU, rows, n, at[4], HEAD)
    _rotate(Q, YQ, WQ, cos, sin, first, n.q_heads, at[0], at[2], rows, n, HEAD)
    _rotate(K, YK, WK, cos, sin, first - n.q_heads, n.k_heads, at[1], at[3], rows, n, HEAD)
