"""Attention forward O = softmax(Q Kᵀ · scale) V as load / compute / finish hooks: one query tile a consumer, K and V stream through the rings."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.masks import edge_of, hidden, keys_of


class AttentionForward(tk.lcf):
    """Any lengths, GQA, causal (aligned at the bottom right) or within a window, soft-cap, log-sum-exp. Blocks of keys go from the last to the first, so that
    only the first ones, the edge, mask. Scores of a block are multiplied under the softmax of the block before, whose product with V follows: K is input,
    V trails by one iteration. Source: FlashAttention-3 (Shah et al., 2024), algorithm 2.

    Q: (B, H, S, head_dim), K: (B, H_kv, S_kv, head_dim), V and O with value_dim, L: (B, H, S) fp32. `scale` is in base 2 (times log₂ e).
    """

    dtype: tl.dtype = tk.bf16
    rows: int = 64
    cols: int = 128
    head_dim: int = 128
    value_dim: int = 128
    causal: bool = False
    window: bool = False
    softcap: bool = False
    lse: bool = False
    order: tk.Order = tk.ColumnMajor()

    def layout(self):
        q, k = tk.st(self.dtype, self.rows, self.head_dim), tk.st(self.dtype, self.cols, self.head_dim)
        v, o = tk.st(self.dtype, self.cols, self.value_dim), tk.st(self.dtype, self.rows, self.value_dim)
        args = ("scale", *(("left", "right") if self.window else ()), *(("squash",) if self.softcap else ()))
        return tk.layout(globals=dict(Q=q, K=k, V=v, O=o, **(dict(L=None) if self.lse else {})), input=dict(K=k), trailing=dict(V=v), scratch=dict(Q=q),
                         finish=dict(O=o), args=args)

    def tiles(self, Q: Any) -> tuple[int, int]:
        """(tiles of queries, heads of the batch)."""
        return -(-Q[2] // (self.rows * self.consumers)), Q[0] * Q[1]

    def tasks(self, Q, *_):
        tiles, heads = self.tiles(Q)
        return 2 * tk.pairs(tiles, heads) if isinstance(self.order, tk.LongAndShort) else tiles * heads

    def blocks(self, slots, Q, *others):
        if not isinstance(self.order, tk.LongAndShort):
            return super().blocks(slots, Q, *others)
        pairs = tk.pairs(*self.tiles(Q))
        return -(-pairs // max(1, -(-pairs // slots)))

    @triton.jit
    def setup(ctx):
        heads = tk.extent(ctx.globals.Q, 1)
        queries, keys = tk.extent(ctx.globals.Q, 2), tk.extent(ctx.globals.K, 2)
        HEIGHT: tl.constexpr = ctx.config.rows * ctx.config.consumers
        row, batch_head = tk.tile_at(ctx.config.order, ctx.task, tk.ceil_div(queries, HEIGHT), tk.extent(ctx.globals.Q, 0) * heads)
        batch, head = tk.unravel(batch_head, heads)
        kv_head = head // (heads // tk.extent(ctx.globals.K, 1))
        more = (row >= 0) & (batch < tk.extent(ctx.globals.Q, 0))
        shift = keys - queries
        last, count = keys_of(ctx, row * HEIGHT, tl.minimum((row + 1) * HEIGHT, queries), shift, keys)
        edge = edge_of(ctx, row * HEIGHT, shift, keys, last) if ctx.config.causal else None
        return tk.task(count, when=more, edge=edge, batch=batch, head=head, kv_head=kv_head, row=row, last=last, shift=shift, keys=keys)

    @triton.jit
    def load_scratch(ctx, scratch):
        tk.load_async(scratch.Q, ctx.globals.Q, (ctx.batch, ctx.head, ctx.row * ctx.config.consumers + ctx.consumer, 0), scratch.arrived)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.K, ctx.globals.K, (ctx.batch, ctx.kv_head, ctx.last - ctx.iter, 0), input.arrived)

    @triton.jit
    def load_trailing(ctx, trailing):
        tk.load_async(trailing.V, ctx.globals.V, (ctx.batch, ctx.kv_head, ctx.last - ctx.iter, 0), trailing.arrived)

    @triton.jit
    def start(ctx):
        scores = tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols)
        o = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.value_dim))
        p = tk.zero(tk.rt(ctx.config.dtype, ctx.config.rows, ctx.config.cols))
        return tk.struct(o=o, p=p, m=tk.neg_infty(tk.col_vec(scores)), sums=tk.row_sum_by_quad(tk.zero(scores)))

    @triton.jit
    def _softmax(ctx, state, s):
        """(p, largest score, factor of what was summed before) of a block's scores."""
        if ctx.config.softcap:
            s = 1.0 - 2.0 * tk.reciprocal(1.0 + tk.exp2(s * ctx.args.squash))
        if ctx.edge or ctx.config.window:
            s = hidden(ctx, s)
        m = tk.row_max(s, accumulate=state.m)
        offset = m * ctx.args.scale
        if ctx.edge or ctx.config.window:  # a row that has seen no key yet
            offset = tk.where(m == float("-inf"), 0.0, offset)
        return tk.exp2_row(s, ctx.args.scale, offset), m, tk.exp2(state.m * ctx.args.scale - offset)

    @triton.jit
    def first(ctx, state, input):
        s = tk.mm_ABt(ctx.scratch.Q, input.K)
        tk.release(ctx, input)
        p, m, _ = ctx.config._softmax(ctx, state, s)
        return state.replace(p=tk.cast(p, ctx.config.dtype), m=m, sums=tk.row_sum_by_quad(p))

    @triton.jit
    def compute(ctx, state, input, previous):
        tk.my_turn(ctx)
        s = tk.mm_ABt(ctx.scratch.Q, input.K, wait=False)
        tk.wait_for(previous)
        o = tk.mma_AB(state.p, previous.V, state.o, wait=False)
        tk.pass_turn(ctx)
        s = tk.mma_wait(s, leave=o)
        tk.release(ctx, input)
        p, m, alpha = ctx.config._softmax(ctx, state, s)
        sums = tk.add(tk.mul_row(state.sums, alpha), tk.row_sum_by_quad(p))
        o = tk.mul_row(tk.mma_wait(o), alpha)
        return state.replace(o=o, p=tk.cast(p, ctx.config.dtype), m=m, sums=sums)

    @triton.jit
    def drain(ctx, state, input):
        tk.wait_for(input)
        return state.replace(o=tk.mma_AB(state.p, input.V, state.o))

    @triton.jit
    def finish(ctx, state, staging):
        total = tk.row_sum(state.sums)
        row = ctx.row * ctx.config.consumers + ctx.consumer
        tk.store(staging.O, tk.mul_row(state.o, tk.where(total > 0, 1.0 / total, 0.0)))
        tk.fence_async()
        tk.store_async(ctx.globals.O, staging.O, (ctx.batch, ctx.head, row, 0))
        if ctx.config.lse:
            tk.store(ctx.globals.L, tk.add(state.m * ctx.args.scale, tk.log2(total)) * 0.6931471805599453, (ctx.batch, ctx.head, row))
