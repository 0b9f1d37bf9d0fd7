"""Based, chunk by chunk: oᵢ = Σ_{j ≤ i} (1 + x + x²/2) vⱼ with x = scale · qᵢ·kⱼ.

The weights are products of features: φ(q) · φ(k), where φ(k) = [kᵢ kⱼ for all pairs i ≤ j, kᵢ, 1]. What earlier chunks
leave is the state S = Σⱼ φ(kⱼ) vⱼᵀ, 192 rows in three pieces of 64. Rows 16·d + i, with d up to 8, belong to
kᵢ k_{i+d mod 16}: with d = 8 each pair occurs twice. Rows 144 … 159 belong to kᵢ, row 160 to 1, the others are 0.

The tensor cores form the features: products with maps of 0 and 1 select columns, exactly. Row i + 16·d of the first map
selects column i, and of the three others column i + d.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.linear_attention.device.chunks import Chunks, load_rows, place_of_keys

KEYS: tl.constexpr = tl.constexpr(16)  # columns of q and k
PIECE: tl.constexpr = tl.constexpr(64)  # features of a piece


@triton.jit
def map_of(ctx, number):
    """The map that all pieces share (0), or that of a piece (1 … 3)."""
    return tk.subtile(ctx.task.MAPS, PIECE, KEYS, number)


@triton.jit
def place_of_piece(ctx, piece):
    """The coordinates of a piece of a consumer's state."""
    return ctx.home, ctx.head, piece, ctx.col * ctx.config.consumers + ctx.consumer


@triton.jit
def add_chunk(ctx, state, input):
    """The state after a chunk: that of each piece, with φ(k)ᵀ (features, rows) in registers."""
    DTYPE: tl.constexpr = ctx.config.dtype
    OF_ROWS: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, PIECE, PIECE))
    v = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer)
    u = tk.mm_ABt(map_of(ctx, 0), input.K, wait=False)
    a = tk.mm_ABt(map_of(ctx, 1), input.K, wait=False)
    u, a = tk.mma_wait(u, a)
    b = tk.mm_ABt(map_of(ctx, 2), input.K, wait=False)
    s_a = tk.mma_AB(tk.cast(u * a, DTYPE), v, state.a, wait=False)
    b = tk.mma_wait(b, leave=(s_a,))
    c = tk.mm_ABt(map_of(ctx, 3), input.K, wait=False)
    s_b = tk.mma_AB(tk.cast(u * b, DTYPE), v, state.b, wait=False)
    s_a, c = tk.mma_wait(s_a, c, leave=(s_b,))
    one, constant = tk.load(ctx.task.NUMBERS, OF_ROWS, PIECE), tk.load(ctx.task.NUMBERS, OF_ROWS, 2 * PIECE)
    c = tk.add_row(u * tk.add_row(c, one), constant)
    c = tk.cast(c, DTYPE)
    s_c = tk.mma_AB(c, v, state.c, wait=False)
    if ctx.config.normalized:
        z = tk.mma_AB(c, input.K, state.z, wait=False)
        s_b, s_c, z = tk.mma_wait(s_b, s_c, z)
        count = tk.cast(tl.minimum(ctx.sequence.rows - 64 * ctx.iter, 64), tk.fp32)
        state = state.replace(z=tk.add_row(z, tk.load(ctx.task.NUMBERS, OF_ROWS, 3 * PIECE) * count))
    else:
        s_b, s_c = tk.mma_wait(s_b, s_c)
    return state.replace(a=s_a, b=s_b, c=s_c)


@triton.jit
def store_state(ctx, S, state):
    """Store the state in S (states, heads, 192, value columns)."""
    tk.store(S, state.a, place_of_piece(ctx, 0))
    tk.store(S, state.b, place_of_piece(ctx, 1))
    tk.store(S, state.c, place_of_piece(ctx, 2))


@triton.jit
def store_sums(ctx, Z, state):
    """Store sums of keys in Z (states, heads, 64, 16)."""
    if ctx.col + ctx.consumer == 0:
        tk.store(Z, state.z, (ctx.home, ctx.head, 0, 0))


@triton.jit
def shifted_queries(ctx, input, shift):
    """q with its columns shifted."""
    return tk.mm_ABt(input.Q, tk.subtile(ctx.task.MAPS, KEYS, KEYS, 4 + shift), wait=False)


@triton.jit
def pairs_of(ctx, q, shifted, shift: tl.constexpr):
    """Products of pairs i, i + shift as factors of x²/2: i < j twice, and of the last shift each pair is there
    twice."""
    factor = ctx.args.scale * ctx.args.scale
    if shift == 0 or shift == 8:
        factor *= 0.5
    return tk.cast(q * factor * shifted, ctx.config.dtype)


class FeatureChunks(Chunks):
    """MAPS: (256, 16). NUMBERS: (256,) fp32, four vectors for the 64 rows of the third piece of a state: factors
    where it is multiplied, what features have added to their factors and to the products, and what a row adds to sums.

    S0: (states, heads, 192, value columns). Z0 (`normalized`): (states, heads, 64, 16), sums over the rows before: rows
    16 … 31 have that of k kᵀ, row 32 that of k, row 48 their number.
    """

    normalized: bool = False

    @property
    def maps(self) -> dict[str, Any]:
        """Tiles of constants."""
        return dict(MAPS=tk.st(self.dtype, 4 * 64, 16), NUMBERS=tk.sv(tk.fp32, 256))

    @property
    def before(self) -> dict[str, None]:
        """The tensors of states before but S0."""
        return {"Z0": None} if self.normalized and self.begins else {}

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.MAPS, ctx.globals.MAPS, (0, 0), task.full)
        tk.load_async(task.NUMBERS, ctx.globals.NUMBERS, (0,), task.full)

    @triton.jit
    def start(ctx):
        s = tk.rt(tk.fp32, PIECE, ctx.config.cols)
        if ctx.config.begins:
            state = tk.struct(
                a=tk.load(ctx.globals.S0, s, place_of_piece(ctx, 0)),
                b=tk.load(ctx.globals.S0, s, place_of_piece(ctx, 1)),
                c=tk.load(ctx.globals.S0, s, place_of_piece(ctx, 2)),
            )
        else:
            state = tk.struct(a=tk.zero(s), b=tk.zero(s), c=tk.zero(s))
        if ctx.config.normalized:
            z = tk.rt(tk.fp32, PIECE, KEYS)
            if ctx.config.begins:
                return tk.with_field(state, "z", tk.load(ctx.globals.Z0, z, (ctx.home, ctx.head, 0, 0)))
            else:
                return tk.with_field(state, "z", tk.zero(z))
        else:
            return state


class BasedStates(FeatureChunks, tk.lcf):
    """S: (segments, heads, 192, value columns) fp32, what each segment adds to the state, and with `normalized` ZS
    (segments, heads, 64, 16)."""

    def layout(self) -> tk.layout:
        states = {"S": None, **({"ZS": None} if self.normalized else {})}
        return self.chunked({**self.operands, **self.maps, **states}, input=self.operands, task=self.maps, per="block")

    @triton.jit
    def load(ctx, input):
        load_rows(ctx, input)

    @triton.jit
    def compute(ctx, state, input):
        return add_chunk(ctx, state, input)

    @triton.jit
    def finish(ctx, state, epilogue):
        store_state(ctx, ctx.globals.S, state)
        if ctx.config.normalized:
            store_sums(ctx, ctx.globals.ZS, state)


class Based(FeatureChunks, tk.lcsf):
    """S1 and Z1: the states after (`ends_wanted`), as S0 and Z0. `normalized`: results are divided by the sums of their
    weights."""

    ends_wanted: bool = False

    def layout(self) -> tk.layout:
        loaded = dict(Q=tk.st(self.dtype, 64, self.key_dim), **self.operands)
        after = ("S1", "Z1")[: 1 + self.normalized] if self.ends_wanted else ()
        sums = dict(Z=tk.st(self.dtype, 64, 16), COUNT=tk.sv(tk.fp32, 64)) if self.normalized else {}
        return self.chunked(
            dict(**loaded, **self.maps, O=self.operands["V"], **dict.fromkeys(after), **self.before),
            input=loaded,
            task=self.maps,
            per="block",
            scratch=dict(S=tk.st(self.dtype, 3 * 64, self.cols), **sums),
            output=dict(O=self.operands["V"]),
        )

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        load_rows(ctx, input)

    @triton.jit
    def _write_state(ctx, state):
        """Write the state to be multiplied; the factors of pairs are those of `_of_earlier_chunks`."""
        OF_ROWS: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, PIECE, ctx.config.cols))
        COLS: tl.constexpr = ctx.config.cols
        S, factors = ctx.scratch.S, tk.load(ctx.task.NUMBERS, OF_ROWS, 0)
        tk.store(tk.subtile(S, PIECE, COLS, 0), state.a)
        tk.store(tk.subtile(S, PIECE, COLS, 1), state.b)
        tk.store(tk.subtile(S, PIECE, COLS, 2), tk.mul_row(state.c, factors))
        if ctx.config.normalized:
            tk.store(ctx.scratch.Z, tk.mul_row(state.z, factors))
            tk.store(ctx.scratch.COUNT, tk.row_max(state.z))
        tk.fence_async()

    @triton.jit
    def _of_earlier_chunks(ctx, input):
        """φ(q) times the state, 16 features at a time: those of pairs, of q and of 1."""
        COLS: tl.constexpr = ctx.config.cols
        DTYPE: tl.constexpr = ctx.config.dtype
        S, q = ctx.scratch.S, tk.cast(tk.load(input.Q), tk.fp32)
        a, b, c = shifted_queries(ctx, input, 0), shifted_queries(ctx, input, 1), shifted_queries(ctx, input, 2)
        o = tk.mm_AB(tk.one(tk.rt(DTYPE, 64, KEYS)), tk.subtile(S, KEYS, COLS, 10), wait=False)
        o = tk.mma_AB(input.Q, tk.subtile(S, KEYS, COLS, 9), o, wait=False)
        for i in tl.static_range(0, 9, 3):
            a, b, c = tk.mma_wait(a, b, c, leave=(o,))
            p_a, p_b, p_c = pairs_of(ctx, q, a, i), pairs_of(ctx, q, b, i + 1), pairs_of(ctx, q, c, i + 2)
            if i < 6:
                a, b = shifted_queries(ctx, input, i + 3), shifted_queries(ctx, input, i + 4)
                c = shifted_queries(ctx, input, i + 5)
            o = tk.mma_AB(p_a, tk.subtile(S, KEYS, COLS, i), o, wait=False)
            o = tk.mma_AB(p_b, tk.subtile(S, KEYS, COLS, i + 1), o, wait=False)
            o = tk.mma_AB(p_c, tk.subtile(S, KEYS, COLS, i + 2), o, wait=False)
        return o

    @triton.jit
    def _normalized(ctx, input, o, p):
        """Results divided by the sums of their weights: those of the chunk's rows are p, those of earlier rows with
        sums M of k kᵀ and z of k are n + scale · (q·z + scale · qᵀMq / 2)."""
        Z, TWO = ctx.scratch.Z, tk.full(tk.rt(ctx.config.dtype, 64, KEYS), 2.0)
        w = tk.mm_AB(input.Q, tk.subtile(Z, KEYS, KEYS, 1), wait=False)
        w = tk.mma_AB(TWO, tk.subtile(Z, KEYS, KEYS, 2), w)
        earlier = tk.row_sum(w * tk.cast(tk.load(input.Q), tk.fp32)) * (0.5 * ctx.args.scale)
        earlier = tk.row_max(tk.broadcast_row(p, earlier))  # in the layout of the rows of p
        return tk.div_row(o, tk.row_sum(p) + earlier + (tk.load_scalar(ctx.scratch.COUNT, 48) + 1e-6))

    @triton.jit
    def compute(ctx, state, input, output):
        ctx.config._write_state(ctx, state)
        o = ctx.config._of_earlier_chunks(ctx, input)
        o, x = tk.mma_wait(o, tk.mm_ABt(input.Q, input.K, wait=False))
        x = x * ctx.args.scale + 1.0
        p = tk.tril(x * x * 0.5 + 0.5)
        v = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer)
        o = tk.mma_AB(tk.cast(p, ctx.config.dtype), v, o)
        if ctx.config.normalized:
            o = ctx.config._normalized(ctx, input, o, p)
        tk.store(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer), o)
        return add_chunk(ctx, state, input)

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.O, output.O, (ctx.sequence, ctx.head, ctx.iter, ctx.col))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            store_state(ctx, ctx.globals.S1, state)
            if ctx.config.normalized:
                store_sums(ctx, ctx.globals.Z1, state)
