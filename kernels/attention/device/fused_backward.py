"""Gradients of attention in a single pass: dK and dV accumulate in registers, dQ in global memory by TMA reductions."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.backward import PARTS, STEP, AttentionBackwardKeys, place_of
from tritonkittens.kernels.attention.device.masks import hidden_from, reach, squashed
from tritonkittens.kernels.attention.device.postprocess import HALF

# Functions that take tiles instead of a context are compiled once for both consumers and all their iterations


@triton.jit
def scores_of(k, q, ones, lse_log2, SOFTCAP: tl.constexpr):
    """S = K @ Q.T − LSE of a block, in flight; with a soft-cap, which comes first, without LSE."""
    s = tk.mm_ABt(k, q, wait=False)
    # LSE after the products: large sums would otherwise be rounded
    return s if SOFTCAP else tk.mma_AB(ones, lse_log2, s, wait=False)


@triton.jit
def stage(scratch, dq, keys):
    """Store dQ to shared memory, for the warp that accumulates it. `keys`: any scalar."""
    tk.store_fragments(scratch, dq)
    # without it ptxas keeps dQ's registers alive, has too few, and serializes the MMAs
    tk.scheduling_barrier(keys)


@triton.jit
def dp_of(v, do, ones, dpsum):
    """dP = V @ dO.T − dPsum of a block, in flight."""
    return tk.mma_ABt(v, do, tk.mm_AB(ones, dpsum, wait=False), wait=False)


@triton.jit
def gradients_of(p, slope, do, dv, dp):
    """(dV, in flight; dS) of a block whose dP is in flight."""
    dv = tk.mma_AB(tk.cast(p, do.dtype), do, dv, wait=False)
    return dv, tk.cast(p * tk.mma_wait(dp, leave=dv) * slope, do.dtype)


class AttentionBackward(tk.ReduceStoreWarp, AttentionBackwardKeys):
    """dK, dV, and dQ accumulated in fp32, with 5 products a block. The last bits of dQ differ from run to run.

    Q, K, V, dO: as for `AttentionBackwardKeys`. LSE_log2, dPsum: (B, H, groups, 3, 64) bf16, as `preprocess` writes
    them with ADDENDS. dQ_accum: (B, H, blocks, block_numbers) fp32, the halves of each block of queries in the order of
    `tk.store_fragments`, without the scale. words: (B, H, blocks, 2) int32, the states of the halves, zeros at first; a
    half stays uninitialized where no query of its block sees a key. With `parts` dK, dV: (B, H_kv, tiles, 64 · summed)
    fp32, zeros at first, for every 64 keys of whole tasks, in the same order.

    A task is `tile_m` keys for each of the two consumers. Scores are transposed, so that P and dS are operands in
    registers. dS also goes through shared memory, because dQ needs that of all keys: each consumer computes half of dQ.
    An iteration computes P, dS and dV of its block, and dQ and dK of the last block. Half an iteration between the
    store of dS and its use lets the consumers drift out of phase, so that exponentials of one overlap MMAs of the
    other. Dimensions: 64 or 128, the same for keys and values. Source: FlashAttention-3 (Shah et al., 2024), appendix
    B.2, also for the warps that store dQ.

    The row values come by MMAs, too: three ones a row times the three bf16 parts of each value, which are exact.
    Threads would otherwise read them once for each row, and add them one by one.

    A warp beside each consumer accumulates dQ. The first CTA to reach a half stores it and the others add
    (`first_store_reduce`), so that nobody writes zeros first. With `rotated` tasks of the same queries begin at
    different blocks: otherwise all would reach the same half first. A causal mask makes tasks begin at different blocks
    anyway.

    Measured variants: docs/notes/attention_backward.md.
    """

    # No consumer loads or stores global memory directly: ptxas would then compute MMA descriptors after its wait for
    # the ring, not before it

    consumers: int = 2
    edges_apart: bool = True
    schedule: tk.Schedule = tk.Dynamic()
    broadcast_tile: bool = True
    producer_registers: int | None = None
    cut: bool = True  # rows after the last key are zero, but zero times infinity is NaN
    summed: int = 128  # columns of the accumulation buffers: those of the tensors, up to a multiple of 32
    parts: int = 1  # tasks of a group's query heads; with several, dK and dV are accumulated in fp32, too

    @property
    def addends_swizzle(self) -> int:
        """At dimension 64 half of what rows allow: then ptxas computes the descriptors of V and dO before an MMA, not
        after."""
        return 64 if self.tile_n == 128 else 128

    @property
    def block_numbers(self) -> int:
        """fp32 values of a block of queries in dQ_accum."""
        return self.tile_n * self.summed

    @property
    def subtiles(self) -> int:
        """Tiles of 64 columns in which dK and dV are stored."""
        return self.head_dim // 64

    @property
    def keys_by_exchange(self) -> bool:
        """Whether dK leaves from the memory of dS: there is room at dimension 64, and the staging of dQ is still in
        use."""
        return self.parts == 1 and self.subtiles == 1

    @property
    def products_first(self) -> bool:
        """Whether the MMAs of dQ and dK are issued before the wait for the scores, and dP's before the wait for dK."""
        return self.tile_n == 64

    def layout(self) -> tk.layout:
        height = self.tile_m * self.consumers
        q, do = tk.st(self.dtype, self.tile_n, self.head_dim), tk.st(self.dtype, self.tile_n, self.value_dim)
        k, v = tk.st(self.dtype, height, self.head_dim), tk.st(self.dtype, height, self.value_dim)
        subtile = tk.st(self.dtype, self.tile_m, 64)
        results: dict[str, Any] = dict.fromkeys(("dK", "dV"), subtile if self.parts == 1 else None)
        if self.keys_by_exchange:
            staged = {}
        elif self.parts == 1:
            staged = dict.fromkeys(("dK0", "dK1"), subtile)
        else:
            staged = dict.fromkeys(("sums0", "sums1"), tk.st(tk.fp32, self.tile_m, 64))
        addends, group = (
            tk.st(tk.bf16, STEP.value, queries, swizzle=self.addends_swizzle) for queries in (self.tile_n, 64)
        )
        input, task, late_task = dict(Q=q, dO=do, LSE_log2=addends, dPsum=addends), dict(K=k), dict(V=v)
        moved: dict[str, Any] = {**input, **dict.fromkeys(("LSE_log2", "dPsum"), group), **task, **late_task}
        return tk.layout(
            globals={**moved, "dQ_accum": None, "words": None, **results},
            input=input,
            per="block",
            task=task,
            late_task=late_task,
            epilogue=staged,
            args=(*self.numbers, "gradient"),
            scratch=dict(dQ=tk.st(tk.fp32, 64, 64)),
            exchange=dict(dS=tk.st(self.dtype, self.tile_m, self.tile_n)),
        )

    def tiles(self, *shapes: Any) -> tuple[int, int]:
        batch, kv_heads, keys, _ = shapes[self.tensors.index("K")]
        return -(-keys // (self.tile_m * self.consumers)), batch * kv_heads * self.parts

    @triton.jit
    def _results(ctx):
        return tk.extent(ctx.globals.K, 1) * ctx.config.parts

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.K, ctx.globals.K, (ctx.kv_batch, ctx.kv_head, ctx.row, 0), task.full)

    @triton.jit
    def load_late_task(ctx, late_task):
        tk.load_async(late_task.V, ctx.globals.V, (ctx.kv_batch, ctx.kv_head, ctx.row, 0), late_task.full)

    @triton.jit
    def load(ctx, input):
        if ctx.config.subtiles == 1:
            if ctx.iter == 0:  # shared memory still holds the last task's K and V: prefetch these into L2
                HEIGHT: tl.constexpr = ctx.config.tile_m * ctx.config.consumers
                tk.prefetch(
                    ctx.globals.K,
                    tk.st(ctx.config.dtype, HEIGHT, ctx.config.head_dim),
                    (ctx.kv_batch, ctx.kv_head, ctx.row, 0),
                )
                tk.prefetch(
                    ctx.globals.V,
                    tk.st(ctx.config.dtype, HEIGHT, ctx.config.value_dim),
                    (ctx.kv_batch, ctx.kv_head, ctx.row, 0),
                )
        head, block = place_of(ctx)
        tk.load_async(input.Q, ctx.globals.Q, (ctx.batch, head, block, 0), input.full)
        tk.load_async(input.dO, ctx.globals.dO, (ctx.batch, head, block, 0), input.full)
        batch, head, block = ctx.config._numbers(ctx, head, block)
        GROUPS: tl.constexpr = ctx.config.tile_n // 64
        for group in tl.static_range(GROUPS):
            place = (batch, head, block * GROUPS + group, 0, 0)
            tk.load_async(tk.subtile(input.LSE_log2, STEP, 64, 0, group), ctx.globals.LSE_log2, place, input.full)
            tk.load_async(tk.subtile(input.dPsum, STEP, 64, 0, group), ctx.globals.dPsum, place, input.full)

    @triton.jit
    def start(ctx):
        dk = tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.head_dim))
        dv = tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.value_dim))
        # Registers that ptxas cannot tell to be equal: it would copy equal ones before every MMA, and serialize those
        # in flight
        ones = tk.right_fill(tk.one(tk.rt(tk.fp32, ctx.config.tile_m, STEP)), PARTS)
        ones = tk.pin(tk.where(tk.iota(ones, 0) % 16 < 8, ones + tk.opaque_zero("y"), ones + tk.opaque_zero("z")))
        return tk.struct(dk=dk, dv=dv, block=ctx.begin_block + ctx.rotation, ones=tk.cast(ones, tk.bf16))

    @triton.jit
    def _weights(ctx, state, input, s, query):
        """(P, derivative of the soft-cap) of the scores of queries from `query` on."""
        slope = 1.0
        if ctx.config.softcap:
            s = squashed(s, ctx.config._descaled(ctx, ctx.args.squash))
            slope = 1.0 - s * s
            s = s + tk.mm_AB(state.ones, input.LSE_log2)
        if ctx.edge:
            key = (ctx.row * ctx.config.consumers + ctx.consumer) * ctx.config.tile_m + tk.opaque_zero("z")
            s = hidden_from(ctx, s, key, query)
            if ctx.config.cut:
                if key + ctx.config.tile_m > ctx.keys:
                    tk.scheduling_barrier(ctx.keys)
                    s = tk.lower_fill(s, ctx.keys - key, float("-inf"))
        return tk.pin(tk.exp2(s * ctx.args.scale)), slope

    @triton.jit
    def _last_block(ctx, state, tiles):
        """(this consumer's half of dQ, dK) after the last block, whose tiles these are; both in flight.

        dQ = dS of all keys @ K, dK = dS of its own keys @ Q.
        """
        tk.exchange_wait(ctx)
        ROWS: tl.constexpr = ctx.config.tile_m
        OF_BLOCK: tl.constexpr = ctx.consumer % (ctx.config.tile_n // 64)
        OF_DIMENSIONS: tl.constexpr = ctx.consumer % (ctx.config.head_dim // 64)
        # Each use of dS has an opaque index, which keeps the compiler from holding all descriptors in registers
        ds, k = (
            tk.subtile(ctx.exchange.dS[tk.opaque_zero("z")], ROWS, 64, 0, OF_BLOCK),
            tk.subtile(ctx.task.K, ROWS, 64, 0, OF_DIMENSIONS),
        )
        dq = tk.mm_AtB(ds, k, wait=False)
        ds, k = (
            tk.subtile(ctx.exchange.dS[tk.opaque_zero("z") + 1], ROWS, 64, 0, OF_BLOCK),
            tk.subtile(ctx.task.K, ROWS, 64, 1, OF_DIMENSIONS),
        )
        dq = tk.mma_AtB(ds, k, dq, wait=False)
        dk = tk.mma_AB(ctx.exchange.dS[tk.opaque_zero("z") + ctx.consumer], tiles.Q, state.dk, wait=False)
        return dq, dk

    @triton.jit
    def reduce_store(ctx, scratch):
        """Store or add a consumer's half of a block's dQ to dQ_accum. Returns what `mark_initialized` takes."""
        batch, head, block = ctx.config._numbers(ctx, *place_of(ctx))
        buffer = (batch * tk.extent(ctx.globals.dQ_accum, 1) + head) * tk.extent(ctx.globals.dQ_accum, 2) + block
        NUMBERS: tl.constexpr = ctx.config.block_numbers
        BEGIN: tl.constexpr = ctx.consumer * HALF
        BYTES: tl.constexpr = 4 * min(HALF, NUMBERS - BEGIN)
        word = ctx.globals.words.pointer + buffer * ctx.config.consumers + ctx.consumer
        initialized = tk.is_initialized(word)
        tk.reduce_wait(ctx)
        half = tk.as_fragments(scratch.dQ)
        first = tk.store_or_add_bytes_async(
            ctx.globals.dQ_accum.pointer + buffer.to(tl.int64) * NUMBERS + BEGIN, half, word, BYTES, initialized
        )
        return tk.struct(word=word, first=first)

    @triton.jit
    def reduce_store_done(ctx, value):
        tk.mark_initialized(value.word, value.first)

    @triton.jit
    def _exchange_ds(ctx, ds):
        """Write dS to shared memory, and make it, and a staged dQ, visible to the other consumer, MMAs and bulk
        copies."""
        tk.store(ctx.exchange.dS[ctx.consumer], ds)
        tk.fence_async()
        tk.exchange_commit(ctx)

    @triton.jit
    def _next(ctx, state):
        """The next block of queries, as `place_of` computes it, but counted: a division takes as long as an MMA."""
        if ctx.edge and ctx.config.edge_loop:
            first, behind = ctx.begin_block, ctx.begin_block + ctx.edge_blocks
        else:
            first, behind = ctx.begin_block + ctx.edge_blocks, ctx.begin_block + ctx.per_head
        return tl.where(state.block + 1 == behind, first, state.block + 1)

    @triton.jit
    def _alone(ctx, state, input, query):
        """(dS, dV) of queries from `query` on, with no other MMA in flight."""
        k = tk.subtile(ctx.task.K, ctx.config.tile_m, ctx.config.head_dim, ctx.consumer, 0)
        s = tk.mma_wait(scores_of(k, input.Q, state.ones, input.LSE_log2, ctx.config.softcap))
        p, slope = ctx.config._weights(ctx, state, input, s, query)
        tk.wait_for(ctx.late_task)
        v = tk.subtile(ctx.late_task.V, ctx.config.tile_m, ctx.config.value_dim, ctx.consumer, 0)
        dp = dp_of(v, input.dO, state.ones, input.dPsum)
        dv, ds = gradients_of(p, slope, input.dO, state.dv, dp)
        return ds, tk.mma_wait(dv)

    @triton.jit
    def _exchange_first_ds(ctx, ds):
        """`_exchange_ds`, after the last task's dK has left from the same memory."""
        if ctx.config.keys_by_exchange:
            tk.store_read_wait(0)
            tk.sync()
        ctx.config._exchange_ds(ctx, ds)

    @triton.jit
    def _on_diagonal(ctx):
        """Whether the first 64 queries of this task's first block see no key of its second consumer."""
        return ctx.begin_block * ctx.config.tile_n + reach(ctx) <= ctx.row * (ctx.config.tile_m * ctx.config.consumers)

    @triton.jit
    def _first_of_last(ctx, state, input):
        """`compute_first` of the second consumer on the diagonal, without the queries that see none of its keys."""
        nothing = tk.zero(tk.rt(ctx.config.dtype, ctx.config.tile_m, 64))
        if ctx.config.tile_n == 64:
            ctx.config._exchange_first_ds(ctx, nothing)
            return state
        else:
            later = tk.struct(
                Q=tk.subtile(input.Q, 64, ctx.config.head_dim, 1, 0),
                dO=tk.subtile(input.dO, 64, ctx.config.value_dim, 1, 0),
                LSE_log2=tk.subtile(input.LSE_log2, STEP, 64, 0, 1),
                dPsum=tk.subtile(input.dPsum, STEP, 64, 0, 1),
            )
            ds, dv = ctx.config._alone(ctx, state, later, state.block * ctx.config.tile_n + 64)
            ctx.config._exchange_first_ds(ctx, tk.concat_cols(nothing, ds, whole=True))
            return state.replace(dv=dv)

    @triton.jit
    def _first_of_all(ctx, state, input):
        ds, dv = ctx.config._alone(ctx, state, input, state.block * ctx.config.tile_n)
        ctx.config._exchange_first_ds(ctx, ds)
        return state.replace(dv=dv)

    @triton.jit
    def compute_first(ctx, state, input):
        if (ctx.config.causal or ctx.config.window) and ctx.consumer > 0:
            if ctx.config._on_diagonal(ctx):
                state = ctx.config._first_of_last(ctx, state, input)
            else:
                state = ctx.config._first_of_all(ctx, state, input)
            return state
        else:
            return ctx.config._first_of_all(ctx, state, input)

    @triton.jit
    def compute(ctx, state, input, previous):
        block = ctx.config._next(ctx, state)
        k = tk.subtile(ctx.task.K, ctx.config.tile_m, ctx.config.head_dim, ctx.consumer, 0)
        s = scores_of(k, input.Q, state.ones, input.LSE_log2, ctx.config.softcap)
        if ctx.config.products_first:
            dq, dk = ctx.config._last_block(ctx, state, previous)
            p, slope = ctx.config._weights(ctx, state, input, tk.mma_wait(s, leave=(dq, dk)), block * ctx.config.tile_n)
        else:
            p, slope = ctx.config._weights(ctx, state, input, tk.mma_wait(s), block * ctx.config.tile_n)
            dq, dk = ctx.config._last_block(ctx, state, previous)
        tk.reduce_acquire(ctx)
        stage(ctx.scratch.dQ, tk.mma_wait(dq, leave=dk), ctx.keys)
        v = tk.subtile(ctx.late_task.V, ctx.config.tile_m, ctx.config.value_dim, ctx.consumer, 0)
        if ctx.config.products_first:
            dp = dp_of(v, input.dO, state.ones, input.dPsum)
            dk = tk.mma_wait(dk, leave=dp)
            tk.exchange_release(ctx)
        else:
            dk = tk.mma_wait(dk)
            tk.exchange_release(ctx)
            dp = dp_of(v, input.dO, state.ones, input.dPsum)
        dv, ds = gradients_of(p, slope, input.dO, state.dv, dp)
        tk.exchange_acquire(ctx)
        ctx.config._exchange_ds(ctx, ds)
        tk.reduce_commit(ctx)
        return state.replace(dk=dk, dv=tk.mma_wait(dv), block=block)

    # Between two tasks: last MMAs, release of K, store of dQ, release of V, next K and V. dV leaves from the memory of
    # V and, at dimension 64, dK from that of dS, so that the ring never waits for stores
    @triton.jit
    def compute_last(ctx, state, input):
        SUBTILES: tl.constexpr = ctx.config.subtiles
        dq, dk = ctx.config._last_block(ctx, state, input)
        if ctx.config.parts == 1:  # the stores of dV overlap the last MMAs
            dv, tile = tk.split_cols(state.dv, 64), ctx.row * ctx.config.consumers + ctx.consumer
            for number in tl.static_range(SUBTILES):
                tk.store(tk.subtile(ctx.late_task.V, ctx.config.tile_m, 64, ctx.consumer, number), dv[number])
            tk.fence_async()
            tk.sync()
            for number in tl.static_range(SUBTILES):
                home = tk.subtile(ctx.late_task.V, ctx.config.tile_m, 64, ctx.consumer, number)
                tk.store_async(ctx.globals.dV, home, (ctx.kv_batch, ctx.result, tile, number))
        tk.reduce_acquire(ctx)
        dq = tk.mma_wait(dq, leave=dk)
        tk.release(ctx, ctx.task)
        stage(ctx.scratch.dQ, dq, ctx.keys)
        dk = tk.mma_wait(dk)
        tk.exchange_release(ctx)
        tk.fence_async()
        tk.store_read_wait(0)  # the next V overwrites dV
        tk.release(ctx, ctx.late_task)
        tk.reduce_commit(ctx)
        return state.replace(dk=dk)

    @triton.jit
    def _first_accum(ctx, accum):
        """The first tile of this task's batch and head in the accumulation buffer of dK or dV."""
        return (ctx.kv_batch * tk.extent(accum, 1) + ctx.kv_head) * tk.extent(accum, 2)

    @triton.jit
    def _add(ctx, epilogue, accum, x, number):
        """Add 64 columns, number `number`, of this consumer's dK or dV to its accumulation buffer."""
        tile = ctx.config._first_accum(ctx, accum) + ctx.row * ctx.config.consumers + ctx.consumer
        NUMBERS: tl.constexpr = ctx.config.tile_m * ctx.config.summed
        BEGIN: tl.constexpr = number * HALF
        BYTES: tl.constexpr = 4 * min(HALF, NUMBERS - BEGIN)
        staged = tk.store_fragments(epilogue, x)
        tk.fence_async()
        tk.sync()
        tk.store_add_bytes_async(accum.pointer + tile.to(tl.int64) * NUMBERS + BEGIN, staged, BYTES)

    @triton.jit
    def _store_keys(ctx, state, epilogue):
        """Store dK; and dV where there was no query, and so no `compute_last`."""
        dk, tile = tk.split_cols(state.dk, 64), ctx.row * ctx.config.consumers + ctx.consumer
        tk.store(epilogue.dK0, dk[0] * ctx.args.gradient)
        tk.store(epilogue.dK1, dk[1] * ctx.args.gradient)
        tk.fence_async()
        tk.sync()
        tk.store_async(ctx.globals.dK, epilogue.dK0, (ctx.kv_batch, ctx.result, tile, 0))
        tk.store_async(ctx.globals.dK, epilogue.dK1, (ctx.kv_batch, ctx.result, tile, 1))
        if ctx.iterations == 0:  # zeros, too
            tk.store_async(ctx.globals.dV, epilogue.dK0, (ctx.kv_batch, ctx.result, tile, 0))
            tk.store_async(ctx.globals.dV, epilogue.dK1, (ctx.kv_batch, ctx.result, tile, 1))

    @triton.jit
    def _store_exchanged(ctx, state):
        """`_store_keys` from the memory of this consumer's dS, once the other consumer has read it."""
        if ctx.iterations > 0:
            tk.exchange_acquire(ctx)
        else:
            tk.store_read_wait(0)
            tk.sync()
        tile = ctx.row * ctx.config.consumers + ctx.consumer
        home = tk.subtile(ctx.exchange.dS[ctx.consumer], ctx.config.tile_m, 64, 0, 0)
        tk.store(home, state.dk * ctx.args.gradient)
        tk.fence_async()
        tk.sync()
        tk.store_async(ctx.globals.dK, home, (ctx.kv_batch, ctx.result, tile, 0))
        if ctx.iterations == 0:  # zeros, too
            tk.store_async(ctx.globals.dV, home, (ctx.kv_batch, ctx.result, tile, 0))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.keys_by_exchange:
            ctx.config._store_exchanged(ctx, state)
        elif ctx.config.parts == 1:
            ctx.config._store_keys(ctx, state, epilogue)
        elif ctx.config.head_dim == 64:
            ctx.config._add(ctx, epilogue.sums0, ctx.globals.dK, state.dk, 0)
            ctx.config._add(ctx, epilogue.sums1, ctx.globals.dV, state.dv, 0)
        else:
            dk, dv = tk.split_cols(state.dk, 64), tk.split_cols(state.dv, 64)
            ctx.config._add(ctx, epilogue.sums0, ctx.globals.dK, dk[0], 0)
            ctx.config._add(ctx, epilogue.sums1, ctx.globals.dK, dk[1], 1)
            tk.store_read_wait(0)
            ctx.config._add(ctx, epilogue.sums0, ctx.globals.dV, dv[0], 0)
            ctx.config._add(ctx, epilogue.sums1, ctx.globals.dV, dv[1], 1)
        if not ctx.config.keys_by_exchange:
            if ctx.iterations > 0:
                tk.exchange_acquire(ctx)  # the next task writes dS anew
