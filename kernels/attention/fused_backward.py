"""Gradients of attention in one pass over the scores: dK and dV stay in registers, dQ is summed up in global memory by TMA."""
from __future__ import annotations

from typing import ClassVar

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.backward import AttentionBackwardKeys
from tritonkittens.kernels.attention.masks import hidden_from, squashed

HALF = tl.constexpr(64 * 64)  # of a block's dQ: what a consumer multiplies


class AttentionBackward(AttentionBackwardKeys):
    """dK, dV, and dQ added to a buffer in fp32 that was zero: 5 products a block, and the order of the sums, so the last bits of dQ, are the card's choice.

    A task is `rows` keys for each of the two consumers. Scores are computed transposed, so that P and dS are operands in registers; for dQ consumers write dS
    to shared memory, meet, and take half of dQ each: half its queries where a block has 128 of them, else half its columns. The scores of the next block, dQ
    and dK are under way together, so that dQ leaves under the product for dK, and dO Vᵀ runs under the softmax. Dimensions: 64 or 128, the same for keys and
    values. Source: FlashAttention-3 (Shah et al., 2024), appendix B.2.

    Worth, on the H200 (`bench/results/attention_variants.json`): a third slot, which hides the copies, 16 to 25 % at dimension 128; causal tasks in pairs of
    one head, whose operands and sums stay in L2, 10 to 40 % where there are many heads; no fence behind dQ's atomic additions 3 %.

    Q, K, V, dO, offsets and deltas as for `AttentionBackwardKeys`. dQ: (B, H, blocks, 2, 4096) fp32, of every block of queries the halves, 64 by 64, as
    `tk.store_fragments` orders them, without the factor.
    """

    consumers: int = 2
    fences_reads: ClassVar[bool] = True  # offsets and deltas are read before dS is written and fenced
    staged: bool = True  # does dQ leave through shared memory (which results take in the end), or straight from registers?

    def layout(self):
        height, number = self.rows * self.consumers, tk.sv(tk.fp32, self.cols)
        q, do = tk.st(self.dtype, self.cols, self.head_dim), tk.st(self.dtype, self.cols, self.value_dim)
        k, v = tk.st(self.dtype, height, self.head_dim), tk.st(self.dtype, height, self.value_dim)
        results = dict(dK=tk.st(self.dtype, self.rows, self.head_dim), dV=tk.st(self.dtype, self.rows, self.value_dim))
        input, common = dict(Q=q, dO=do, offsets=number, deltas=number), dict(K=k, V=v)
        working = dict(dQ=tk.st(tk.fp32, 64, 64)) if self.staged else {}
        return tk.layout(globals={**input, **common, "dQ": None, **results}, input=input, late_input=True, common=common, finish=results,
                         working=working, exchange=dict(dS=tk.st(self.dtype, height, self.cols)), args=(*self.numbers, "gradient"))

    @triton.jit
    def load_common(ctx, common):
        tk.load_async(common.K, ctx.globals.K, (ctx.kv_batch, ctx.kv_head, ctx.row, 0), common.arrived)
        tk.load_async(common.V, ctx.globals.V, (ctx.kv_batch, ctx.kv_head, ctx.row, 0), common.arrived)

    @triton.jit
    def start(ctx):
        dk = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.head_dim))
        dv = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.value_dim))
        s = tk.zero(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        return tk.struct(s=s, dk=dk, dv=dv, head=ctx.kv_head * ctx.group, block=ctx.begin_block)

    @triton.jit
    def _scores(ctx, input):
        """The product of this consumer's keys and a block of queries, under way."""
        return tk.mm_ABt(tk.subtile(ctx.common.K, ctx.config.rows, ctx.config.head_dim, ctx.consumer, 0), input.Q, wait=False)

    @triton.jit
    def _values(ctx, state, tiles, number):
        """(dV under way, dS) of the state's block, which is `number` of the task; dS is also where all consumers see it."""
        OF_QUERIES: tl.constexpr = tk.row_vec(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols))
        ROWS: tl.constexpr = ctx.config.rows
        EARLY: tl.constexpr = ctx.config.cols <= 64  # reads behind products wait for the queue in which these are issued; of 128 they would spill
        offsets = tk.load(tiles.offsets, OF_QUERIES) if EARLY else None
        dp = tk.mm_ABt(tk.subtile(ctx.common.V, ROWS, ctx.config.value_dim, ctx.consumer, 0), tiles.dO, wait=False)
        s, slope = state.s, 1.0
        if ctx.config.softcap:
            s = squashed(ctx, s)
            slope = 1.0 - s * s
        key = (ctx.row * ctx.config.consumers + ctx.consumer) * ROWS
        s = hidden_from(ctx, s, key, state.block * ctx.config.cols)
        if key + ROWS > ctx.keys:  # what is behind the keys is zero, but zero times infinity is not
            s = tk.lower_fill(s, ctx.keys - key, float("-inf"))
        p = tk.exp2_col(s, ctx.args.scale, offsets if EARLY else tk.load(tiles.offsets, OF_QUERIES))
        deltas = tk.load(tiles.deltas, OF_QUERIES) if EARLY else None
        dv = tk.mma_AB(tk.cast(p, ctx.config.dtype), tiles.dO, state.dv, wait=False)
        ds = p * tk.sub_col(tk.mma_wait(dp, leave=dv), deltas if EARLY else tk.load(tiles.deltas, OF_QUERIES)) * slope
        ds = tk.cast(ds, ctx.config.dtype)
        tk.store(tk.subtile(ctx.exchange.dS[number % 2], ROWS, ctx.config.cols, ctx.consumer, 0), ds)
        tk.fence_async()
        tk.sync_consumers(ctx)
        return dv, ds

    @triton.jit
    def _queries(ctx, number):
        """This consumer's half of dQ, under way: dS of all keys times the keys."""
        HEIGHT: tl.constexpr = ctx.config.rows * ctx.config.consumers
        dS = ctx.exchange.dS[number % 2]
        if ctx.config.cols > 64:
            return tk.mm_AtB(tk.subtile(dS, HEIGHT, 64, 0, ctx.consumer), ctx.common.K, wait=False)
        else:
            return tk.mm_AtB(dS, tk.subtile(ctx.common.K, HEIGHT, 64, 0, ctx.consumer), wait=False)

    @triton.jit
    def _add(ctx, state, dq):
        """Add this consumer's half to dQ of the state's block in global memory."""
        batch, head, block = ctx.config._numbers(ctx, state.head, state.block)
        place = (batch * tk.extent(ctx.globals.dQ, 1) + head) * tk.extent(ctx.globals.dQ, 2) + block
        target = ctx.globals.dQ.pointer + (place.to(tl.int64) * ctx.config.consumers + ctx.consumer) * HALF
        if ctx.config.staged:
            tk.store_read_wait(0)
            half = tk.store_fragments(ctx.working.dQ, dq)
            tk.fence_async()
            tk.sync()
            tk.store_add_bytes_async(target, half)
        else:
            tk.add_fragments(target, dq)

    @triton.jit
    def first(ctx, state, input):
        return state.replace(s=tk.mma_wait(ctx.config._scores(ctx, input)))

    @triton.jit
    def compute(ctx, state, input, previous):
        dv, ds = ctx.config._values(ctx, state, previous, ctx.iter - 1)
        dv = tk.mma_wait(dv)
        tk.wait_for(input)
        s = ctx.config._scores(ctx, input)
        dq = ctx.config._queries(ctx, ctx.iter - 1)
        dk = tk.mma_AB(ds, previous.Q, state.dk, wait=False)
        s, dq = tk.mma_wait(s, dq, leave=dk)
        ctx.config._add(ctx, state, dq)
        # the next block, or the first of the next head: counted, for a division takes as long as a product
        last = state.block + 1 == ctx.begin_block + ctx.per_head
        head, block = tl.where(last, state.head + 1, state.head), tl.where(last, ctx.begin_block, state.block + 1)
        return state.replace(s=s, dk=tk.mma_wait(dk), dv=dv, head=head, block=block)

    @triton.jit
    def drain(ctx, state, input):
        dv, ds = ctx.config._values(ctx, state, input, ctx.iterations - 1)
        dv = tk.mma_wait(dv)
        dq = ctx.config._queries(ctx, ctx.iterations - 1)
        dk = tk.mma_AB(ds, input.Q, state.dk, wait=False)
        dq = tk.mma_wait(dq, leave=dk)
        ctx.config._add(ctx, state, dq)
        return state.replace(dk=tk.mma_wait(dk), dv=dv)


@triton.jit
def write_half(sums, half, dQ, stride_s, first, behind, begin_col, factor, WIDTH: tl.constexpr):
    """Rows from `first` on and 64 columns from `begin_col` on of dQ: factor · the sums of half number `half`. Rows from `behind` and columns from WIDTH on are
    left out. dQ: a pointer to row 0, `stride_s` between rows."""
    row, col = first + tl.arange(0, 64)[:, None], begin_col + tl.arange(0, 64)[None, :]
    # as it lies in memory: 8 columns, 16 and 8 rows, 2 columns, 8 rows, a column; `tk.fragment_place` says the same
    x = tl.reshape(tl.load(sums + half * HALF + tl.arange(0, HALF)), (8, 4, 8, 4, 2, 2))
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), (64, 64))
    tl.store(dQ + row.to(tl.int64) * stride_s + col, (x * factor).to(dQ.dtype.element_ty), mask=(row < behind) & (col < WIDTH))


@triton.jit
def gather_queries(sums, dQ, stride_b, stride_h, stride_s, factor, queries, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """dQ = factor · its sums. Grid: halves of all blocks, heads, batch. sums: as `AttentionBackward` leaves them, of DIM columns; dQ: (B, H, queries, WIDTH),
    with these strides, the last 1."""
    ACROSS: tl.constexpr = DIM // 64
    part, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    half = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + part
    write_half(sums, half, dQ + batch * stride_b + head * stride_h, stride_s, part // ACROSS * 64, queries, part % ACROSS * 64, factor, WIDTH)
