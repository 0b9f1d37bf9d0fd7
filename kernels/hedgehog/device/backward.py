"""Gradients of Hedgehog, in two passes of one kind each: of features, and of windows. Letters are those of `window.py`.

With the total weight t of a row, δ = do·o / t, and the state S, z before its block, φ(q) has the gradient α (S do / t -
δ z). Gradients of states, G = Σ α φ(q) (do / t)ᵀ and g = -Σ α δ φ(q) over later blocks, give φ(k) the gradient G v + g,
and v the part Gᵀ φ(k). So keys mirror queries with time reversed: `FeatureGradients` computes either, and the gradients
of the maps. The features of a softmax p of y have dy = p (dp - p·dp).

In a window, w = β exp((s - m) / √128) / t has the gradient do·v - do·o, and ds = w (do·v - do·o) / √128. The gradient
of m goes to the key with the largest score. Those of all weights of a row sum to 0, so that it is α φ(q)·(S do / t - δ
z) / √128. `WindowGradients` adds this part to the gradients of features.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.hedgehog.device.window import OF_FEATURES, TO_BASE_2, features, half
from tritonkittens.kernels.linear_attention.device.chunks import ROWS, Chunks, chunk_of_slot
from tritonkittens.launch import plain_kernel

DIM: tl.constexpr = tl.constexpr(128)
NUMBERS: tl.constexpr = tl.constexpr(6)  # of a query: 1 / t, do·o, two parts of the gradient of m, m in base 2, its key
OF_O: tl.constexpr = tl.constexpr(64)  # where those of a block begin
OF_MOST: tl.constexpr = tl.constexpr(128)
OF_KEY: tl.constexpr = tl.constexpr(64)  # in the second tile
SCALE: tl.constexpr = tl.constexpr(128**-0.5)
SQUARE: tl.constexpr = tk.rt(tk.fp32, 64, 64)
OF_ROWS: tl.constexpr = tk.col_vec(SQUARE)


@plain_kernel(num_warps=4)
@triton.jit
def prepare_rows(OUT, DOUT, L, B, ENDS, sequences, slots, o_row, o_head, do_head, do_row, MOST: tl.constexpr):
    """The first two of NUMBERS in B (heads, slots, NUMBERS · 64), of the totals L (heads, slots, 64), and of results
    and their gradients, with these strides. Grid: slots, heads."""
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    if tl.sum(inside.to(tl.int32)) > 0:
        i, d, home = tl.arange(0, ROWS), tl.arange(0, DIM), (head * slots + slot) * ROWS
        o = tl.load(OUT + (row * o_row + head * o_head)[:, None] + d[None, :], mask=inside[:, None], other=0)
        do = tl.load(DOUT + (row * do_row + head * do_head)[:, None] + d[None, :], mask=inside[:, None], other=0)
        total = tl.load(L + home + i, mask=inside, other=1)
        tl.store(B + home * NUMBERS + i, tl.where(inside, 1 / total, 0))
        tl.store(B + home * NUMBERS + OF_O + i, tl.sum(tk.cast(o, tk.fp32) * tk.cast(do, tk.fp32), 1))


@triton.jit
def own_block(ctx):
    """The block of this iteration, whose gradients it computes."""
    return ctx.block + (ctx.blocks - 1 - ctx.iter if ctx.config.reverse else ctx.iter)


@triton.jit
def other_block(ctx):
    """(the block beside it, whether it exists)."""
    block = own_block(ctx) + (1 if ctx.config.reverse else -1)
    return block, (block >= 0) & (block < tk.ceil_div(ctx.sequence.rows, 64))


@triton.jit
def inside(ctx, block):
    """A block of the sequence, for a load whose values do not count where the block does not exist."""
    return tl.maximum(tl.minimum(block, tk.ceil_div(ctx.sequence.rows, 64) - 1), 0)


@triton.jit
def place(ctx, block):
    """The coordinates of a block's rows."""
    return ctx.sequence, ctx.head, inside(ctx, block), 0


@triton.jit
def place_of_numbers(ctx, block, part: tl.constexpr = 0):
    """The coordinates of numbers of a block's queries."""
    return ctx.head, ctx.first + inside(ctx, block), part


class Gradients(Chunks):
    """A task is a segment of a sequence and a head, an iteration a block. Q, Y: the rows whose gradients are computed,
    queries and the gradients of results, or with `reverse` keys and values; K, V: those of the other kind. All are
    (heads, rows of all sequences, 128). B: (heads, slots, NUMBERS · 64) fp32, of queries. ALPHA, BETA: (heads,) fp32.

    dQ: the gradient of Q, and with `reverse` dV that of Y.
    """

    gated: bool = False
    further: int = 0  # iterations behind the last block

    @property
    def tiles(self) -> dict[str, tk.st]:
        return {name: tk.st(self.dtype, 64, 128) for name in ("Q", "Y", "K", "V")}

    @property
    def found(self) -> dict[str, tk.st]:
        """Tiles of gradients."""
        return {name: tk.st(self.dtype, 64, 64) for name in ("dQ", "dV")[: 1 + self.reverse]}

    @triton.jit
    def setup(ctx):
        heads, span = tk.extent(ctx.globals.V, 0), ctx.args.span
        segment = ctx.task_id // heads
        number, rows, first = tk.sequence_of_tile(ctx.globals.ends, segment, span, ctx.args.total, ctx.config.most)
        before = (segment - first) * span
        blocks = tk.ceil_div(tl.minimum(rows.rows - before, span), 64)
        return tk.task(
            blocks + ctx.config.further,
            when=number < tk.extent(ctx.globals.ends, 0),
            sequence=rows,
            first=rows.begin // 64 + number,
            block=before // 64,
            blocks=blocks,
            home=segment if ctx.config.cut else number,
            head=ctx.task_id % heads,
        )

    @triton.jit
    def load_params(ctx):
        head = (ctx.head,)
        return tk.struct(alpha=tk.load_scalar(ctx.globals.ALPHA, head), beta=tk.load_scalar(ctx.globals.BETA, head))


class FeatureGradients(Gradients, tk.lcf):
    """MQ, MK: the maps of Q and K, (heads, 128, 64). dM: (sequences, heads, 128, 64) fp32, the gradient of MQ. Without
    `reverse`, dALPHA: (2, sequences, heads, 64) fp32, parts of the gradient of alpha. It also writes both parts of the
    gradient of m to B.

    S0, Z0: (sequences, heads, 128, 128) and (sequences, heads, 128) fp32, the state, or its gradient, before the first
    iteration (`begins`). S1, Z1: that after the last (`ends_wanted`).

    Each consumer has 64 features, and their rows of the state. In an iteration, it first computes their gradients. Then
    it multiplies those of all features with its 64 columns of Q and the map.
    """

    ends_wanted: bool = False

    def layout(self) -> tk.layout:
        numbers, map = dict(B=tk.sv(tk.fp32, 128)), tk.st(self.dtype, 128, 64)
        maps = dict(MQ=map, MK=map)
        others = ["dM", *(["S1", "Z1"] if self.ends_wanted else []), *(["Z0"] if self.begins else [])]
        others = others if self.reverse else ["dALPHA", *others]
        return self.chunked(
            {**self.tiles, **numbers, **maps, "ALPHA": None, "BETA": None, **self.found, **dict.fromkeys(others)},
            input={**self.tiles, **numbers},
            task=maps,
            per="block",
            scratch=dict(Z=tk.sv(tk.fp32, 64)),
            exchange=dict(S=tk.st(self.dtype, 64, 128), dY=tk.st(self.dtype, 64, 64)),
        )

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.MQ, ctx.globals.MQ, (ctx.head, 0, 0), task.full)
        tk.load_async(task.MK, ctx.globals.MK, (ctx.head, 0, 0), task.full)

    @triton.jit
    def load(ctx, input):
        own, (other, _) = own_block(ctx), other_block(ctx)
        tk.load_async(input.Q, ctx.globals.Q, place(ctx, own), input.full)
        tk.load_async(input.Y, ctx.globals.Y, place(ctx, own), input.full)
        tk.load_async(input.K, ctx.globals.K, place(ctx, other), input.full)
        tk.load_async(input.V, ctx.globals.V, place(ctx, other), input.full)
        query = other if ctx.config.reverse else own
        tk.load_async(input.B, ctx.globals.B, place_of_numbers(ctx, query), input.full)

    @triton.jit
    def start(ctx):
        S: tl.constexpr = tk.rt(tk.fp32, 64, 128)
        Z: tl.constexpr = tk.rv(tk.fp32, 64)
        if ctx.config.begins:
            s = tk.load(ctx.globals.S0, S, (ctx.home, ctx.head, ctx.consumer, 0))
            tk.store(ctx.scratch.Z, tk.load(ctx.globals.Z0, Z, (ctx.home, ctx.head, ctx.consumer)))
        else:
            s = tk.zero(S)
            tk.store(ctx.scratch.Z, tk.zero(Z))
        return tk.struct(s=s, dm=tk.zero(SQUARE), alpha=tk.zero(OF_ROWS))

    @triton.jit
    def _of_features(ctx, state, input, x, h):
        """(the gradient of the products x with the map, from this consumer's features, the features of both, the part
        of alpha), of the products h of Y and the state."""
        me: tl.constexpr = ctx.consumer
        z, f = tk.load(ctx.scratch.Z, OF_FEATURES), features(x, me, 1.0)
        if ctx.config.reverse:
            h, own = tk.add_col(h, z), own_block(ctx)
            exists = tl.where((ctx.iter > 0) & (own >= 0), 1.0, 0.0)  # no state has the last block
            dy = f * tk.sub_row(h, tk.row_sum(f * h)) * exists
            other = tk.cast(features(x, 1 - me, exists), ctx.config.dtype)
            mine, alpha = tk.cast(f * exists, ctx.config.dtype), state.alpha
            both = (mine, other) if me == 0 else (other, mine)
        else:
            h -= tk.mul_row(tk.broadcast_col(h, z), tk.load(input.B, OF_ROWS, OF_O))
            total, of_t = tk.row_sum(f * h), tk.load(input.B, OF_ROWS, 0)
            dy = tk.mul_row(f * tk.sub_row(h, total), of_t * ctx.params.alpha)
            home = ctx.head, ctx.first + own_block(ctx), OF_MOST // 64 + me
            tk.store(ctx.globals.B, total * of_t, home)
            both, alpha = (), state.alpha + total * of_t
        return tk.neg(dy) if me == 1 else dy, both, alpha

    @triton.jit
    def _with_block(ctx, state, input, x):
        """The state with the rows of K and V, of the products x with the map."""
        me: tl.constexpr = ctx.consumer
        _, exists = other_block(ctx)
        exists, z, f = tl.where(exists, 1.0, 0.0), tk.load(ctx.scratch.Z, OF_FEATURES), half(ctx.exchange.S[me], 0)
        if ctx.config.reverse:
            weights = features(x, me, tk.load(input.B, OF_ROWS, 0) * (ctx.params.alpha * exists))
            of_z = tk.neg(tk.mul_row(weights, tk.load(input.B, OF_ROWS, OF_O)))
        else:
            weights = features(x, me, exists)
            of_z = weights
        tk.store(ctx.scratch.Z, tk.col_sum(of_z, accumulate=z))
        tk.store(f, weights)
        tk.fence_async()
        return tk.mma_AtB(f, input.V, state)

    @triton.jit
    def compute(ctx, state, input):
        me: tl.constexpr = ctx.consumer
        S, dY, task = ctx.exchange.S, ctx.exchange.dY, ctx.task
        tk.store_read_wait(0)
        tk.store(S[me], state.s)
        tk.fence_async()
        x = tk.mm_AB(input.Q, task.MQ, wait=False)
        x, h = tk.mma_wait(x, tk.mm_ABt(input.Y, S[me], wait=False))
        dy, both, alpha = ctx.config._of_features(ctx, state, input, x, h)
        tk.store(dY[me], dy)
        tk.fence_async()
        tk.sync_consumers(ctx)
        q, map = tk.subtile(input.Q, 64, 64, 0, me), tk.subtile(task.MQ, 64, 64, me, 0)
        dq = tk.mma_ABt(dY[1], map, tk.mm_ABt(dY[0], map, wait=False), wait=False)
        dm = tk.mma_AtB(q, dY[1], tk.mma_AtB(q, dY[0], state.dm, wait=False), wait=False)
        if ctx.config.reverse:
            dv = tk.mm_AB(both[0], half(S[0], me), wait=False)
            dq, dm, dv = tk.mma_wait(dq, dm, tk.mma_AB(both[1], half(S[1], me), dv, wait=False))
        else:
            dq, dm = tk.mma_wait(dq, dm)
        x = tk.mm_AB(input.K, task.MK, wait=False)
        tk.sync_consumers(ctx)  # now the tiles are free
        tk.store(dY[me], dq)
        if ctx.config.reverse:
            tk.store(half(S[me], 1), dv)
        s = ctx.config._with_block(ctx, state.s, input, tk.mma_wait(x))
        own = own_block(ctx)
        if own >= 0:
            home = ctx.sequence, ctx.head, own, me
            tk.store_async(ctx.globals.dQ, dY[me], home)
            if ctx.config.reverse:
                tk.store_async(ctx.globals.dV, half(S[me], 1), home)
        return tk.struct(s=s, dm=dm, alpha=alpha)

    @triton.jit
    def finish(ctx, state, epilogue):
        home = ctx.home, ctx.head, ctx.consumer, 0
        tk.store(ctx.globals.dM, state.dm, home)
        if not ctx.config.reverse:
            tk.store(ctx.globals.dALPHA, state.alpha, (ctx.consumer, ctx.home, ctx.head, 0))
        if ctx.config.ends_wanted:
            tk.store(ctx.globals.S1, state.s, home)
            tk.store(ctx.globals.Z1, tk.load(ctx.scratch.Z), (ctx.home, ctx.head, ctx.consumer))


class WindowGradients(Gradients, tk.lcf):
    """Adds to dQ and dV. Without `reverse`, dBETA: (segments, heads, 64) fp32, parts of the gradient of beta. It also
    writes m and its key, which keys need, to B.

    Each consumer has 64 columns of the gradients, and computes all scores.
    """

    cut: bool = True

    def layout(self) -> tk.layout:
        rows, numbers, keys = tk.st(self.dtype, 64, 128), tk.sv(tk.fp32, 256), tk.sv(tk.fp32, 128)
        others = dict(K_other=rows, V_other=rows)
        if self.reverse:
            others |= dict(KEYS=keys, B_other=numbers, KEYS_other=keys)
        return self.chunked(
            {
                **self.tiles, "B": (numbers, keys), "ALPHA": None, "BETA": None, **self.found,
                **({} if self.reverse else {"dBETA": None}),
            },
            input={**self.tiles, "B": numbers, **others},
            scratch=dict(O=tk.st(self.dtype, 64, 64)),
        )  # fmt: skip

    @triton.jit
    def load(ctx, input):
        own, (other, _) = own_block(ctx), other_block(ctx)
        tk.load_async(input.Q, ctx.globals.Q, place(ctx, own), input.full)
        tk.load_async(input.Y, ctx.globals.Y, place(ctx, own), input.full)
        tk.load_async(input.K, ctx.globals.K, place(ctx, own), input.full)
        tk.load_async(input.V, ctx.globals.V, place(ctx, own), input.full)
        tk.load_async(input.B, ctx.globals.B, place_of_numbers(ctx, own), input.full)
        tk.load_async(input.K_other, ctx.globals.K, place(ctx, other), input.full)
        tk.load_async(input.V_other, ctx.globals.V, place(ctx, other), input.full)
        if ctx.config.reverse:
            tk.load_async(input.KEYS, ctx.globals.B, place_of_numbers(ctx, own, 2), input.full)
            tk.load_async(input.B_other, ctx.globals.B, place_of_numbers(ctx, other), input.full)
            tk.load_async(input.KEYS_other, ctx.globals.B, place_of_numbers(ctx, other, 2), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(beta=tk.zero(OF_ROWS))

    @triton.jit
    def _weights(ctx, input):
        """The weights of queries without their factors, those of the own block and of the one before, and the numbers
        of the keys of maxima."""
        own = tk.mm_ABt(input.Q, input.K, wait=False)
        own, other = tk.mma_wait(own, tk.mm_ABt(input.Q, input.K_other, wait=False))
        own, other = tk.make_causal(own), other + tl.where(other_block(ctx)[1], 0.0, float("-inf"))
        most_other = tk.row_max(other)
        most = tk.row_max(own, accumulate=most_other)
        key = tl.where(most > most_other, tk.row_argmax(own) + 64, tk.row_argmax(other))
        most *= TO_BASE_2
        number = most if ctx.consumer == 0 else tk.cast(key, tk.fp32)
        tk.store(ctx.globals.B, number, (ctx.head, ctx.first + own_block(ctx), 4 + ctx.consumer))
        return (tk.exp2_row(own, TO_BASE_2, most), tk.exp2_row(other, TO_BASE_2, most)), key

    @triton.jit
    def _of_queries(ctx, state, input):
        """(this consumer's columns of the gradient of Q, the parts of beta)."""
        weights, key = ctx.config._weights(ctx, input)
        of_t, of_o = tk.load(input.B, OF_ROWS, 0), tk.load(input.B, OF_ROWS, OF_O)
        most = tk.load(input.B, OF_ROWS, OF_MOST) + tk.load(input.B, OF_ROWS, OF_MOST + 64)
        most, factor = most * (ctx.params.alpha * SCALE), of_t * (ctx.params.beta * SCALE)
        dq, beta = tk.zero(SQUARE), state.beta
        for i in tl.static_range(2):
            k, v = (input.K, input.V) if i == 0 else (input.K_other, input.V_other)
            ds = weights[i] * tk.sub_row(tk.mm_ABt(input.Y, v), of_o)
            beta += tk.row_sum(ds) * of_t
            ds = tk.mul_row(ds, factor)
            is_most = tk.eq_row(tk.iota(SQUARE, 1, 64 - 64 * i), key)
            ds = tk.cast(ds + tk.where(is_most, tk.broadcast_row(ds, most), 0.0), ctx.config.dtype)
            dq = tk.mma_AB(ds, tk.subtile(k, 64, 64, 0, ctx.consumer), dq)
        return dq, beta

    @triton.jit
    def _of_keys(ctx, input):
        """This consumer's columns of the gradients of Q and Y, which are keys and values."""
        me: tl.constexpr = ctx.consumer
        DTYPE: tl.constexpr = ctx.config.dtype
        dq, dv = tk.zero(SQUARE), tk.zero(SQUARE)
        for i in tl.static_range(2):
            k, v = (input.K, input.V) if i == 0 else (input.K_other, input.V_other)
            numbers, keys = (input.B, input.KEYS) if i == 0 else (input.B_other, input.KEYS_other)
            s = tk.mm_ABt(input.Q, k, wait=False)
            s, p = tk.mma_wait(s, tk.mm_ABt(input.Y, v, wait=False))
            exists = 1.0 if i == 0 else tl.where(other_block(ctx)[1], 1.0, 0.0)
            s = tk.make_causal_t(s) if i == 0 else s + tl.where(exists > 0, 0.0, float("-inf"))
            factor = tk.load(numbers, OF_FEATURES, 0) * ctx.params.beta
            w = tk.mul_col(tk.exp2_col(s, TO_BASE_2, tk.load(keys, OF_FEATURES, 0)), factor)
            dv = tk.mma_AB(tk.cast(w, DTYPE), tk.subtile(v, 64, 64, 0, me), dv, wait=False)
            ds = w * tk.sub_col(p, tk.load(numbers, OF_FEATURES, OF_O)) * SCALE
            most = tk.load(numbers, OF_FEATURES, OF_MOST) + tk.load(numbers, OF_FEATURES, OF_MOST + 64)
            key = tk.cast(tk.load(keys, OF_FEATURES, OF_KEY), tk.int32)
            is_most = tk.eq_col(tk.iota(SQUARE, 0, 64 - 64 * i), key)
            ds += tk.where(is_most, tk.broadcast_col(ds, most * (ctx.params.alpha * SCALE * exists)), 0.0)
            dq = tk.mma_AB(tk.cast(ds, DTYPE), tk.subtile(k, 64, 64, 0, me), dq, wait=False)
            dq, dv = tk.mma_wait(dq, dv)
        return dq, dv

    @triton.jit
    def compute(ctx, state, input):
        home, staged = (ctx.sequence, ctx.head, own_block(ctx), ctx.consumer), ctx.scratch.O
        beta = state.beta
        if ctx.config.reverse:
            dq, dv = ctx.config._of_keys(ctx, input)
            tk.store_read_wait(0)
            tk.store(staged, dv)
            tk.fence_async()
            tk.store_add_async(ctx.globals.dV, staged, home)
        else:
            dq, beta = ctx.config._of_queries(ctx, state, input)
        tk.store_read_wait(0)
        tk.store(staged, dq)
        tk.fence_async()
        tk.store_add_async(ctx.globals.dQ, staged, home)
        return state.replace(beta=beta)

    @triton.jit
    def finish(ctx, state, epilogue):
        if not ctx.config.reverse:
            if ctx.consumer == 0:
                tk.store(ctx.globals.dBETA, state.beta, (ctx.home, ctx.head, 0))
