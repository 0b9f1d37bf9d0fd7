"""Attention of few queries against long keys and values. Reading K and V takes nearly all the time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.forward import AttentionForward, nothing_seen
from tritonkittens.lang.core.constants import GROUP
from tritonkittens.launch import plain_kernel

ZEROED = tl.constexpr(16)  # keys of V that are zeroed at a time
STAGGERED = 4  # CTAs of an SM from which on tasks begin to read at different blocks
LONG, PLACES = tl.constexpr(16), tl.constexpr(8)  # blocks of keys of a task that does so; blocks it may begin at
WORKING_REGISTERS, MASKING_REGISTERS = 56, 16


@triton.jit
def _hidden(ctx, s):
    """The scores of this iteration's block, −∞ where a query does not see a key.

    Row r is query r % queries of a head of the group.
    """
    col = (ctx.last - ctx.iter) * ctx.config.tile_n
    behind = ctx.keys - col  # columns that are keys
    if ctx.config.starts:
        s = tk.left_fill(s, ctx.start - col, float("-inf"))
    if ctx.config.causal:
        ROWS: tl.constexpr = tk.col_vec(tk.rt(tk.int32, ctx.config.tile_m, ctx.config.tile_n))
        limit = tk.iota(ROWS) % ctx.args.queries + (behind - ctx.args.queries)  # a query's own key
        return tk.where(tk.le_row(tk.iota(s, 1), limit), s, float("-inf"))
    else:
        return tk.right_fill(s, behind, float("-inf"))


class AttentionDecode(tk.SplitTask, AttentionForward):
    """Attention of at most 64 rows a tile: the queries of a group of heads, or of a part of one (`row_tiles`).

    Q: (B, tiles, rows, head_dim), tiles = H_kv · row_tiles, rows = heads of a tile · queries. K, V: (B, H_kv, S, …).
    lengths (with `lengths`): (B,) int32, keys of each sequence. starts (with `starts`, which needs `causal`): (B,)
    int32, the first key that is seen. O: (B, tiles, splits, rows, value_dim), fp32 where `partial`. L (with `lse`): (B,
    tiles, splits, rows) fp32.

    K and V are read once for all heads of a group. Several tasks, the splits, read a sequence where `partial`, and
    `combine` weighs their results. Otherwise one task does, which CTAs may share (`ClusterSplitK`, `SplitRest`).
    Sources: Flash-Decoding (Dao et al., 2023); `pack_gqa` of FlashAttention-3.
    """

    consumers: int = 1
    lse: bool = True
    lengths: bool = True
    starts: bool = False
    partial: bool = True
    row_tiles: int = 1  # of a key head

    @property
    def edge_loop(self) -> bool:
        """Whether blocks that need a mask have a loop of their own: where only the last ones do."""
        return not self.starts

    @property
    def broadcast_tile(self) -> bool:  # type: ignore[override]
        """One role reads a sequence's length for all roles, unless CTAs fetch their tasks."""
        return self.lengths and not self.schedule.dynamic

    @property
    def cache_policy(self) -> str | None:
        """L2 evicts first what nobody reads again (measured: docs/notes/attention_decode.md)."""
        return "evict_first" if self.row_tiles == 1 else None

    @property
    def needed_registers(self) -> int:
        """Of a thread: scores, sums, temporaries, and more of these for masks and the soft-cap."""
        return (
            self.tile_m * (self.tile_n + self.value_dim) // GROUP
            + WORKING_REGISTERS
            + MASKING_REGISTERS * (self.causal or self.softcap)
        )

    _hidden = _hidden

    @property
    def staggers_reads(self) -> bool:
        """Whether tasks begin to read at different blocks of keys."""
        return self.blocks_per_sm >= STAGGERED and not self.starts

    @triton.jit
    def _block(ctx):
        """The block of keys of this iteration, last to first.

        Where reads are staggered and the task is long, blocks that need no mask begin at a place that depends on the
        sequence, and wrap around. Otherwise tasks that start together, whose keys lie a power of two of bytes apart,
        would use few of memory's channels. The place does not depend on the head: in (B, S, H, D) the heads of a
        sequence read neighbouring bytes. With fewer CTAs an SM tasks drift apart by themselves (measured:
        docs/notes/attention_decode.md).
        """
        if ctx.config.staggers_reads:
            edges = tl.maximum(ctx.masked, 1)
            rest = ctx.iterations - edges
            place = ctx.iter - edges + tl.where(rest >= LONG, rest * (ctx.batch % PLACES) // PLACES, 0)
            place = tl.where(place >= rest, place - rest, place)
            return ctx.last - tl.where(ctx.iter < edges, ctx.iter, edges + place)
        else:
            return ctx.last - ctx.iter

    @triton.jit
    def _operand(ctx, p):
        """Not in pairs: together with the zeros of `_values` they would not fit into registers."""
        return tk.cast(p, ctx.config.dtype)

    @triton.jit
    def _values(ctx, tiles, first):
        """V, with zeros after the sequence's last key: a cache may hold NaN there, and zero times NaN is NaN.

        Only a task's first block reaches that far. A fence by the template would run for every stage that is released,
        which costs short tasks most.
        """
        behind = ctx.keys - ctx.last * ctx.config.tile_n
        if ctx.config.lengths:
            if first & (behind < ctx.config.tile_n):
                # some keys at a time: registers also hold accumulators and P
                for i in tl.static_range(ctx.config.tile_n // ZEROED):
                    if behind < (i + 1) * ZEROED:
                        part = tk.subtile(tiles.V, ZEROED, ctx.config.value_dim, i, 0)
                        v = tk.load(part, layout="memory", fenced=True)
                        tk.store(part, tk.where(tk.lt(tk.iota(v, 0), behind - i * ZEROED), v, 0.0))
                tk.fence_async()
                tk.sync()
        return tiles.V

    def layout(self) -> tk.layout:
        q, k = tk.st(self.dtype, self.tile_m, self.head_dim), tk.st(self.dtype, self.tile_n, self.head_dim)
        v = tk.st(self.dtype, self.tile_n, self.value_dim)
        o = tk.st(tk.fp32 if self.partial else self.dtype, self.tile_m, self.value_dim // self.sharers)
        # First: a CTA needs their addresses first, and reading 64 bytes of a kernel's parameters takes about a hundred
        # cycles
        bounds = dict.fromkeys(name for name in ("lengths", "starts") if getattr(self, name))
        results = dict(O=o, **(dict(L=None) if self.lse else {}))
        merged = (
            dict(o=tk.rt(tk.fp32, self.tile_m, self.value_dim), lse=tk.rv(tk.fp32, self.tile_m))
            if self.sharers > 1 or self.splits
            else {}
        )
        return tk.layout(
            globals=dict(**bounds, Q=q, K=k, V=v, **results),
            input=dict(K=k),
            lagged=dict(V=v),
            task=dict(Q=q),
            epilogue=dict(O=o),
            merged=merged,
            args=(*self.numbers, "queries"),
        )

    def tasks(self, *shapes: Any) -> int:
        batch, tiles, splits = shapes[self.tensors.index("O")][:3]
        return batch * tiles * splits

    @triton.jit
    def setup(ctx):
        tiles = tk.extent(ctx.globals.K, 1) * ctx.config.row_tiles
        # a constant where possible: it spares 3 divisions
        splits = tk.extent(ctx.globals.O, 2) if ctx.config.partial else 1
        batch_tile, split = tk.unravel(ctx.task_id, splits)
        batch, tile = tk.unravel(batch_tile, tiles)
        # The extent of a tensor whose parameters a task needs first, see `layout`
        more = batch < tk.extent(ctx.globals.lengths if ctx.config.lengths else ctx.globals.K, 0)
        keys = (
            tl.load(ctx.globals.lengths.pointer + batch, mask=more, other=0)
            if ctx.config.lengths
            else tk.extent(ctx.globals.K, 2)
        )
        start = tl.load(ctx.globals.starts.pointer + batch, mask=more, other=0) if ctx.config.starts else 0
        first = start // ctx.config.tile_n
        blocks = tl.maximum(tk.ceil_div(keys, ctx.config.tile_n) - first, 0)
        begin, end = first + split * blocks // splits, first + (split + 1) * blocks // splits
        seen = tl.maximum(keys - ctx.args.queries + 1, 0) if ctx.config.causal else keys
        masked, whole = end - seen // ctx.config.tile_n, end - tk.ceil_div(start, ctx.config.tile_n)
        # Inline, so that 1 stays a constant: for a split the compiler cannot see that the loop for edges has no
        # iterations left
        return tk.task(
            end - begin,
            when=more,
            edges=1 if ctx.config.one_edge else masked if ctx.config.edge_loop else None,
            batch=batch,
            kv_batch=batch,
            head=tile,
            kv_head=tile // ctx.config.row_tiles,
            row=0,
            last=end - 1,
            split=split,
            keys=keys,
            start=start,
            masked=masked,
            whole=whole,
        )

    @triton.jit
    def start(ctx):
        if ctx.config.partial:
            tk.dependents_launch()  # `combine` starts while this kernel runs, and waits for its end
        return nothing_seen(ctx)

    @triton.jit
    def part(ctx, state):
        total = tk.row_sum(state.sums)
        return tk.struct(
            o=tk.mul_row(state.o, ctx.config._share(ctx, total)), lse=ctx.config._log_sum(ctx, state, total)
        )

    @triton.jit
    def merge(ctx, mine, theirs):
        """The mean of two parts' outputs, weighed by their sums of exponentials."""
        largest = tk.where(mine.lse > theirs.lse, mine.lse, theirs.lse)
        offset = tk.where(largest == float("-inf"), 0.0, largest)  # neither part has seen a key
        a, b = tk.exp(mine.lse - offset), tk.exp(theirs.lse - offset)
        total = a + b
        share = ctx.config._share(ctx, total)
        o = tk.add(tk.mul_row(mine.o, a * share), tk.mul_row(theirs.o, b * share))
        return tk.struct(o=o, lse=tk.where(largest == float("inf"), largest, tk.add(largest, tk.log(total))))

    @triton.jit
    def finish(ctx, state, epilogue):
        SHARERS: tl.constexpr = ctx.config.sharers
        found = state if ctx.config.merges else ctx.config.part(ctx, state)
        tk.store(epilogue.O, found.o)
        tk.fence_async()
        tk.store_async(ctx.globals.O, epilogue.O, (ctx.batch, ctx.head, ctx.split, 0, ctx.part if SHARERS > 1 else 0))
        if ctx.config.lse:
            if SHARERS == 1 or ctx.part == 0:
                tk.store(ctx.globals.L, found.lse, (ctx.batch, ctx.head, ctx.split, 0))


@triton.jit
def _copy_at(ctx, n):
    """The copy that is number `n` of this iteration's block; higher numbers continue in the blocks before it.

    A copy has `copied` keys. After the sequence's last key it is the last copy in use again: the table may end there,
    or hold anything.
    """
    COPIES: tl.constexpr = ctx.config.tile_n // ctx.config.copied
    block = ctx.last - ctx.iter - n // COPIES
    return tl.maximum(tl.minimum(block * COPIES + n % COPIES, (ctx.keys - 1) // ctx.config.copied), 0)


@triton.jit
def _load_pages(ctx, tiles, to, source, width):
    """Load a block of `source`, with `width` columns, by copies from pages."""
    ROWS: tl.constexpr = ctx.config.copied
    for i in tl.static_range(ctx.config.tile_n // ROWS):
        part = _copy_at(ctx, i) % (ctx.config.page_size // ROWS)
        tk.load_async(
            tk.subtile(to, ROWS, width, i, 0),
            source,
            (ctx.page_indices[i], ctx.kv_head, part, 0),
            tiles.full,
            cache_policy=ctx.config.cache_policy,
        )


class AttentionDecodePaged(tk.IndexPrefetch, AttentionDecode):
    """K and V in pages of `page_size` keys anywhere in a pool. Source: PagedAttention (Kwon et al., 2023).

    K, V: (pages of the pool, H_kv, page_size, …). pages: (B, pages of the longest sequence) int32, the pages of each
    sequence. Other tensors as for `AttentionDecode`.

    A block is loaded by copies of gcd(tile_n, page_size) keys, each in one page. Page numbers are prefetched through
    shared memory (`page_index`), and one role reads lengths for all (`broadcast_tile`): once copies are in flight, a
    read of global memory takes one to two thousand cycles (measured: docs/notes/attention_decode.md).
    """

    page_size: int = 16

    @property
    def copied(self) -> int:
        """Keys of a copy."""
        return math.gcd(self.tile_n, self.page_size)

    @property
    def staggers_reads(self) -> bool:
        """Never: pages lie anywhere."""
        return False

    @property
    def lagged_producer(self) -> bool:  # type: ignore[override]
        """Whether V has a producer warp of its own: one warp issues several copies a block too slowly.

        With one copy a block, the order in which K and V are requested is worth more (measured:
        docs/notes/attention_decode.md).
        """
        return self.copied < self.tile_n

    def layout(self) -> tk.layout:
        plan = super().layout()
        k, v = tk.st(self.dtype, self.copied, self.head_dim), tk.st(self.dtype, self.copied, self.value_dim)
        return replace(
            plan,
            globals=dict(pages=None) | dict(plan.globals) | dict(K=k, V=v),
            page_indices=self.tile_n // self.copied,
        )

    @triton.jit
    def page_index(ctx, n):
        """Where the page number of copy `n` stands in the table."""
        return tk.pointer_to(
            ctx.globals.pages, (ctx.batch, _copy_at(ctx, n) // (ctx.config.page_size // ctx.config.copied))
        )

    @triton.jit
    def load(ctx, input):
        _load_pages(ctx, input, input.K, ctx.globals.K, ctx.config.head_dim)

    @triton.jit
    def load_lagged(ctx, lagged):
        _load_pages(ctx, lagged, lagged.V, ctx.globals.V, ctx.config.value_dim)


@plain_kernel(launch_pdl=True)
@triton.jit
def combine(
    O,  # noqa: E741
    L,
    out,
    lse,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    splits,
    rows,
    queries,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    COLS: tl.constexpr,  # noqa: E741
    HAS_LSE: tl.constexpr,
):
    """One query of one head: the splits' outputs, weighed by their sums of exponentials. Grid: rows, tiles, batch.

    O, L: contiguous, from `AttentionDecode`. out: (B, H, S, WIDTH) with these strides. lse: (B, H, S), contiguous.
    `launch_pdl`: it starts early and waits.
    """
    tk.dependency_wait()
    row, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split, col = tl.arange(0, SPLITS), tl.arange(0, COLS)
    place = ((batch * tl.num_programs(1) + tile) * splits + split) * rows + row
    sums = tl.load(L + place, mask=split < splits, other=float("-inf"))
    largest = tl.max(sums)
    weights = tl.exp(sums - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights)
    o = tl.load(
        O + place[:, None] * WIDTH + col[None, :], mask=(split < splits)[:, None] & (col < WIDTH)[None, :], other=0.0
    )
    o = tl.sum(o * weights[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
    head, query = tile * (rows // queries) + row // queries, row % queries
    tl.store(
        out + batch * stride_b + head * stride_h + query * stride_s + col * stride_d,
        o.to(out.dtype.element_ty),
        mask=col < WIDTH,
    )
    if HAS_LSE:
        found = tl.where(largest == float("inf"), largest, largest + tl.log(total))
        tl.store(lse + (batch * tl.num_programs(1) * rows + head * queries + query), found)
