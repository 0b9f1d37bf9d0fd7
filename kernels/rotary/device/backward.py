"""Gradients of heads and of their weights through a rotation and the RMS norm before it.

Programs are persistent: each has some heads of every so many tokens. It sums the gradients of weights in registers, and
stores the sums, which another kernel adds up in the order of the programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.rotary.device.rotary import load_angles, load_head, mean_product, store_head
from tritonkittens.launch import plain_kernel


@triton.jit
def _differentiate(X, DY, DX, W, sums, cos, sin, first, count, at_x, at_dy, at_dx, rows, n, HEAD: tl.constexpr):
    """Store the gradients of heads, and return `sums` with those of the weights added."""
    w1, w2, w3 = load_head(W, (0, 0), rows, HEAD)
    s1, s2, s3 = sums
    for i in range(max(first, 0), min(first + n.heads, count)):
        head = tl.cast(i, tl.int64) * HEAD.unit
        x1, x2, x3 = load_head(X + head * at_x[2], at_x, rows, HEAD)
        r1, r2, g3 = load_head(DY + head * at_dy[2], at_dy, rows, HEAD)
        g1, g2 = r1 * cos + r2 * sin, r2 * cos - r1 * sin
        scale = tk.rsqrt(mean_product(x1, x2, x3, x1, x2, x3, HEAD) + n.eps)
        x1, x2, x3 = x1 * scale, x2 * scale, x3 * scale
        s1, s2, s3 = s1 + g1 * x1, s2 + g2 * x2, s3 + g3 * x3
        g1, g2, g3 = g1 * w1, g2 * w2, g3 * w3
        along = mean_product(x1, x2, x3, g1, g2, g3, HEAD)
        x1, x2, x3 = (g1 - along * x1) * scale, (g2 - along * x2) * scale, (g3 - along * x3) * scale
        store_head(DX + head * at_dx[2], x1, x2, x3, at_dx, rows, HEAD)
    return s1, s2, s3


@plain_kernel(num_warps=4)
@triton.jit
def norm_rotary_backward(
    Q, K, DYQ, DYK, DQ, DK, WQ, WK, C, S, PLACES, CU, P, n, at, width, HEAD: tl.constexpr, TOKENS: tl.constexpr
):
    """DQ, DK: gradients of Q and K. P: sums of the gradients of WQ, then of WK, (2, programs, width · HEAD.unit). at:
    strides of Q, K, DYQ, DYK, DQ, DK, and of C and S."""
    first, programs = tl.program_id(0) % n.groups * n.heads, tl.num_programs(0) // n.groups
    half = tl.zeros((TOKENS, triton.next_power_of_2(HEAD.half)), tl.float32)
    rest = tl.zeros((TOKENS, triton.next_power_of_2(max(HEAD.rest, 1))), tl.float32)
    q, k = (half, half, rest), (half, half, rest)
    for token in range(tl.program_id(0) // n.groups * TOKENS, n.tokens, programs * TOKENS):
        rows = tk.struct(at=tl.cast(token, tl.int64) + tl.arange(0, TOKENS), count=n.tokens, inner=n.length)
        cos, sin = load_angles(C, S, PLACES, CU, rows, n, at[6], HEAD)
        q = _differentiate(Q, DYQ, DQ, WQ, q, cos, sin, first, n.q_heads, at[0], at[2], at[4], rows, n, HEAD)
        head = first - n.q_heads
        k = _differentiate(K, DYK, DK, WK, k, cos, sin, head, n.k_heads, at[1], at[3], at[5], rows, n, HEAD)
    row = tk.struct(at=tl.program_id(0) + tl.arange(0, 1), count=tl.num_programs(0), inner=1)
    for i in tl.static_range(2):
        s1, s2, s3 = tl.sum((q, k)[i][0], 0), tl.sum((q, k)[i][1], 0), tl.sum((q, k)[i][2], 0)
        store_head(P, s1[None, :], s2[None, :], s3[None, :], (width, 0), row, HEAD)
        P += tl.num_programs(0) * width * HEAD.unit
