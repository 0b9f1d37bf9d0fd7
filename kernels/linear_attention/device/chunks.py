"""Causal linear attention with decays, chunk by chunk: oᵢ = Σ_{j ≤ i} λ^{i-j} (qᵢ·kⱼ) vⱼ, and what a state adds to it.

What earlier chunks leave is a matrix, the state Sᵀ = Σⱼ λ^{last-j} vⱼ kⱼᵀ. Long sequences are cut into segments that
run at once: `SegmentStates` computes what each adds to the state, `carry_states` the state before each.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel


class Chunks:
    """What both templates share: a task is a segment of a sequence, a head and a block of columns of V, an iteration a
    chunk of `rows` positions.

    K: (H, rows of all sequences, key_dim), V: with value columns. Segments have `span` rows. `ends`: (sequences,)
    int32; without, all sequences have `length` rows (`uniform`). decay: (H,) fp32, -log₂ λ. `reverse`: time runs from
    the last row to the first.

    Consumers share the columns of V. The state of each stays in registers, in fp32.
    """

    dtype: tl.dtype = tk.bf16
    consumers: int = 2
    rows: int = 64
    key_dim: int = 128
    value_dim: int = 128
    decayed: bool = True
    uniform: bool = True
    cut: bool = False  # whether states are those of segments, not of sequences
    most: int = 16  # a power of two, at least the number of sequences that are not uniform
    reverse: bool = False

    @property
    def cols(self) -> int:
        """Columns of V of a consumer."""
        return self.value_dim // self.consumers

    def plan(self, **fields: Any) -> tk.layout:
        """The layout, with what both templates need."""
        globals_ = fields.pop("globals")
        k, v = tk.st(self.dtype, self.rows, self.key_dim), tk.st(self.dtype, self.rows, self.value_dim)
        optional = {"ends": not self.uniform, "decay": self.decayed}
        return tk.layout(
            globals=dict(K=k, V=v, **globals_, **{name: None for name, there in optional.items() if there}),
            args=("span", "length", "total", *(("scale",) if "Q" in globals_ else ())),
            ragged=("K", "V", *(name for name in ("Q", "O") if name in globals_)),
            **fields,
        )

    @triton.jit
    def setup(ctx):
        heads, blocks = tk.extent(ctx.globals.K, 0), tk.ceil_div(tk.extent(ctx.globals.V, 2), ctx.config.value_dim)
        total, span, segment = ctx.args.total, ctx.args.span, ctx.task_id // (blocks * heads)
        if ctx.config.uniform:
            of_each = tk.ceil_div(ctx.args.length, span)
            begin, length = segment // of_each * ctx.args.length, ctx.args.length
            number, first, more = segment // of_each, segment // of_each * of_each, begin < total
        else:
            number, rows, first = tk.sequence_of_tile(ctx.globals.ends, segment, span, total, ctx.config.most)
            begin, length, more = rows.begin, rows.rows, number < tk.extent(ctx.globals.ends, 0)
        before = (segment - first) * span
        length = tl.minimum(length - before, span)
        return tk.task(
            tk.ceil_div(length, ctx.config.rows),
            when=more,
            sequence=tk.sequence(begin + before, length),
            home=segment if ctx.config.cut else number,
            head=ctx.task_id // blocks % heads,
            col=ctx.task_id % blocks,
        )

    @triton.jit
    def start(ctx):
        rate = tk.load_scalar(ctx.globals.decay, (ctx.head,)) if ctx.config.decayed else 0.0
        return tk.struct(s=ctx.config._before(ctx, tk.rt(tk.fp32, ctx.config.cols, ctx.config.key_dim)), rate=rate)


@triton.jit
def chunk(ctx):
    """The chunk of this iteration."""
    return ctx.iterations - 1 - ctx.iter if ctx.config.reverse else ctx.iter


@triton.jit
def times(ctx):
    """(rows of this chunk, the times of a chunk's rows, a vector)."""
    rows = tl.minimum(ctx.sequence.rows - chunk(ctx) * ctx.config.rows, ctx.config.rows)
    i = tk.iota(tk.col_vec(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols)))
    return rows, tk.cast(rows - 1 - i if ctx.config.reverse else i, tk.fp32)


@triton.jit
def weigh(ctx, v, rate):
    """The consumer's columns of V with the weights that they have in the state after the chunk, where they are an
    operand after a fence."""
    if ctx.config.decayed:
        rows, time = times(ctx)
        weights = tk.exp2(tk.maximum(rows - 1 - time, 0) * -rate)
        tk.store(ctx.scratch.V, tk.mul_row(tk.cast(tk.load(v), tk.fp32), weights))
        return ctx.scratch.V
    else:
        return v


@triton.jit
def add_chunk(ctx, s, weighted, k, rate):
    """The state after the chunk, its product in flight."""
    s *= tl.exp2(-rate * times(ctx)[0]) if ctx.config.decayed else 1.0
    return tk.mma_AtB(weighted, k, s, wait=False)


class SegmentStates(Chunks, tk.lcf):
    """S: (segments, H, value columns, key_dim) fp32, what each segment adds to the state."""

    def layout(self) -> tk.layout:
        weighted = dict(V=tk.st(self.dtype, self.rows, self.cols)) if self.decayed else {}
        k, v = tk.st(self.dtype, self.rows, self.key_dim), tk.st(self.dtype, self.rows, self.value_dim)
        return self.plan(globals=dict(S=None), input=dict(K=k, V=v), scratch=weighted)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.K, ctx.globals.K, (ctx.sequence, ctx.head, chunk(ctx), 0), input.full)
        tk.load_async(input.V, ctx.globals.V, (ctx.sequence, ctx.head, chunk(ctx), ctx.col), input.full)

    @triton.jit
    def _before(ctx, s):
        return tk.zero(s)

    @triton.jit
    def compute(ctx, state, input):
        weighted = weigh(ctx, tk.subtile(input.V, ctx.config.rows, ctx.config.cols, 0, ctx.consumer), state.rate)
        tk.fence_async()
        return state.replace(s=tk.mma_wait(add_chunk(ctx, state.s, weighted, input.K, state.rate)))

    @triton.jit
    def finish(ctx, state, epilogue):
        place = (ctx.home, ctx.head, ctx.col * ctx.config.consumers + ctx.consumer, 0)
        tk.store(ctx.globals.S, state.s, place)


class LinearAttention(Chunks, tk.lcsf):
    """Q and O: as K and V. S0: (segments, H, value columns, key_dim) fp32, the states before (`begins`). S1: those
    after (`ends_wanted`)."""

    begins: bool = False
    ends_wanted: bool = False

    def layout(self) -> tk.layout:
        k, v = tk.st(self.dtype, self.rows, self.key_dim), tk.st(self.dtype, self.rows, self.value_dim)
        states = {"S0": self.begins, "S1": self.ends_wanted}
        weighted = dict(V=tk.st(self.dtype, self.rows, self.cols)) if self.decayed else {}
        return self.plan(
            globals=dict(Q=k, O=v, **{name: None for name, there in states.items() if there}),
            input=dict(Q=k, K=k, V=v),
            scratch=dict(S=tk.st(self.dtype, self.cols, self.key_dim), **weighted),
            output=dict(O=v),
        )

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, (ctx.sequence, ctx.head, chunk(ctx), 0), input.full)
        tk.load_async(input.K, ctx.globals.K, (ctx.sequence, ctx.head, chunk(ctx), 0), input.full)
        tk.load_async(input.V, ctx.globals.V, (ctx.sequence, ctx.head, chunk(ctx), ctx.col), input.full)

    @triton.jit
    def _before(ctx, s):
        place = (ctx.home, ctx.head, ctx.col * ctx.config.consumers + ctx.consumer, 0)
        return tk.load(ctx.globals.S0, s, place) if ctx.config.begins else tk.zero(s)

    @triton.jit
    def compute(ctx, state, input, output):
        v = tk.subtile(input.V, ctx.config.rows, ctx.config.cols, 0, ctx.consumer)
        tk.store(ctx.scratch.S, state.s)
        weighted = weigh(ctx, v, state.rate)
        tk.fence_async()
        p = tk.mm_ABt(input.Q, input.K, wait=False)
        o = tk.mm_ABt(input.Q, ctx.scratch.S, wait=False)
        s = add_chunk(ctx, state.s, weighted, input.K, state.rate)
        p, o = tk.mma_wait(p, o, leave=(s,))
        if ctx.config.decayed:
            between = tk.cast(tk.iota(p, 0) - tk.iota(p, 1), tk.fp32)
            p *= tk.exp2(between * (state.rate if ctx.config.reverse else -state.rate))
            o = tk.mul_row(o, tk.exp2((times(ctx)[1] + 1) * -state.rate))
        p = tk.triu(p) if ctx.config.reverse else tk.tril(p)
        o, s = tk.mma_wait(tk.mma_AB(tk.cast(p, ctx.config.dtype), v, o, wait=False), s)
        tk.store(tk.subtile(output.O, ctx.config.rows, ctx.config.cols, 0, ctx.consumer), o * ctx.args.scale)
        return state.replace(s=s)

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.O, output.O, (ctx.sequence, ctx.head, chunk(ctx), ctx.col))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            place = (ctx.home, ctx.head, ctx.col * ctx.config.consumers + ctx.consumer, 0)
            tk.store(ctx.globals.S1, state.s, place)


@triton.jit
def _segments_of(ends, number, sequences, span, MOST: tl.constexpr):
    """(first segment, rows) of a sequence that is not uniform."""
    i = tl.arange(0, MOST)
    end = tl.load(ends + i, mask=i < sequences, other=0)
    begin = tl.load(ends + i - 1, mask=(i > 0) & (i < sequences), other=0)
    rows = tl.maximum(end - begin, 0)
    return tl.sum(tl.where(i < number, tl.cdiv(rows, span), 0)), tl.sum(tl.where(i == number, rows, 0))


@plain_kernel(num_warps=4)
@triton.jit
def carry_states(
    S, S0, S1, ENDS, DECAY, sequences, heads, size, span, length, s0, s1,
    BEGINS: tl.constexpr, ENDS_WANTED: tl.constexpr, DECAYED: tl.constexpr, UNIFORM: tl.constexpr,
    REVERSE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """S, what each segment adds, becomes the state before it. S0, S1: the states before and after each sequence, with
    these strides. Grid: sequences · heads, blocks of a state."""
    number, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, col = i // size[1], i % size[1]
    rate = tl.load(DECAY + head) if DECAYED else 0.0
    inside = row < size[0]
    state = tl.zeros((BLOCK,), tl.float32)
    if BEGINS:
        state = tl.load(S0 + number * s0[0] + head * s0[1] + row * s0[2] + col * s0[3], mask=inside, other=0)
    first, rows = number * tl.cdiv(length, span), length
    if not UNIFORM:
        first, rows = _segments_of(ENDS, number, sequences, span, MOST)
    count = tl.cdiv(rows, span)
    for j in range(count):
        segment = count - 1 - j if REVERSE else j
        place = S + ((first + segment) * heads + head).to(tl.int64) * size[0] * size[1] + i
        added = tl.load(place, mask=inside, other=0)
        tl.store(place, state, mask=inside)
        state = state * tl.exp2(-rate * tl.minimum(rows - segment * span, span)) + added
    if ENDS_WANTED:
        tl.store(S1 + number * s1[0] + head * s1[1] + row * s1[2] + col * s1[3], state, mask=inside)
