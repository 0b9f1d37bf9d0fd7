"""Gradients of attention in two passes: the kernel for dK and dV streams queries, the kernel for dQ streams keys.

With P = exp(S − L), L the log-sum-exp, and Δ the row sums of dO ∘ O (less dL):

    dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ − Δ),  dK = scale · dSᵀ Q,  dQ = scale · dS K

Two passes compute S and dO Vᵀ twice: 7 products instead of 5. But no sum crosses CTAs, so results have the same bits in
every run and no fp32 buffer is needed. Δ is `dPsum`, L in base 2 is `LSE_log2` (FlashAttention's names). Source:
FlashAttention-2 (Dao, 2023), section 3.1.2. Dimensions above 128: `wide_backward`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.masks import hidden_from, queries_of, squashed, whole_from
from tritonkittens.kernels.attention.device.tiles import QueryTiles
from tritonkittens.launch import plain_kernel

ROWS = 64  # queries of a program of `preprocess`, and of a group of its results for `AttentionBackward`
PARTS = tl.constexpr(3)  # bf16 values whose sum is one fp32 value: 3 · 8 bits
STEP = tl.constexpr(16)  # depth of one wgmma
LARGEST = tl.constexpr(3e38)  # finite in bf16
CLEARED = tl.constexpr(512)  # int32 that a program of `preprocess` clears at a time


@triton.jit
def numbers(ctx, head, block):
    """Coordinates of a block of queries in LSE_log2 and dPsum."""
    return ctx.batch, head, block


@triton.jit
def lse_and_dpsum(
    O, o_row, dO, do_row, L, dL, first, behind,  # noqa: E741
    DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_DL: tl.constexpr,
):  # fmt: skip
    """(LSE_log2, dPsum) of 64 queries from `first` on, see `preprocess`; zeros from `behind` on.

    O, dO: pointers to row 0, with strides between rows. L, dL: pointers to query 0.
    """
    row, col = first + tl.arange(0, 64), tl.arange(0, WIDTH)
    inside, place = row < behind, row[:, None].to(tl.int64)
    here = inside[:, None] & (col < DIM)[None, :]
    o = tl.load(O + place * o_row + col[None, :], mask=here, other=0.0).to(tl.float32)
    do = tl.load(dO + place * do_row + col[None, :], mask=here, other=0.0).to(tl.float32)
    dpsum = tl.sum(o * do, 1)
    if HAS_DL:
        dpsum -= tl.load(dL + row, mask=inside, other=0.0)
    lse_log2 = tl.load(L + row, mask=inside, other=0.0) * 1.4426950408889634
    return tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2), dpsum


@triton.jit
def store_addends(addends, stride, x):
    """Store a group's values as `AttentionBackward` adds them to products: PARTS rows of bf16, `stride` apart.

    −∞ becomes the smallest finite value, because zero times infinity is NaN.
    """
    query = tl.arange(0, 64)
    rest = tl.where(x < -LARGEST, -LARGEST, x)
    for part in tl.static_range(PARTS):
        head = rest.to(tl.bfloat16).to(tl.float32)
        tl.store(addends + part * stride + query, head.to(tl.bfloat16))
        rest = tl.where(tl.abs(head) == float("inf"), 0.0, rest - head)


@triton.jit
def last_first():
    """(head, batch) of a program of a grid (…, heads, batch), last first.

    The next kernel begins with the first heads: what it reads of them is then still in L2.
    """
    head, batch = tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(2) - 1 - tl.program_id(2)
    return head.to(tl.int64), batch.to(tl.int64)


@plain_kernel(launch_pdl=True)
@triton.jit
def preprocess(
    O, dO, L, dL, LSE_log2, dPsum, zeros,  # noqa: E741
    o_batch, o_head, o_row, do_batch, do_head, do_row, l_batch, l_head, n_batch, n_head, n_tile, n_part,
    queries, zeros_each, factor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_DL: tl.constexpr, ADDENDS: tl.constexpr,
):  # fmt: skip
    """LSE_log2 and dPsum of every query. Grid: tiles of 64 queries, heads, batch.

    O, dO: (B, H, S, DIM), L: (B, H, S) fp32, with these strides, the last 1. dL: (B, H, S) fp32, contiguous. LSE_log2,
    dPsum: (B, H, S) fp32, `n_tile` between tiles. WIDTH: the power of two from DIM on. LSE_log2 is +∞ for a query
    without keys, so that its P is zero.

    With 2 ADDENDS they are what `AttentionBackward` adds to scores (−L · factor) and to dP (−Δ): (B, H, tiles, PARTS,
    64) bf16, see `store_addends`, zeros after the last query. With 1, dPsum alone is, and LSE_log2 is −L, (B, H, tiles,
    64) fp32. Then every program writes `zeros_each` 32-bit zeros of `zeros`, a multiple of 4. `launch_pdl`: it
    starts early and waits, and the next kernel does so, too.
    """
    tk.dependency_wait()
    tk.dependents_launch()
    tile, (head, batch) = tl.program_id(0), last_first()
    number = batch * tl.num_programs(1) + head
    lse_log2, dpsum = lse_and_dpsum(
        O + batch * o_batch + head * o_head,
        o_row,
        dO + batch * do_batch + head * do_head,
        do_row,
        L + batch * l_batch + head * l_head,
        dL + number * queries,
        tile * 64,
        queries,
        DIM,
        WIDTH,
        HAS_DL,
    )
    place = batch * n_batch + head * n_head + tile.to(tl.int64) * n_tile
    if ADDENDS:
        if ADDENDS == 1:
            tl.store(LSE_log2 + (number * tl.num_programs(0) + tile) * 64 + tl.arange(0, 64), -lse_log2)
        else:
            store_addends(LSE_log2 + place, n_part, -lse_log2 * factor)
        store_addends(dPsum + place, n_part, -dpsum)
        mine = zeros + (number * tl.num_programs(0) + tile) * zeros_each
        for begin in range(0, zeros_each, CLEARED):
            word = begin + tl.arange(0, CLEARED)
            tl.store(mine + word, 0, mask=word < zeros_each)
    else:
        query = tl.arange(0, 64)
        tl.store(dPsum + place + query, dpsum, mask=query < queries - tile * 64)
        tl.store(LSE_log2 + place + query, lse_log2, mask=query < queries - tile * 64)


class AttentionBackwardQueries(QueryTiles):
    """dQ. The MMA of a block's dS with its keys overlaps the softmax of the next block.

    Q, dQ: (B, H, S, head_dim), dO: (B, H, S, value_dim), K: (B, H_kv, S_kv, head_dim), V: (…, value_dim), LSE_log2 and
    dPsum: (B, H, S) fp32, from `preprocess`. `gradient`: the factor of dQ.
    """

    tile_n: int = 64
    edges_apart: bool = False  # a second loop costs the producer as much in registers as it saves

    _numbers = numbers

    def layout(self) -> tk.layout:
        q, do = tk.st(self.dtype, self.tile_m, self.head_dim), tk.st(self.dtype, self.tile_m, self.value_dim)
        k, v = tk.st(self.dtype, self.tile_n, self.head_dim), tk.st(self.dtype, self.tile_n, self.value_dim)
        return tk.layout(
            globals=dict(Q=q, dO=do, K=k, V=v, LSE_log2=None, dPsum=None, dQ=q),
            input=dict(K=k, V=v),
            task=dict(Q=q, dO=do),
            epilogue=dict(dQ=q),
            args=(*self.numbers, "gradient"),
        )

    @triton.jit
    def load_task(ctx, task):
        row = ctx.row * ctx.config.consumers + ctx.consumer
        tk.load_async(task.Q, ctx.globals.Q, (ctx.batch, ctx.head, row, 0), task.full)
        tk.load_async(task.dO, ctx.globals.dO, (ctx.batch, ctx.head, row, 0), task.full)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.K, ctx.globals.K, (ctx.kv_batch, ctx.kv_head, ctx.last - ctx.iter, 0), input.full)
        tk.load_async(input.V, ctx.globals.V, (ctx.kv_batch, ctx.kv_head, ctx.last - ctx.iter, 0), input.full)

    @triton.jit
    def load_params(ctx):
        SUMS: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n))
        place = ctx.config._numbers(ctx, ctx.head, ctx.row * ctx.config.consumers + ctx.consumer)
        return tk.struct(
            lse_log2=tk.load(ctx.globals.LSE_log2, SUMS, place), dpsum=tk.load(ctx.globals.dPsum, SUMS, place)
        )

    @triton.jit
    def start(ctx):
        ds = tk.zero(tk.rt(ctx.config.dtype, ctx.config.tile_m, ctx.config.tile_n))
        return tk.struct(dq=tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.head_dim)), ds=ds)

    @triton.jit
    def _weights(ctx, s):
        """(P, derivative of the soft-cap) of a block's scores."""
        slope = 1.0
        if ctx.config.softcap:
            s = squashed(s, ctx.config._descaled(ctx, ctx.args.squash))
            slope = 1.0 - s * s
        if ctx.edge:
            if (ctx.iter < ctx.masked) | (ctx.iter >= ctx.whole):
                s = ctx.config._hidden(ctx, s)
        return tk.exp2_row(s, ctx.args.scale, ctx.params.lse_log2), slope

    @triton.jit
    def _score_gradients(ctx, input):
        """dS of a block."""
        s = tk.mm_ABt(ctx.task.Q, input.K, wait=False)
        dp = tk.mm_ABt(ctx.task.dO, input.V, wait=False)
        p, slope = ctx.config._weights(ctx, tk.mma_wait(s, leave=dp))
        return p * tk.sub_row(tk.mma_wait(dp), ctx.params.dpsum) * slope

    @triton.jit
    def compute_first(ctx, state, input):
        return state.replace(ds=tk.cast_pairs(ctx.config._score_gradients(ctx, input), ctx.config.dtype))

    @triton.jit
    def compute(ctx, state, input, previous):
        s = tk.mm_ABt(ctx.task.Q, input.K, wait=False)
        dp = tk.mm_ABt(ctx.task.dO, input.V, wait=False)
        dq = tk.mma_AB(state.ds, previous.K, state.dq, wait=False)
        p, slope = ctx.config._weights(ctx, tk.mma_wait(s, leave=(dp, dq)))
        ds = p * tk.sub_row(tk.mma_wait(dp, leave=dq), ctx.params.dpsum) * slope
        return state.replace(dq=tk.mma_wait(dq), ds=tk.cast_pairs(ds, ctx.config.dtype))

    @triton.jit
    def compute_last(ctx, state, input):
        return state.replace(dq=tk.mma_AB(state.ds, input.K, state.dq))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.dQ, state.dq * ctx.args.gradient)
        tk.fence_async()
        tk.store_async(
            ctx.globals.dQ, epilogue.dQ, (ctx.batch, ctx.head, ctx.row * ctx.config.consumers + ctx.consumer, 0)
        )


@triton.jit
def task_of_keys(ctx, row, batch, kv_batch, result, results, queries, keys, heads, kv_heads, when):
    """The task of a tile `row` of keys, for result number `result` of `results`.

    It has the blocks of queries of a part of the group's heads. With an `edge_loop` the blocks that need a mask come
    first, `edge_blocks` of every head. The others follow, last head first. With `rotated` a task begins every head at
    block `rotation` instead of block 0, and ends with the blocks before it.
    """
    HEIGHT: tl.constexpr = ctx.config.task_rows
    EDGES: tl.constexpr = ctx.config.edge_loop and (ctx.config.causal or ctx.config.cut)
    MASKED: tl.constexpr = ctx.config.causal or ctx.config.window
    behind, shift, group = (row + 1) * HEIGHT, keys - queries, heads // results
    begin, end = queries_of(ctx, row * HEIGHT, behind, shift, queries)
    edge_blocks = 0
    if EDGES:
        if ctx.config.cut:
            edge_blocks = tl.where(behind > keys, end - begin, 0)
        if ctx.config.causal:
            edge_blocks = tl.maximum(whole_from(ctx, behind, shift, begin, end) - begin, edge_blocks)
    return tk.task(
        (end - begin) * group,
        when=when,
        edges=(edge_blocks * group if EDGES else 0) if ctx.config.edge_loop else None,
        batch=batch,
        kv_batch=kv_batch,
        kv_head=result // (results // kv_heads),
        result=result,
        row=row,
        keys=keys,
        begin_block=begin if MASKED else 0,
        per_head=end - begin,
        edge_blocks=edge_blocks if EDGES else 0,
        shift=shift,
        group=group,
        rotation=row * (HEIGHT // ctx.config.tile_n) % tl.maximum(end - begin, 1) if ctx.config.rotated else 0,
    )


@triton.jit
def place_of(ctx):
    """(head, block of queries) of this iteration, see `task_of_keys`."""
    edges = ctx.edge_blocks * ctx.group
    edge = ctx.iter < edges
    number, each = (
        tl.where(edge, ctx.iter, ctx.iter - edges),
        tl.where(edge, ctx.edge_blocks, ctx.per_head - ctx.edge_blocks),
    )
    head, block = number // each, number % each
    block = tl.where(edge, block, ctx.edge_blocks + block)
    if ctx.config.rotated:
        block = tl.where(
            block + ctx.rotation >= ctx.per_head, block + ctx.rotation - ctx.per_head, block + ctx.rotation
        )
    return ctx.result * ctx.group + tl.where(edge, head, ctx.group - 1 - head), ctx.begin_block + block


class AttentionBackwardKeys(QueryTiles):
    """dK and dV, where the registers of a consumer hold both of its keys' accumulators.

    A task is `tile_m` keys of a key head for each consumer, and the blocks of `tile_n` queries, of all heads of the
    group, that see them. Scores are transposed, so that P and dS are operands in registers.

    Tensors as for `AttentionBackwardQueries`, with LSE_log2 and dPsum in rows that TMA can address; dK like K, dV like
    V, or with a multiple of their heads. Then a task is a part of a group's query heads, and the results are to be
    summed (`parts_of_group`).
    """

    tile_n: int = 64
    cut: bool = False  # the last tile of keys may be partial, and that matters
    rotated: bool = False  # tasks of the same queries begin at different blocks
    edges_apart: bool = False  # two loops need more registers than there are
    producer_registers: int | None = 32  # a task's bounds do not fit into 24

    _numbers = numbers

    def layout(self) -> tk.layout:
        q, do = tk.st(self.dtype, self.tile_n, self.head_dim), tk.st(self.dtype, self.tile_n, self.value_dim)
        k, v = tk.st(self.dtype, self.tile_m, self.head_dim), tk.st(self.dtype, self.tile_m, self.value_dim)
        number = tk.sv(tk.fp32, self.tile_n)
        input, mine, results = dict(Q=q, dO=do, LSE_log2=number, dPsum=number), dict(K=k, V=v), dict(dK=k, dV=v)
        return tk.layout(
            globals={**input, **mine, **results},
            input=input,
            task=mine,
            epilogue=results,
            args=(*self.numbers, "gradient"),
        )

    def tiles(self, *shapes: Any) -> tuple[int, int]:
        of = shapes[self.tensors.index("dK")]
        return -(-of[2] // self.task_rows), of[0] * of[1]

    @triton.jit
    def _results(ctx):
        """Results of a batch: key heads, or parts of their groups."""
        return tk.extent(ctx.globals.dK, 1)

    @triton.jit
    def setup(ctx):
        queries, keys, results = tk.extent(ctx.globals.Q, 2), tk.extent(ctx.globals.K, 2), ctx.config._results(ctx)
        HEIGHT: tl.constexpr = ctx.config.task_rows
        tiles = tk.ceil_div(keys, HEIGHT)
        row, batch_head = tk.tile_at(ctx.config.order, ctx.task_id, tiles, tk.extent(ctx.globals.K, 0) * results)
        more = (batch_head < tk.extent(ctx.globals.K, 0) * results) & (row >= 0)
        row = tiles - 1 - row  # most queries see the first keys: longest first
        batch, result = tk.unravel(batch_head, results)
        return task_of_keys(
            ctx,
            row,
            batch,
            batch,
            result,
            results,
            queries,
            keys,
            tk.extent(ctx.globals.Q, 1),
            tk.extent(ctx.globals.K, 1),
            more,
        )

    @triton.jit
    def _tile(ctx):
        """The tile of keys of this consumer."""
        return ctx.row * ctx.config.consumers + ctx.consumer

    @triton.jit
    def load_task(ctx, task):
        place = (ctx.kv_batch, ctx.kv_head, ctx.config._tile(ctx), 0)
        tk.load_async(task.K, ctx.globals.K, place, task.full)
        tk.load_async(task.V, ctx.globals.V, place, task.full)

    @triton.jit
    def load(ctx, input):
        head, block = place_of(ctx)
        tk.load_async(input.Q, ctx.globals.Q, (ctx.batch, head, block, 0), input.full)
        tk.load_async(input.dO, ctx.globals.dO, (ctx.batch, head, block, 0), input.full)
        tk.load_async(input.LSE_log2, ctx.globals.LSE_log2, ctx.config._numbers(ctx, head, block), input.full)
        tk.load_async(input.dPsum, ctx.globals.dPsum, ctx.config._numbers(ctx, head, block), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(
            dk=tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.head_dim)),
            dv=tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.value_dim)),
        )

    @triton.jit
    def _weights(ctx, s, input):
        """(P, derivative of the soft-cap) of a block's scores."""
        OF_QUERIES: tl.constexpr = tk.row_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n))
        slope = 1.0
        if ctx.config.softcap:
            s = squashed(s, ctx.config._descaled(ctx, ctx.args.squash))
            slope = 1.0 - s * s
        if ctx.edge:
            _, block = place_of(ctx)
            s = hidden_from(ctx, s, ctx.config._tile(ctx) * ctx.config.tile_m, block * ctx.config.tile_n)
        return tk.exp2_col(s, ctx.args.scale, tk.load(input.LSE_log2, OF_QUERIES)), slope

    @triton.jit
    def compute(ctx, state, input):
        OF_QUERIES: tl.constexpr = tk.row_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n))
        s = tk.mm_ABt(ctx.task.K, input.Q, wait=False)
        dp = tk.mm_ABt(ctx.task.V, input.dO, wait=False)
        p, slope = ctx.config._weights(ctx, tk.mma_wait(s, leave=dp), input)
        dv = tk.mma_AB(tk.cast(p, ctx.config.dtype), input.dO, state.dv, wait=False)
        dp = tk.mma_wait(dp, leave=dv)
        ds = p * tk.sub_col(dp, tk.load(input.dPsum, OF_QUERIES)) * slope
        dk = tk.mma_AB(tk.cast(ds, ctx.config.dtype), input.Q, state.dk, wait=False)
        dv, dk = tk.mma_wait(dv, dk)
        return state.replace(dv=dv, dk=dk)

    @triton.jit
    def finish(ctx, state, epilogue):
        place = (ctx.kv_batch, ctx.result, ctx.config._tile(ctx), 0)
        tk.store(epilogue.dK, state.dk * ctx.args.gradient)
        tk.store(epilogue.dV, state.dv)
        tk.fence_async()
        tk.store_async(ctx.globals.dK, epilogue.dK, place)
        tk.store_async(ctx.globals.dV, epilogue.dV, place)
