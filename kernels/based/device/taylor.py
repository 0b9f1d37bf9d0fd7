"""Based, chunk by chunk: oᵢ = Σ_{j ≤ i} (1 + x + x²/2) vⱼ with x = scale · qᵢ·kⱼ, and the gradient of q.

The weights are φ(q) · F φ(k) with features φ(k) = [kᵢ kⱼ for all pairs i ≤ j, kᵢ, 1] and factors F. What earlier chunks
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
from tritonkittens.kernels.linear_attention.device.chunks import (
    Chunks,
    LinearAttention,
    causal,
    chunk,
    load_rows,
    place_of_keys,
)

KEYS: tl.constexpr = tl.constexpr(16)  # columns of q and k
OF_FEATURES: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, 64, 64))  # a number for each feature of a piece


@triton.jit
def map_of(ctx, number):
    """The map that all pieces share (0), or that of a piece (1 … 3)."""
    return tk.subtile(ctx.task.MAPS, 64, KEYS, number)


@triton.jit
def numbers(ctx, number, vector: tl.constexpr):
    """64 of the numbers for features."""
    return tk.load(tk.subvector(ctx.task.NUMBERS, 64, number), vector)


@triton.jit
def add_chunk(ctx, state, input):
    """The state after a chunk, with φ(k)ᵀ (features, rows) in registers."""
    v, s = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer), ()
    first = tk.mm_ABt(map_of(ctx, 0), input.K, wait=False)
    first, second = tk.mma_wait(first, tk.mm_ABt(map_of(ctx, 1), input.K, wait=False))
    for i in tl.static_range(3):
        second = tk.add_row(second, numbers(ctx, 3, OF_FEATURES)) if i == 2 else second
        f = first * second
        f = tk.cast(tk.add_row(f, numbers(ctx, 4, OF_FEATURES)) if i == 2 else f, ctx.config.dtype)
        if i < 2:
            second = tk.mm_ABt(map_of(ctx, i + 2), input.K, wait=False)
        s += (tk.mma_AB(f, v, state.s[i], wait=False),)
        if i < 2:
            second = tk.mma_wait(second, leave=s[i])
    if ctx.config.normalized:
        z = tk.mma_AB(f, input.K, state.z, wait=False)
        a, b, c, z = tk.mma_wait(s[0], s[1], s[2], z)
        rows = tk.cast(tl.minimum(ctx.sequence.rows - 64 * chunk(ctx), 64), tk.fp32)
        return tk.struct(s=(a, b, c), z=tk.add_row(z, numbers(ctx, 5, OF_FEATURES) * rows))
    else:
        return tk.struct(s=tk.mma_wait(s[0], s[1], s[2]))


@triton.jit
def write_state(ctx, state):
    """Write F S, to be multiplied."""
    OF_ROWS: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, 64, ctx.config.cols))
    for i in tl.static_range(3):
        s = tk.mul_row(state.s[i], numbers(ctx, i, OF_ROWS))
        tk.store(tk.subtile(ctx.scratch.S, 64, ctx.config.cols, i), s)
    if ctx.config.normalized:
        tk.store(ctx.scratch.Z, tk.mul_row(state.z, numbers(ctx, 2, OF_FEATURES)))
        tk.store(ctx.scratch.COUNT, tk.row_max(state.z))
    tk.fence_async()


@triton.jit
def shift_map(ctx, shift):
    """The map whose row i selects column i + shift."""
    return tk.subtile(ctx.task.MAPS, KEYS, KEYS, 4 + shift)


@triton.jit
def shifted_queries(ctx, input, shift):
    """q with its columns shifted."""
    return tk.mm_ABt(input.Q, shift_map(ctx, shift), wait=False)


@triton.jit
def place_of_piece(ctx, piece):
    """The coordinates of a piece of a consumer's state."""
    return ctx.home, ctx.head, piece, ctx.col * ctx.config.consumers + ctx.consumer


class FeatureChunks(Chunks):
    """MAPS: (256, 16). NUMBERS: (384,) fp32, for each feature of a piece: the factors F; then, for those of the third
    piece, what is added to the second factors of products, to products, and to sums for each row.

    S0: (states, heads, 192, value columns). Z0 (`normalized`): (states, heads, 64, 16), sums over the rows before: rows
    16 … 31 have that of k kᵀ, row 32 that of k, row 48 their number. S1 and Z1: the states after (`ends_wanted`).
    """

    normalized: bool = False
    ends_wanted: bool = False

    def featured(self, tensors: dict[str, Any], **fields: Any) -> tk.layout:
        """A layout with maps, numbers and states after tensors of rows."""
        maps = dict(MAPS=tk.st(self.dtype, 4 * 64, 16), NUMBERS=tk.sv(tk.fp32, 384))
        names = [*(["S1", "Z1"] if self.ends_wanted else []), *(["Z0"] if self.begins else [])]
        states = dict.fromkeys(n for n in names if self.normalized or n == "S1")
        return self.chunked({**tensors, **maps, **states}, task=maps, per="block", **fields)

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.MAPS, ctx.globals.MAPS, (0, 0), task.full)
        tk.load_async(task.NUMBERS, ctx.globals.NUMBERS, (0,), task.full)

    @triton.jit
    def start(ctx):
        TILE: tl.constexpr = tk.rt(tk.fp32, 64, ctx.config.cols)
        Z: tl.constexpr = tk.rt(tk.fp32, 64, KEYS)
        s = ()
        for i in tl.static_range(3):
            s += (tk.load(ctx.globals.S0, TILE, place_of_piece(ctx, i)) if ctx.config.begins else tk.zero(TILE),)
        if not ctx.config.normalized:
            return tk.struct(s=s)
        else:
            z = tk.load(ctx.globals.Z0, Z, (ctx.home, ctx.head, 0, 0)) if ctx.config.begins else tk.zero(Z)
            return tk.struct(s=s, z=z)

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            for i in tl.static_range(3):
                tk.store(ctx.globals.S1, state.s[i], place_of_piece(ctx, i))
            if ctx.config.normalized:
                if ctx.col + ctx.consumer == 0:
                    tk.store(ctx.globals.Z1, state.z, (ctx.home, ctx.head, 0, 0))


class BasedStates(FeatureChunks, tk.lcf):
    """S1 and Z1: what each segment adds to the state."""

    ends_wanted: bool = True

    def layout(self) -> tk.layout:
        return self.featured(self.operands, input=self.operands)

    @triton.jit
    def load(ctx, input):
        load_rows(ctx, input)

    @triton.jit
    def compute(ctx, state, input):
        return add_chunk(ctx, state, input)


class Based(FeatureChunks, LinearAttention):
    """`normalized`: results are divided by the sums of their weights."""

    def layout(self) -> tk.layout:
        sums = dict(Z=tk.st(self.dtype, 64, 16), COUNT=tk.sv(tk.fp32, 64)) if self.normalized else {}
        return self.featured(
            {**self.loaded, "O": self.operands["V"]},
            input=self.loaded,
            scratch=dict(S=tk.st(self.dtype, 3 * 64, self.cols), **sums),
            output=dict(O=self.operands["V"]),
        )

    @triton.jit
    def _of_earlier_chunks(ctx, input):
        """φ(q) F S, 16 features at a time: 1, those of q, and pairs."""
        COLS: tl.constexpr = ctx.config.cols
        S, q = ctx.scratch.S, tk.cast(tk.load(input.Q), tk.fp32)
        o = tk.mm_AB(tk.one(tk.rt(ctx.config.dtype, 64, KEYS)), tk.subtile(S, KEYS, COLS, 10), wait=False)
        shifted = shifted_queries(ctx, input, 0)
        o = tk.mma_AB(input.Q, tk.subtile(S, KEYS, COLS, 9), o, wait=False)
        for i in tl.static_range(9):
            f = tk.cast(q * tk.mma_wait(shifted, leave=(o,)), ctx.config.dtype)
            if i < 8:
                shifted = shifted_queries(ctx, input, i + 1)
            o = tk.mma_AB(f, tk.subtile(S, KEYS, COLS, i), o, wait=False)
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
        write_state(ctx, state)
        o = ctx.config._of_earlier_chunks(ctx, input)
        o, x = tk.mma_wait(o, tk.mm_ABt(input.Q, input.K, wait=False))
        x = x * ctx.args.scale + 1.0
        p = causal(ctx, input, x * x * 0.5 + 0.5)
        o = tk.mma_AB(tk.cast(p, ctx.config.dtype), tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer), o)
        o = ctx.config._normalized(ctx, input, o, p) if ctx.config.normalized else o
        tk.store(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer), o)
        return add_chunk(ctx, state, input)


class BasedGradient(FeatureChunks, LinearAttention):
    """O: (heads, rows, 16 columns for each 64 of V), scale · Σ_{j ≤ i} (yᵢ·vⱼ) (1 + x) kⱼ: the gradient of q where Y,
    as V, is that of the results.

    The gradient of k is the same, with q and k, and v and y, in each other's place and time reversed.
    """

    consumers: int = 1

    def layout(self) -> tk.layout:
        loaded, of_keys = dict(**self.loaded, Y=self.operands["V"]), dict(O=self.operands["K"])
        scratch = dict(S=tk.st(self.dtype, 3 * 64, self.cols))
        return self.featured({**loaded, **of_keys}, input=loaded, scratch=scratch, output=of_keys)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        tk.load_async(input.Y, ctx.globals.Y, (ctx.sequence, ctx.head, chunk(ctx), ctx.col), input.full)
        load_rows(ctx, input)

    @triton.jit
    def _of_earlier_chunks(ctx, input):
        """y (F S)ᵀ ∂φ(q)/∂q, 16 features at a time: those of q, and products of pairs, derived by both factors."""
        q, dq = tk.cast(tk.load(input.Q), tk.fp32), tk.zero(tk.rt(tk.fp32, 64, KEYS))
        for piece in tl.static_range(3):
            y = tk.split_cols(tk.mm_ABt(input.Y, tk.subtile(ctx.scratch.S, 64, ctx.config.cols, piece)), KEYS)
            for j in tl.static_range(4):
                if 4 * piece + j < 9:
                    dq += y[j] * tk.mma_wait(shifted_queries(ctx, input, 4 * piece + j))
                    dq = tk.mma_AB(tk.cast(y[j] * q, ctx.config.dtype), shift_map(ctx, 4 * piece + j), dq)
                elif 4 * piece + j == 9:
                    dq += y[j]
        return dq

    @triton.jit
    def compute(ctx, state, input, output):
        write_state(ctx, state)
        dq = ctx.config._of_earlier_chunks(ctx, input)
        p = tk.mm_ABt(input.Y, input.V, wait=False)
        p, x = tk.mma_wait(p, tk.mm_ABt(input.Q, input.K, wait=False))
        p = causal(ctx, input, p * (x * ctx.args.scale + 1.0)) * ctx.args.scale
        tk.store(output.O, tk.mma_AB(tk.cast(p, ctx.config.dtype), input.K, dq))
        return add_chunk(ctx, state, input)
