"""Causal linear attention whose past fades, chunk by chunk: oᵢ = Σ_{j ≤ i} e^{Gᵢ-Gⱼ} (qᵢ·kⱼ) vⱼ, and what a state adds.

G are sums of gates from a chunk's first row on, which `sum_gates` computes. What earlier chunks leave is a matrix, the
state Sᵀ = Σⱼ e^{G_last-Gⱼ} vⱼ kⱼᵀ. Long sequences are cut into segments that run at once: `SegmentStates` computes what
each adds to the state, `carry_states` the state before each.

A chunk of sequence n that begins at row b has slot ⌊b / 64⌋ + n + its number in the sequence: so all slots differ.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.linear_attention import config
from tritonkittens.launch import plain_kernel

ROWS: tl.constexpr = tl.constexpr(config.ROWS)
HEADS: tl.constexpr = tl.constexpr(config.HEADS)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING_KEPT: tl.constexpr = tl.constexpr(-256.0)  # a logarithm in base 2, of 0 in fp32


@triton.jit
def chunk_of_slot(ENDS, slot, sequences, MOST: tl.constexpr):
    """(the rows of a slot's chunk, which of them exist)."""
    n = tl.arange(0, MOST)
    ends = tl.load(ENDS + n, mask=n < sequences, other=0)
    number = tl.sum(((ends // ROWS + n + 1 <= slot) & (n < sequences)).to(tl.int32))
    begin = tl.load(ENDS + number - 1, mask=(number > 0) & (number < sequences), other=0)
    end = tl.load(ENDS + number, mask=number < sequences, other=0)
    row = begin + (slot - begin // ROWS - number) * ROWS + tl.arange(0, ROWS)
    return row.to(tl.int64), row < end


@triton.jit
def sums_of_steps(gates):
    """Sums of gates (rows, heads) from the first row on. What keeps nothing counts as `NOTHING_KEPT`: differences of
    sums stay exact behind it, and -∞ would make them NaN."""
    return tl.cumsum(tl.maximum(gates, NOTHING_KEPT, propagate_nan=tl.PropagateNan.ALL), 0)


@plain_kernel(num_warps=4)
@triton.jit
def sum_gates(GATES, ENDS, G, sequences, heads, slots, row_step, head_step, MOST: tl.constexpr):
    """G (heads, slots, ROWS): sums of GATES (rows, heads), which have these strides, in base 2. Grid: slots, heads."""
    slot, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    inside = inside[:, None] & (head < heads)[None, :]
    gates = tl.load(GATES + row[:, None] * row_step + head[None, :] * head_step, mask=inside, other=0)
    sums = sums_of_steps(tk.cast(gates, tk.fp32) * LOG2_E)
    place = (head[None, :].to(tl.int64) * slots + slot) * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(G + place, sums, mask=(head < heads)[None, :])


class Chunks:
    """What the templates share: a task is a segment of a sequence, a head and a block of columns of V, an iteration a
    chunk of 64 rows.

    Q, K: (heads of keys, rows of all sequences, key_dim), V, O: (heads, rows, value columns), G: (heads, slots, 64)
    fp32, in base 2 (`gated`). W (`weighted`): G, less the logarithm of the weight of a row of V. ends: (sequences,)
    int32. Segments have `span` rows, and `group` heads a head of keys. S0, the states before (`begins`): (segments, or
    without `cut` sequences, heads, value columns, key_dim) fp32.
    `reverse`: time runs from the last row to the first.

    Consumers share the columns of V. The state of each stays in registers, in fp32. `paired`: a head of V, O and
    S0 stands for two heads of G and W, whose columns are side by side: each consumer has one.
    """

    dtype: tl.dtype = tk.bf16
    consumers: int = 2
    key_dim: int = 128
    value_dim: int = 128
    gated: bool = True
    weighted: bool = False  # gated and not reverse
    paired: bool = False  # gated, of two consumers
    begins: bool = False
    cut: bool = False
    most: int = 16  # a power of two, at least the number of sequences
    reverse: bool = False

    @property
    def cols(self) -> int:
        """Columns of V of a consumer."""
        return self.value_dim // self.consumers

    @property
    def overlap(self) -> int:
        """Rows of the segment before, with which a segment begins."""
        return 0

    @property
    def operands(self) -> dict[str, Any]:
        """Tiles of a chunk's rows."""
        k, v = tk.st(self.dtype, 64, self.key_dim), tk.st(self.dtype, 64, self.value_dim)
        sums = "GW"[: self.gated + self.weighted]
        return dict(K=k, V=v, **{name: tk.sv(tk.fp32, 64) for name in sums})

    @property
    def of_second(self) -> dict[str, Any]:
        """Tiles of the second head of a pair."""
        return {f"{name}_second": tile for name, tile in self.operands.items() if self.paired and name in "GW"}

    @property
    def weighted_rows(self) -> dict[str, Any]:
        """A tile of a consumer's columns of V, for rows with the factors of what they give to the state after."""
        return dict(V=tk.st(self.dtype, 64, self.cols)) if self.gated else {}

    def chunked(self, globals: dict[str, Any], **fields: Any) -> tk.layout:
        """A layout with what all templates take after their own tensors."""
        last = {**({"S0": None} if self.begins else {}), "ends": None}
        packed = tuple(name for name in globals if name.removeprefix("d") in ("Q", "K", "V", "Z", "O", "U", "Y"))
        return tk.layout(globals={**globals, **last}, args=("span", "total", "group", "scale"), ragged=packed, **fields)

    def tasks(self: Any, *shapes: Any) -> int:
        """At most as many: each sequence may end with a short chunk."""
        heads, rows, cols = shapes[self.tensors.index("V")]
        return (rows // config.ROWS + shapes[-1][0]) * heads * -(-cols // self.value_dim)

    def blocks(self, slots: int, *shapes: Any) -> int:
        """All that run at once: the tasks that `tasks` counts are more than there are."""
        return min(self.tasks(*shapes), slots)

    @triton.jit
    def setup(ctx):
        heads, blocks = tk.extent(ctx.globals.V, 0), tk.ceil_div(tk.extent(ctx.globals.V, 2), ctx.config.value_dim)
        segment, span = ctx.task_id // (blocks * heads), ctx.args.span
        number, rows, first = tk.sequence_of_tile(ctx.globals.ends, segment, span, ctx.args.total, ctx.config.most)
        before = (segment - first) * span
        overlap = tl.minimum(before, ctx.config.overlap) if ctx.config.overlap else 0
        before -= overlap
        length = tl.minimum(rows.rows - before, span + overlap)
        return tk.task(
            tk.ceil_div(length, 64),
            when=number < tk.extent(ctx.globals.ends, 0),
            sequence=tk.sequence(rows.begin + before, length),
            first=rows.begin // 64 + number + before // 64,
            home=segment if ctx.config.cut else number,
            head=ctx.task_id // blocks % heads,
            col=ctx.task_id % blocks,
            overlap=overlap,
        )

    @triton.jit
    def start(ctx):
        return tk.struct(s=state_before(ctx))


@triton.jit
def chunk(ctx):
    """The chunk of this iteration."""
    return ctx.iterations - 1 - ctx.iter if ctx.config.reverse else ctx.iter


@triton.jit
def place_of_keys(ctx):
    """The coordinates of a chunk's rows of Q and K."""
    return ctx.sequence, ctx.head // ctx.args.group, chunk(ctx), 0


@triton.jit
def load_rows(ctx, input):
    """Load a chunk of K, V, G and W."""
    tk.load_async(input.K, ctx.globals.K, place_of_keys(ctx), input.full)
    tk.load_async(input.V, ctx.globals.V, (ctx.sequence, ctx.head, chunk(ctx), ctx.col), input.full)
    if ctx.config.gated:
        head, slot = ctx.head * 2 if ctx.config.paired else ctx.head, ctx.first + chunk(ctx)
        tk.load_async(input.G, ctx.globals.G, (head, slot, 0), input.full)
        if ctx.config.weighted:
            tk.load_async(input.W, ctx.globals.W, (head, slot, 0), input.full)
        if ctx.config.paired:
            tk.load_async(input.G_second, ctx.globals.G, (head + 1, slot, 0), input.full)
            if ctx.config.weighted:
                tk.load_async(input.W_second, ctx.globals.W, (head + 1, slot, 0), input.full)


@triton.jit
def place_of_state(ctx):
    """The coordinates of a consumer's state."""
    return ctx.home, ctx.head, ctx.col * ctx.config.consumers + ctx.consumer, 0


@triton.jit
def state_before(ctx):
    """A consumer's state before the first row."""
    s = tk.rt(tk.fp32, ctx.config.cols, ctx.config.key_dim)
    return tk.load(ctx.globals.S0, s, place_of_state(ctx)) if ctx.config.begins else tk.zero(s)


@triton.jit
def sums(ctx, input):
    """A consumer's tiles G and W; without `weighted`, G stands for both."""
    if ctx.config.paired and ctx.consumer == 1:
        return input.G_second, input.W_second if ctx.config.weighted else input.G_second
    else:
        return input.G, input.W if ctx.config.weighted else input.G


@triton.jit
def gates(ctx, input):
    """(factors of what the state before gives to rows, of what rows give to the state after, of the state itself). A
    chunk with fewer rows repeats its last sum."""
    ROWS_OF: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, 64, ctx.config.cols))
    of_rows, of_cols = sums(ctx, input)
    g, last = tk.load(of_rows, ROWS_OF), tk.load_scalar(of_rows, 63)
    begun = tk.exp2(g)
    left = tk.exp2(last - (tk.load(of_cols, ROWS_OF) if ctx.config.weighted else g))
    return (left, begun, tl.exp2(last)) if ctx.config.reverse else (begun, left, tl.exp2(last))


@triton.jit
def causal(ctx, input, p, DIAGONAL: tl.constexpr = 0):
    """Scores of a chunk's rows and rows before them, up to a diagonal, with what is left of these."""
    if ctx.config.gated:
        SCORES: tl.constexpr = tk.rt(tk.fp32, 64, 64)
        of_rows, of_cols = sums(ctx, input)
        rows, cols = tk.load(of_rows, tk.col_vec(SCORES)), tk.load(of_cols, tk.row_vec(SCORES))
        between = tk.sub_col(tk.broadcast_row(p, rows), cols)  # G of the row, less that of the column
        p *= tk.exp2(tk.neg(between) if ctx.config.reverse else between)
    return tk.triu(p, DIAGONAL) if ctx.config.reverse else tk.tril(p, DIAGONAL)


@triton.jit
def add_rows(ctx, s, input):
    """A consumer's state after a chunk."""
    v = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer)
    if ctx.config.gated:
        _, weights, kept = gates(ctx, input)
        tk.store(ctx.scratch.V, tk.mul_row(tk.cast(tk.load(v), tk.fp32), weights))
        tk.fence_async()
        return tk.mma_AtB(ctx.scratch.V, input.K, s * kept)
    else:
        return tk.mma_AtB(v, input.K, s)


class SegmentStates(Chunks, tk.lcf):
    """S: (segments, heads, value columns, key_dim) fp32, what each segment adds to the state."""

    def layout(self) -> tk.layout:
        return self.chunked(
            {**self.operands, "S": None}, input={**self.operands, **self.of_second}, scratch=self.weighted_rows
        )

    @triton.jit
    def load(ctx, input):
        load_rows(ctx, input)

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(s=add_rows(ctx, state.s, input))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(ctx.globals.S, state.s, place_of_state(ctx))


@triton.jit
def attend(ctx, s, input):
    """(a consumer's columns of the result of a chunk without its scale, the state after) of the state before."""
    v = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer)
    weighted = v
    tk.store(ctx.scratch.S, s)
    if ctx.config.gated:
        begun, weights, kept = gates(ctx, input)
        weighted, s = ctx.scratch.V, s * kept
        tk.store(weighted, tk.mul_row(tk.cast(tk.load(v), tk.fp32), weights))
    tk.fence_async()
    p = tk.mm_ABt(input.Q, input.K, wait=False)
    o = tk.mm_ABt(input.Q, ctx.scratch.S, wait=False)
    s = tk.mma_AtB(weighted, input.K, s, wait=False)
    p, o = tk.mma_wait(p, o, leave=(s,))
    o = tk.mul_row(o, begun) if ctx.config.gated else o
    p = tk.cast(causal(ctx, input, p), ctx.config.dtype)
    return tk.mma_wait(tk.mma_AB(p, v, o, wait=False), s)


class LinearAttention(Chunks, tk.lcsf):
    """S1: the states after (`ends_wanted`), as S0."""

    ends_wanted: bool = False

    @property
    def loaded(self) -> dict[str, Any]:
        """Tiles of a pipeline stage."""
        return dict(Q=tk.st(self.dtype, 64, self.key_dim), **self.operands)

    @property
    def beside(self) -> dict[str, Any]:
        """Tensors that no tile takes."""
        return {}

    @property
    def results(self) -> dict[str, Any]:
        """Tiles that a chunk stores."""
        return dict(O=self.operands["V"])

    @property
    def scratch(self) -> dict[str, Any]:
        """Tiles of a consumer."""
        return dict(S=tk.st(self.dtype, self.cols, self.key_dim), **self.weighted_rows)

    def layout(self) -> tk.layout:
        return self.chunked(
            {**self.loaded, **self.beside, **self.results, **({"S1": None} if self.ends_wanted else {})},
            input={**self.loaded, **self.of_second},
            scratch=self.scratch,
            output=self.results,
        )

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        load_rows(ctx, input)

    @triton.jit
    def compute(ctx, state, input, output):
        o, s = attend(ctx, state.s, input)
        tk.store(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer), o * ctx.args.scale)
        return state.replace(s=s)

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.O, output.O, (ctx.sequence, ctx.head, chunk(ctx), ctx.col))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            tk.store(ctx.globals.S1, state.s, place_of_state(ctx))


@plain_kernel(num_warps=4)
@triton.jit
def carry_states(
    S, S0, S1, ENDS, G, sequences, heads, size, span, slots, s0, s1,
    BEGINS: tl.constexpr, ENDS_WANTED: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """S, what each segment adds, becomes the state before it. S0, S1: the states before and after each sequence, with
    these strides. Grid: sequences · heads, blocks of a state."""
    number, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, MOST)
    row, col = i // size[1], i % size[1]
    inside = row < size[0]
    state = tl.zeros((BLOCK,), tl.float32)
    if BEGINS:
        state = tl.load(S0 + number * s0[0] + head * s0[1] + row * s0[2] + col * s0[3], mask=inside, other=0)
    begin = tl.load(ENDS + n - 1, mask=(n > 0) & (n < sequences), other=0)
    rows = tl.load(ENDS + n, mask=n < sequences, other=0) - begin
    first = tl.sum(tl.where(n < number, tl.cdiv(rows, span), 0))
    slot = tl.sum(tl.where(n == number, begin // ROWS, 0)) + number
    length = tl.sum(tl.where(n == number, rows, 0))
    count = tl.cdiv(length, span)
    for j in range(count):
        segment = count - 1 - j if REVERSE else j
        place = S + ((first + segment) * heads + head).to(tl.int64) * size[0] * size[1] + i
        added = tl.load(place, mask=inside, other=0)
        tl.store(place, state, mask=inside)
        kept = 0.0
        if GATED:
            for at in range(segment * span, tl.minimum(length, (segment + 1) * span), ROWS * MOST):
                chunks = at // ROWS + n
                last = G + ((head * slots + slot + chunks) * ROWS + ROWS - 1).to(tl.int64)
                kept += tl.sum(tl.load(last, mask=chunks * ROWS < tl.minimum(length, (segment + 1) * span), other=0))
        state = state * tl.exp2(kept) + added
    if ENDS_WANTED:
        tl.store(S1 + number * s1[0] + head * s1[1] + row * s1[2] + col * s1[3], state, mask=inside)
