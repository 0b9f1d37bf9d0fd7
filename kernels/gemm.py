"""Matrix product C = A·B or A·Bᵀ of 16-bit matrices, as load / compute / finish hooks. One source for Hopper (wgmma) and Blackwell (tcgen05)."""
from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk


class Gemm(tk.lcf):
    """One task is a (consumers·rows) × cols tile of C; every consumer computes `rows` of them, `depth` of K an iteration. Supergroup order for L2."""

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    cols: int = 256
    depth: int = 64
    group: int = 8
    transposed: bool = False  # B is stored N × K

    def layout(self):
        a = tk.st(self.dtype, self.consumers * self.rows, self.depth)
        b = tk.st(self.dtype, *((self.cols, self.depth) if self.transposed else (self.depth, self.cols)))
        c = tk.st(self.dtype, self.rows, self.cols)
        acc = tk.rt(tk.fp32, self.rows, self.cols)
        return tk.layout(globals=dict(A=a, B=b, C=c), input=dict(A=a, B=b), finish=dict(C=c), accumulators=dict(acc=acc))

    def tasks(self, A, B, C):
        return triton.cdiv(C.shape[0], self.consumers * self.rows) * triton.cdiv(C.shape[1], self.cols)

    @triton.jit
    def setup(ctx):
        row_tiles = tk.ceil_div(tk.extent(ctx.globals.C, 0), ctx.config.consumers * ctx.config.rows)
        col_tiles = tk.ceil_div(tk.extent(ctx.globals.C, 1), ctx.config.cols)
        row, col = tk.supergroup(ctx.task, row_tiles, col_tiles, ctx.config.group)
        iterations = tk.ceil_div(tk.extent(ctx.globals.A, 1), ctx.config.depth)
        return tk.task(iterations, when=ctx.task < row_tiles * col_tiles, row=row, col=col)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (ctx.row, ctx.iter), input.arrived)
        place = (ctx.col, ctx.iter) if ctx.config.transposed else (ctx.iter, ctx.col)
        tk.load_async(input.B, ctx.globals.B, place, input.arrived)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(ctx.accumulators.acc))

    @triton.jit
    def compute(ctx, state, input):
        a = tk.subtile(input.A, ctx.config.rows, ctx.config.depth, ctx.consumer, 0)
        acc = tk.mma_ABt(a, input.B, state.acc) if ctx.config.transposed else tk.mma_AB(a, input.B, state.acc)
        return state.replace(acc=acc)

    @triton.jit
    def finish(ctx, state, staging):
        tk.store(staging.C, tk.load(state.acc))
        tk.fence_async()
        tk.store_async(ctx.globals.C, staging.C, (ctx.row * ctx.config.consumers + ctx.consumer, ctx.col))
