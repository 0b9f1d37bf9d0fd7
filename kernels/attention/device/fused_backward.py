"""Gradients of attention in one pass over the scores: dK and dV stay in registers, dQ is summed up in global memory by TMA."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.backward import PARTS, STEP, AttentionBackwardKeys, place_of
from tritonkittens.kernels.attention.device.masks import hidden_from, reach, squashed
from tritonkittens.launch import plain_kernel

HALF = tl.constexpr(64 * 64)  # of a block's dQ: what a consumer multiplies


class AttentionBackward(tk.ReduceStoreWarp, AttentionBackwardKeys):
    """dK, dV, and dQ added up in a buffer in fp32: 5 products a block, and the order of the sums, so the last bits of dQ, are the card's choice.

    A task is `tile_m` keys for each of the two consumers. Scores are computed transposed, so that P and dS are operands in registers; dS also goes through shared
    memory, for dQ needs that of all keys: each consumer multiplies half of dQ, half its queries where a block has 128 of them, else half its columns. An
    iteration computes P, dS and dV of its block, dQ and dK of the block before: half an iteration lies between the writing of dS and the first that needs the
    other's, so that the consumers drift out of phase, and one computes exponentials while products of the other run. At dimension 128 dQ and dK are under way
    before the scores are waited for. Wherever the exponentials are written, ptxas computes them between the instructions of dP, which is best. Dimensions:
    64 or 128, the same for keys and values. Source: FlashAttention-3 (Shah et al., 2024), appendix B.2, also for the warps that send dQ.

    On the diagonal of a causal mask the first block of a task has 64 queries that see no key of the second consumer, which leaves them out there. (Two more
    products of the iteration behind multiply zeros.)

    What is added to the scores and to dP of a query, a number for each column, comes by products, too, of three ones a row, which stay in registers, and of the
    number's three parts in bf16, which are exact (`store_addends`): threads would read it as often as there are rows for one of them, and add it one by one. In
    memory there are those three rows of a group of queries, the rows behind them are zeros that TMA adds.

    dQ leaves by a sender beside each consumer, and its sums need no zeros: who comes first to half a block of queries stores what others add to
    (`tk.store_or_add_bytes_async`), which takes an access of L2 to find out, and longer to say. Zeros that tasks of earlier heads made beside their products,
    of a role of their own, were out of L2 again before they were added to. Without a causal mask, whose tasks begin at different blocks anyway, tasks of the
    same queries take `turns`: else all would come first to the same. At the end of a task dV leaves from where this consumer's values were, under the last
    products: the ring does not wait for stores.

    Between the iterations of two tasks lie the last products, results, the next K and V, the first scores. So the keys go back as soon as the last dQ is
    multiplied, in front of its way to shared memory, and the values behind, before the sender hears of that dQ, so that TMA is asked for V first; V is waited
    for where dP needs it. At dimension 64 dK leaves from where dS was, for where dQ is staged it would wait until the last has left, and L2 fetches the next K
    and V while the task ends.

    Plain loads and stores of global memory anywhere in a consumer's code make ptxas compute the first descriptors of an iteration behind its wait for the ring,
    not in front of it: there are none. What was tried, and what each of these is worth: docs/notes/attention_backward.md.

    Q, K, V, dO as for `AttentionBackwardKeys`; LSE_log2 and dPsum, (B, H, groups, 3, 64) bf16, as `preprocess` leaves them for this, in dQ's memory, say. sums:
    (B, H, blocks, block_numbers) in fp32, of every block of queries the halves of dQ, 64 by 64 or what the second has of that, as `tk.store_fragments` orders
    them, without the factor. words: (B, H, blocks, 2) int32, zeros at first, one for each half; still zero where no query of a block sees a key: its sums are
    not written. Where there are `parts`, dK and dV: (B, H_kv, tiles, 64 · summed) in fp32, zeros at first, of every 64 keys, of whole tasks,
    ordered likewise.
    """

    consumers: int = 2
    edges_apart: bool = True
    schedule: tk.Schedule = tk.Dynamic()
    broadcast_tile: bool = True
    producer_registers: int | None = None
    cut: bool = True  # what is behind the last keys is zero, but zero times infinity is not
    summed: int = 128  # columns of gradients that have sums: up to a multiple of 32 those that the tensors have
    parts: int = 1  # of a group's query heads, a task for each: where several, dK and dV are sums in fp32, too

    @property
    def addends_swizzle(self) -> int:
        """At dimension 64 half of what rows allow: with descriptors unlike those of V and dO ptxas computes those behind the product of dPsum, not before."""
        return 64 if self.tile_n == 128 else 128

    @property
    def block_numbers(self) -> int:
        """Sums of a block of queries: both halves, of the second, where that is columns, those that there are."""
        return self.tile_n * self.summed

    @property
    def panels(self) -> int:
        """Those of 64 columns that gradients of keys and values leave in."""
        return self.head_dim // 64

    @property
    def keys_by_exchange(self) -> bool:
        """Does dK leave from where dS was? There is room at dimension 64, and where dQ is staged it would wait until the last has left."""
        return self.parts == 1 and self.panels == 1

    @property
    def products_first(self) -> bool:
        """Are dQ and dK of the block before under way before the scores are waited for, and dP before dK is?"""
        return self.tile_n == 64

    def layout(self):
        height = self.tile_m * self.consumers
        q, do = tk.st(self.dtype, self.tile_n, self.head_dim), tk.st(self.dtype, self.tile_n, self.value_dim)
        k, v = tk.st(self.dtype, height, self.head_dim), tk.st(self.dtype, height, self.value_dim)
        panel = tk.st(self.dtype, self.tile_m, 64)
        results: dict[str, Any] = dict.fromkeys(("dK", "dV"), panel if self.parts == 1 else None)
        if self.keys_by_exchange:
            staged = {}
        elif self.parts == 1:
            staged = dict.fromkeys(("dK0", "dK1"), panel)
        else:
            staged = dict.fromkeys(("sums0", "sums1"), tk.st(tk.fp32, self.tile_m, 64))
        addends, group = (tk.st(tk.bf16, STEP.value, queries, swizzle=self.addends_swizzle) for queries in (self.tile_n, 64))
        input, task, late_task = dict(Q=q, dO=do, LSE_log2=addends, dPsum=addends), dict(K=k), dict(V=v)
        moved: dict[str, Any] = {**input, **dict.fromkeys(("LSE_log2", "dPsum"), group), **task, **late_task}
        return tk.layout(globals={**moved, "dQ_accum": None, "words": None, **results}, input=input, per="block", task=task, late_task=late_task,
                         epilogue=staged, args=(*self.numbers, "gradient"), scratch=dict(dQ=tk.st(tk.fp32, 64, 64)),
                         exchange=dict(dS=tk.st(self.dtype, self.tile_m, self.tile_n)))

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
        if ctx.config.panels == 1:
            if ctx.iter == 0:  # shared memory still holds the keys and values of the task before: L2 fetches these
                HEIGHT: tl.constexpr = ctx.config.tile_m * ctx.config.consumers
                tk.prefetch(ctx.globals.K, tk.st(ctx.config.dtype, HEIGHT, ctx.config.head_dim), (ctx.kv_batch, ctx.kv_head, ctx.row, 0))
                tk.prefetch(ctx.globals.V, tk.st(ctx.config.dtype, HEIGHT, ctx.config.value_dim), (ctx.kv_batch, ctx.kv_head, ctx.row, 0))
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
        # No two of a thread's registers alike, as far as ptxas can tell: it would copy them in front of every product, where others are under way, which then
        # all wait for each other
        ones = tk.right_fill(tk.one(tk.rt(tk.fp32, ctx.config.tile_m, STEP)), PARTS)
        ones = tk.pin(tk.where(tk.iota(ones, 0) % 16 < 8, ones + tk.opaque_zero("y"), ones + tk.opaque_zero("z")))
        return tk.struct(dk=dk, dv=dv, block=ctx.begin_block + ctx.turned, ones=tk.cast(ones, tk.bf16))

    @triton.jit
    def _scores(ctx, state, input):
        """The product of this consumer's keys and a block of queries, less their log-sum-exp, under way; with a soft-cap, which comes first, without that."""
        s = tk.mm_ABt(tk.subtile(ctx.task.K, ctx.config.tile_m, ctx.config.head_dim, ctx.consumer, 0), input.Q, wait=False)
        if ctx.config.softcap:
            return s
        else:  # behind the products, whose sums would else be rounded where they are large
            return tk.mma_AB(state.ones, input.LSE_log2, s, wait=False)

    @triton.jit
    def _weights(ctx, state, input, s, query):
        """(P, derivative of the soft-cap) of the scores of queries from `query` on. What masks need is computed where they are, and not kept in registers."""
        slope = 1.0
        if ctx.config.softcap:
            s = squashed(ctx, s)
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
    def _exchanged(ctx, consumer):
        """dS of a consumer's keys, for products. The compiler does not see that its slot is always the same: else it keeps the descriptors of all parts in
        registers that accumulators need."""
        return ctx.exchange.dS[tk.opaque_zero("z") + consumer]

    @triton.jit
    def _before(ctx, state, tiles):
        """(this consumer's half of dQ, dK) with the block before, whose tiles these are, under way: dS of all keys times the keys, of its own times queries."""
        tk.exchange_wait(ctx)
        ROWS: tl.constexpr = ctx.config.tile_m
        OF_BLOCK: tl.constexpr = ctx.consumer % (ctx.config.tile_n // 64)
        OF_DIMENSIONS: tl.constexpr = ctx.consumer % (ctx.config.head_dim // 64)
        ds, k = tk.subtile(ctx.config._exchanged(ctx, 0), ROWS, 64, 0, OF_BLOCK), tk.subtile(ctx.task.K, ROWS, 64, 0, OF_DIMENSIONS)
        dq = tk.mm_AtB(ds, k, wait=False)
        ds, k = tk.subtile(ctx.config._exchanged(ctx, 1), ROWS, 64, 0, OF_BLOCK), tk.subtile(ctx.task.K, ROWS, 64, 1, OF_DIMENSIONS)
        dq = tk.mma_AtB(ds, k, dq, wait=False)
        dk = tk.mma_AB(ctx.config._exchanged(ctx, ctx.consumer), tiles.Q, state.dk, wait=False)
        return dq, dk

    @triton.jit
    def _stage(ctx, dq):
        """Send dQ to shared memory."""
        tk.store_fragments(ctx.scratch.dQ, dq)
        tk.scheduling_barrier(ctx.keys)  # else ptxas lets dQ's registers live on, has too few, and makes all products wait for each other

    @triton.jit
    def reduce_store(ctx, scratch):
        """Add a consumer's half to dQ of a block in global memory, or store it there, the first. Returns what is to be published."""
        batch, head, block = ctx.config._numbers(ctx, *place_of(ctx))
        buffer = (batch * tk.extent(ctx.globals.dQ_accum, 1) + head) * tk.extent(ctx.globals.dQ_accum, 2) + block
        NUMBERS: tl.constexpr = ctx.config.block_numbers
        BEGIN: tl.constexpr = ctx.consumer * HALF
        BYTES: tl.constexpr = 4 * min(HALF, NUMBERS - BEGIN)
        word = ctx.globals.words.pointer + buffer * ctx.config.consumers + ctx.consumer
        initialized = tk.is_initialized(word)
        tk.reduce_wait(ctx)
        half = tk.as_fragments(scratch.dQ)
        first = tk.store_or_add_bytes_async(ctx.globals.dQ_accum.pointer + buffer.to(tl.int64) * NUMBERS + BEGIN, half, word, BYTES, initialized)
        return tk.struct(word=word, first=first)

    @triton.jit
    def reduce_store_done(ctx, value):
        tk.mark_initialized(value.word, value.first)

    @triton.jit
    def _of_weights(ctx, state, input):
        """dP of a block, less the dPsum, under way."""
        v = tk.subtile(ctx.late_task.V, ctx.config.tile_m, ctx.config.value_dim, ctx.consumer, 0)
        return tk.mma_ABt(v, input.dO, tk.mm_AB(state.ones, input.dPsum, wait=False), wait=False)

    @triton.jit
    def _gradient(ctx, state, p, slope, input, dp):
        """(dV under way, dS) of a block, with dP under way."""
        dv = tk.mma_AB(tk.cast(p, ctx.config.dtype), input.dO, state.dv, wait=False)
        return dv, tk.cast(p * tk.mma_wait(dp, leave=dv) * slope, ctx.config.dtype)

    @triton.jit
    def _show(ctx, ds):
        """Show dS, and dQ where it is staged, to the other consumer and to the tensor cores and copies."""
        tk.store(ctx.exchange.dS[ctx.consumer], ds)
        tk.fence_async()
        tk.exchange_commit(ctx)

    @triton.jit
    def _next(ctx, state):
        """The block that `place_of` would name of the iteration behind the state's: counted, for a division takes as long as a product."""
        if ctx.edge and ctx.config.edge_loop:
            first, behind = ctx.begin_block, ctx.begin_block + ctx.edge_blocks
        else:
            first, behind = ctx.begin_block + ctx.edge_blocks, ctx.begin_block + ctx.per_head
        return tl.where(state.block + 1 == behind, first, state.block + 1)

    @triton.jit
    def _alone(ctx, state, input, query):
        """(dS, dV) of queries from `query` on, with nothing else under way."""
        s = tk.mma_wait(ctx.config._scores(ctx, state, input))
        p, slope = ctx.config._weights(ctx, state, input, s, query)
        tk.wait_for(ctx.late_task)
        dv, ds = ctx.config._gradient(ctx, state, p, slope, input, ctx.config._of_weights(ctx, state, input))
        return ds, tk.mma_wait(dv)

    @triton.jit
    def _show_first(ctx, ds):
        """Show dS where, in the task before, dK may have left from."""
        if ctx.config.keys_by_exchange:
            tk.store_read_wait(0)
            tk.sync()
        ctx.config._show(ctx, ds)

    @triton.jit
    def _on_diagonal(ctx):
        """Do the first 64 queries of this task's first block see no key of its second consumer?"""
        return ctx.begin_block * ctx.config.tile_n + reach(ctx) <= ctx.row * (ctx.config.tile_m * ctx.config.consumers)

    @triton.jit
    def _first_of_last(ctx, state, input):
        """`compute_first` of the second consumer's keys on the diagonal, without the queries that see none of them."""
        nothing = tk.zero(tk.rt(ctx.config.dtype, ctx.config.tile_m, 64))
        if ctx.config.tile_n == 64:
            ctx.config._show_first(ctx, nothing)
            return state
        else:
            later = tk.struct(Q=tk.subtile(input.Q, 64, ctx.config.head_dim, 1, 0), dO=tk.subtile(input.dO, 64, ctx.config.value_dim, 1, 0),
                              LSE_log2=tk.subtile(input.LSE_log2, STEP, 64, 0, 1), dPsum=tk.subtile(input.dPsum, STEP, 64, 0, 1))
            ds, dv = ctx.config._alone(ctx, state, later, state.block * ctx.config.tile_n + 64)
            ctx.config._show_first(ctx, tk.concat_cols(nothing, ds, whole=True))
            return state.replace(dv=dv)

    @triton.jit
    def _first_of_all(ctx, state, input):
        ds, dv = ctx.config._alone(ctx, state, input, state.block * ctx.config.tile_n)
        ctx.config._show_first(ctx, ds)
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
        s = ctx.config._scores(ctx, state, input)
        if ctx.config.products_first:
            dq, dk = ctx.config._before(ctx, state, previous)
            p, slope = ctx.config._weights(ctx, state, input, tk.mma_wait(s, leave=(dq, dk)), block * ctx.config.tile_n)
        else:
            p, slope = ctx.config._weights(ctx, state, input, tk.mma_wait(s), block * ctx.config.tile_n)
            dq, dk = ctx.config._before(ctx, state, previous)
        tk.reduce_acquire(ctx)
        ctx.config._stage(ctx, tk.mma_wait(dq, leave=dk))
        if ctx.config.products_first:
            dp = ctx.config._of_weights(ctx, state, input)
            dk = tk.mma_wait(dk, leave=dp)
            tk.exchange_release(ctx)
        else:
            dk = tk.mma_wait(dk)
            tk.exchange_release(ctx)
            dp = ctx.config._of_weights(ctx, state, input)
        dv, ds = ctx.config._gradient(ctx, state, p, slope, input, dp)
        tk.exchange_acquire(ctx)
        ctx.config._show(ctx, ds)
        tk.reduce_commit(ctx)
        return state.replace(dk=dk, dv=tk.mma_wait(dv), block=block)

    @triton.jit
    def _values_panel(ctx, number):
        """64 columns of this consumer's values, where their gradient waits to be stored: nobody else reads these, nor it any more."""
        return tk.subtile(ctx.late_task.V, ctx.config.tile_m, 64, ctx.consumer, number)

    @triton.jit
    def _place(ctx, number):
        """Where panel `number` of this consumer's gradients of keys and values goes."""
        return ctx.kv_batch, ctx.result, ctx.row * ctx.config.consumers + ctx.consumer, number

    @triton.jit
    def compute_last(ctx, state, input):
        PANELS: tl.constexpr = ctx.config.panels
        dq, dk = ctx.config._before(ctx, state, input)
        if ctx.config.parts == 1:  # dV leaves under the last products
            dv = tk.split_cols(state.dv, 64)
            for number in tl.static_range(PANELS):
                tk.store(ctx.config._values_panel(ctx, number), dv[number])
            tk.fence_async()
            tk.sync()
            for number in tl.static_range(PANELS):
                tk.store_async(ctx.globals.dV, ctx.config._values_panel(ctx, number), ctx.config._place(ctx, number))
        tk.reduce_acquire(ctx)
        dq = tk.mma_wait(dq, leave=dk)
        tk.release(ctx, ctx.task)
        ctx.config._stage(ctx, dq)
        dk = tk.mma_wait(dk)
        tk.exchange_release(ctx)
        tk.fence_async()
        tk.store_read_wait(0)  # the next task's values come where dV was
        tk.release(ctx, ctx.late_task)
        tk.reduce_commit(ctx)
        return state.replace(dk=dk)

    @triton.jit
    def _first_accum(ctx, accum):
        """The tile of sums of dK and dV that is the first of this task's batch and head."""
        return (ctx.kv_batch * tk.extent(accum, 1) + ctx.kv_head) * tk.extent(accum, 2)

    @triton.jit
    def _add(ctx, epilogue, accum, x, number):
        """Add 64 columns, `number` of them, of this consumer's dK or dV to the sums of its keys."""
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
        """Store dK, and dV where there was no query, and so no `compute_last`."""
        dk = tk.split_cols(state.dk, 64)
        tk.store(epilogue.dK0, dk[0] * ctx.args.gradient)
        tk.store(epilogue.dK1, dk[1] * ctx.args.gradient)
        tk.fence_async()
        tk.sync()
        tk.store_async(ctx.globals.dK, epilogue.dK0, ctx.config._place(ctx, 0))
        tk.store_async(ctx.globals.dK, epilogue.dK1, ctx.config._place(ctx, 1))
        if ctx.iterations == 0:  # zeros, too
            tk.store_async(ctx.globals.dV, epilogue.dK0, ctx.config._place(ctx, 0))
            tk.store_async(ctx.globals.dV, epilogue.dK1, ctx.config._place(ctx, 1))

    @triton.jit
    def _store_exchanged(ctx, state):
        """Store dK, and dV where there was no query, and so no `compute_last`, from where this consumer's dS was, once the other has read it."""
        if ctx.iterations > 0:
            tk.exchange_acquire(ctx)
        else:
            tk.store_read_wait(0)
            tk.sync()
        home = tk.subtile(ctx.exchange.dS[ctx.consumer], ctx.config.tile_m, 64, 0, 0)
        tk.store(home, state.dk * ctx.args.gradient)
        tk.fence_async()
        tk.sync()
        tk.store_async(ctx.globals.dK, home, ctx.config._place(ctx, 0))
        if ctx.iterations == 0:  # zeros, too
            tk.store_async(ctx.globals.dV, home, ctx.config._place(ctx, 0))

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


@triton.jit
def write_half(accum, words, tile, home, stride_s, first, behind, across, factor, SUMMED: tl.constexpr, WIDTH: tl.constexpr, MAY_BE_EMPTY: tl.constexpr):
    """Rows from `first` on and columns number `across`, 64 at a time, of a gradient: factor · its sums, those of tile number `tile` of 64 rows, whose SUMMED
    columns lie behind those of the tile before; where sums are MAY_BE_EMPTY, zeros of those whose word in `words` says that nobody did. Left out are rows from
    `behind`, columns from WIDTH on. home: a pointer to row 0, `stride_s` between rows."""
    initialized = tl.load(words + tile * ((SUMMED + 63) // 64) + across) != 0 if MAY_BE_EMPTY else True
    row, col = first + tl.arange(0, 64)[:, None], across * 64 + tl.arange(0, 64)[None, :]
    place = tile * (64 * SUMMED) + across * HALF + tl.arange(0, HALF)
    there = tl.multiple_of(tl.minimum(HALF, 64 * SUMMED - across * HALF), 64 * 32)  # of the last columns half as many, where SUMMED says so
    x = tl.load(accum + place, mask=(tl.arange(0, HALF) < there) & initialized, other=0.0)
    # as it lies in memory: 32 columns, 16 rows, 8 columns, a row, 2 columns, 8 rows, a column; `tk.fragment_place` says the same
    x = tl.reshape(tl.permute(tl.reshape(x, (2, 4, 4, 8, 4, 2, 2)), (1, 5, 3, 0, 2, 4, 6)), (64, 64))
    tl.store(home + row.to(tl.int64) * stride_s + col, (x * factor).to(home.dtype.element_ty), mask=(row < behind) & (col < WIDTH))


@plain_kernel
@triton.jit
def postprocess(accum, words, home, stride_b, stride_h, stride_s, factor, rows, heads, SUMMED: tl.constexpr, WIDTH: tl.constexpr, MAY_BE_EMPTY: tl.constexpr):
    """dQ = factor · its sums, the last head first: its sums are still in L2. Grid: columns, 64 at a time, of all tiles of 64 rows, B · heads. sums: as
    `AttentionBackward` leaves them, of SUMMED columns; dQ, `home`: (B, heads, rows, WIDTH), with these strides, the last 1. Or so dK and dV, of several parts,
    whose sums were zeros and not MAY_BE_EMPTY."""
    ACROSS: tl.constexpr = (SUMMED + 63) // 64
    part, number = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    tile = number * (tl.num_programs(0) // ACROSS) + part // ACROSS
    place = home + number // heads * stride_b + number % heads * stride_h
    write_half(accum, words, tile, place, stride_s, part // ACROSS * 64, rows, part % ACROSS, factor, SUMMED, WIDTH, MAY_BE_EMPTY)
