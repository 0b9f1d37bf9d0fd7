"""A GEMM from hooks: C = A·B at the speed of cuBLAS.

What this rung teaches: a product that stays in flight. `compute` starts the wgmma of its iteration and waits for the
one before, so that the tensor cores always have work. With the hook `compute_last` the template releases a stage one
iteration later. With `staggered_epilogue` the two consumers end a task one after the other: one stores results while
the other multiplies. Results leave in sub-tiles of 64 columns, which leaves shared memory for a fourth stage.

Run it: `python examples/gemm.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class Gemm(tk.lcf):
    """A task is a tile of C, of which each consumer computes `tile_m` rows; an iteration multiplies `tile_k` of K."""

    staggered_epilogue = True
    order = tk.Supergroup(8)  # tiles that are computed at the same time share rows of A and columns of B in L2
    dtype: tl.dtype = tk.bf16
    tile_m: int = 64
    tile_n: int = 256
    tile_k: int = 64
    epilogue_n: int = 64  # columns of C that a consumer stages at a time

    def layout(self):
        a, b = tk.st(self.dtype, self.team * self.tile_m, self.tile_k), tk.st(self.dtype, self.tile_k, self.tile_n)
        return tk.layout(
            globals=dict(A=a, B=b, C=tk.st(self.dtype, self.tile_m, self.epilogue_n)),
            input=dict(A=a, B=b),
            epilogue=dict(C=tk.st(self.dtype, 2 * self.tile_m, self.epilogue_n)),
            accumulators=dict(acc=tk.rt(tk.fp32, self.tile_m, self.tile_n)),
        )

    def tasks(self, A: torch.Size, B: torch.Size, C: torch.Size) -> int:
        return triton.cdiv(C[0], self.team * self.tile_m) * triton.cdiv(C[1], self.tile_n)

    @triton.jit
    def setup(ctx):
        rows = tk.ceil_div(tk.extent(ctx.globals.C, 0), ctx.config.team * ctx.config.tile_m)
        cols = tk.ceil_div(tk.extent(ctx.globals.C, 1), ctx.config.tile_n)
        row, col = tk.tile_at(ctx.config.order, ctx.task_id, rows, cols)
        iterations = tk.ceil_div(tk.extent(ctx.globals.A, 1), ctx.config.tile_k)
        return tk.task(iterations, when=ctx.task_id < rows * cols, row=row, col=col)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (ctx.row, ctx.iter), input.full)
        tk.load_async(input.B, ctx.globals.B, (ctx.iter, ctx.col), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.mma_zero(ctx.accumulators.acc, ctx.config.dtype))

    @triton.jit
    def compute(ctx, state, input, previous):
        a = tk.subtile(input.A, ctx.config.tile_m, ctx.config.tile_k, ctx.consumer, 0)
        acc = tk.mma_AB(a, input.B, state.acc, wait=False)
        return state.replace(acc=tk.mma_retire(acc))  # waits for the product before this one

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(acc=tk.mma_begin(tk.mma_wait(state.acc), ctx.config.dtype))

    @triton.jit
    def finish(ctx, state, epilogue):
        row = ctx.row * ctx.config.team + ctx.consumer
        sub_tiles = tk.split_cols(tk.mma_wait(state.acc), ctx.config.epilogue_n)
        for i in tl.static_range(len(sub_tiles)):
            half = tk.subtile(epilogue.C, ctx.config.tile_m, ctx.config.epilogue_n, i % 2, 0)
            tk.store_read_wait(1)  # the sub-tile before the last has left
            tk.store(half, tk.load(sub_tiles[i]))
            tk.fence_async()  # TMA sees what registers wrote
            tk.store_async(ctx.globals.C, half, (row, ctx.col * len(sub_tiles) + i))


def gemm(a: torch.Tensor, b: torch.Tensor, **knobs) -> torch.Tensor:
    """A·B of an (M, K) and a (K, N) matrix, bf16 or fp16, rows of multiples of 16 bytes."""
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    Gemm(dtype=tk.from_torch(a.dtype), **knobs)(a, b, c)
    return c


def gemm_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192)) if has_gpu() else ((200, 264, 328),):
        operands = [randn(m, k), randn(k, n)]
        show(f"GEMM {m}×{n}×{k}", gemm, gemm_torch, operands, peers={"cuBLAS": torch.mm}, flop=2 * m * n * k)
