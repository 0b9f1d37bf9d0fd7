"""Gradients of attention in two passes, for dimensions above 128; see `backward`.

Accumulators of one gradient take half of a consumer's registers, so no consumer computes two gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.backward import AttentionBackwardKeys, AttentionBackwardQueries, numbers
from tritonkittens.kernels.attention.device.tiles import QueryTiles

VALUES, KEYS = tl.constexpr(0), tl.constexpr(1)  # consumers of `AttentionBackwardWideKeys`


def subtile(T: QueryTiles, dim: int) -> tk.st:
    """The shared tile through which a gradient of `dim` columns is stored, some columns at a time.

    A tile of all columns would leave too little shared memory for pipeline stages.
    """
    return tk.st(T.dtype, T.tile_m, min(64, dim & -dim))


@triton.jit
def store_in_subtiles(gradient, staging, batch, head, tile, x):
    """Store `x` to tile number `tile` of a head of `gradient`, `staging.shape[1]` columns at a time."""
    subtiles = tk.split_cols(x, staging.shape[1])
    for i in tl.static_range(len(subtiles)):
        if i > 0:
            tk.store_read_wait(0)
        tk.store(staging, subtiles[i])
        tk.fence_async()
        tk.store_async(gradient, staging, (batch, head, tile, i))


class AttentionBackwardWideQueries(QueryTiles):
    """dQ. The computation is not pipelined: registers do not hold dS of a second block beside dQ.

    Tensors as for `AttentionBackwardQueries`. TMA loads LSE_log2 and dPsum too, so it must be able to address their
    rows.
    """

    # There is one loop, and consumers do not load from global memory. Otherwise ptxas keeps MMA descriptors in vector
    # registers, of which too few are left.

    tile_n: int = 64
    consumers: int = 2
    edges_apart: bool = False

    _numbers = numbers
    load = AttentionBackwardQueries.load
    _weights = AttentionBackwardQueries._weights
    _score_gradients = AttentionBackwardQueries._score_gradients

    @property
    def one_edge(self) -> bool:
        return False

    def layout(self) -> tk.layout:
        q, do = tk.st(self.dtype, self.tile_m, self.head_dim), tk.st(self.dtype, self.tile_m, self.value_dim)
        k, v = tk.st(self.dtype, self.tile_n, self.head_dim), tk.st(self.dtype, self.tile_n, self.value_dim)
        number, staging = tk.sv(tk.fp32, self.tile_m), subtile(self, self.head_dim)
        task = dict(Q=q, dO=do, LSE_log2=number, dPsum=number)
        return tk.layout(
            globals=dict(**task, K=k, V=v, dQ=staging),
            input=dict(K=k, V=v),
            task=task,
            epilogue=dict(dQ=staging),
            args=(*self.numbers, "gradient"),
        )

    @triton.jit
    def _tile(ctx):
        """The number of this consumer's tile of queries."""
        return ctx.row * ctx.config.consumers + ctx.consumer

    @triton.jit
    def load_task(ctx, task):
        place, numbers = ctx.config._tile(ctx), ctx.config._numbers(ctx, ctx.head, ctx.config._tile(ctx))
        tk.load_async(task.Q, ctx.globals.Q, (ctx.batch, ctx.head, place, 0), task.full)
        tk.load_async(task.dO, ctx.globals.dO, (ctx.batch, ctx.head, place, 0), task.full)
        tk.load_async(task.LSE_log2, ctx.globals.LSE_log2, numbers, task.full)
        tk.load_async(task.dPsum, ctx.globals.dPsum, numbers, task.full)

    @triton.jit
    def load_params(ctx):
        OF_QUERIES: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n))
        return tk.struct(lse_log2=tk.load(ctx.task.LSE_log2, OF_QUERIES), dpsum=tk.load(ctx.task.dPsum, OF_QUERIES))

    @triton.jit
    def start(ctx):
        return tk.struct(dq=tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.head_dim)))

    @triton.jit
    def compute(ctx, state, input):
        ds = tk.cast(ctx.config._score_gradients(ctx, input), ctx.config.dtype)
        return state.replace(dq=tk.mma_AB(ds, input.K, state.dq))

    @triton.jit
    def finish(ctx, state, epilogue):
        dq = state.dq * ctx.args.gradient
        store_in_subtiles(ctx.globals.dQ, epilogue.dQ, ctx.batch, ctx.head, ctx.config._tile(ctx), dq)


class AttentionBackwardWideKeys(AttentionBackwardKeys):
    """dK and dV. A task is `tile_m` keys. Consumer VALUES computes P and dV, consumer KEYS computes dP, dS and dK.

    VALUES passes P to KEYS through an exchange tile, multiplied by the derivative of the soft-cap and rounded to the
    operands' dtype. Tensors as for `AttentionBackwardKeys`.
    """

    consumers: int = 2

    @property
    def task_rows(self) -> int:
        return self.tile_m

    def layout(self) -> tk.layout:
        plan, staging = super().layout(), subtile(self, self.head_dim | self.value_dim)
        return tk.layout(
            globals={**dict(plan.globals), "dK": staging, "dV": staging},
            input=dict(plan.input),
            task=dict(plan.task),
            per="block",
            exchange=dict(P=tk.st(self.dtype, self.tile_m, self.tile_n)),
            epilogue=dict(gradient=staging),
            args=plan.args,
        )

    @triton.jit
    def _tile(ctx):
        """The number of the tile of keys, which both consumers share."""
        return ctx.row

    @triton.jit
    def start(ctx):
        DIM: tl.constexpr = ctx.config.head_dim if ctx.consumer == KEYS else ctx.config.value_dim
        return tk.struct(gradient=tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, DIM)))

    @triton.jit
    def _add_to_dv(ctx, dv, input):
        s = tk.mm_ABt(ctx.task.K, input.Q)
        p, slope = ctx.config._weights(ctx, s, input)
        if ctx.iter > 0:
            tk.exchange_acquire(ctx)
        tk.store(ctx.exchange.P[VALUES], tk.cast(p * slope, ctx.config.dtype))
        tk.exchange_commit(ctx)
        return tk.mma_AB(tk.cast(p, ctx.config.dtype), input.dO, dv)

    @triton.jit
    def _add_to_dk(ctx, dk, input):
        SCORES: tl.constexpr = tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n)
        dp = tk.mm_ABt(ctx.task.V, input.dO, wait=False)
        dpsum = tk.load(input.dPsum, tk.row_vec(SCORES))
        tk.exchange_wait(ctx)
        p = tk.load(ctx.exchange.P[VALUES], SCORES, fenced=True)
        tk.exchange_release(ctx)
        ds = tk.cast(p, tk.fp32) * tk.sub_col(tk.mma_wait(dp), dpsum)
        return tk.mma_AB(tk.cast(ds, ctx.config.dtype), input.Q, dk)

    @triton.jit
    def compute(ctx, state, input):
        if ctx.consumer == KEYS:
            return state.replace(gradient=ctx.config._add_to_dk(ctx, state.gradient, input))
        else:
            return state.replace(gradient=ctx.config._add_to_dv(ctx, state.gradient, input))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.consumer == KEYS:
            home, gradient = ctx.globals.dK, state.gradient * ctx.args.gradient
        else:
            if ctx.iterations > 0:
                tk.exchange_acquire(ctx)  # matches the last release: the next task begins without an acquire
            home, gradient = ctx.globals.dV, state.gradient
        store_in_subtiles(home, epilogue.gradient, ctx.kv_batch, ctx.result, ctx.config._tile(ctx), gradient)
