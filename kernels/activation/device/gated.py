"""Gated activations, y = a · g(a) · b element by element, and their gradients. A program has a tile."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._row_tiles import load, store, tile
from tritonkittens.launch import plain_kernel


@triton.jit
def _gate(a, KIND: tl.constexpr):
    """g(a) of the activation a · g(a), and its derivative."""
    if KIND == "gelu":
        return 0.5 + 0.5 * tl.erf(a * 0.7071067811865476), 0.3989422804014327 * tl.exp(-0.5 * a * a)
    # The tanh form of GELU is (1 + tanh(x / 2)) / 2, the sigmoid of this x. It does not cancel.
    x, dx = a, 1.0
    if KIND == "gelu_tanh":
        x, dx = a * (1.5957691216057308 + 0.0713548162726 * a * a), 1.5957691216057308 + 0.2140644488178 * a * a
    e = tl.exp(-x)
    g = 1 / (1 + e)
    # g · (1 - g), of which the difference has few digits where g is near 1. e may be infinite, where g is 0.
    return g, tl.minimum(e, 3e38) * g * g * dx


@triton.jit
def _tiles(size, inner, SHAPE: tl.constexpr):
    """The tile of a program, and of pairs of interleaved columns of a and b."""
    across = tl.cdiv(size[1] * SHAPE.unit, SHAPE.cols)
    row = (tl.program_id(0) // across).to(tl.int64) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    first = tl.program_id(0) % across * SHAPE.cols
    t = tile(row, first, size, inner, SHAPE.cols, SHAPE.unit)
    return t, tile(row, 2 * first, (size[0], 2 * size[1]), inner, 2 * SHAPE.cols, SHAPE.unit)


@triton.jit
def _load_pair(A, B, at, t, pairs, SHAPE: tl.constexpr):
    if SHAPE.interleaved:
        return tl.split(tl.reshape(load(A, at[0], pairs), (SHAPE.rows, SHAPE.cols, 2)))
    return load(A, at[0], t), load(B, at[1], t)


@plain_kernel(num_warps=4)
@triton.jit
def gated_forward(A, B, Y, size, inner, at, SHAPE: tl.constexpr):
    """at: strides of A and B. SHAPE: `config.Shape`. B: not read where A has both in interleaved columns."""
    t, pairs = _tiles(size, inner, SHAPE)
    a, b = _load_pair(A, B, at, t, pairs, SHAPE)
    if SHAPE.kind == "gelu":  # erf takes as many instructions as memory leaves time for, and the fast form half
        y = tk.gelu(a, "none", Y.dtype.element_ty != tl.float32) * b
    else:
        y = a * _gate(a, SHAPE.kind)[0] * b
    store(Y, y, t)


@plain_kernel(num_warps=4)
@triton.jit
def gated_backward(A, B, DY, DA, DB, size, inner, at, SHAPE: tl.constexpr):
    """DA, DB: gradients of A and B. at: strides of A, B, DY, DA and DB."""
    t, pairs = _tiles(size, inner, SHAPE)
    a, b = _load_pair(A, B, at, t, pairs, SHAPE)
    dy = load(DY, at[2], t)
    g, dg = _gate(a, SHAPE.kind)
    da, db = dy * b * (g + a * dg), dy * a * g
    if SHAPE.interleaved:
        store(DA, tl.reshape(tl.join(da, db), (SHAPE.rows, 2 * SHAPE.cols)), pairs, at[3])
    else:
        store(DA, da, t, at[3])
        store(DB, db, t, at[4])
