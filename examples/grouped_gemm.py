"""A grouped GEMM: rows of X are sorted by expert, each with weights of its own: Y[t] = X[t] · W[expert of t]ᵀ.

Where an expert's rows begin is known on the device only: `setup` finds a task's expert, whose sequence of rows is a
coordinate of TMA copies. The products stay in flight as in gemm.py.
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class GroupedGemm(tk.lcf):
    """A task is a tile of Y. X: (tokens, K), W: (experts, N, K), Y: (tokens, N), ends: (experts) int32."""

    staggered_epilogue = True
    order = tk.Supergroup(8)
    dtype: tl.dtype = tk.bf16
    tile_m: int = 64
    tile_n: int = 256
    tile_k: int = 64

    def layout(self):
        x, w = tk.st(self.dtype, self.team * self.tile_m, self.tile_k), tk.st(self.dtype, self.tile_n, self.tile_k)
        y, acc = tk.st(self.dtype, self.tile_m, self.tile_n), tk.rt(tk.fp32, self.tile_m, self.tile_n)
        tiles = dict(globals=dict(X=x, W=w, Y=y, ends=None), input=dict(X=x, W=w), epilogue=dict(Y=y))
        return tk.layout(**tiles, accumulators=dict(acc=acc), ragged=("X", "Y"), args=("tokens",))

    @triton.jit
    def setup(ctx):
        height: tl.constexpr = ctx.config.team * ctx.config.tile_m
        cols = tk.ceil_div(tk.extent(ctx.globals.W, 1), ctx.config.tile_n)
        tile, ends = ctx.task_id // cols, ctx.globals.ends
        expert, rows, first = tk.sequence_of_tile(ends, tile, height, ctx.args.tokens, 256)
        row, col = tk.tile_at(ctx.config.order, ctx.task_id - first * cols, tk.ceil_div(rows.rows, height), cols)
        iterations = tk.ceil_div(tk.extent(ctx.globals.X, 1), ctx.config.tile_k)
        return tk.task(iterations, when=expert < tk.extent(ends, 0), expert=expert, rows=rows, row=row, col=col)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.rows, ctx.row, ctx.iter), input.full)
        tk.load_async(input.W, ctx.globals.W, (ctx.expert, ctx.col, ctx.iter), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.mma_zero(ctx.accumulators.acc, ctx.config.dtype))

    @triton.jit
    def compute(ctx, state, input, previous):
        x = tk.subtile(input.X, ctx.config.tile_m, ctx.config.tile_k, ctx.consumer, 0)
        return state.replace(acc=tk.mma_retire(tk.mma_ABt(x, input.W, state.acc, wait=False)))

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(acc=tk.mma_begin(tk.mma_wait(state.acc), ctx.config.dtype))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.Y, tk.load(tk.mma_wait(state.acc)))
        tk.fence_async()
        tk.store_async(ctx.globals.Y, epilogue.Y, (ctx.rows, ctx.row * ctx.config.team + ctx.consumer, ctx.col))


def grouped_gemm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, **knobs) -> torch.Tensor:
    """x: (tokens, K), w: (experts, N, K), bf16 or fp16, up to 256 experts; offsets: (experts + 1) int32, from 0 to the
    number of tokens."""
    y = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    GroupedGemm(dtype=tk.from_torch(x.dtype), **knobs)(x, w, y, offsets[1:], tokens=x.shape[0])
    return y


def grouped_gemm_torch(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows.double() @ w[e].double().T for e, rows in enumerate(x.split(offsets.diff().tolist()))])


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    counts, n, k = ([4000, 0, 9000, 1700] * 2, 4096, 4096) if has_gpu() else ([100, 0, 300, 17], 264, 200)
    x, w = randn(sum(counts), k), randn(len(counts), n, k)
    offsets = torch.tensor([0, *counts], device=x.device).cumsum(0).to(torch.int32)
    peers = {"torch grouped_mm": lambda x, w, o: torch.nn.functional.grouped_mm(x, w.mT, offs=o[1:])}
    show("grouped GEMM", grouped_gemm, grouped_gemm_torch, [x, w, offsets], peers=peers, flop=2 * x.shape[0] * n * k)
