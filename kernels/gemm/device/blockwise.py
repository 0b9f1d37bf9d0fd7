"""fp8 matrix product with block scales: C = Σₖ (A·B of a block of K) · scale_a[row, block] · scale_b[block, column
block]. Source: DeepSeek-V3 (2024), 3.3."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.epilogue import Steps, load_values, load_vectors
from tritonkittens.kernels.gemm.device.result import load_residual, place, result_tiles, store_result
from tritonkittens.kernels.gemm.reference import BLOCK

SCALES = 16  # of B, along K, that a slot holds: the smallest vector


class BlockwiseGemm(tk.lcf):
    """A block of K is an iteration: its product is made exact in fp32 by its scales before the tensor cores' 14 bits
    lose what is small beside the sum.

    A (M × K) and B (N × K) with their depth contiguous; scale_a (⌈K/128⌉ × M), scale_b (⌈N/128⌉ × ⌈K/128⌉). Scales come
    through the ring: a load from global memory in every iteration would take longer than its product.

    Registers hold the sums of 256 columns and the product of 128: a tile is multiplied in column blocks, each with a
    scale of B of its own. While one consumer scales a column block, the other's products keep the tensor cores busy.
    256 columns read a third less of L2 than 128.
    """

    dtype: tl.dtype = tk.fp8e4m3
    b_dtype: tl.dtype = tk.fp8e4m3
    out_dtype: tl.dtype = tk.bf16
    tile_m: int = 64
    tile_n: int = BLOCK
    order: tk.Order = tk.Supergroup(8)
    epilogue: Steps = Steps()
    batched: bool = False
    grouped: bool = False
    a_stored_km: bool = False
    scattered: bool = False
    c_stored_nm: bool = False
    epilogue_n: int | None = None
    cache_hint: str | None = None

    def layout(self) -> tk.layout:
        a, b = tk.st(self.dtype, self.consumers * self.tile_m, BLOCK), tk.st(self.b_dtype, self.tile_n, BLOCK)
        c, staged = result_tiles(self)
        residual, operands, results = self.epilogue.memory(c, staged, self.result_cols, self.epilogue_n)
        scales_a, scales_b = tk.sv(tk.fp32, self.consumers * self.tile_m), tk.sv(tk.fp32, SCALES)
        return tk.layout(
            globals=dict(A=a, B=b, C=c, **residual, scales_a=scales_a, scales_b=scales_b, **operands),
            input=dict(A=a, B=b, scales_a=scales_a, **dict.fromkeys(self.scales_b, scales_b)),
            **results,
            args=self.epilogue.numbers,
            multicast=("B",) if self.cluster > 1 else (),
        )

    @property
    def tile_k(self) -> int:
        """K of an iteration: a block's, whose product has scales of its own."""
        return BLOCK

    @property
    def column_blocks(self) -> int:
        """Column blocks of a tile, each with one scale of B."""
        return max(1, self.tile_n // BLOCK)

    @property
    def scales_b(self) -> tuple[str, ...]:
        """Names of the input vectors that hold the column blocks' scales."""
        return tuple(f"scales_b{block}" for block in range(self.column_blocks))

    @property
    def result_cols(self) -> int:
        """Columns that a block finishes of a task."""
        return self.tile_n

    @property
    def task_rows(self) -> int:
        """Rows of C of a task: those of all consumers, and of all blocks of a cluster."""
        return self.cluster * self.consumers * self.tile_m

    def tasks(self, A: Any, B: Any, C: Any, *others: Any) -> int:
        return -(-C[0] // self.task_rows) * -(-C[1] // self.tile_n)

    @triton.jit
    def setup(ctx):
        rows = tk.ceil_div(tk.extent(ctx.globals.C, 0), ctx.config.task_rows)
        cols = tk.ceil_div(tk.extent(ctx.globals.C, 1), ctx.config.tile_n)
        row, col = tk.tile_at(ctx.config.order, ctx.task_id, rows, cols)
        iterations = tk.ceil_div(tk.extent(ctx.globals.A, 1), 128)
        return tk.task(
            iterations, when=ctx.task_id < rows * cols, row=row * ctx.config.cluster + ctx.rank, col=col, result_col=col
        )

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, place(ctx, ctx.globals.A, ctx.row, ctx.iter), input.full)
        where = place(ctx, ctx.globals.B, ctx.col, ctx.iter)
        tk.load_async(input.B, ctx.globals.B, where, input.full, ctx.config.cache_hint)
        ctx.config._load_scales_a(ctx, input)
        BLOCKS: tl.constexpr = ctx.config.column_blocks
        NAMES: tl.constexpr = ctx.config.scales_b
        for block in tl.static_range(BLOCKS):
            where = place(ctx, ctx.globals.scales_b, ctx.col * ctx.config.tile_n // 128 + block, ctx.iter // 16)
            tk.load_async(tk.field(input, NAMES[block]), ctx.globals.scales_b, where, input.full)

    @triton.jit
    def _load_scales_a(ctx, input):
        tk.load_async(input.scales_a, ctx.globals.scales_a, (ctx.iter, ctx.row), input.full)

    @triton.jit
    def _scales_a(ctx, input):
        """The scales of this consumer's rows."""
        rows = tk.subvector(input.scales_a, ctx.config.tile_m, ctx.consumer)
        return tk.load(rows, tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, 128)))

    @triton.jit
    def load_epilogue(ctx, epilogue):
        load_vectors(ctx, epilogue, ctx.config.epilogue)
        if ctx.config.epilogue.residual:
            load_residual(ctx, epilogue, ctx.row * ctx.config.consumers + ctx.consumer)

    @triton.jit
    def load_params(ctx):
        return load_values(ctx, ctx.row * ctx.config.consumers + ctx.consumer)

    @triton.jit
    def start(ctx):
        BLOCKS: tl.constexpr = ctx.config.column_blocks
        return tk.struct(acc=(tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n // BLOCKS)),) * BLOCKS)

    @triton.jit
    def compute(ctx, state, input):
        a = tk.subtile(input.A, ctx.config.tile_m, 128, ctx.consumer, 0)
        scale_a = ctx.config._scales_a(ctx, input)
        BLOCKS: tl.constexpr = ctx.config.column_blocks
        NAMES: tl.constexpr = ctx.config.scales_b
        acc, product = (), None
        for block in tl.static_range(BLOCKS):
            b = tk.subtile(input.B, ctx.config.tile_n // BLOCKS, 128, block, 0)
            product = tk.mm_ABt(a, b, wait=False, into=product)
            scale = scale_a * tk.load_scalar(tk.field(input, NAMES[block]), ctx.iter % 16)
            product = tk.mma_wait(product)
            acc = acc + (tk.pin(state.acc[block] + tk.mul_row(product, scale)),)
        return state.replace(acc=acc)

    @triton.jit
    def finish(ctx, state, epilogue):
        store_result(ctx, state.acc, epilogue, ctx.row * ctx.config.consumers + ctx.consumer)
