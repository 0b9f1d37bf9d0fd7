"""Rotary position embedding of halves: y = [x₁·cos − x₂·sin, x₂·cos + x₁·sin]. A template with an output ring."""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class Rotary(tk.lcsf):
    """A task is a band of positions of some heads, an iteration a head: sines stay in registers."""

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    dim: int = 64
    heads: int = 8

    def layout(self):
        tile = tk.st(self.dtype, self.team * self.rows, self.dim)
        return tk.layout(globals=dict(X=tile, Y=tile, C=None, S=None), input=dict(X=tile), output=dict(Y=tile))

    @triton.jit
    def setup(ctx):
        bands = tk.ceil_div(tk.extent(ctx.globals.X, 1), ctx.config.team * ctx.config.rows)
        band, head = ctx.task_id % bands, ctx.task_id // bands * ctx.config.heads
        heads = tl.minimum(tk.extent(ctx.globals.X, 0) - head, ctx.config.heads)
        return tk.task(heads, when=heads > 0, band=band, head=head)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (ctx.head + ctx.iter, ctx.band, 0), input.full)

    @triton.jit
    def start(ctx):
        half: tl.constexpr = tk.rt(tk.fp32, ctx.config.rows, ctx.config.dim // 2, "memory")
        at = (ctx.band * ctx.config.team + ctx.consumer, 0)
        return tk.struct(cos=tk.load(ctx.globals.C, half, at), sin=tk.load(ctx.globals.S, half, at))

    @triton.jit
    def compute(ctx, state, input, output):
        half: tl.constexpr = ctx.config.dim // 2
        x1 = tk.cast(tk.load(tk.subtile(input.X, ctx.config.rows, half, ctx.consumer, 0), like=state.cos), tk.fp32)
        x2 = tk.cast(tk.load(tk.subtile(input.X, ctx.config.rows, half, ctx.consumer, 1), like=state.cos), tk.fp32)
        tk.store(tk.subtile(output.Y, ctx.config.rows, half, ctx.consumer, 0), x1 * state.cos - x2 * state.sin)
        tk.store(tk.subtile(output.Y, ctx.config.rows, half, ctx.consumer, 1), x2 * state.cos + x1 * state.sin)
        return state

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.Y, output.Y, (ctx.head + ctx.iter, ctx.band, 0))


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **knobs) -> torch.Tensor:
    """x: (heads, positions, D), bf16 or fp16, D 64 or 128; cos, sin: (positions, D / 2), fp32."""
    y = torch.empty_like(x)
    Rotary(dtype=tk.from_torch(x.dtype), dim=x.shape[-1], **knobs)(x, y, cos, sin)
    return y


def rotary_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.double().chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    x = randn(64, 16384, 128) if has_gpu() else randn(3, 200, 64)
    angles = randn(x.shape[1], x.shape[2] // 2, dtype=torch.float32)
    show("rotary", rotary, rotary_torch, [x, angles.cos(), angles.sin()], peers={}, nbytes=4 * x.numel())
