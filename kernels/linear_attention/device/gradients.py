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


class ChunkGradients(Chunks, tk.lcsf):
    """A task is a chunk and `shared` heads, an iteration one of these. Consumer 0 has rows of scores, consumer 1
    columns.

    dO and dV are as V, H and dH as of `ChunkStates`. W (`weighted`): weights of the rows of V. dQ, dK: (parts, rows,
    key_dim), sums over `shared` heads; `group` heads have one head of Q and K. SUMS: (heads, 4 or `weighted` 5, slots,
    64) fp32, sums of rows of Z, of its columns, both without the diagonal, what later chunks add to the latter, in 64
    parts Σ H ∘ dH of what the chunk keeps of H, and sums of columns with the diagonal. Sums of columns are without the
    weights of V.

    D: (heads,), or with `skips_columns` (heads, value columns), of dtype `skip`: V was added to O with these factors.
    dD: parts of its gradient, (heads, slots, 64) or (heads, slots, value columns).
    """

    consumers: int = 2
    output_stages: int = 1
    skip: tl.dtype | None = None
    skips_columns: bool = False

    def layout(self) -> tk.layout:
        keys, values = tk.st(self.dtype, 64, self.key_dim), tk.st(self.dtype, 64, self.value_dim)
        states = tk.st(self.dtype, self.value_dim, self.key_dim)
        of_rows = {name: tile for name, tile in self.operands.items() if name in "GW"}
        loaded = dict(V=values, dO=values, **of_rows, H=states, dH=states)
        skipped = () if self.skip is None else ("D", "dD")
        return tk.layout(
            globals={
                **dict(Q=keys, K=keys, **loaded, dV=values),
                **dict.fromkeys(("dQ", "dK", "SUMS", *skipped, "ends")),
            },
            input=loaded,
            task=dict(Q=keys, K=keys),
            per="block",
            output=dict(dV=values),
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
            ctx.args.shared,
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
        head = head_of(ctx)
        state = ctx.chunk * tk.extent(ctx.globals.V, 0) + head
        tk.load_async(input.V, ctx.globals.V, (ctx.sequence, head, 0, 0), input.full)
        tk.load_async(input.dO, ctx.globals.dO, (ctx.sequence, head, 0, 0), input.full)
        tk.load_async(input.G, ctx.globals.G, (head, ctx.chunk, 0), input.full)
        if ctx.config.weighted:
            tk.load_async(input.W, ctx.globals.W, (head, ctx.chunk, 0), input.full)
        tk.load_async(input.H, ctx.globals.H, (state, 0, 0), input.full)
        tk.load_async(input.dH, ctx.globals.dH, (state, 0, 0), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(sum=tk.zero(tk.rt(tk.fp32, 64, ctx.config.key_dim)))

    @triton.jit
    def compute(ctx, state, input, output):
        if ctx.consumer == 0:
            return state.replace(sum=of_rows(ctx, state.sum, input))
        else:
            return state.replace(sum=of_columns(ctx, state.sum, input, output))

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.dV, output.dV, (ctx.sequence, head_of(ctx), 0, 0))

    @triton.jit
    def finish(ctx, state, epilogue):
        of_keys = ctx.globals.dQ if ctx.consumer == 0 else ctx.globals.dK
        tk.store(of_keys, state.sum * ctx.args.scale, (ctx.sequence, ctx.heads, 0, 0))


@triton.jit
def head_of(ctx):
    """The head of this iteration."""
    return ctx.heads * ctx.args.shared + ctx.iter


@triton.jit
def kept_between(like, input, EARLIER: tl.constexpr):
    """What is left of rows at later rows of the chunk, else 0. `EARLIER`: the rows of the tile are the earlier ones."""
    between = tk.sub_col(tk.broadcast_row(like, tk.load(input.G, OF_ROWS)), tk.load(input.G, OF_COLUMNS))
    return tk.triu(tk.exp2(tk.neg(between))) if EARLIER else tk.tril(tk.exp2(between))


@triton.jit
def store_sums(ctx, sums, number: tl.constexpr):
    """Store one of the vectors of a chunk and a head."""
    tk.store(ctx.globals.SUMS, sums, (head_of(ctx), number, ctx.chunk, 0))


@triton.jit
def of_rows(ctx, dq, input):
    """dQ with a head more; sums of rows, and those of states."""
    DTYPE: tl.constexpr = ctx.config.dtype
    KEYS: tl.constexpr = ctx.config.key_dim
    p, r = tk.mm_ABt(ctx.task.Q, ctx.task.K, wait=False), tk.mm_ABt(input.dO, input.V, wait=False)
    p, r = tk.mma_wait(p, r)
    r *= kept_between(r, input, False)
    if ctx.config.weighted:
        r = tk.mul_col(r, tk.load(input.W, OF_COLUMNS))
    sums = tk.row_sum(tk.tril(p * r, -1))
    dq = tk.mma_AB(tk.cast(r, DTYPE), ctx.task.K, dq)
    begun, kept = tk.exp2(tk.load(input.G, OF_ROWS)), tl.exp2(tk.load_scalar(input.G, 63))
    left, skipped = tk.zero(OF_ROWS), tk.zero(OF_ROWS)
    for i in tl.static_range(ctx.config.value_dim // 64):  # columns of V
        before, do = tk.subtile(input.H, 64, KEYS, i, 0), tk.cast(tk.load(tk.subtile(input.dO, 64, 64, 0, i)), tk.fp32)
        of_before, faded = tk.mm_ABt(ctx.task.Q, before), tk.mul_row(do, begun)
        dq = tk.mma_AB(tk.cast(faded, DTYPE), before, dq, wait=False)
        sums += tk.row_sum(of_before * faded)
        for j in tl.static_range(KEYS // 64):
            h, dh = tk.load(tk.subtile(input.H, 64, 64, i, j)), tk.load(tk.subtile(input.dH, 64, 64, i, j))
            left += tk.row_sum(tk.cast(h, tk.fp32) * tk.cast(dh, tk.fp32))
        if ctx.config.skip is not None:
            v = tk.cast(tk.load(tk.subtile(input.V, 64, 64, 0, i)), tk.fp32)
            if ctx.config.skips_columns:
                tk.store(ctx.globals.dD, tk.col_sum(do * v), (head_of(ctx), ctx.chunk, i))
            else:
                skipped += tk.row_sum(do * v)
        dq = tk.mma_wait(dq)
    store_sums(ctx, sums, 0)
    store_sums(ctx, left * kept, 3)
    if ctx.config.skip is not None and not ctx.config.skips_columns:
        tk.store(ctx.globals.dD, skipped, (head_of(ctx), ctx.chunk, 0))
    return dq


@triton.jit
def of_columns(ctx, dk, input, output):
    """dK with a head more; dV, and sums of columns. The rows of score tiles are columns of Z."""
    DTYPE: tl.constexpr = ctx.config.dtype
    KEYS: tl.constexpr = ctx.config.key_dim
    p, r = tk.mm_ABt(ctx.task.K, ctx.task.Q, wait=False), tk.mm_ABt(input.V, input.dO, wait=False)
    p, r = tk.mma_wait(p, r)
    kept = kept_between(r, input, True)
    p *= kept
    z = p * r
    r *= kept
    store_sums(ctx, tk.row_sum(tk.triu(z, 1)), 1)
    left = tk.exp2(tk.neg(tk.load(input.G, OF_ROWS) - tk.load_scalar(input.G, 63)))
    weights = left
    if ctx.config.weighted:
        store_sums(ctx, tk.row_sum(z), 4)
        r, weights = tk.mul_row(r, tk.load(input.W, OF_ROWS)), left * tk.load(input.W, OF_ROWS)
    dk = tk.mma_AB(tk.cast(r, DTYPE), ctx.task.Q, dk)
    p, later = tk.cast(p, DTYPE), tk.zero(OF_ROWS)
    for i in tl.static_range(ctx.config.value_dim // 64):  # columns of V
        dh, do = tk.subtile(input.dH, 64, KEYS, i, 0), tk.subtile(input.dO, 64, 64, 0, i)
        v = tk.cast(tk.load(tk.subtile(input.V, 64, 64, 0, i)), tk.fp32)
        dv = tk.mul_row(tk.mm_ABt(ctx.task.K, dh), left)
        later += tk.row_sum(v * dv)
        dk = tk.mma_AB(tk.cast(tk.mul_row(v, weights), DTYPE), dh, dk, wait=False)
        dv, dk = tk.mma_wait(tk.mma_AB(p, do, dv, wait=False), dk)
        if ctx.config.weighted:
            dv = tk.mul_row(dv, tk.load(input.W, OF_ROWS))
        if ctx.config.skip is not None:
            dv += skipped_rows(ctx, tk.cast(tk.load(do), tk.fp32), i)
        tk.store(tk.subtile(output.dV, 64, 64, 0, i), dv * ctx.args.scale)
    store_sums(ctx, later, 2)
    return dk


@triton.jit
def skipped_rows(ctx, do, i: tl.constexpr):
    """Rows times D, of number i of the blocks of 64 columns."""
    if ctx.config.skips_columns:
        d = tk.load(ctx.globals.D, tk.row_vec(tk.rt(ctx.config.skip, 64, 64)), (head_of(ctx), i))
        return tk.mul_col(do, tk.cast(d, tk.fp32))
    else:
        return do * tk.cast(tk.load_scalar(ctx.globals.D, (head_of(ctx),)), tk.fp32)


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
