"""Gradients of linear attention with gates, chunk by chunk.

H is the state before a chunk, and dH the gradient of the state after it. With scores P = Q Kᵀ, R = dO Vᵀ, and what is
kept, E = e^{Gᵢ-Gⱼ} for j ≤ i: dQ = (R ∘ E) K + e^G (dO H), dK = (R ∘ E)ᵀ Q + e^{G_last-G} (V dH) and
dV = (P ∘ E)ᵀ dO + e^{G_last-G} (K dHᵀ). The gradient of Gᵢ is Σⱼ Zᵢⱼ - Σⱼ Zⱼᵢ of Z = P ∘ R ∘ E, and of what states add
to both sums. It is not formed as q·dq - k·dk: these are rounded, and their difference is small.

`ChunkStates` stores the states H of all chunks, and with time reversed dH. `ChunkGradients` computes the rest, chunk by
chunk at once. `gate_gradients` sums over the rows of a chunk. Source: Dao and Gu, Transformers are SSMs (2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.linear_attention.device.chunks import (
    HEADS,
    ROWS,
    Chunks,
    add_rows,
    chunk,
    chunk_of_slot,
    load_rows,
    place_of_state,
)
from tritonkittens.launch import plain_kernel

SCORES: tl.constexpr = tl.constexpr(tk.rt(tk.fp32, 64, 64))
OF_ROWS, OF_COLUMNS = (tl.constexpr(vector(tk.rt(tk.fp32, 64, 64))) for vector in (tk.col_vec, tk.row_vec))


class ChunkStates(Chunks, tk.lcsf):
    """H: (slots · heads, value columns, key_dim) in the dtype of V, the states before the chunks. S1, the states after
    (`ends_wanted`): as S0."""

    ends_wanted: bool = False

    def layout(self) -> tk.layout:
        states = dict(H=tk.st(self.dtype, self.value_dim, self.key_dim))
        return self.chunked(
            {**self.operands, **states, **({"S1": None} if self.ends_wanted else {})},
            input={**self.operands, **self.of_second},
            scratch=self.weighted_rows,
            output=states,
        )

    @triton.jit
    def load(ctx, input):
        load_rows(ctx, input)

    @triton.jit
    def compute(ctx, state, input, output):
        tk.store(tk.subtile(output.H, ctx.config.cols, ctx.config.key_dim, ctx.consumer, 0), state.s)
        return state.replace(s=add_rows(ctx, state.s, input))

    @triton.jit
    def store(ctx, output):
        slot = ctx.first + chunk(ctx)
        tk.store_async(ctx.globals.H, output.H, (slot * tk.extent(ctx.globals.V, 0) + ctx.head, ctx.col, 0))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            tk.store(ctx.globals.S1, state.s, place_of_state(ctx))


class ChunkGradients(Chunks, tk.lcf):
    """A task is a chunk and `shared` heads, an iteration 64 columns of V of one of these; `whole`: V has no more.
    Consumer 0 has rows of scores, consumer 1 columns.

    dO and dV are as V, H and dH as of `ChunkStates`. W (`weighted`): weights of the rows of V. dQ, dK: (parts, rows,
    key_dim), sums over `shared` heads; `group` heads have one head of Q and K. SUMS: (heads, 4 or `weighted` 5, slots,
    64) fp32, sums of rows of Z, of its columns, both without the diagonal, what later chunks add to the latter, in 64
    parts Σ H ∘ dH of what the chunk keeps of H, and sums of columns with the diagonal. Sums of columns are without the
    weights of V.

    D: (heads,), or with `skips_columns` (heads, value columns), of dtype `skip`: V was added to O with these factors.
    dD: parts of its gradient, (heads, slots, 64) or (heads, slots, value columns).
    """

    consumers: int = 2
    schedule: tk.Schedule = tk.Dynamic()  # `setup` reads memory: the producer calls it for all
    broadcast_tile: bool = True
    consumer_registers: int | None = 240
    whole: bool = False
    skip: tl.dtype | None = None
    skips_columns: bool = False

    def layout(self) -> tk.layout:
        keys, values = tk.st(self.dtype, 64, self.key_dim), tk.st(self.dtype, 64, 64)
        of_rows = {name: tile for name, tile in self.operands.items() if name in "GW"}
        loaded = dict(V=values, dO=values, **of_rows, H=keys, dH=keys)
        skipped = () if self.skip is None else ("D", "dD")
        return tk.layout(
            globals={
                **dict(Q=keys, K=keys, **loaded, dV=values),
                **dict.fromkeys(("dQ", "dK", "SUMS", *skipped, "ends")),
            },
            input=loaded,
            task=dict(Q=keys, K=keys),
            per="block",
            exchange=dict(dV=values),
            ragged=("Q", "K", "V", "dO", "dV"),
            args=("shared", "total", "group", "scale"),
        )

    @triton.jit
    def setup(ctx):
        parts = tk.extent(ctx.globals.V, 0) // ctx.args.shared
        number, rows, first = tk.sequence_of_tile(
            ctx.globals.ends, ctx.task_id // parts, 64, ctx.args.total, ctx.config.most
        )
        before = (ctx.task_id // parts - first) * 64
        return tk.task(
            ctx.args.shared * blocks_of(ctx),
            when=number < tk.extent(ctx.globals.ends, 0),
            sequence=tk.sequence(rows.begin + before, tl.minimum(rows.rows - before, 64)),
            chunk=rows.begin // 64 + number + before // 64,
            heads=ctx.task_id % parts,
        )

    @triton.jit
    def load_task(ctx, task):
        head = ctx.heads * ctx.args.shared // ctx.args.group
        tk.load_async(task.Q, ctx.globals.Q, (ctx.sequence, head, 0, 0), task.full)
        tk.load_async(task.K, ctx.globals.K, (ctx.sequence, head, 0, 0), task.full)

    @triton.jit
    def load(ctx, input):
        head, col = place_of_block(ctx)
        state = ctx.chunk * tk.extent(ctx.globals.V, 0) + head
        tk.load_async(input.V, ctx.globals.V, (ctx.sequence, head, 0, col), input.full)
        tk.load_async(input.dO, ctx.globals.dO, (ctx.sequence, head, 0, col), input.full)
        tk.load_async(input.G, ctx.globals.G, (head, ctx.chunk, 0), input.full)
        if ctx.config.weighted:
            tk.load_async(input.W, ctx.globals.W, (head, ctx.chunk, 0), input.full)
        tk.load_async(input.H, ctx.globals.H, (state, col, 0), input.full)
        tk.load_async(input.dH, ctx.globals.dH, (state, col, 0), input.full)

    @triton.jit
    def start(ctx):
        keys, none = tk.zero(tk.rt(tk.fp32, 64, ctx.config.key_dim)), tk.zero(OF_ROWS)
        return tk.struct(sum=keys, scores=tk.zero(SCORES), rows=none, left=none, skipped=none)

    @triton.jit
    def compute(ctx, state, input):
        return of_rows(ctx, state, input) if ctx.consumer == 0 else of_columns(ctx, state, input)

    @triton.jit
    def finish(ctx, state, epilogue):
        of_keys = ctx.globals.dQ if ctx.consumer == 0 else ctx.globals.dK
        tk.store(of_keys, state.sum * ctx.args.scale, (ctx.sequence, ctx.heads, 0, 0))


@triton.jit
def blocks_of(ctx):
    """Blocks of 64 columns of V."""
    return 1 if ctx.config.whole else tk.ceil_div(tk.extent(ctx.globals.V, 2), 64)


@triton.jit
def place_of_block(ctx):
    """(the head of this iteration, the block of its columns)."""
    blocks = blocks_of(ctx)
    return ctx.heads * ctx.args.shared + ctx.iter // blocks, ctx.iter % blocks


@triton.jit
def is_last_of_head(ctx):
    """Is this the last block of a head's columns?"""
    return place_of_block(ctx)[1] == blocks_of(ctx) - 1


@triton.jit
def kept_between(like, input, EARLIER: tl.constexpr):
    """What is left of rows at later rows of the chunk, else 0. `EARLIER`: the rows of the tile are the earlier ones."""
    between = tk.sub_col(tk.broadcast_row(like, tk.load(input.G, OF_ROWS)), tk.load(input.G, OF_COLUMNS))
    return tk.triu(tk.exp2(tk.neg(between))) if EARLIER else tk.tril(tk.exp2(between))


@triton.jit
def store_sums(ctx, sums, number: tl.constexpr):
    """Store one of the vectors of a chunk and a head."""
    tk.store(ctx.globals.SUMS, sums, (place_of_block(ctx)[0], number, ctx.chunk, 0))


@triton.jit
def of_rows(ctx, state, input):
    """dQ with what a block adds, and behind a head's last block what its scores add; sums of rows, and of states."""
    DTYPE: tl.constexpr = ctx.config.dtype
    scores = tk.mma_ABt(input.dO, input.V, state.scores, wait=False)
    of_before, do = tk.mm_ABt(ctx.task.Q, input.H, wait=False), tk.cast(tk.load(input.dO), tk.fp32)
    faded, skipped = tk.mul_row(do, tk.exp2(tk.load(input.G, OF_ROWS))), state.skipped
    scores, of_before = tk.mma_wait(scores, of_before)
    rows = tk.row_sum(of_before * faded, state.rows)
    dq = tk.mma_AB(tk.cast(faded, DTYPE), input.H, state.sum, wait=False)
    kept = tk.mm_ABt(input.H, input.dH, wait=False)  # only its diagonal is used: it sums H ∘ dH
    if ctx.config.skip is not None:
        of_skip = do * tk.cast(tk.load(input.V), tk.fp32)
        if ctx.config.skips_columns:
            head, col = place_of_block(ctx)
            tk.store(ctx.globals.dD, tk.col_sum(of_skip), (head, ctx.chunk, col))
        else:
            skipped = tk.row_sum(of_skip, skipped)
    dq, kept = tk.mma_wait(dq, kept)
    left = tk.row_sum(tk.block_diagonal(kept, 1, 0.0), state.left)
    if ctx.config.whole or is_last_of_head(ctx):
        p = tk.mm_ABt(ctx.task.Q, ctx.task.K)
        r = scores * kept_between(p, input, False)
        if ctx.config.weighted:
            r = tk.mul_col(r, tk.load(input.W, OF_COLUMNS))
        store_sums(ctx, tk.row_sum(tk.tril(p * r, -1), rows), 0)
        store_sums(ctx, left * tl.exp2(tk.load_scalar(input.G, 63)), 3)
        if ctx.config.skip is not None and not ctx.config.skips_columns:
            tk.store(ctx.globals.dD, skipped, (place_of_block(ctx)[0], ctx.chunk, 0))
        dq = tk.mma_AB(tk.cast(r, DTYPE), ctx.task.K, dq)
        scores, none = tk.zero(SCORES), tk.zero(OF_ROWS)
        rows, left, skipped = none, none, none
    return tk.struct(sum=dq, scores=scores, rows=rows, left=left, skipped=skipped)


@triton.jit
def of_columns(ctx, state, input):
    """dK with what a block adds, and behind a head's last block what its scores add; a block of dV, and sums of
    columns. The rows of score tiles are columns of Z."""
    DTYPE: tl.constexpr = ctx.config.dtype
    scores = tk.mma_ABt(input.V, input.dO, state.scores, wait=False)
    p, dv = tk.mm_ABt(ctx.task.K, ctx.task.Q, wait=False), tk.mm_ABt(ctx.task.K, input.dH, wait=False)
    left = tk.exp2(tk.neg(tk.load(input.G, OF_ROWS) - tk.load_scalar(input.G, 63)))
    weights = left * tk.load(input.W, OF_ROWS) if ctx.config.weighted else left
    scores, p, dv = tk.mma_wait(scores, p, dv)
    kept = kept_between(p, input, True)
    p, dv, v = p * kept, tk.mul_row(dv, left), tk.cast(tk.load(input.V), tk.fp32)
    weighted = tk.cast(tk.mul_row(v, weights), DTYPE)
    rows, dk = tk.row_sum(v * dv, state.rows), state.sum
    if ctx.config.whole or is_last_of_head(ctx):
        z, r = p * scores, scores * kept
        store_sums(ctx, tk.row_sum(tk.triu(z, 1)), 1)
        store_sums(ctx, rows, 2)
        if ctx.config.weighted:
            store_sums(ctx, tk.row_sum(z), 4)
            r = tk.mul_row(r, tk.load(input.W, OF_ROWS))
        dk = tk.mma_AB(tk.cast(r, DTYPE), ctx.task.Q, dk)
        scores, rows = tk.zero(SCORES), tk.zero(OF_ROWS)
    dk = tk.mma_AB(weighted, input.dH, dk, wait=False)
    dv = tk.mma_AB(tk.cast(p, DTYPE), input.dO, dv, wait=False)
    dk, dv = tk.mma_wait(dk, dv)
    if ctx.config.weighted:
        dv = tk.mul_row(dv, tk.load(input.W, OF_ROWS))
    if ctx.config.skip is not None:
        dv += skipped_rows(ctx, tk.cast(tk.load(input.dO), tk.fp32))
    head, col = place_of_block(ctx)
    tk.store_read_wait(0)
    tk.store(ctx.exchange.dV[0], dv * ctx.args.scale)
    tk.fence_async()
    tk.store_async(ctx.globals.dV, ctx.exchange.dV[0], (ctx.sequence, head, 0, col))
    return state.replace(sum=dk, scores=scores, rows=rows)


@triton.jit
def skipped_rows(ctx, do):
    """Rows times D, of a block of columns."""
    head, col = place_of_block(ctx)
    if ctx.config.skips_columns:
        d = tk.load(ctx.globals.D, tk.row_vec(tk.rt(ctx.config.skip, 64, 64)), (head, col))
        return tk.mul_col(do, tk.cast(d, tk.fp32))
    else:
        return do * tk.cast(tk.load_scalar(ctx.globals.D, (head,)), tk.fp32)


@triton.jit
def sums_of_chunk(SUMS, number: tl.constexpr, head, heads, slot, slots, COUNT: tl.constexpr):
    """One of the COUNT vectors of a chunk, of some heads: (64, heads)."""
    place = ((head.to(tl.int64) * COUNT + number) * slots + slot)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    return tl.load(SUMS + place, mask=(head < heads)[None, :], other=0)


@triton.jit
def gates_of_chunk(SUMS, weights, head, heads, slot, slots, COUNT: tl.constexpr):
    """Gradients of gates. Columns and what they give to later chunks have these weights.

    That of row t is Σ Z over rows from t on and columns before t. Here rows are sums of a chunk, with earlier chunks,
    columns of a chunk alone: later chunks count for all columns before t.
    """
    rows, cols = (
        sums_of_chunk(SUMS, 0, head, heads, slot, slots, COUNT),
        weights * sums_of_chunk(SUMS, 1, head, heads, slot, slots, COUNT),
    )
    later = weights * sums_of_chunk(SUMS, 2, head, heads, slot, slots, COUNT)
    left = tl.sum(sums_of_chunk(SUMS, 3, head, heads, slot, slots, COUNT), 0)
    return tl.cumsum(rows - cols, 0, reverse=True) + (tl.cumsum(later, 0) - later) + left[None, :]


@plain_kernel(num_warps=4)
@triton.jit
def gate_gradients(SUMS, ENDS, DG, sequences, heads, slots, row_step, head_step, scale, MOST: tl.constexpr):
    """DG (rows, heads), with these strides: gradients of gates. Grid: slots, blocks of heads."""
    slot, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    dg = gates_of_chunk(SUMS, 1.0, head, heads, slot, slots, 4)
    place = DG + row[:, None] * row_step + head[None, :] * head_step
    tl.store(place, tk.cast(dg * scale, DG.dtype.element_ty), mask=inside[:, None] & (head < heads)[None, :])
