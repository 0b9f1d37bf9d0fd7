"""Two matrix products with the same rows, of which one is activated and the other gates it: C = f(A·B) · (A·Up)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.gemm import Gemm, load_a
from tritonkittens.kernels.gemm.device.result import defer_result, place, store_result


class Gated:
    """What gated products share: f by `gated_by`. Half of a tile's columns are of B, half gate them: a thread has both
    sums of a result, and the products run as those of one matrix of 2N columns."""

    gated_by: str = "silu"

    @property
    def half(self: Any) -> tk.st:
        """The tile of B that is loaded at a time."""
        cols = self.tile_n // 2
        return tk.st(self.b_dtype or self.dtype, *((cols, self.tile_k) if self.b_stored_nk else (self.tile_k, cols)))

    @property
    def result_cols(self: Any) -> int:
        """Columns that a block finishes of a task."""
        return self.tile_n // 2

    @triton.jit
    def finish(ctx, state, epilogue):
        store_result(ctx, (_gated(ctx, state),), epilogue, ctx.row * ctx.config.team + ctx.consumer)

    @triton.jit
    def defer_results(ctx, state, epilogue):
        return defer_result(ctx, _gated(ctx, state), epilogue, ctx.row * ctx.config.team + ctx.consumer)


@triton.jit
def half_of(ctx, tile, n):
    """Half of the columns of a tile of B: those that are activated (n = 0), or those that gate them (1)."""
    if ctx.config.b_stored_nk:
        return tk.subtile(tile, ctx.config.tile_n // 2, ctx.config.tile_k, n, 0)
    else:
        return tk.subtile(tile, ctx.config.tile_k, ctx.config.tile_n // 2, 0, n)


@triton.jit
def _gated(ctx, state):
    """The results of a consumer's sums."""
    first, second = tk.split_cols(tk.cast(tk.load(tk.mma_wait(state.acc)), tk.fp32), ctx.config.tile_n // 2)
    if ctx.config.gated_by == "silu":
        return tk.mul(tk.silu(first, fast=ctx.config.out_dtype), second)
    else:
        return tk.mul(tk.gelu(first, "tanh", fast=ctx.config.out_dtype), second)


class GatedGemm(Gated, Gemm):
    """C = f(A·B) · (A·Up). A: (M, K), B and Up: (K, N), C: (M, N)."""

    def layout(self) -> tk.layout:
        plan = super().layout()
        rest = {name: x for name, x in plan.globals if name not in ("A", "B")}
        return replace(plan, globals={"A": dict(plan.globals)["A"], "B": self.half, "Up": self.half, **rest})

    def tasks(self, *shapes: Any) -> int:
        rows, cols = shapes[-1]
        return -(-rows // self.task_rows) * -(-cols // self.result_cols)

    @triton.jit
    def setup(ctx):
        rows = tk.ceil_div(tk.extent(ctx.globals.C, 0), ctx.config.task_rows)
        cols = tk.ceil_div(tk.extent(ctx.globals.C, 1), ctx.config.result_cols)
        row, col = tk.tile_at(ctx.config.order, ctx.task_id, rows, cols)
        depth = tk.extent(ctx.globals.A, 0 if ctx.config.a_stored_km else 1)
        return tk.task(
            tk.ceil_div(depth, ctx.config.tile_k), when=ctx.task_id < rows * cols, row=row, col=col, result_col=col
        )

    @triton.jit
    def load(ctx, input):
        load_a(ctx, input)
        where = place(ctx, ctx.globals.B, ctx.iter, ctx.col, ctx.config.b_stored_nk)
        tk.load_async(half_of(ctx, input.B, 0), ctx.globals.B, where, input.full, ctx.config.cache_hint)
        tk.load_async(half_of(ctx, input.B, 1), ctx.globals.Up, where, input.full, ctx.config.cache_hint)
