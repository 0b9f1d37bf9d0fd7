"""The first template: sums of the rows of a matrix, from five hooks.

What this rung teaches: `tk.lcf` (load, compute, finish) contains the pipeline and the roles of the rung before. The
layout says which tiles a stage has. `setup` says what a task is and how many iterations it takes. `load` fills a stage,
`compute` uses it, `finish` stores the result. CTAs are persistent: each takes one task after the other, and
loads for the next task while it finishes one.

Run it: `python examples/row_sums.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class RowSums(tk.lcf):
    """A task is a band of rows, an iteration one tile of it; each consumer adds up `rows` rows of the tile."""

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    cols: int = 64

    def layout(self):
        tile = tk.st(self.dtype, self.team * self.rows, self.cols)
        return tk.layout(globals=dict(X=tile, Y=None), input=dict(X=tile))  # TMA moves tiles of X; registers write Y

    @triton.jit
    def setup(ctx):
        bands = tk.ceil_div(tk.extent(ctx.globals.X, 0), ctx.config.team * ctx.config.rows)
        return tk.task(tk.ceil_div(tk.extent(ctx.globals.X, 1), ctx.config.cols), when=ctx.task_id < bands)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, ctx.iter), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(total=tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols, "memory")))

    @triton.jit
    def compute(ctx, state, input):
        x = tk.load(tk.subtile(input.X, ctx.config.rows, ctx.config.cols, ctx.consumer, 0), like=state.total)
        return state.replace(total=state.total + tk.cast(x, tk.fp32))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(ctx.globals.Y, tk.row_sum(state.total), (ctx.task_id * ctx.config.team + ctx.consumer,))


def row_sums(x: torch.Tensor, **knobs) -> torch.Tensor:
    """The sum of each row of a matrix, bf16 or fp16, rows of multiples of 16 bytes: a vector in fp32."""
    sums = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    RowSums(dtype=tk.from_torch(x.dtype), **knobs)(x, sums)
    return sums


def row_sums_torch(x: torch.Tensor) -> torch.Tensor:
    return x.double().sum(1)


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    x, peer = randn(16384, 8192) if has_gpu() else randn(300, 200), lambda x: x.sum(1, dtype=torch.float32)
    show("sums of rows", row_sums, row_sums_torch, [x], peers={"torch": peer}, nbytes=2 * x.numel())
    print(RowSums().explain())
