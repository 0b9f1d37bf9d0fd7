"""Attention forward O = softmax(Q Kᵀ · scale) V: each consumer keeps a tile of queries, K and V stream through
rings."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.masks import reach, squashed
from tritonkittens.kernels.attention.device.tiles import QueryTiles
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

LIMIT = tl.constexpr(2.0**15)  # of a thread's sum of a block's weights, so that each weight is finite in fp16
# that sum is at most GROWTH · the sum of earlier blocks + USUAL, unless there are outliers
GROWTH, USUAL = tl.constexpr(3.0), tl.constexpr(4.0)
SHORTEST_LINE = 64  # bytes of a swizzle line of K
MOST_HELD = 128  # scores of a row that fit into registers beside their weights


def lines_of_keys(head_dim: int, itemsize: int) -> int:
    """Swizzle lines of a key; 0 where there would be several of less than `SHORTEST_LINE` bytes."""
    line = min(head_dim & -head_dim, SWIZZLE_LINE // itemsize)
    return head_dim // line if line == head_dim or line * itemsize >= SHORTEST_LINE else 0


@triton.jit
def nothing_seen(ctx):
    """The state of queries that have seen no key: output, weights of the last block, largest score, sums of weights."""
    scores = tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n)
    o = tk.zero(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.value_dim))
    p = ctx.config._operand(ctx, tk.zero(scores))
    state = tk.struct(o=o, p=p, m=tk.neg_infty(tk.col_vec(scores)), sums=tk.row_sum_by_quad(tk.zero(scores)))
    return tk.with_field(state, "alpha", tk.one(tk.col_vec(scores))) if ctx.config.lazy else state


class AttentionForward(QueryTiles):
    """Any lengths, GQA, causal (bottom right alignment) or a sliding window, soft-cap, log-sum-exp.

    Q: (B, H, S, head_dim), K: (B, H_kv, S_kv, head_dim), V and O with value_dim, L: (B, H, S) fp32.

    Blocks of keys come last to first, so that only the first ones need a mask. The MMA of a block's scores overlaps the
    softmax of the block before, whose MMA with V follows: K is input, V is lagged by one iteration. Where `tile_n` is
    no power of two, K comes in swizzle lines (`key_lines`), so that one wgmma still computes a block's scores. Source:
    FlashAttention-3 (Shah et al., 2024), algorithm 2.

    The instructions between two MMAs of a consumer limit the kernel, not the tensor cores. A sixth of them find largest
    scores, a seventh rescale the output. A `lazy` kernel does neither. A row's weights are relative to the largest
    score of its first block, and may exceed one. A warp that finds a sum above `LIMIT`, or far above earlier ones
    (`GROWTH`), computes its weights again with the true largest score. Floating point absorbs the factor, so results
    differ by rounding only. `GROWTH` keeps the errors of operands with outliers near those of weights up to one.

    On the diagonal of a causal mask, where a block has as many keys as a task has queries, the first consumer sees half
    a block: it computes that half only.

    Measured variants: docs/notes/attention_forward.md.
    """

    lse: bool = False
    result: tl.dtype | None = None  # element type of O: that of V where None
    raised: float = 0.0  # log₂ of the factor of P
    shifted: bool = True  # keys − queries need not be a multiple of the queries of a task
    long_turns: bool = False  # a consumer's turn ends when its scores are there, instead of when their MMA is issued
    epilogue_n: int | None = None  # columns of O that a consumer stages at a time; None: all

    @property
    def lazy(self) -> bool:
        """Whether a block's largest scores may stay unknown: registers hold its scores as long as its weights.

        Not with two consumers at dimension 64: there ptxas copies MMA operands into other registers, which costs more.
        """
        return self.tile_n <= MOST_HELD and self.raised == 0 and (self.consumers != 2 or self.value_dim > 64)

    @property
    def cache_policy(self) -> str | None:
        """L2 policy of K and V. None: tasks of other queries read them again."""
        return None

    @property
    def one_edge(self) -> bool:
        """Whether exactly one block of a task needs a mask."""
        whole = self.causal and not self.shifted and self.tile_n % (self.tile_m * self.consumers) == 0
        if self.lazy and self.consumers == 3 and not whole:
            # with a loop of its own for edges ptxas spills nothing in the main one; without, 20 registers an iteration
            return False
        return super().one_edge or whole

    @property
    def halves_first(self) -> bool:
        """Whether the first consumer's queries may see only half of the first block: a mask hides the rest."""
        hides = (self.causal or self.window) and self.consumers == 2 and self.tile_n == 2 * self.tile_m
        return hides and self.raised == 0 and not self.key_lines

    @property
    def key_lines(self) -> int:
        """Tiles, of a swizzle line each, that K comes in where `tile_n` is no power of two; 0: K is one tile."""
        return lines_of_keys(self.head_dim, tk.to_torch(self.dtype).itemsize) if self.tile_n & (self.tile_n - 1) else 0

    @property
    def key_tiles(self) -> tuple[str, ...]:
        """Names of the tiles of K of a block."""
        return tuple(f"K{i}" for i in range(self.key_lines)) or ("K",)

    def layout(self) -> tk.layout:
        lines = self.key_lines
        line = self.head_dim // lines * tk.to_torch(self.dtype).itemsize if lines else "auto"
        q, k = (
            tk.st(self.dtype, self.tile_m, self.head_dim, swizzle=line),
            tk.st(self.dtype, self.tile_n, self.head_dim // (lines or 1), contiguous=lines > 0),
        )
        v, o = (
            tk.st(self.dtype, self.tile_n, self.value_dim),
            tk.st(self.result or self.dtype, self.tile_m, self.epilogue_n or self.value_dim),
        )
        return tk.layout(
            globals=dict(Q=q, K=k, V=v, O=o, **(dict(L=None) if self.lse else {})),
            input=dict.fromkeys(self.key_tiles, k),
            lagged=dict(V=v),
            task=dict(Q=q),
            epilogue=dict(O=o),
            args=self.numbers,
        )

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(
            task.Q, ctx.globals.Q, (ctx.batch, ctx.head, ctx.row * ctx.config.consumers + ctx.consumer, 0), task.full
        )

    @triton.jit
    def _block(ctx):
        """The block of keys of this iteration."""
        return ctx.last - ctx.iter

    @triton.jit
    def load(ctx, input):
        TILES: tl.constexpr = ctx.config.key_tiles
        for i in tl.static_range(len(TILES)):
            tk.load_async(
                tk.field(input, TILES[i]),
                ctx.globals.K,
                (ctx.kv_batch, ctx.kv_head, ctx.config._block(ctx), i),
                input.full,
                cache_policy=ctx.config.cache_policy,
            )

    @triton.jit
    def load_lagged(ctx, lagged):
        tk.load_async(
            lagged.V,
            ctx.globals.V,
            (ctx.kv_batch, ctx.kv_head, ctx.config._block(ctx), 0),
            lagged.full,
            cache_policy=ctx.config.cache_policy,
        )

    @triton.jit
    def start(ctx):
        return nothing_seen(ctx)

    @triton.jit
    def _scores(ctx, input):
        """S = Q @ K.T of a block, in flight."""
        TILES: tl.constexpr = ctx.config.key_tiles
        if len(TILES) == 1:
            return tk.mm_ABt(ctx.task.Q, tk.field(input, TILES[0]), wait=False)
        else:
            LINE: tl.constexpr = ctx.config.head_dim // len(TILES)
            s = tk.mm_ABt(tk.subtile(ctx.task.Q, ctx.config.tile_m, LINE), tk.field(input, TILES[0]), wait=False)
            for i in tl.static_range(1, len(TILES)):
                s = tk.mma_ABt(
                    tk.subtile(ctx.task.Q, ctx.config.tile_m, LINE, 0, i), tk.field(input, TILES[i]), s, wait=False
                )
            return s

    @triton.jit
    def _masked(ctx, s):
        """A block's scores after soft-cap and mask."""
        if ctx.config.softcap:
            s = squashed(s, ctx.config._descaled(ctx, ctx.args.squash))
        if ctx.edge:
            if (ctx.iter < ctx.masked) | (ctx.iter >= ctx.whole):
                s = ctx.config._hidden(ctx, s)
        return s

    @triton.jit
    def _softmax(ctx, state, s):
        """(P, largest score, factor of earlier sums) of a block's scores."""
        scale = ctx.config._scale(ctx)
        m = tk.row_max(s, accumulate=state.m)
        # For rows that have seen no key. Where there are none, the selection still moves the wait for the MMA with V
        # into the middle of the softmax, which is faster (measured: docs/notes/attention_forward.md)
        offset = tk.where(m == float("-inf"), 0.0, m * scale)
        return tk.exp2_row(s, scale, offset - ctx.config.raised), m, tk.exp2(state.m * scale - offset)

    @triton.jit
    def _lazily(ctx, state, s, o):
        """The state after a block whose largest scores stay unknown (see the class).

        The output, in flight in `o`, is rescaled when its next MMA is issued.
        """
        m, scale = state.m, ctx.config._scale(ctx)
        alpha = tk.one(tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n)))
        weights = tk.exp2_row(s, scale, m * scale)  # infinite or NaN in a row that has seen no key yet
        o = tk.mma_wait(o)  # before P is made: it then takes the registers of the last P
        sums, p = tk.row_sum_by_quad(weights), ctx.config._operand(ctx, weights)
        usual = USUAL
        # after blocks of which rows have seen few keys, weights above one are usual
        if ctx.config.causal or ctx.config.window:
            usual = tl.where(ctx.iter > ctx.masked, USUAL, LIMIT)
        if tk.warp_exceeds(sums, LIMIT, sums - state.sums * GROWTH, usual):
            weights, m, alpha = ctx.config._softmax(ctx, state, s)
            sums, p = tk.row_sum_by_quad(weights), ctx.config._operand(ctx, weights)
        return state.replace(o=o, p=p, m=m, alpha=alpha, sums=tk.mul_row(state.sums, alpha) + sums)

    @triton.jit
    def _sees_half(ctx):
        """Whether this consumer's queries see keys of the first half of the task's first block only."""
        behind = (ctx.row * ctx.config.consumers + ctx.consumer + 1) * ctx.config.tile_m
        return behind + reach(ctx) <= ctx.last * ctx.config.tile_n + ctx.config.tile_n // 2

    @triton.jit
    def _release_input(ctx, input):
        """Release a stage. The template counts releases where they are written, and only one branch runs: hence a
        function."""
        tk.release(ctx, input)

    @triton.jit
    def _first_of_half(ctx, state, input):
        """`compute_first` without the second half of the keys: half the MMA and half the exponentials."""
        COLS: tl.constexpr = ctx.config.tile_n // 2
        s = tk.mm_ABt(ctx.task.Q, tk.subtile(input.K, COLS, ctx.config.head_dim, 0, 0))
        ctx.config._release_input(ctx, input)
        before = tk.struct(m=tk.neg_infty(tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, COLS))))
        p, m, _ = ctx.config._softmax(ctx, before, ctx.config._masked(ctx, s))
        # Adding to it converts the layout of a vector of half as many columns
        nothing = tk.zero(tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.tile_n)))
        weights = tk.concat_cols(
            ctx.config._operand(ctx, p), tk.zero(tk.rt(ctx.config.dtype, ctx.config.tile_m, COLS)), whole=True
        )
        return state.replace(p=weights, m=tk.add(nothing, m), sums=tk.add(state.sums, tk.row_sum_by_quad(p)))

    @triton.jit
    def _first_of_all(ctx, state, input):
        s = tk.mma_wait(ctx.config._scores(ctx, input))
        ctx.config._release_input(ctx, input)
        p, m, _ = ctx.config._softmax(ctx, state, ctx.config._masked(ctx, s))
        return state.replace(p=ctx.config._operand(ctx, p), m=m, sums=tk.row_sum_by_quad(p))

    @triton.jit
    def compute_first(ctx, state, input):
        if ctx.config.halves_first and ctx.consumer == 0:
            if ctx.config._sees_half(ctx):
                state = ctx.config._first_of_half(ctx, state, input)
            else:
                state = ctx.config._first_of_all(ctx, state, input)
            return state
        else:
            return ctx.config._first_of_all(ctx, state, input)

    @triton.jit
    def _operand(ctx, p):
        """P as an operand of the next MMA."""
        return tk.cast_pairs(p, ctx.config.dtype)

    @triton.jit
    def _scale(ctx):
        """The factor of scores, which are in units of the soft-cap where there is one."""
        return ctx.args.scale if ctx.config.softcap else ctx.config._descaled(ctx, ctx.args.scale)

    @triton.jit
    def _share(ctx, total):
        """The factor of an output whose weights have this sum."""
        return tk.where(total > 0, 1.0 / total, 0.0)

    @triton.jit
    def _log_sum(ctx, state, total):
        """Log-sum-exps of rows whose weights have this sum."""
        found = tk.add(state.m * ctx.config._scale(ctx) - ctx.config.raised, tk.log2(total)) * 0.6931471805599453
        return tk.where(state.m == float("inf"), state.m, found)

    @triton.jit
    def _values(ctx, tiles, first):
        """V of a block. `first`: whether the block is the task's first."""
        return tiles.V

    @triton.jit
    def _times_values(ctx, p, tiles, o, first):
        """O += P @ V of a block, in flight."""
        return tk.mma_AB(p, ctx.config._values(ctx, tiles, first), o, wait=False)

    @triton.jit
    def _weighted(ctx, state, tiles, first):
        """The output with the last block, whose V is in `tiles`; its MMA is in flight."""
        o = tk.rescale_row(state.o, state.alpha) if ctx.config.lazy else state.o
        return ctx.config._times_values(ctx, state.p, tiles, o, first)

    @triton.jit
    def compute(ctx, state, input, previous):
        tk.warp_scheduler_sync(ctx)
        s = ctx.config._scores(ctx, input)
        tk.wait_for(previous)
        o = ctx.config._weighted(ctx, state, previous, ctx.iter == 1)
        if not ctx.config.long_turns:
            tk.warp_scheduler_arrive(ctx)
        s = tk.mma_wait(s, leave=o)
        tk.release(ctx, input)
        if ctx.config.long_turns:  # one consumer's exponentials then overlap the other's MMAs and largest scores
            tk.warp_scheduler_arrive(ctx)
        s = ctx.config._masked(ctx, s)
        if ctx.config.lazy:
            return ctx.config._lazily(ctx, state, s, o)
        else:
            p, m, alpha = ctx.config._softmax(ctx, state, s)
            sums = tk.row_sum_by_quad(p, accumulate=tk.mul_row(state.sums, alpha))
            return state.replace(o=tk.mul_row(tk.mma_wait(o), alpha), p=ctx.config._operand(ctx, p), m=m, sums=sums)

    @triton.jit
    def compute_last(ctx, state, input):
        tk.wait_for(input)
        return state.replace(o=tk.mma_wait(ctx.config._weighted(ctx, state, input, ctx.begin + ctx.count == 1)))

    @triton.jit
    def finish(ctx, state, epilogue):
        total = tk.row_sum(state.sums)
        row = ctx.row * ctx.config.consumers + ctx.consumer
        o = tk.mul_row(state.o, ctx.config._share(ctx, total))
        subtiles = (o,) if ctx.config.epilogue_n is None else tk.split_cols(o, ctx.config.epilogue_n)
        for i in tl.static_range(len(subtiles)):
            if i > 0:
                tk.store_read_wait(0)
            tk.store(epilogue.O, subtiles[i])
            tk.fence_async()
            tk.store_async(ctx.globals.O, epilogue.O, (ctx.batch, ctx.head, row, i))
        if ctx.config.lse:
            tk.store(ctx.globals.L, ctx.config._log_sum(ctx, state, total), (ctx.batch, ctx.head, row))
