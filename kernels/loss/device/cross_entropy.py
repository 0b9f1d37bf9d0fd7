"""Cross entropy of rows of logits: loss and log-sum-exp of each row by one read of the logits, their gradient by one
read and one write, and the sum or mean over the rows.

With t = softcap · tanh(x / softcap), or t = x, and V columns, the loss of a row is
lse - (1 - smoothing) · t[target] - smoothing / V · Σt + square · lse².
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._row_tiles import load, load_rows, places, store, tile
from tritonkittens.kernels.loss.device.softmax import LOWEST, beyond, exp, of_rows, online
from tritonkittens.launch import plain_kernel


@triton.jit
def _capped(x, cap, CAP: tl.constexpr):
    """cap · tanh(x / cap), with the absolute error of fp32; x itself without CAP. The square of a reciprocal root takes
    fewer instructions than a division."""
    root = tk.rsqrt(1.0 + tl.exp2(x * (2.8853900817779268 / cap))) if CAP else 0.0
    return cap - 2 * cap * (root * root) if CAP else x


@plain_kernel
@triton.jit
def cross_entropy_forward(
    X, T, L, LSE, size, inner, at, ignored, cap, smoothing, square,
    HAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """L: losses, 0 for a target that is `ignored`, NaN for one that is no column. LSE: log-sum-exps. Rows of such
    targets are not read where nobody wants their LSE (HAS.skips)."""
    if HAS.early:
        tk.dependents_launch()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(T + row, mask=row < size[0], other=0)
    kept, n = (row < size[0]) & (target != ignored), size[1] * UNIT
    peak = tl.full((ROWS, COLS // GROUP), LOWEST, tl.float32)
    total, along = tl.zeros_like(peak), tl.zeros((ROWS, COLS), tl.float32)
    for first in tl.range(0, n * tl.max(kept.to(tl.int32), 0) if HAS.skips else n, COLS, num_stages=STAGES):
        x = _capped(load(X, at[0], tile(row, first, size, inner, COLS, UNIT)), cap, HAS.cap)
        along = along + x if HAS.smoothing else along
        peak, total = online(beyond(x, n - first), peak, total, GROUP)
    highest, total = of_rows(peak, total)
    lse = highest + tl.log(total)
    is_class = kept & (target >= 0) & (target < n)
    x = tl.load(X + places(at[0], row, inner, UNIT) + target, mask=is_class, other=float("nan"))
    x = _capped(tk.cast(x, tk.fp32), cap, HAS.cap)
    loss = (1 - smoothing) * (highest - x) + smoothing * (highest - tl.sum(along, 1) / n)
    loss += tl.log(total) + square * lse * lse
    tl.store(L + row, tl.where(kept, loss, 0), mask=row < size[0])
    tl.store(LSE + row, lse, mask=row < size[0])


@plain_kernel
@triton.jit
def cross_entropy_backward(
    X, T, LSE, G, DLSE, COUNT, DX, size, inner, at, step, ignored, cap, smoothing, square,
    HAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """DX: the gradient of the logits, possibly their own memory. G: gradients of the losses of rows, one each (step 1)
    or of all (step 0), of their mean over COUNT rows with HAS.mean. DLSE: gradients of LSE. Grid: rows · chunks."""
    chunks, n = tl.cdiv(size[1] * UNIT, COLS), size[1] * UNIT
    row = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(T + row, mask=row < size[0], other=0)
    kept, first = (row < size[0]) & (target != ignored), tl.program_id(0) % chunks * COLS
    lse, g = load_rows(LSE, row, size[0]), load_rows(G, row * step, size[0])
    g = tl.where(kept, g / tl.load(COUNT) if HAS.mean else g, 0)
    of_p = tl.where(kept, g * (1 + 2 * square * lse), 0) + (load_rows(DLSE, row, size[0]) if HAS.dlse else 0.0)
    lse, read = (lse, row) if HAS.dlse else (tl.where(kept, lse, float("inf")), tl.where(kept, row, size[0]))
    x = _capped(load(X, at[0], tile(read, first, size, inner, COLS, UNIT)), cap, HAS.cap)
    t = tile(row, first, size, inner, COLS, UNIT)
    dx = of_p[:, None] * exp(x - lse[:, None]) - (g * smoothing / n)[:, None]
    hot = tl.where(kept & (target >= 0) & (target < n), target, -1).to(tl.int32)
    dx -= tl.where(t.col[None, :] == hot[:, None], (g * (1 - smoothing))[:, None], 0)
    store(DX, dx * (1 - x * x * (1 / (cap * cap))) if HAS.cap else dx, t, at[1])


@plain_kernel(num_warps=8)
@triton.jit
def cross_entropy_sum(
    L, C, S, N, rows, ignored, FIRST: tl.constexpr, MEAN: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):
    """S, N: sums of losses and of counts of rows, those of each program. C: targets (FIRST), else counts. MEAN: S is
    the mean. EARLY: it starts before the kernel of the losses ends."""
    if EARLY:
        tk.dependency_wait()
    total, count = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        total += load_rows(L, row, rows)
        count += 1.0 * (row < rows) * (tl.load(C + row, row < rows, 0) != ignored) if FIRST else load_rows(C, row, rows)
    tl.store(S + tl.program_id(0), tl.sum(total, 0) / tl.sum(count, 0) if MEAN else tl.sum(total, 0))
    tl.store(N + tl.program_id(0), tl.sum(count, 0))
