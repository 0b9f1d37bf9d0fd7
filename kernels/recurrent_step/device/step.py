"""Rows of recurrences, one after another: S ← a S + k uᵀ and o = scale · Sᵀq, with a, u of linear attention, the gated
delta rule, or Mamba-2.

A program has some columns of V of a head, whose part of S stays in fp32 registers from the first row to the last: a
tuple of tiles of 32 keys, (COLS, 32). So a warp reads 128 bytes of each of four columns at once, a sum over all keys is
one of 32, which takes three shuffles, and loads of q and k are too small to have a layout of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.recurrent_step import config
from tritonkittens.launch import plain_kernel

LANE_KEYS: tl.constexpr = tl.constexpr(config.LANE_KEYS)


@triton.jit
def softplus(x):
    """log(1 + eˣ) in fp32. Where 1 + eˣ is rounded, so is the logarithm: their quotient is exact again."""
    e = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


@triton.jit
def clamped(x, least, most):
    """x within limits; NaN stays NaN."""
    x = tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _of_row(P, at, batch, row, head, place, mask, UNIT: tl.constexpr):
    """Numbers of a row of a head in fp32. `at`: strides of batches, rows and heads in units of UNIT elements."""
    first = (batch * at[0] + tl.cast(row, tl.int64) * at[1] + head * at[2]) * UNIT
    return tk.cast(tl.load(P + first + place, mask=mask, other=0), tk.fp32)


@triton.jit
def _of_head(P, step, head):
    return tk.cast(tl.load(P + head * step), tk.fp32)


@triton.jit
def _fading(GATES, DECAY, BIAS, at, steps, batch, row, head, limits, HAS: tl.constexpr):
    """(log a, the weight of k uᵀ). limits: a factor of log a, the least and the most step."""
    log_a, weight = limits[0], 1.0
    if HAS.decay:
        decay = _of_head(DECAY, steps[0], head)
        log_a *= tl.exp(decay) if HAS.log_decay else decay
    if HAS.gates:
        gate = _of_row(GATES, at, batch, row, head, 0, True, 1)
        if HAS.bias:
            gate += _of_head(BIAS, steps[1], head)
        if HAS.softplus:
            gate = softplus(gate)
        if HAS.weights:
            gate = clamped(gate, limits[1], limits[2])
            weight = gate
        log_a *= gate
    return log_a, weight


@triton.jit
def _keys_of_row(P, at, batch, row, head, keys, UNIT: tl.constexpr, PARTS: tl.constexpr):
    """A row of Q or K, in parts of (1, 32)."""
    parts = ()
    for j in tl.static_range(PARTS):
        key = (j * LANE_KEYS + tl.arange(0, LANE_KEYS))[None, :]
        parts += (_of_row(P, at, batch, row, head, key, key < keys, UNIT),)
    return parts


@triton.jit
def _times(s, x, PARTS: tl.constexpr):
    """Sums over keys of s · x."""
    total = s[0] * x[0]
    for j in tl.static_range(1, PARTS):
        total += s[j] * x[j]
    return tl.sum(total, 1)


@triton.jit
def _to_unit(x, s, PARTS: tl.constexpr):
    """What makes x, of keys, a vector of length 1: for each column, so that no thread waits for another."""
    square = x[0] * x[0]
    for j in tl.static_range(1, PARTS):
        square += x[j] * x[j]
    return tk.rsqrt(tl.sum(tl.broadcast_to(square, s[0].shape), 1) + 1e-6)


@plain_kernel
@triton.jit
def recurrent_step(
    Q, K, V, GATES, BETA, DECAY, BIAS, SKIP, Z, BEFORE, OUT, AFTER, rows, keys, values, group, at, steps,
    s_batch, s_head, s_col, s_key, scale, limits,
    HAS: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """OUT (batches, rows, heads, values) and AFTER (batches, heads, values, keys), contiguous.

    `at`: strides of Q, K, V, Z, as of `_of_row`, of GATES and BETA. `steps`: from head to head of DECAY, BIAS and SKIP,
    and from column to column of SKIP. `s_…`: strides of BEFORE. `limits`: of `_fading`. HAS: `config.Parts`.
    Grid: blocks of columns, heads, batches.
    """
    col, lane = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, LANE_KEYS)[None, :]
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    of_head, is_col, cols = batch * tl.num_programs(1) + head, col < values, col[:, None].to(tl.int64)
    s = ()
    for j in tl.static_range(PARTS):
        if HAS.begins:
            key = j * LANE_KEYS + lane
            before = BEFORE + (batch * s_batch + head * s_head) + cols * s_col + key * s_key
            s += (tl.load(before, mask=is_col[:, None] & (key < keys), other=0),)
        else:
            s += (tl.zeros((COLS, LANE_KEYS), tl.float32),)
    for row in tl.range(rows, num_stages=2):
        q = _keys_of_row(Q, at[0], batch, row, head // group, keys, UNIT, PARTS)
        k = _keys_of_row(K, at[1], batch, row, head // group, keys, UNIT, PARTS)
        v = _of_row(V, at[2], batch, row, head, col, is_col, UNIT)
        of_q, of_k = (_to_unit(q, s, PARTS), _to_unit(k, s, PARTS)) if HAS.unit else (1.0, 1.0)
        log_a, weight = _fading(GATES, DECAY, BIAS, at[4], steps, batch, row, head, limits, HAS)
        a, u = tl.exp(log_a), v * weight
        if HAS.beta:
            beta = _of_row(BETA, at[5], batch, row, head, 0, True, 1)
            u = (v - _times(s, k, PARTS) * (a * of_k)) * (tl.sigmoid(beta) if HAS.logits else beta)
        after = ()
        for j in tl.static_range(PARTS):
            after += (s[j] * a + k[j] * (u * of_k)[:, None],)
        s = after
        o = _times(s, q, PARTS) * (of_q * scale)
        if HAS.skip:
            of_cols = SKIP + head * steps[2] + col * steps[3]
            o += v * tk.cast(tl.load(of_cols, mask=is_col, other=0), tk.fp32)
        if HAS.silu:
            o *= tk.silu(_of_row(Z, at[3], batch, row, head, col, is_col, UNIT), fast=OUT.dtype.element_ty)
        home = OUT + ((batch * rows + row) * tl.num_programs(1) + head) * values + col
        tl.store(home, tk.cast(o, OUT.dtype.element_ty), mask=is_col)
    if HAS.ends:
        for j in tl.static_range(PARTS):
            key = j * LANE_KEYS + lane
            tl.store(AFTER + (of_head * values + cols) * keys + key, s[j], mask=is_col[:, None] & (key < keys))
