"""A template with an output ring: silu(scale · x) of a matrix, streamed.

What this rung teaches: with `tk.lcsf` (load, compute, store, finish) tiles are loaded, computed and stored at the same
time, by roles of their own. The hooks say what one tile needs. The template has both rings, their semaphores and
phases, and the loop over the bands of rows.

Run it: `python examples/stream_rows.py` (on a Hopper GPU, or in the simulator where there is none).
"""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class ScaledSilu(tk.lcsf):
    """A task is a band of rows, an iteration one tile of it; each consumer computes `rows` rows of the tile."""

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    cols: int = 64

    def layout(self):
        tile = tk.st(self.dtype, self.team * self.rows, self.cols)
        return tk.layout(globals=dict(X=tile, Y=tile), input=dict(X=tile), output=dict(Y=tile), args=("scale",))

    def tasks(self, X: torch.Size, Y: torch.Size) -> int:
        return triton.cdiv(X[0], self.team * self.rows)

    @triton.jit
    def setup(ctx):
        bands = tk.ceil_div(tk.extent(ctx.globals.X, 0), ctx.config.team * ctx.config.rows)
        return tk.task(tk.ceil_div(tk.extent(ctx.globals.X, 1), ctx.config.cols), when=ctx.task_id < bands)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.task_id, ctx.iter), input.full)

    @triton.jit
    def compute(ctx, state, input, output):
        x = tk.load(tk.subtile(input.X, ctx.config.rows, ctx.config.cols, ctx.consumer, 0), layout="memory")
        y = tk.silu(tk.cast(x, tk.fp32) * ctx.args.scale)
        tk.store(tk.subtile(output.Y, ctx.config.rows, ctx.config.cols, ctx.consumer, 0), y)
        return state

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.Y, output.Y, (ctx.task_id, ctx.iter))


def scaled_silu(x: torch.Tensor, scale: float, **knobs) -> torch.Tensor:
    """silu(scale · x) in fp32, rounded to the dtype of x: a matrix, bf16 or fp16, rows of multiples of 16 bytes."""
    out = torch.empty_like(x)
    ScaledSilu(dtype=tk.from_torch(x.dtype), **knobs)(x, out, scale=float(scale))
    return out


def scaled_silu_torch(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.nn.functional.silu(x.double() * scale)


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    x = randn(16384, 4096) if has_gpu() else randn(300, 200)
    peers = {"torch": lambda x, scale: torch.nn.functional.silu(x * scale)}
    show("silu(0.5 · x)", scaled_silu, scaled_silu_torch, [x, 0.5], peers=peers, nbytes=4 * x.numel())
    print(ScaledSilu().explain())
