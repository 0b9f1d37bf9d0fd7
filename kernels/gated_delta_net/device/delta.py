"""The gated delta rule, chunk by chunk: S ← e^g S, S ← S + β k (v - Sᵀk)ᵀ, o = scale · Sᵀq.

With the sums G of g from a chunk's first row on, and A the lower triangle of β (K Kᵀ) ∘ e^{G_i - G_j}, rows of a chunk
depend on each other by T = (I + A)⁻¹: the corrected values are V' = T β R for R = V - e^G K S. Then O = e^G Q S +
(Q Kᵀ ∘ e^{G_i - G_j}) V', and the state after the chunk is e^{G_last} S + (e^{G_last - G} K)ᵀ V'. `invert_chunks`
computes T of all chunks at once, `GatedDeltaNet` the rest. Source: Yang et al., Gated Delta Networks (2024).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.linear_attention.device.chunks import (
    ROWS,
    LinearAttention,
    chunk,
    chunk_of_slot,
    gates,
    load_rows,
    place_of_keys,
)
from tritonkittens.launch import plain_kernel

BLOCK: tl.constexpr = tl.constexpr(16)  # rows of blocks that are inverted row by row


@triton.jit
def _inverse(a):
    """(I + a)⁻¹ of a lower triangle without its diagonal, ROWS × ROWS.

    The blocks on the diagonal are inverted by rows: row i is eᵢ - aᵢ · (the rows above). With them, D, and the blocks N
    below, the inverse is (I + E)⁻¹ D, where E = D N, and E⁴ = 0. tf32 is enough: the result is rounded to 16 bits.
    """
    BLOCKS: tl.constexpr = ROWS // BLOCK
    b, i = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    blocks = tl.permute(tl.reshape(a, (BLOCKS, BLOCK, BLOCKS, BLOCK)), (0, 2, 1, 3))
    own, below = (b[:, None] == b[None, :])[:, :, None, None], (b[:, None] > b[None, :])[:, :, None, None]
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32)
    diagonal = tl.sum(tl.where(own, blocks, 0.0), 1)
    for row in range(1, BLOCK):
        is_row = (i == row)[None, :, None]
        of_row = tl.sum(tl.where(is_row, diagonal, 0.0), 1)
        found = tl.where(is_row, found - tl.sum(of_row[:, :, None] * found, 1)[:, None, :], found)
    d = _matrix(tl.where(own, found[:, None, :, :], 0.0))
    e = tl.dot(d, _matrix(tl.where(below, blocks, 0.0)), input_precision="tf32")
    square = tl.dot(e, e, input_precision="tf32")
    rest = square - e - tl.dot(square, e, input_precision="tf32")  # (I + E)⁻¹ - I
    return d + tl.dot(rest, d, input_precision="tf32")


@triton.jit
def _matrix(blocks):
    """The matrix of blocks (block row, block column, row, column)."""
    return tl.reshape(tl.permute(blocks, (0, 2, 1, 3)), (ROWS, ROWS))


@plain_kernel(num_warps=4)
@triton.jit
def invert_chunks(
    K, BETA, ENDS, G, T, B, Q, P, sequences, group, slots, dim, k_row, k_head, b_row, b_head, q_row, q_head,
    DIM: tl.constexpr, MOST: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """T (HV, slots · ROWS, ROWS) for K (rows, H, dim) and BETA (rows, HV), with these strides, and B (HV, slots, ROWS),
    which is BETA in fp32. Grid: slots, HV.

    SCORED: P, as T, is (Q Kᵀ) ∘ e^{G_i - G_j} on and below the diagonal, and B (HV, slots, 4 · ROWS) has β, e^G and
    e^{G_last - G} one after another.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    i, d, home = tl.arange(0, ROWS), tl.arange(0, DIM), head.to(tl.int64) * slots + slot
    if tl.sum(inside.to(tl.int32)) > 0:
        sums, beta = (
            tl.load(G + home * ROWS + i),
            tk.cast(tl.load(BETA + row * b_row + head * b_head, mask=inside, other=0), tk.fp32),
        )
        place = (row * k_row + head // group * k_head)[:, None] + d[None, :]
        exists = inside[:, None] & (d < dim)[None, :]
        k = tl.load(K + place, mask=exists, other=0)
        fading = tl.exp2(tl.where(i[:, None] >= i[None, :], sums[:, None] - sums[None, :], float("-inf")))
        of_chunk = (home * ROWS + i)[:, None] * ROWS + i[None, :]
        if SCORED:
            q = tl.load(Q + (row * q_row + head // group * q_head)[:, None] + d[None, :], mask=exists, other=0)
            tl.store(P + of_chunk, tk.cast(tl.dot(q, tl.trans(k)) * fading, P.dtype.element_ty))
            last = tl.sum(tl.where(i == ROWS - 1, sums, 0.0))
            tl.store(B + home * 4 * ROWS + i, beta)
            tl.store(B + home * 4 * ROWS + ROWS + i, tl.exp2(sums))
            tl.store(B + home * 4 * ROWS + 2 * ROWS + i, tl.exp2(last - sums))
        else:
            tl.store(B + home * ROWS + i, beta)
        t = _inverse(tl.dot(k, tl.trans(k)) * tl.where(i[:, None] > i[None, :], fading, 0.0) * beta[:, None])
        tl.store(T + of_chunk, tk.cast(t, T.dtype.element_ty))


class DeltaChunks(LinearAttention):
    """T: (heads, slots · 64, 64), B: as G."""

    @property
    def loaded(self) -> dict[str, Any]:
        return {**super().loaded, "T": tk.st(self.dtype, 64, 64), "B": tk.sv(tk.fp32, 64)}

    @property
    def scratch(self) -> dict[str, Any]:
        part = tk.st(self.dtype, 64, self.cols)
        return dict(R=part, W=part)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        load_chunk(ctx, input)


@triton.jit
def load_chunk(ctx, input):
    """Load all but Q."""
    slot = ctx.first + chunk(ctx)
    tk.load_async(input.T, ctx.globals.T, (ctx.head, slot, 0), input.full)
    tk.load_async(input.B, ctx.globals.B, (ctx.head, slot, 0), input.full)
    load_rows(ctx, input)


@triton.jit
def of_rows(ctx, numbers):
    """A number of each row of a consumer's columns of V."""
    return tk.load(numbers, tk.col_vec(tk.rt(tk.fp32, 64, ctx.config.cols)))


@triton.jit
def correct(ctx, input, r):
    """V' of r = K S. Scratch tile W gets e^{G_last - G} V'."""
    v, (begun, left, _) = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer), gates(ctx, input)
    missing = tk.cast(tk.load(v), tk.fp32) - tk.mul_row(r, begun)
    tk.store(ctx.scratch.R, tk.mul_row(missing, of_rows(ctx, input.B)))
    tk.fence_async()
    corrected = tk.mm_AB(input.T, ctx.scratch.R)
    tk.store(ctx.scratch.W, tk.mul_row(corrected, left))
    return corrected


class GatedDeltaNet(LinearAttention):
    """The result, and the states after (`ends_wanted`). T, P, B: of `invert_chunks`, (heads, slots · 64, 64) and
    (heads, slots, 256).

    All is transposed, so that what depends on the state before stays in registers: it is the A operand of products
    with rows of K and Q.
    """

    gated: bool = False  # B has what gates give

    @property
    def loaded(self) -> dict[str, Any]:
        square = tk.st(self.dtype, 64, 64)
        return {**super().loaded, "T": square, "P": square, "B": tk.sv(tk.fp32, 256)}

    @property
    def scratch(self) -> dict[str, Any]:
        return {}

    @triton.jit
    def load(ctx, input):
        slot = ctx.first + ctx.iter
        load_rows(ctx, input)
        tk.load_async(input.B, ctx.globals.B, (ctx.head, slot, 0), input.full)
        tk.load_async(input.T, ctx.globals.T, (ctx.head, slot, 0), input.full)
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        tk.load_async(input.P, ctx.globals.P, (ctx.head, slot, 0), input.full)

    @triton.jit
    def compute(ctx, state, input, output):
        DTYPE: tl.constexpr = ctx.config.dtype
        OF_ROWS: tl.constexpr = tk.row_vec(tk.rt(tk.fp32, ctx.config.cols, 64))
        before = tk.cast(state.s, DTYPE)
        r = tk.mm_ABt(before, input.K, wait=False)
        v = tk.transpose(tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer))
        beta, begun = tk.load(input.B, OF_ROWS, 0), tk.load(input.B, OF_ROWS, 64)
        v = tk.mul_col(tk.cast(tk.load(v), tk.fp32), beta)
        missing = v - tk.mul_col(tk.mma_wait(r), beta * begun)
        corrected = tk.mm_ABt(tk.cast(missing, DTYPE), input.T, wait=False)
        o = tk.mm_ABt(before, input.Q, wait=False)
        corrected = tk.mma_wait(corrected, leave=(o,))
        left, kept = tk.load(input.B, OF_ROWS, 128), tk.load_scalar(input.B, 127)
        written = tk.cast(tk.mul_col(corrected, left), DTYPE)
        s = tk.mma_AB(written, input.K, state.s * kept, wait=False)
        o = tk.mul_col(tk.mma_wait(o, leave=(s,)), begun)
        o, s = tk.mma_wait(tk.mma_ABt(tk.cast(corrected, DTYPE), input.P, o, wait=False), s)
        home = tk.transpose(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer))
        tk.store(home, o * ctx.args.scale)
        return state.replace(s=s)
