"""Rotary embedding of q and k in one launch, with an optional RMS norm of each head before it, and its gradients.

A program has some tokens and some heads, those of k behind those of q. It loads cos and sin once, and loops over heads.
A head has three parts: the first elements of all pairs, the second elements, and the columns that do not rotate.
Without a norm, the backward is the forward with the other sign of sin. With norms, its programs are persistent: they
sum the gradients of weights in registers, and store the sums, which another kernel adds up in the order of programs.
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
def _load_head(P, strides, rows, HEAD: tl.constexpr):
    """The three parts of a head in fp32."""
    if HEAD.interleaved:
        x = load(P, strides, _part(rows, 2 * HEAD.half, HEAD))
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    else:
        half = _part(rows, HEAD.half, HEAD)
        x1, x2 = load(P, strides, half), load(P + HEAD.half, strides, half)
    return x1, x2, load(P + 2 * HEAD.half, strides, _part(rows, HEAD.rest, HEAD)) if HEAD.rest else 0.0


@triton.jit
def _store_head(P, x1, x2, rest, strides, rows, HEAD: tl.constexpr):
    if HEAD.interleaved:
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], 2 * x1.shape[1]))
        store(P, x, _part(rows, 2 * HEAD.half, HEAD), strides)
    else:
        store(P, x1, _part(rows, HEAD.half, HEAD), strides)
        store(P + HEAD.half, x2, _part(rows, HEAD.half, HEAD), strides)
    if HEAD.rest:
        store(P + 2 * HEAD.half, rest, _part(rows, HEAD.rest, HEAD), strides)


@triton.jit
def _load_angles(C, S, PLACES, CU, rows, n, strides, HEAD: tl.constexpr):
    """cos and sin of tokens; cos is NaN at positions outside of the table."""
    sequence, position = rows.at // rows.inner, rows.at % rows.inner
    position += sequence * n.batch_angles
    if HEAD.packed:
        sequence = tl.zeros_like(rows.at)
        for first in range(1, n.sequences, 32):
            i = first + tl.arange(0, 32)
            begin = tl.load(CU + i, mask=i < n.sequences, other=2147483647)
            sequence += tl.sum((begin[None, :] <= rows.at[:, None]).to(tl.int32), 1)
        position = rows.at - tl.load(CU + sequence)
    if HEAD.placed:
        place = tl.load(PLACES + sequence * n.steps[0] + position * n.steps[1], mask=rows.at < rows.count, other=0)
        position = position * n.steps[2] + place
    angles = tk.struct(at=position.to(tl.uint32).to(tl.int64), count=n.angles, inner=1)
    t = _part(angles, HEAD.half, HEAD)
    # rows beyond the last token are no terms of sums
    known = (angles.at < n.angles) | (rows.at >= rows.count)
    return tl.where(known[:, None], load(C, strides, t), float("nan")), load(S, strides, t) * n.sign


@triton.jit
def _mean_product(x1, x2, x3, y1, y2, y3, HEAD: tl.constexpr):
    """The mean of products of two heads, for each token."""
    total = tk.row_sum(x1 * y1 + x2 * y2)
    if HEAD.rest:
        total += tk.row_sum(x3 * y3)
    return (total / (2 * HEAD.half + HEAD.rest))[:, None]


@triton.jit
def _run_heads(X, DY, Y, W, sums, cos, sin, first, count, at, rows, n, HEAD: tl.constexpr):
    """Store heads, or their gradients, and return `sums` with the gradients of weights added."""
    w1, w2, w3 = _load_head(W, (0, 0), rows, HEAD) if HEAD.norm else (1.0, 1.0, 1.0)
    for i in range(max(first, 0), min(first + n.heads, count)):
        head = tl.cast(i, tl.int64) * HEAD.unit
        x1, x2, x3 = _load_head(X + head * at[0][2], at[0], rows, HEAD)
        if HEAD.norm:
            scale = tk.rsqrt(_mean_product(x1, x2, x3, x1, x2, x3, HEAD) + n.eps)
            x1, x2, x3 = x1 * scale, x2 * scale, x3 * scale
        if HEAD.backward:
            y1, y2, g3 = _load_head(DY + head * at[1][2], at[1], rows, HEAD)
            g1, g2 = y1 * cos + y2 * sin, y2 * cos - y1 * sin
            sums = (sums[0] + g1 * x1, sums[1] + g2 * x2, sums[2] + g3 * x3)
            g1, g2, g3 = g1 * w1, g2 * w2, g3 * w3
            along = _mean_product(g1, g2, g3, x1, x2, x3, HEAD)
            x1, x2, x3 = (g1 - along * x1) * scale, (g2 - along * x2) * scale, (g3 - along * x3) * scale
        else:
            x1, x2, x3 = x1 * w1, x2 * w2, x3 * w3
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        _store_head(Y + head * at[2][2], x1, x2, x3, at[2], rows, HEAD)
    return sums


@plain_kernel(num_warps=4)
@triton.jit
def rotary_heads(Q, K, DYQ, DYK, YQ, YK, WQ, WK, C, S, PLACES, CU, P, n, at, HEAD: tl.constexpr, TOKENS: tl.constexpr):
    """YQ, YK: Q and K rotated by the angles of which C and S are cos and sin; in a backward, gradients of Q and K, for
    DYQ and DYK, those of results. P: sums of the gradients of WQ, then of WK, (2, programs, D). n, HEAD: see
    `call_plan.Numbers` and `config.Head`. at: strides of Q, DYQ and YQ, those of K, DYK and YK, of C, and of P."""
    if HEAD.early:
        tk.dependents_launch()
    first, programs = tl.program_id(0) % n.groups * n.heads, tl.num_programs(0) // n.groups
    half = tl.zeros((TOKENS, triton.next_power_of_2(HEAD.half)), tl.float32)
    rest = tl.zeros((TOKENS, triton.next_power_of_2(max(HEAD.rest, 1))), tl.float32)
    q, k = (half, half, rest), (half, half, rest)
    for token in range(tl.program_id(0) // n.groups * TOKENS, n.tokens, programs * TOKENS):
        rows = tk.struct(at=token + tl.arange(0, TOKENS), count=n.tokens, inner=n.length)
        cos, sin = _load_angles(C, S, PLACES, CU, rows, n, at[2], HEAD)
        q = _run_heads(Q, DYQ, YQ, WQ, q, cos, sin, first, n.q_heads, at[0], rows, n, HEAD)
        k = _run_heads(K, DYK, YK, WK, k, cos, sin, first - n.q_heads, n.k_heads, at[1], rows, n, HEAD)
    for i in tl.static_range(2 * HEAD.backward):
        at_sums = tk.struct(
            at=tl.program_id(0) + tl.arange(0, 1) + i * tl.num_programs(0), count=2 * tl.num_programs(0), inner=1
        )
        s1, s2, s3 = tl.sum((q, k)[i][0], 0), tl.sum((q, k)[i][1], 0), tl.sum((q, k)[i][2], 0)
        _store_head(P, s1[None, :], s2[None, :], s3[None, :], at[3], at_sums, HEAD)
