"""Attention prefill O = softmax(Q Kᵀ · scale) V as load / compute / finish hooks: one query tile a consumer, K and V stream through the ring."""
from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk


class AttentionPrefill(tk.lcf):
    """Non-causal, any sequence length, GQA. Blocks of keys go from the last, ragged one to the first, so that only `first` masks; the product with V of one
    block runs under the softmax of the next. Source: FlashAttention-3 (Shah et al., 2024), algorithm 2."""

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    cols: int = 128
    head_dim: int = 128
    ordered: bool = True

    def layout(self):
        q, kv = tk.st(self.dtype, self.rows, self.head_dim), tk.st(self.dtype, self.cols, self.head_dim)
        return tk.layout(globals=dict(Q=q, K=kv, V=kv, O=q), input=dict(K=kv, V=kv), scratch=dict(Q=q), finish=dict(O=q), args=("scale",))

    def tasks(self, Q, K, V, O, scale):  # noqa: E741
        return Q.shape[0] * Q.shape[1] * triton.cdiv(Q.shape[2], self.rows * self.consumers)

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
        p = tk.zero(tk.rt(ctx.config.dtype, ctx.config.rows, ctx.config.cols))
        o = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.head_dim))
        s = tk.neg_infty(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(o=o, p=p, m=tk.row_max(s), sums=tk.row_sum_by_quad(tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))))

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
