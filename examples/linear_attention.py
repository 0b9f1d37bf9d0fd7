"""Causal linear attention in chunks: o_i = Σ_{j ≤ i} (q_i · k_j) v_j. The chunks before leave a D × D matrix, Σ kᵀ
v."""

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk


class LinearAttention(tk.lcf):
    """A task is a head, an iteration a chunk of `rows` positions. Q, K, V, O: (heads, positions, dim)."""

    consumers = 1
    dtype: tl.dtype = tk.bf16
    rows: int = 64
    dim: int = 64

    def layout(self):
        tile, square = tk.st(self.dtype, self.rows, self.dim), tk.st(self.dtype, self.dim, self.dim)
        scratch = dict(S=square, O=tile)
        return tk.layout(globals=dict.fromkeys("QKVO", tile), input=dict.fromkeys("QKV", tile), scratch=scratch)

    @triton.jit
    def setup(ctx):
        heads, positions = tk.extent(ctx.globals.Q, 0), tk.extent(ctx.globals.Q, 1)
        return tk.task(tk.ceil_div(positions, ctx.config.rows), when=ctx.task_id < heads)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, (ctx.task_id, ctx.iter, 0), input.full)
        tk.load_async(input.K, ctx.globals.K, (ctx.task_id, ctx.iter, 0), input.full)
        tk.load_async(input.V, ctx.globals.V, (ctx.task_id, ctx.iter, 0), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(s=tk.zero(tk.rt(tk.fp32, ctx.config.dim, ctx.config.dim)))

    @triton.jit
    def compute(ctx, state, input):
        tk.store(ctx.scratch.S, state.s)
        tk.fence_async()
        p = tk.tril(tk.mm_ABt(input.Q, input.K))
        o = tk.mma_AB(tk.cast(p, ctx.config.dtype), input.V, tk.mm_AB(input.Q, ctx.scratch.S))
        s = tk.mma_AtB(input.K, input.V, state.s)
        tk.store_read_wait()  # the results of the chunk before have left
        tk.store(ctx.scratch.O, o)
        tk.fence_async()
        tk.store_async(ctx.globals.O, ctx.scratch.O, (ctx.task_id, ctx.iter, 0))
        return state.replace(s=s)

    @triton.jit
    def finish(ctx, state, epilogue):
        pass  # `compute` has stored all results


def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **knobs) -> torch.Tensor:
    """q, k, v: (heads, positions, D), bf16 or fp16, D 64 or 128."""
    o, dim = torch.empty_like(q), q.shape[-1]
    knobs = {"blocks_per_sm": 2 if dim == 64 else 1, **knobs}
    LinearAttention(dtype=tk.from_torch(q.dtype), dim=dim, **knobs)(q, k, v, o)
    return o


def linear_attention_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q.double() @ k.double().mT).tril() @ v.double()


if __name__ == "__main__":
    from _run import has_gpu, randn, show

    operands = [randn(256, 2048, 64) if has_gpu() else randn(2, 200, 64) for _ in range(3)]
    peers = {"torch": lambda q, k, v: (q @ k.mT).tril() @ v}
    work = dict(peers=peers, nbytes=8 * operands[0].numel())
    show("linear attention", linear_attention, linear_attention_torch, operands, **work)
