"""Few queries against long keys and values: what a model does for every token that it writes. Reading K and V is all the time it takes."""
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

ZEROED = tl.constexpr(16)  # keys
CROWD, LONG, PLACES = 4, tl.constexpr(16), tl.constexpr(8)  # thread blocks a multiprocessor; blocks of keys; where tasks begin to read
WORKING_REGISTERS, MASKING_REGISTERS = 56, 16


@triton.jit
def _hidden(ctx, s):
    """The scores of this iteration's block, −∞ where a query does not see a key: row r is query r % queries of a head of the group."""
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
    """The queries of a group of heads are rows of one tile, so that K and V are read once for all, or of `row_tiles` of a key head where they are too many; a
    sequence is dealt to `parts` tasks, whose results `combine` weighs, unless there is only one (`partial` False), which blocks may share (of a cluster:
    `ClusterSplitK`; others: `SplitRest`). Source: Flash-Decoding (Dao et al., 2023); packed groups: FlashAttention-3, `pack_gqa`.

    Q: (B, tiles, rows, head_dim), tiles = H_kv · row_tiles, rows = heads of a tile · queries, at most 64; K, V: (B, H_kv, S, …); with `lengths`, lengths: (B,)
    int32, keys of each sequence, otherwise all S; with `starts`, which needs `causal`, starts: (B,) int32, the first key that is seen; O: (B, tiles, parts,
    rows, value_dim), fp32 where `partial`, and with `lse` L: (B, tiles, parts, rows) fp32.
    """

    consumers: int = 1
    lse: bool = True
    lengths: bool = True
    starts: bool = False
    partial: bool = True
    row_tiles: int = 1  # of a key head

    @property
    def edge_loop(self) -> bool:
        return not self.starts

    @property
    def broadcast_tile(self) -> bool:  # type: ignore[override]
        """A sequence's length is read once for all roles, where a block does not draw its tasks."""
        return self.lengths and not self.schedule.dynamic

    @property
    def cache_policy(self) -> str | None:
        """What nobody reads again leaves L2 first (measured: docs/notes/attention_decode.md)."""
        return "evict_first" if self.row_tiles == 1 else None

    @property
    def needed_registers(self) -> int:
        """Scores and sums, and what works on them, more where scores are hidden or capped."""
        return self.tile_m * (self.tile_n + self.value_dim) // GROUP + WORKING_REGISTERS + MASKING_REGISTERS * (self.causal or self.softcap)

    _hidden = _hidden

    @property
    def staggers_reads(self) -> bool:
        """Do tasks read their keys from different places on?"""
        return self.blocks_per_sm >= CROWD and not self.starts

    @triton.jit
    def _block(ctx):
        """Blocks from the last one on, or, where tasks spread and are long, those that hide nothing from a place on that depends on the sequence, and round.

        Many tasks that begin together, each of whose keys take a power of two of bytes, would all ask for the same part of such a piece, and share few of
        memory's channels, the fewer the more powers of two lie between K and V, too. Not of the head: where heads lie in turn, (B, S, H, D), those of a
        sequence read what lies together. Fewer blocks a multiprocessor drift apart by themselves (measured: docs/notes/attention_decode.md)."""
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
        """Not in pairs: with what writing zeros behind a sequence takes they would not fit into registers."""
        return tk.cast(p, ctx.config.dtype)

    @triton.jit
    def _values(ctx, tiles, first):
        """What a cache holds behind a sequence may be anything, and zero times NaN is NaN: there V becomes zero. Only a task's first block reaches so far.

        Where the template fenced these reads it would do so for every slot that is given back, which costs short tasks most."""
        behind = ctx.keys - ctx.last * ctx.config.tile_n
        if ctx.config.lengths:
            if first & (behind < ctx.config.tile_n):
                for i in tl.static_range(ctx.config.tile_n // ZEROED):  # some keys at a time: registers hold the sums and the weights
                    if behind < (i + 1) * ZEROED:
                        part = tk.subtile(tiles.V, ZEROED, ctx.config.value_dim, i, 0)
                        v = tk.load(part, layout="memory", fenced=True)
                        tk.store(part, tk.where(tk.lt(tk.iota(v, 0), behind - i * ZEROED), v, 0.0))
                tk.fence_async()
                tk.sync()
        return tiles.V

    def layout(self):
        q, k = tk.st(self.dtype, self.tile_m, self.head_dim), tk.st(self.dtype, self.tile_n, self.head_dim)
        v = tk.st(self.dtype, self.tile_n, self.value_dim)
        o = tk.st(tk.fp32 if self.partial else self.dtype, self.tile_m, self.value_dim // self.sharers)
        # In front: a block needs their addresses first, and what it reads of a kernel's parameters it waits for, about a hundred cycles each 64 bytes
        bounds = dict.fromkeys(name for name in ("lengths", "starts") if getattr(self, name))
        results = dict(O=o, **(dict(L=None) if self.lse else {}))
        merged = dict(o=tk.rt(tk.fp32, self.tile_m, self.value_dim), lse=tk.rv(tk.fp32, self.tile_m)) if self.sharers > 1 or self.splits else {}
        return tk.layout(globals=dict(**bounds, Q=q, K=k, V=v, **results), input=dict(K=k), lagged=dict(V=v), task=dict(Q=q), epilogue=dict(O=o),
                         merged=merged, args=(*self.numbers, "queries"))

    def tasks(self, *shapes: Any) -> int:
        batch, tiles, parts = shapes[self.tensors.index("O")][:3]
        return batch * tiles * parts

    @triton.jit
    def setup(ctx):
        tiles = tk.extent(ctx.globals.K, 1) * ctx.config.row_tiles
        parts = tk.extent(ctx.globals.O, 2) if ctx.config.partial else 1  # a constant where it can be one: blocks begin 3 divisions earlier
        batch_tile, part = tk.unravel(ctx.task_id, parts)
        batch, tile = tk.unravel(batch_tile, tiles)
        # Of what lies beside other parameters that a task needs first, see `layout`
        more = batch < tk.extent(ctx.globals.lengths if ctx.config.lengths else ctx.globals.K, 0)
        keys = tl.load(ctx.globals.lengths.pointer + batch, mask=more, other=0) if ctx.config.lengths else tk.extent(ctx.globals.K, 2)
        start = tl.load(ctx.globals.starts.pointer + batch, mask=more, other=0) if ctx.config.starts else 0
        first = start // ctx.config.tile_n
        blocks = tl.maximum(tk.ceil_div(keys, ctx.config.tile_n) - first, 0)
        begin, end = first + part * blocks // parts, first + (part + 1) * blocks // parts
        seen = tl.maximum(keys - ctx.args.queries + 1, 0) if ctx.config.causal else keys
        masked, whole = end - seen // ctx.config.tile_n, end - tk.ceil_div(start, ctx.config.tile_n)
        # In place, so that 1 stays a constant: of a part of a task the compiler does not see that no iteration is left to a loop for edges
        return tk.task(end - begin, when=more, edges=1 if ctx.config.one_edge else masked if ctx.config.edge_loop else None, batch=batch, kv_batch=batch,
                       head=tile, kv_head=tile // ctx.config.row_tiles, row=0, last=end - 1, share=part, keys=keys, start=start, masked=masked, whole=whole)

    @triton.jit
    def start(ctx):
        if ctx.config.partial:
            tk.dependents_launch()  # `combine` is launched while this kernel works, and waits for its end
        return nothing_seen(ctx)

    @triton.jit
    def part(ctx, state):
        total = tk.row_sum(state.sums)
        return tk.struct(o=tk.mul_row(state.o, ctx.config._share(ctx, total)), lse=ctx.config._log_sum(ctx, state, total))

    @triton.jit
    def merge(ctx, mine, theirs):
        """Means of the values that two parts have seen, weighed by the sums of their exponentials."""
        largest = tk.where(mine.lse > theirs.lse, mine.lse, theirs.lse)
        offset = tk.where(largest == float("-inf"), 0.0, largest)  # neither has seen a key
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
        tk.store_async(ctx.globals.O, epilogue.O, (ctx.batch, ctx.head, ctx.share, 0, ctx.part if SHARERS > 1 else 0))
        if ctx.config.lse:
            if SHARERS == 1 or ctx.part == 0:
                tk.store(ctx.globals.L, found.lse, (ctx.batch, ctx.head, ctx.share, 0))


@triton.jit
def _copy_at(ctx, n):
    """Which of the sequence's copies, of so many keys each, is number `n` of this iteration's block, or of those behind it, which lie in front. Behind the
    sequence's last key it is the last in use once more: the table may end there, or say anything."""
    COPIES: tl.constexpr = ctx.config.tile_n // ctx.config.copied
    block = ctx.last - ctx.iter - n // COPIES
    return tl.maximum(tl.minimum(block * COPIES + n % COPIES, (ctx.keys - 1) // ctx.config.copied), 0)


@triton.jit
def _load_pages(ctx, tiles, to, source, width):
    """A block of `source`, keys of so many columns, by copies of pages."""
    ROWS: tl.constexpr = ctx.config.copied
    for i in tl.static_range(ctx.config.tile_n // ROWS):
        part = _copy_at(ctx, i) % (ctx.config.page_size // ROWS)
        tk.load_async(tk.subtile(to, ROWS, width, i, 0), source, (ctx.page_indices[i], ctx.kv_head, part, 0), tiles.full, cache_policy=ctx.config.cache_policy)


class AttentionDecodePaged(tk.IndexPrefetch, AttentionDecode):
    """K and V lie in pages of `page_size` keys anywhere in a pool. A block is loaded by copies of gcd(cols, page_size) keys, each of which lies in one page: a
    copy a page where pages are smaller, one for the block where it is a part of a page. Source: PagedAttention (Kwon et al., 2023).

    Page numbers are read ahead through shared memory (`page_index`), lengths once for all roles (`broadcast_tile`): what a role reads from memory once copies are under
    way takes one to two thousand cycles (measured, also the rates of reading: docs/notes/attention_decode.md).

    K, V: (pages of the pool, H_kv, page_size, …); pages: (B, pages of the longest) int32, in which the keys of a sequence are; the others as there.
    """

    page_size: int = 16

    @property
    def copied(self) -> int:
        """Keys of a copy."""
        return math.gcd(self.tile_n, self.page_size)

    @property
    def staggers_reads(self) -> bool:
        """Pages lie anywhere."""
        return False

    @property
    def lagged_producer(self) -> bool:  # type: ignore[override]
        """Where a block takes several copies V has a producer of its own: one warp would be as long about all copies as memory is. Where it takes one, the
        order in which K and V are asked for is worth more (measured: docs/notes/attention_decode.md)."""
        return self.copied < self.tile_n

    def layout(self):
        plan = super().layout()
        k, v = tk.st(self.dtype, self.copied, self.head_dim), tk.st(self.dtype, self.copied, self.value_dim)
        return replace(plan, globals=dict(pages=None) | dict(plan.globals) | dict(K=k, V=v), page_indices=self.tile_n // self.copied)

    @triton.jit
    def page_index(ctx, n):
        """Where in the table the pages of the copies stand."""
        return tk.pointer_to(ctx.globals.pages, (ctx.batch, _copy_at(ctx, n) // (ctx.config.page_size // ctx.config.copied)))

    @triton.jit
    def load(ctx, input):
        _load_pages(ctx, input, input.K, ctx.globals.K, ctx.config.head_dim)

    @triton.jit
    def load_lagged(ctx, lagged):
        _load_pages(ctx, lagged, lagged.V, ctx.globals.V, ctx.config.value_dim)


@plain_kernel(launch_pdl=True)
@triton.jit
def combine(O, L, out, lse, stride_b, stride_h, stride_s, stride_d, parts, rows, queries, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,  # noqa: E741
            HAS_LSE: tl.constexpr):  # fmt: skip
    """One query of one head: the parts' results, weighed by their sums of exponentials. Grid: rows, tiles of them, batch. O, L contiguous as `AttentionDecode`
    leaves them; out: (B, H, S, WIDTH) with these strides; lse: (B, H, S), contiguous. `launch_pdl` lets it start early and wait."""
    tk.dependency_wait()
    row, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, col = tl.arange(0, PARTS), tl.arange(0, COLS)
    place = ((batch * tl.num_programs(1) + tile) * parts + part) * rows + row
    sums = tl.load(L + place, mask=part < parts, other=float("-inf"))
    largest = tl.max(sums)
    weights = tl.exp(sums - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights)
    o = tl.load(O + place[:, None] * WIDTH + col[None, :], mask=(part < parts)[:, None] & (col < WIDTH)[None, :], other=0.0)
    o = tl.sum(o * weights[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
    head, query = tile * (rows // queries) + row // queries, row % queries
    tl.store(out + batch * stride_b + head * stride_h + query * stride_s + col * stride_d, o.to(out.dtype.element_ty), mask=col < WIDTH)
    if HAS_LSE:
        found = tl.where(largest == float("inf"), largest, largest + tl.log(total))
        tl.store(lse + (batch * tl.num_programs(1) * rows + head * queries + query), found)
