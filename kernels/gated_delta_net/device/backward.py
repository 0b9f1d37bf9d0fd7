"""Gradients of the gated delta rule, in three passes over the chunks of `delta.py`, whose letters these are.

`DeltaStates` computes the state S before each chunk and V' again. `DeltaStateGradients` runs from the last chunk to the
first: dV' = (Q Kᵀ ∘ Γ)ᵀ dO + e^{G_last - G} K dS, where Γ = e^{G_i - G_j} and dS is the gradient of the state after the
chunk. With dU = Tᵀ dV', the gradient of V is dR = β dU, and that of the state before the chunk is e^{G_last} dS +
(e^G Q)ᵀ dO - (e^G K)ᵀ dR.

`DeltaGradients` computes the rest, all chunks at once. The inverse has the gradient dA = -dU V'ᵀ. Let M = scale ·
dO V'ᵀ ∘ Γ and N = -dU V'ᵀ ∘ Γ be lower triangles, N without its diagonal. Then dQ = M K + scale · e^G dO Sᵀ, and
dK = β Z + W, where Z = N K - e^G dU Sᵀ and W = Mᵀ Q + (β N)ᵀ K + e^{G_last - G} V' dSᵀ. The gradient of β sums the
columns of dU ∘ V + Z ∘ K, and that of G those of Q ∘ dQ + β Z ∘ K - W ∘ K. G_last also has the sum of all numbers of
e^{G_last - G} V' dSᵀ ∘ K and e^{G_last} S ∘ dS.
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

PARTS: tl.constexpr = tl.constexpr(4)  # of the gradients of a chunk's gates and beta, from each of two consumers


class DeltaStates(GatedDeltaNet):
    """S: (slots, heads, value columns, key_dim), the states before all chunks. Y: V', as V."""

    @property
    def loaded(self) -> dict[str, Any]:
        return {name: tile for name, tile in super().loaded.items() if name not in "QP"}

    @property
    def results(self) -> dict[str, Any]:
        return dict(S=tk.st(self.dtype, self.value_dim, self.key_dim), Y=self.operands["V"])

    @triton.jit
    def load(ctx, input):
        load_chunk(ctx, input)

    @triton.jit
    def compute(ctx, state, input, output):
        before = tk.cast(state.s, ctx.config.dtype)
        corrected = correct(ctx, input, before)
        tk.store(tk.subtile(output.S, ctx.config.cols, ctx.config.key_dim, ctx.consumer, 0), before)
        corrected = tk.mma_wait(corrected)
        s = write(ctx, input, state.s, corrected)
        tk.store(columns(ctx, output.Y), corrected)
        return state.replace(s=tk.mma_wait(s))

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.S, output.S, (ctx.first + chunk(ctx), ctx.head, ctx.col, 0))
        tk.store_async(ctx.globals.Y, output.Y, (ctx.sequence, ctx.head, chunk(ctx), ctx.col))


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
    heads, slots, 64) fp32, of G, G_last, and twice of beta. A task is a chunk and a head, an iteration 64 columns of V.

    Each consumer has half the columns of Q, K and states. Consumer 0 computes M and consumer 1 N, which they exchange.
    Q and K have 128 columns: half of 64 would cut a swizzle atom, which tensor cores cannot read.
    """

    consumers: int = 2
    schedule: tk.Schedule = tk.Dynamic()  # `setup` reads memory: the producer calls it for all
    broadcast_tile: bool = True
    consumer_registers: int | None = 240

    def layout(self) -> tk.layout:
        keys, half, tile = (tk.st(self.dtype, 64, n) for n in (self.key_dim, self.key_dim // 2, 64))
        loaded = dict(V=tile, Y=tile, dO=tile, dU=tile, S=keys, dS=keys)
        rows = dict(Q=half, K=half, G=tk.sv(tk.fp32, 64), B=tk.sv(tk.fp32, 256))
        return self.chunked(
            {**rows, **loaded, "dQ": half, "dK": half, "P": None},
            input=loaded, epilogue=rows, epilogue_loads=tuple(rows), exchange=dict(scores=tile, scaled=tile),
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
    def load(ctx, input):
        place, of_state = (ctx.sequence, ctx.head, 0, ctx.iter), (ctx.home, ctx.head, ctx.iter, 0)
        tk.load_async(input.V, ctx.globals.V, place, input.full)
        tk.load_async(input.Y, ctx.globals.Y, place, input.full)
        tk.load_async(input.dO, ctx.globals.dO, place, input.full)
        tk.load_async(input.dU, ctx.globals.dU, place, input.full)
        tk.load_async(input.S, ctx.globals.S, of_state, input.full)
        tk.load_async(input.dS, ctx.globals.dS, of_state, input.full)

    @triton.jit
    def load_epilogue(ctx, epilogue):
        place, of_chunk = (ctx.sequence, ctx.head // ctx.args.group, 0, ctx.consumer), (ctx.head, ctx.home, 0)
        tk.load_async(epilogue.Q, ctx.globals.Q, place, epilogue.full)
        tk.load_async(epilogue.K, ctx.globals.K, place, epilogue.full)
        tk.load_async(epilogue.G, ctx.globals.G, of_chunk, epilogue.full)
        tk.load_async(epilogue.B, ctx.globals.B, of_chunk, epilogue.full)

    @triton.jit
    def start(ctx):
        half = tk.zero(tk.rt(tk.fp32, 64, ctx.config.key_dim // 2))
        scores, beta = tk.zero(tk.rt(tk.fp32, 64, 64)), tk.zero(tk.col_vec(tk.rt(tk.fp32, 64, 32)))
        return tk.struct(scores=scores, diagonal=scores, dq=half, dk=half, read=half, beta=beta)

    @triton.jit
    def compute(ctx, state, input):
        me: tl.constexpr = ctx.consumer
        half: tl.constexpr = ctx.config.key_dim // 2
        s, ds = tk.subtile(input.S, 64, half, 0, me), tk.subtile(input.dS, 64, half, 0, me)
        scores = tk.mma_ABt(input.dO if me == 0 else input.dU, input.Y, state.scores, wait=False)
        dq = tk.mma_AB(input.dO, s, state.dq, wait=False)
        read = tk.mma_AB(input.dU, s, state.read, wait=False)
        dk = tk.mma_AB(input.Y, ds, state.dk, wait=False)
        diagonal = tk.mma_ABt(s, ds, state.diagonal, wait=False)  # only its diagonal is used: it sums S ∘ dS
        v, du = tk.load(tk.subtile(input.V, 64, 32, 0, me)), tk.load(tk.subtile(input.dU, 64, 32, 0, me))
        beta = tk.row_sum(tk.cast(v, tk.fp32) * tk.cast(du, tk.fp32), state.beta)
        scores, dq, read, dk, diagonal = tk.mma_wait(scores, dq, read, dk, diagonal)
        return tk.struct(scores=scores, diagonal=diagonal, dq=dq, dk=dk, read=read, beta=beta)

    @triton.jit
    def finish(ctx, state, epilogue):
        me: tl.constexpr = ctx.consumer
        ROWS_OF: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, 64, 64))
        beta, begun = tk.load(epilogue.B, ROWS_OF, 0), tk.load(epilogue.B, ROWS_OF, 64)
        left, kept = tk.load(epilogue.B, ROWS_OF, 128), tk.load_scalar(epilogue.B, 127)
        scores = causal(ctx, epilogue, state.scores * ctx.args.scale if me == 0 else tk.neg(state.scores), -me)
        tk.sync_consumers(ctx)  # products of the previous task have read these
        tk.store(ctx.exchange.scores[me], scores)
        if me == 1:
            tk.store(ctx.exchange.scaled[1], tk.mul_row(scores, beta))
        tk.fence_async()
        q, k, values = epilogue.Q, epilogue.K, tk.cast(tk.load(epilogue.K), tk.fp32)
        dk, dq = tk.mul_row(state.dk, left), tk.mul_row(state.dq, begun * ctx.args.scale)
        written = tk.row_sum(dk * values)
        tk.sync_consumers(ctx)
        of_q, of_k = ctx.exchange.scores[0], ctx.exchange.scores[1]
        dq = tk.mma_AB(of_q, k, dq, wait=False)
        read = tk.mma_AB(of_k, k, tk.mul_row(state.read, tk.neg(begun)), wait=False)
        dk = tk.mma_AtB(of_q, q, dk, wait=False)
        dk = tk.mma_AtB(ctx.exchange.scaled[1], k, dk, wait=False)
        queries, diagonal = tk.cast(tk.load(q), tk.fp32), tk.row_sum(tk.block_diagonal(state.diagonal, 1, 0.0))
        dq, read, dk = tk.mma_wait(dq, read, dk)
        tk.sync()  # all warps have read Q and K
        tk.store(q, dq)
        tk.store(k, dk + tk.mul_row(read, beta))
        tk.fence_async()
        tk.store_async(ctx.globals.dQ, q, (ctx.sequence, ctx.head, 0, me))
        tk.store_async(ctx.globals.dK, k, (ctx.sequence, ctx.head, 0, me))
        of_beta = tk.row_sum(read * values)
        of_gates = tk.row_sum(dq * queries - dk * values, of_beta * beta)
        parts = (of_gates, written + diagonal * kept, of_beta, state.beta)
        for i in tl.static_range(PARTS):
            tk.store(ctx.globals.P, parts[i], (2 * i + me, ctx.head, ctx.home, 0))


@triton.jit
def _sum_of_two(place, part, exists, NUMBER: tl.constexpr):
    """A part, of both consumers."""
    first = place + 2 * NUMBER * part
    return tl.load(first, mask=exists, other=0) + tl.load(first + part, mask=exists, other=0)


@plain_kernel(num_warps=4)
@triton.jit
def gather_gates(P, ENDS, DG, DB, sequences, heads, slots, MOST: tl.constexpr):
    """DG and DB (rows, heads), the gradients of gates and beta, of their parts P. Grid: slots, heads.

    G sums gates: the gradient of a gate is that of all sums from its row on, and of G_last.
    """
    slot, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    exists = (head < heads)[None, :]
    place = P + (head[None, :].to(tl.int64) * slots + slot) * ROWS + tl.arange(0, ROWS)[:, None]
    part = tl.cast(slots, tl.int64) * heads * ROWS
    rows, last = _sum_of_two(place, part, exists, 0), _sum_of_two(place, part, exists, 1)
    beta = _sum_of_two(place, part, exists, 2) + _sum_of_two(place, part, exists, 3)
    dg = tl.cumsum(rows, 0, reverse=True) + tl.sum(last, 0)[None, :]
    home = row[:, None] * heads + head[None, :]
    tl.store(DG + home, tk.cast(dg, DG.dtype.element_ty), mask=inside[:, None] & exists)
    tl.store(DB + home, tk.cast(beta, DB.dtype.element_ty), mask=inside[:, None] & exists)
