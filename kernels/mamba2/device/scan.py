"""The scan of Mamba-2, as linear attention: q = C, k = B, v = x, gates A · dt, and a weight dt of each row of k vᵀ.

With the sums G of gates, y_i = Σ_{j ≤ i} e^{G_i-G_j} dt_j (C_i·B_j) x_j. Since dt_j = e^{log dt_j}, W = G - log dt in
place of G_j has the weight in it. A row of dt = 0 has W = ∞. Source: Dao and Gu, Transformers are SSMs (2024).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.linear_attention.device.chunks import (
    HEADS,
    LOG2_E,
    ROWS,
    LinearAttention,
    attend,
    chunk_of_slot,
    load_rows,
    place_of_keys,
    state_before,
    sums_of_steps,
)
from tritonkittens.kernels.linear_attention.device.gradients import gates_of_chunk, sums_of_chunk
from tritonkittens.kernels.recurrent_step.device.step import clamped, softplus
from tritonkittens.launch import plain_kernel


@triton.jit
def _steps(DT, BIAS, row, head, inside, exists, row_step, head_step, SOFTPLUS: tl.constexpr, BIASED: tl.constexpr):
    """(dt + bias, that after softplus) of rows and heads."""
    dt = tk.cast(tl.load(DT + row[:, None] * row_step + head[None, :] * head_step, mask=inside, other=0), tk.fp32)
    if BIASED:
        dt += tk.cast(tl.load(BIAS + head, mask=exists, other=0), tk.fp32)[None, :]
    return dt, softplus(dt) if SOFTPLUS else dt


@plain_kernel(num_warps=4)
@triton.jit
def sum_steps(
    DT, A, BIAS, ENDS, G, W, STEPS, sequences, heads, slots, row_step, head_step, least, most,
    SOFTPLUS: tl.constexpr, BIASED: tl.constexpr, MOST: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """G and W (heads, slots, ROWS) in base 2, of DT (rows, heads), which has these strides, A and BIAS (heads,).

    STEPS: as G, the steps after softplus and limits (`KEEP`). Grid: slots, blocks of heads.
    """
    slot, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    exists = head < heads
    inside = inside[:, None] & exists[None, :]
    _, dt = _steps(DT, BIAS, row, head, inside, exists, row_step, head_step, SOFTPLUS, BIASED)
    dt = tl.where(inside, clamped(dt, least, most), 0.0)
    sums = sums_of_steps(dt * (tl.load(A + head, mask=exists, other=0) * LOG2_E)[None, :])
    weighed = tl.where(dt > 0.0, sums - tl.log2(tl.where(dt > 0.0, dt, 1.0)), float("inf"))
    place = (head[None, :].to(tl.int64) * slots + slot) * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(G + place, sums, mask=exists[None, :])
    tl.store(W + place, weighed, mask=exists[None, :])
    if KEEP:
        tl.store(STEPS + place, dt, mask=exists[None, :])


@plain_kernel(num_warps=4)
@triton.jit
def step_gradients(
    SUMS, DT, A, BIAS, ENDS, DDT, DA, DBIAS, sequences, heads, slots, row_step, head_step, least, most,
    SOFTPLUS: tl.constexpr, BIASED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """DDT (rows, heads), contiguous, and parts DA and DBIAS (slots, heads) of the others' gradients. With a = A · dt,
    the gradient of dt is A · da + x·d(dt · x) within the limits, times that of softplus. Grid as of `sum_steps`."""
    slot, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    exists = head < heads
    inside = inside[:, None] & exists[None, :]
    given, wide = _steps(DT, BIAS, row, head, inside, exists, row_step, head_step, SOFTPLUS, BIASED)
    dt = tl.where(inside, clamped(wide, least, most), 0.0)
    da = tl.where(inside, gates_of_chunk(SUMS, dt, head, heads, slot, slots, 5), 0.0)
    of_step = sums_of_chunk(SUMS, 2, head, heads, slot, slots, 5) + sums_of_chunk(SUMS, 4, head, heads, slot, slots, 5)
    ddt = tl.load(A + head, mask=exists, other=0)[None, :] * da + of_step
    ddt = tl.where(inside & (wide >= least) & (wide <= most), ddt, 0.0)
    if SOFTPLUS:
        ddt = ddt / (1.0 + tl.exp(-given))
    place = row[:, None] * heads + head[None, :]
    tl.store(DDT + place, tk.cast(ddt, DDT.dtype.element_ty), mask=inside)
    of_slot = slot.to(tl.int64) * heads + head
    tl.store(DA + of_slot, tl.sum(dt * da, 0), mask=exists)
    tl.store(DBIAS + of_slot, tl.sum(ddt, 0), mask=exists)


class MambaScan(LinearAttention):
    """Y = (scan + D · x) · silu(Z) for D (heads,) or (heads, columns of one) of dtype `skip`, and Z as V (`silu`)."""

    weighted: bool = True
    skip: tl.dtype | None = None
    skips_columns: bool = False
    silu: bool = False

    @property
    def loaded(self) -> dict[str, Any]:
        return {**super().loaded, **({"Z": self.operands["V"]} if self.silu else {})}

    @property
    def beside(self) -> dict[str, Any]:
        return {"D": None} if self.skip is not None else {}

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        load_rows(ctx, input)
        if ctx.config.silu:
            tk.load_async(input.Z, ctx.globals.Z, (ctx.sequence, ctx.head, ctx.iter, ctx.col), input.full)

    @triton.jit
    def start(ctx):
        s, consumers = state_before(ctx), ctx.config.consumers
        head = ctx.head * consumers + ctx.consumer if ctx.config.paired else ctx.head
        if ctx.config.skip is None:
            return tk.struct(s=s)
        elif ctx.config.skips_columns:
            of_cols: tl.constexpr = tk.row_vec(tk.rt(ctx.config.skip, 64, ctx.config.cols))
            col = 0 if ctx.config.paired else ctx.col * consumers + ctx.consumer
            return tk.struct(s=s, d=tk.cast(tk.load(ctx.globals.D, of_cols, (head, col)), tk.fp32))
        else:
            return tk.struct(s=s, d=tk.cast(tk.load_scalar(ctx.globals.D, (head,)), tk.fp32))

    @triton.jit
    def compute(ctx, state, input, output):
        y, s = attend(ctx, state.s, input)
        if ctx.config.skip is not None:
            x = tk.cast(tk.load(tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer)), tk.fp32)
            y += tk.mul_col(x, state.d) if ctx.config.skips_columns else x * state.d
        if ctx.config.silu:
            z = tk.load(tk.subtile(input.Z, 64, ctx.config.cols, 0, ctx.consumer))
            y *= tk.silu(tk.cast(z, tk.fp32), fast=ctx.config.dtype)
        tk.store(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer), y)
        return state.replace(s=s)
