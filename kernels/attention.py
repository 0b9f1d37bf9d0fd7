"""Attention prefill O = softmax(Q Kᵀ · scale) V as load / compute / finish hooks: one query tile a consumer, K and V stream through the ring."""
from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import HALF_TYPES, as_addressable, check_operands, storable

HEAD_DIMS = range(16, 257, 16)


class AttentionPrefill(tk.lcf):
    """Non-causal, any sequence length, GQA. Blocks of keys go from the last, ragged one to the first, so that only `first` masks; the product with V of one
    block runs under the softmax of the next. Source: FlashAttention-3 (Shah et al., 2024), algorithm 2."""

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    cols: int = 128
    head_dim: int = 128

    def layout(self):
        q, kv = tk.st(self.dtype, self.rows, self.head_dim), tk.st(self.dtype, self.cols, self.head_dim)
        return tk.layout(globals=dict(Q=q, K=kv, V=kv, O=q), input=dict(K=kv, V=kv), scratch=dict(Q=q), finish=dict(O=q), args=("scale",))

    def tasks(self, Q, K, V, O):  # noqa: E741
        return Q[0] * Q[1] * -(-Q[2] // (self.rows * self.consumers))

    @triton.jit
    def setup(ctx):
        heads = tk.extent(ctx.globals.Q, 1)
        tiles = tk.ceil_div(tk.extent(ctx.globals.Q, 2), ctx.config.rows * ctx.config.consumers)
        batch_head, row = tk.unravel(ctx.task, tiles)
        batch, head = tk.unravel(batch_head, heads)
        kv_head = head // (heads // tk.extent(ctx.globals.K, 1))
        length = tk.extent(ctx.globals.K, 2)
        more = batch < tk.extent(ctx.globals.Q, 0)
        return tk.task(tk.ceil_div(length, ctx.config.cols), when=more, batch=batch, head=head, kv_head=kv_head, row=row, length=length)

    @triton.jit
    def load_scratch(ctx, scratch):
        tk.load_async(scratch.Q, ctx.globals.Q, (ctx.batch, ctx.head, ctx.row * ctx.config.consumers + ctx.consumer, 0), scratch.arrived)

    @triton.jit
    def load(ctx, input):
        block = ctx.iterations - 1 - ctx.iter
        tk.load_async(input.K, ctx.globals.K, (ctx.batch, ctx.kv_head, block, 0), input.arrived)
        tk.load_async(input.V, ctx.globals.V, (ctx.batch, ctx.kv_head, block, 0), input.arrived)

    @triton.jit
    def start(ctx):
        scores = tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols)
        sums = tk.row_sum_by_quad(tk.zero(scores))
        o = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.head_dim))
        return tk.struct(o=o, p=tk.zero(tk.rt(ctx.config.dtype, ctx.config.rows, ctx.config.cols)), m=tk.neg_infty(tk.col_vec(scores)), sums=sums)

    @triton.jit
    def first(ctx, state, input):
        s = tk.mm_ABt(ctx.scratch.Q, input.K)
        s = tk.right_fill(s, ctx.length - (ctx.iterations - 1) * ctx.config.cols, float("-inf"))
        m = tk.row_max(s)
        p = tk.exp2_row(s, ctx.args.scale, m * ctx.args.scale)
        return state.replace(p=tk.cast(p, ctx.config.dtype), m=m, sums=tk.row_sum_by_quad(p))

    @triton.jit
    def compute(ctx, state, input, previous):
        tk.my_turn(ctx)
        s = tk.mm_ABt(ctx.scratch.Q, input.K, wait=False)
        o = tk.mma_AB(state.p, previous.V, state.o, wait=False)
        tk.pass_turn(ctx)
        s = tk.mma_wait(s, leave=o)
        m = tk.row_max(s, accumulate=state.m)
        alpha = tk.exp2((state.m - m) * ctx.args.scale)
        p = tk.exp2_row(s, ctx.args.scale, m * ctx.args.scale)
        sums = tk.add(tk.mul_row(state.sums, alpha), tk.row_sum_by_quad(p))
        o = tk.mul_row(tk.mma_wait(o), alpha)
        return state.replace(o=o, p=tk.cast(p, ctx.config.dtype), m=m, sums=sums)

    @triton.jit
    def drain(ctx, state, input):
        return state.replace(o=tk.mma_AB(state.p, input.V, state.o))

    @triton.jit
    def finish(ctx, state, staging):
        total = tk.row_sum(state.sums)
        o = tk.mul_row(state.o, tk.where(total > 0, 1.0 / total, 0.0))
        tk.store(staging.O, o)
        tk.fence_async()
        tk.store_async(ctx.globals.O, staging.O, (ctx.batch, ctx.head, ctx.row * ctx.config.consumers + ctx.consumer, 0))


@functools.lru_cache
def template(dtype: torch.dtype, head_dim: int) -> AttentionPrefill:
    """The kernel for a dtype and a head dimension. Wide heads take smaller key blocks, so that the accumulators fit the registers and the ring its memory."""
    return AttentionPrefill(dtype=tk.from_torch(dtype), head_dim=head_dim, cols=128 if head_dim <= 128 else 64)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(Q Kᵀ · scale) V for every batch and head, non-causal.

    q: (batch, heads, queries, D); k, v: (batch, kv_heads, keys, D), heads a multiple of kv_heads; bf16 or fp16; D a multiple of 16 up to 256. Any strides
    whose last is 1 run without a copy if they are multiples of 16 bytes (so also permuted (batch, sequence, heads, D) tensors). `scale` is positive,
    1/√D by default.
    Returns a tensor like q, `out` where given; zeros where there are no keys. Raises ValueError or TypeError for operands that do not fit together.
    """
    check_operands("attention", HALF_TYPES, 4, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    (batch, heads, _, dim), (kv_batch, kv_heads, keys, kv_dim) = q.shape, k.shape
    if v.shape != k.shape or kv_batch != batch or kv_dim != dim:
        raise ValueError(f"attention: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}; "
                         "they must be (B, H, S, D) and twice (B, H_kv, S_kv, D)")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads and {kv_heads} key heads; the first must be a multiple of the second")
    if dim not in HEAD_DIMS:
        raise ValueError(f"attention: head dimension {dim}; it must be a multiple of 16 up to 256")
    if out is not None and out.shape != q.shape:
        raise ValueError(f"attention: out is {tuple(out.shape)}; it must be {tuple(q.shape)}")
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    if not scale > 0:
        raise ValueError(f"attention: scale={scale}; it must be positive")
    result = torch.empty_like(q) if out is None else out
    if q.numel() == 0:
        return result
    if keys == 0:
        return result.zero_()
    home = result if storable(result) else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    template(q.dtype, dim)(as_addressable(q), as_addressable(k), as_addressable(v), home, scale=scale * math.log2(math.e))
    return result if home is result else result.copy_(home)


def attention_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
    """Reference in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return scores.softmax(-1) @ v


def _compiled(arch: str, head_dim: int) -> object:
    x = torch.empty(4, 16, 4096, head_dim, dtype=torch.bfloat16, device="meta")
    return template(torch.bfloat16, head_dim).compile(x, x, x, x, scale=1.0, arch=arch)


inspectable = {f"attention_d{dim}": functools.partial(_compiled, head_dim=dim) for dim in (64, 128)}
