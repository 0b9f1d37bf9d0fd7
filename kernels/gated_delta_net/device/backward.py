"""Gradients of the gated delta rule, in three passes over the chunks of `delta.py`, whose letters these are.

`DeltaStates` computes the state S before each chunk again. `DeltaStateGradients` runs from the last chunk to the first:
dV' = (Q Kᵀ ∘ Γ)ᵀ dO + e^{G_last - G} K dS, where Γ = e^{G_i - G_j} and dS is the gradient of the state after the chunk.
With dU = Tᵀ dV', the gradient of V is dR = β dU, and that of the state before the chunk is e^{G_last} dS + (e^G Q)ᵀ dO
- (e^G K)ᵀ dR. `DeltaGradients` computes the rest, all chunks at once. The inverse has the gradient dA = -dU V'ᵀ.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gated_delta_net.device.delta import (
    GatedDeltaNet,
    columns,
    correct,
    load_chunk,
    of_rows,
    write,
)
from tritonkittens.kernels.linear_attention.device.chunks import HEADS, ROWS, Chunks, causal, chunk, chunk_of_slot
from tritonkittens.launch import plain_kernel

PARTS: tl.constexpr = tl.constexpr(6)  # of the gradients of a chunk's gates, from each of two consumers


class DeltaStates(GatedDeltaNet):
    """S: (slots, heads, value columns, key_dim), the states before all chunks."""

    @property
    def loaded(self) -> dict[str, Any]:
        return {name: tile for name, tile in super().loaded.items() if name not in "QP"}

    @property
    def results(self) -> dict[str, Any]:
        return dict(S=tk.st(self.dtype, self.value_dim, self.key_dim))

    @triton.jit
    def load(ctx, input):
        load_chunk(ctx, input)

    @triton.jit
    def compute(ctx, state, input, output):
        before = tk.cast(state.s, ctx.config.dtype)
        corrected = correct(ctx, input, before)
        tk.store(tk.subtile(output.S, ctx.config.cols, ctx.config.key_dim, ctx.consumer, 0), before)
        return state.replace(s=tk.mma_wait(write(ctx, input, state.s, tk.mma_wait(corrected))))

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.S, output.S, (ctx.first + chunk(ctx), ctx.head, ctx.col, 0))


class DeltaStateGradients(GatedDeltaNet):
    """dS: as S, the gradients of the states after all chunks; dU and dV: as V, in whose place dO is. States are
    gradients of states."""

    reverse: bool = True

    @property
    def results(self) -> dict[str, Any]:
        v = self.operands["V"]
        return dict(dS=tk.st(self.dtype, self.value_dim, self.key_dim), dU=v, dV=v)

    @triton.jit
    def compute(ctx, state, input, output):
        DTYPE: tl.constexpr = ctx.config.dtype
        after, do = tk.cast(state.s, DTYPE), tk.load(columns(ctx, input.V))
        dv, of_o = tk.mm_ABt(after, input.K, wait=False), tk.mm_AB(do, input.P, wait=False)
        tk.store(tk.subtile(output.dS, ctx.config.cols, ctx.config.key_dim, ctx.consumer, 0), after)
        begun, scale = of_rows(ctx, input, 1), ctx.args.scale
        read = tk.cast(tk.mul_col(tk.cast(do, tk.fp32), begun * scale), DTYPE)
        dv, of_o = tk.mma_wait(dv, of_o)
        dv = tk.mul_col(dv, of_rows(ctx, input, 2)) + of_o * scale
        du = tk.mm_AB(tk.cast(dv, DTYPE), input.T, wait=False)  # before the product that does not depend on dS
        s = tk.mma_AB(read, input.Q, state.s * tk.load_scalar(input.B, 127), wait=False)
        du = tk.mma_wait(du, leave=(s,))
        dr = tk.mul_col(du, of_rows(ctx, input, 0))
        s = tk.mma_AB(tk.cast(tk.neg(tk.mul_col(dr, begun)), DTYPE), input.K, s, wait=False)
        tk.store(columns(ctx, output.dU), du)
        tk.store(columns(ctx, output.dV), dr)
        return state.replace(s=tk.mma_wait(s))

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.dS, output.dS, (ctx.first + chunk(ctx), ctx.head, ctx.col, 0))
        tk.store_async(ctx.globals.dU, output.dU, (ctx.sequence, ctx.head, chunk(ctx), ctx.col))
        tk.store_async(ctx.globals.dV, output.dV, (ctx.sequence, ctx.head, chunk(ctx), ctx.col))


class DeltaGradients(Chunks, tk.lcf):
    """dQ and dK of each head of V: (heads, rows, key_dim), and parts of the gradients of gates and beta: P (2 · PARTS,
    heads, slots, 64) fp32. A task is a chunk and a head, an iteration 64 columns of V.

    Each consumer has half the columns of Q and K, and half of those of V' in an iteration. Consumer 0 computes the
    gradient of Q Kᵀ, consumer 1 that of K Kᵀ. Q and K have 128 columns: half of 64 would cut a swizzle atom, which
    tensor cores cannot read.
    """

    consumers: int = 2
    broadcast_tile: bool = True  # `setup` reads memory
    consumer_registers: int | None = 240

    def layout(self) -> tk.layout:
        keys, half, tile = (tk.st(self.dtype, 64, n) for n in (self.key_dim, self.key_dim // 2, 64))
        task = dict(Q=keys, K=keys, T=tile, G=tk.sv(tk.fp32, 64), B=tk.sv(tk.fp32, 256))
        loaded = dict(V=tile, dO=tile, dU=tile, S=keys, dS=keys)
        found = dict(dQ=half, dK=half)
        exchange = dict(R=tk.st(self.dtype, 64, 32), corrected=tile, scores=tile)
        return self.chunked(
            {**task, **loaded, **found, "P": None},
            input=loaded, task=task, per="block", exchange=exchange, epilogue=found,
        )  # fmt: skip

    @triton.jit
    def setup(ctx):
        heads = tk.extent(ctx.globals.V, 0)
        tile = ctx.task_id // heads
        number, rows, first = tk.sequence_of_tile(ctx.globals.ends, tile, 64, ctx.args.total, ctx.config.most)
        before = (tile - first) * 64
        return tk.task(
            tk.ceil_div(tk.extent(ctx.globals.V, 2), 64),
            when=number < tk.extent(ctx.globals.ends, 0),
            sequence=tk.sequence(rows.begin + before, tl.minimum(rows.rows - before, 64)),
            home=rows.begin // 64 + number + tile - first,
            head=ctx.task_id % heads,
        )

    @triton.jit
    def load_task(ctx, task):
        place, of_chunk = (ctx.sequence, ctx.head // ctx.args.group, 0, 0), (ctx.head, ctx.home, 0)
        tk.load_async(task.Q, ctx.globals.Q, place, task.full)
        tk.load_async(task.K, ctx.globals.K, place, task.full)
        tk.load_async(task.T, ctx.globals.T, of_chunk, task.full)
        tk.load_async(task.G, ctx.globals.G, of_chunk, task.full)
        tk.load_async(task.B, ctx.globals.B, of_chunk, task.full)

    @triton.jit
    def load(ctx, input):
        place, of_state = (ctx.sequence, ctx.head, 0, ctx.iter), (ctx.home, ctx.head, ctx.iter, 0)
        tk.load_async(input.V, ctx.globals.V, place, input.full)
        tk.load_async(input.dO, ctx.globals.dO, place, input.full)
        tk.load_async(input.dU, ctx.globals.dU, place, input.full)
        tk.load_async(input.S, ctx.globals.S, of_state, input.full)
        tk.load_async(input.dS, ctx.globals.dS, of_state, input.full)

    @triton.jit
    def start(ctx):
        half = tk.zero(tk.rt(tk.fp32, 64, ctx.config.key_dim // 2))
        scores = tk.zero(tk.rt(tk.fp32, 64, 64))
        beta, kept = tk.zero(tk.col_vec(tk.rt(tk.fp32, 64, 32))), tk.zero(tk.col_vec(tk.rt(tk.fp32, 64, 64)))
        return tk.struct(scores=scores, dq=half, dk=half, read=half, beta=beta, kept=kept)

    @triton.jit
    def compute(ctx, state, input, previous):
        me: tl.constexpr = ctx.consumer
        half: tl.constexpr = ctx.config.key_dim // 2
        ROWS_OF: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, 64, 32))
        r = tk.mm_ABt(ctx.task.K, tk.subtile(input.S, 32, ctx.config.key_dim, me, 0))
        r = tk.mul_row(r, tk.load(ctx.task.B, ROWS_OF, 64))
        r = tk.cast(tk.load(tk.subtile(input.V, 64, 32, 0, me)), tk.fp32) - r
        tk.store(ctx.exchange.R[me], tk.mul_row(r, tk.load(ctx.task.B, ROWS_OF, 0)))
        tk.fence_async()
        corrected = ctx.exchange.corrected[ctx.iter % 2]
        tk.store(tk.subtile(corrected, 64, 32, 0, me), tk.mm_AB(ctx.task.T, ctx.exchange.R[me]))
        tk.fence_async()
        tk.sync_consumers(ctx)
        s, ds = tk.subtile(input.S, 64, half, 0, me), tk.subtile(input.dS, 64, half, 0, me)
        scores = tk.mma_ABt(input.dO if me == 0 else input.dU, corrected, state.scores, wait=False)
        dq = tk.mma_AB(input.dO, s, state.dq, wait=False)
        read = tk.mma_AB(input.dU, s, state.read, wait=False)
        dk = tk.mma_AB(corrected, ds, state.dk, wait=False)
        beta = tk.row_sum(r * tk.cast(tk.load(tk.subtile(input.dU, 64, 32, 0, me)), tk.fp32), state.beta)
        kept = tk.row_sum(tk.cast(tk.load(s), tk.fp32) * tk.cast(tk.load(ds), tk.fp32), state.kept)
        scores, dq, dk, read = tk.mma_wait(scores, dq, dk, read)
        return tk.struct(scores=scores, dq=dq, dk=dk, read=read, beta=beta, kept=kept)

    @triton.jit
    def compute_last(ctx, state, input):
        me: tl.constexpr = ctx.consumer
        half: tl.constexpr = ctx.config.key_dim // 2
        task = ctx.task
        ROWS_OF: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, 64, 64))
        beta, begun, left = tk.load(task.B, ROWS_OF, 0), tk.load(task.B, ROWS_OF, 64), tk.load(task.B, ROWS_OF, 128)
        kept = tk.load_scalar(task.B, 127)
        q, k = tk.subtile(task.Q, 64, half, 0, me), tk.subtile(task.K, 64, half, 0, me)
        values = tk.cast(tk.load(k), tk.fp32)
        read, dk = tk.mul_row(state.read, beta * begun), tk.mul_row(state.dk, left)
        of_gates, of_written = tk.row_sum(read * values), tk.row_sum(dk * values)
        dk, dq = dk - read, tk.mul_row(state.dq, begun * ctx.args.scale)
        of_gates = tk.row_sum(dq * tk.cast(tk.load(q), tk.fp32)) - of_gates
        scores = causal(ctx, task, state.scores * ctx.args.scale if me == 0 else tk.tril(tk.neg(state.scores), -1))
        products = scores * tk.mm_ABt(task.Q if me == 0 else task.K, task.K)
        inverse = tk.row_sum(products) * me
        if me == 1:
            scores, products = tk.mul_row(scores, beta), tk.mul_row(products, beta)
        tk.store(ctx.exchange.scores[me], scores)
        tk.fence_async()
        tk.sync_consumers(ctx)
        of_q, of_k = ctx.exchange.scores[0], ctx.exchange.scores[1]
        dq = tk.mma_AB(of_q, k, dq, wait=False)
        dk = tk.mma_AtB(of_q, q, dk, wait=False)
        dk = tk.mma_AtB(of_k, k, tk.mma_AB(of_k, k, dk, wait=False), wait=False)
        of_gates += tk.row_sum(products)
        parts = (of_gates, tk.col_sum(products), of_written, state.kept * kept, state.beta, inverse)
        for i in tl.static_range(PARTS):
            tk.store(ctx.globals.P, parts[i], (2 * i + me, ctx.head, ctx.home, 0))
        dq, dk = tk.mma_wait(dq, dk)
        return state.replace(dq=dq, dk=dk)

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.dQ, state.dq)
        tk.store(epilogue.dK, state.dk)
        tk.fence_async()
        tk.store_async(ctx.globals.dQ, epilogue.dQ, (ctx.sequence, ctx.head, 0, ctx.consumer))
        tk.store_async(ctx.globals.dK, epilogue.dK, (ctx.sequence, ctx.head, 0, ctx.consumer))


@triton.jit
def _sum_of_two(place, part, exists, NUMBER: tl.constexpr):
    """A part, of both consumers."""
    first = place + 2 * NUMBER * part
    return tl.load(first, mask=exists, other=0) + tl.load(first + part, mask=exists, other=0)


@plain_kernel(num_warps=4)
@triton.jit
def gather_gates(P, ENDS, DG, DB, sequences, heads, slots, MOST: tl.constexpr):
    """DG and DB (rows, heads), the gradients of gates and beta, of their parts P. Grid: slots, heads.

    A gate scales what rows from its own on read of rows before it: rows and columns of products on both sides of it
    cancel. What rows write into the state after the chunk, later gates scale; the state before, all.
    """
    slot, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    exists = (head < heads)[None, :]
    place = P + (head[None, :].to(tl.int64) * slots + slot) * ROWS + tl.arange(0, ROWS)[:, None]
    part = tl.cast(slots, tl.int64) * heads * ROWS
    rows, cols = _sum_of_two(place, part, exists, 0), _sum_of_two(place, part, exists, 1)
    written, kept = _sum_of_two(place, part, exists, 2), _sum_of_two(place, part, exists, 3)
    beta = _sum_of_two(place, part, exists, 4) + _sum_of_two(place, part, exists, 5)
    dg = tl.cumsum(rows - cols, 0, reverse=True) + tl.cumsum(written, 0) - written + tl.sum(kept, 0)[None, :]
    home = row[:, None] * heads + head[None, :]
    tl.store(DG + home, tk.cast(dg, DG.dtype.element_ty), mask=inside[:, None] & exists)
    tl.store(DB + home, tk.cast(beta, DB.dtype.element_ty), mask=inside[:, None] & exists)
