"""Matrix product of microscaled operands: C = Σₖ (A · scale_a) · (B · scale_b), each scale of 32 or 16 numbers along K,
applied by the tensor cores (tcgen05, block_scale). MXFP8, MXFP4 and NVFP4."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.gemm import Gemm
from tritonkittens.kernels.gemm.device.result import place

ROWS = 128  # of a block of scales, and of a product


class BlockScaledGemm(Gemm):
    """A `Gemm` whose A (M × K) and B (N × K) have scales. Only chips with block scaling have it.

    A and B have their depth contiguous; fp4 has two numbers a byte. Scales are blocks of 128 rows and 4 scales
    (`tk.scale_tile`), (…, ⌈M/128⌉, blocks of K, 2, 256) and (…, ⌈N/128⌉, blocks of K, 2, 256): a tile of C begins at a
    whole block, so `tile_n` is a multiple of 128.

    - `scale_dtype`: fp8e8m0, or fp8e4m3 (NVFP4).
    - `tile_k`: in bytes of K.
    """

    dtype: tl.dtype = tk.fp8e4m3
    b_dtype: tl.dtype | None = None
    scale_dtype: tl.dtype = tk.fp8e8m0
    tile_m: int = ROWS
    tile_n: int = ROWS
    tile_k: int = 128
    consumers: int = 1
    b_stored_nk: bool = True

    def layout(self) -> tk.layout:
        """A tile of A has the rows of one product. CTAs of a cluster load B together, and all scales alone. Two CTAs
        multiply as a pair."""
        plain = self.a_stored_km or not self.b_stored_nk or self.c_stored_nm
        if plain or (self.tile_m, self.team) != (ROWS, 1) or self.tile_n % ROWS:
            raise tk.TileError(
                f"BlockScaledGemm(tile_m={self.tile_m}, tile_n={self.tile_n}, consumers={self.consumers}): block "
                f"scales need tile_m={ROWS}, tile_n that is a multiple of {ROWS}, one consumer a task, and K "
                "contiguous in both operands"
            )
        plan, scales = super().layout(), self.scale_tiles
        tensors = list(plan.globals)
        first = 3 + bool(self.epilogue.residual)  # A, B, C and the residual are in front
        return replace(
            plan, globals=dict((*tensors[:first], *scales.items(), *tensors[first:])), input=dict(plan.input) | scales
        )

    @property
    def scale_tiles(self) -> dict[str, tk.scale_tile]:
        """The tiles of scales of an iteration."""
        numbers = self.tile_k * (2 if self.dtype == tk.fp4e2m1x2 else 1)
        across = numbers // (16 if self.scale_dtype == tk.fp8e4m3 else 32)
        return {
            name: tk.scale_tile(self.scale_dtype, rows, across)
            for name, rows in (("scales_a", self.tile_m), ("scales_b", self.tile_n))
        }

    @triton.jit
    def load(ctx, input):
        g = ctx.globals
        tk.load_async(input.A, g.A, place(ctx, g.A, ctx.row, ctx.iter), input.full)
        tk.load_async(input.B, g.B, place(ctx, g.B, ctx.col, ctx.iter), input.full, ctx.config.cache_hint)
        tk.load_async(input.scales_a, g.scales_a, place(ctx, g.scales_a, ctx.row, ctx.iter), input.full)
        tk.load_async(input.scales_b, g.scales_b, place(ctx, g.scales_b, ctx.col, ctx.iter), input.full)

    @triton.jit
    def compute(ctx, state, input, previous):
        acc = tk.mma_ABt(input.A, input.B, state.acc, wait=False, scales=(input.scales_a, input.scales_b))
        return state.replace(acc=tk.mma_retire(acc))
