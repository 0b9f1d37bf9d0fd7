"""Backward: gradients of the rows, and of weights and biases.

Programs are persistent, and load rows while they compute others (cp.async). Each sums the gradients of its columns'
parameters over its rows in registers, and stores the sums. `sum_partials` adds them up in the order of the programs, so
results are the same bits in every run. The CTAs of a cluster share a wide row, as in the forward. On a chip without
clusters, a program has a chunk of the columns, after `norm_projections` has computed the two sums over each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._row_tiles import load, load_columns, load_rows, store, tile
from tritonkittens.kernels.norm.device.dropout import dropout
from tritonkittens.launch import plain_kernel


@triton.jit
def _weights(W, W1, first, n, COLS: tl.constexpr, HAS: tl.constexpr):
    """weight and weight1 of columns; 1 and 0 without them."""
    col = first + tl.arange(0, COLS)
    w = load_columns(W, col, n)[None, :] + HAS.centre if HAS.weight else 1.0
    w1 = load_columns(W1, col, n)[None, :] + HAS.centre if HAS.weight1 else 0.0
    return w, w1


@triton.jit
def _scaled(DY, DY1, Z, weights, MEAN, RSTD, at, t, HAS: tl.constexpr):
    """(dy, dy1, normalised z, its gradient) of a tile. Beyond the edge z is any number, the others are 0."""
    dy, dy1, z = load(DY, at[0], t), 0.0, load(Z, at[2], t)
    if not HAS.rms:
        z -= load_rows(MEAN, t.row, t.m)[:, None]
    g = dy * weights[0]
    if HAS.weight1:
        dy1 = load(DY1, at[1], t)
        g += dy1 * weights[1]
    return dy, dy1, z * load_rows(RSTD, t.row, t.m)[:, None], g


@plain_kernel
@triton.jit
def norm_projections(
    DY, DY1, Z, W, W1, MEAN, RSTD, C, size, inner, at,
    HAS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """C: sums of g · z and of g over each row, where g is the gradient of the normalised z. A program has a row."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    along, total = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    for j in tl.static_range(PARTS):
        t = tile(row, j * COLS, size, inner, COLS, UNIT)
        _, _, z, g = _scaled(DY, DY1, Z, _weights(W, W1, t.first, t.n, COLS, HAS), MEAN, RSTD, at, t, HAS)
        along, total = along + tk.row_sum(g * z), total + tk.row_sum(g)
    tl.store(C + row, along)
    tl.store(C + size[0] + row, total)


@plain_kernel
@triton.jit
def norm_backward(
    DY, DY1, DZ, Z, W, W1, S, RNG, MEAN, RSTD, C, DX, DX1, DR, P, size, inner, at, p,
    HAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """DX, DX1, DR: gradients of x, x1 and z. DZ: the gradient of z as a result. P: partial sums of the gradients of
    weight, bias, weight1 and bias1, those that there are, (…, programs, columns). `at`: strides of dy, dy1, z and dz.
    STAGES: of the loop over rows. EARLY: `sum_partials` may start before this ends. Grid: programs, chunks of PARTS
    parts."""
    if EARLY:
        tk.dependents_launch()
    first_col, nothing, sums = tl.program_id(1) * (PARTS * COLS), tl.zeros((ROWS, COLS), tl.float32), ()
    for _ in tl.static_range(PARTS):
        sums += ((nothing, nothing, nothing, nothing),)
    weights = _weights(W, W1, first_col, size[1] * UNIT, COLS, HAS)  # of parts they would take too many registers
    for first in tl.range(tl.program_id(0) * ROWS, size[0], tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        parts, added, along, total = (), (), 0.0, 0.0
        for j in tl.static_range(PARTS):
            t = tile(row, first_col + j * COLS, size, inner, COLS, UNIT)
            if PARTS > 1:
                weights = _weights(W, W1, t.first, t.n, COLS, HAS)
            dy, dy1, z, g = _scaled(DY, DY1, Z, weights, MEAN, RSTD, at, t, HAS)
            along, total = (g * z, g) if j == 0 else (along + g * z, total + g)
            dw, db, dw1, db1 = sums[j]
            parts, added = parts + ((z, g),), added + ((dw + dy * z, db + dy, dw1 + dy1 * z, db1 + dy1),)
        sums, n = added, size[1] * UNIT
        if CHUNKS > 1:
            along, total = load_rows(C, row, size[0]), load_rows(C + size[0], row, size[0])
        elif HAS.rms:
            along = tk.row_sum(along)
        else:
            along, total = tl.split(tl.sum(tl.join(along, total), 1))  # one exchange between warps, not two
        for j in tl.static_range(PARTS):
            t = tile(row, first_col + j * COLS, size, inner, COLS, UNIT)
            rstd = load_rows(RSTD, row, t.m)
            dz = parts[j][1] * rstd[:, None]
            if not HAS.rms:
                dz -= (total / n * rstd)[:, None]
            dz -= parts[j][0] * (along / n * rstd)[:, None]
            if HAS.dz:
                dz += load(DZ, at[3], t)
            if HAS.residual:
                store(DR, dz, t)
            if HAS.x1:
                store(DX1, dropout(dz, RNG, p, t, 1) if HAS.dropout else dz, t)
            if HAS.dropout:
                dz = dropout(dz, RNG, p, t, 0)
            if HAS.rowscale:
                dz *= load_rows(S, row, t.m)[:, None]
            store(DX, dz, t)
    program, programs = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.num_programs(0)
    for k in tl.static_range(4):
        if HAS.grads[k]:
            for j in tl.static_range(PARTS):
                t = tile(program, first_col + j * COLS, (programs, size[1]), 1, COLS, UNIT)
                store(P, tl.sum(sums[j][k], 0)[None, :], t)
            P += programs.to(tl.int64) * (size[1] * UNIT)


@plain_kernel(num_warps=8)
@triton.jit
def sum_partials(P, D, programs, n, PARTS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    """D (…, columns): sums of P (…, programs, columns) over the programs, in order, PARTS at a time. EARLY: it starts
    before `norm_backward` ends. Grid: parts of COLS columns, sums."""
    col, i = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :], tl.arange(0, PARTS)[:, None]
    total = tl.zeros((PARTS, COLS), tl.float32)
    P += tl.program_id(1).to(tl.int64) * programs * n
    if EARLY:
        tk.dependency_wait()
    for first in range(0, programs, PARTS):
        place = (first + i).to(tl.int64) * n + col
        total += tl.load(P + place, mask=(first + i < programs) & (col < n), other=0)
    place = tl.program_id(1) * n + tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = tl.program_id(0) * COLS + tl.arange(0, COLS) < n
    tl.store(D + place, tk.cast(tl.sum(total, 0), D.dtype.element_ty), mask=inside)


@plain_kernel(num_warps=4)
@triton.jit
def dropout_mask(RNG, K, m, n, p, BRANCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """K: 1 where dropout keeps an element, else 0. Grid: parts of ROWS rows, parts of COLS columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t = tile(row, tl.program_id(1) * COLS, (m, n), 1, COLS, 1)
    store(K, (dropout(tl.full((ROWS, COLS), 1.0, tl.float32), RNG, p, t, BRANCH) > 0).to(tl.uint8), t)
