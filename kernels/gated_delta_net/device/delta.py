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
    load_rows,
    place_of_keys,
)
from tritonkittens.launch import plain_kernel

BLOCK: tl.constexpr = tl.constexpr(16)  # rows of blocks that are inverted on their own
STEPS: tl.constexpr = tl.constexpr(6)  # of doubling a block until it has the rows of a chunk


@triton.jit
def _inverse(a):
    """(I + a)⁻¹ of a lower triangle without its diagonal, ROWS × ROWS.

    With the inverse t of the blocks of some rows on the diagonal, that of blocks of twice as many has -t a t below. The
    first blocks, on the diagonal of a, are inverted one by one. tf32 is enough: the result is rounded to 16 bits.
    """
    BLOCKS: tl.constexpr = ROWS // BLOCK
    b, i, one = tl.arange(0, BLOCKS), tl.arange(0, BLOCK), tl.arange(0, ROWS)
    own = (b[:, None] == b[None, :])[:, :, None, None]
    blocks = tl.permute(tl.reshape(a, (BLOCKS, BLOCK, BLOCKS, BLOCK)), (0, 2, 1, 3))
    t = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32)
    t = _doubled(t, tl.sum(tl.where(own, blocks, 0.0), 1), i, 1, BLOCK)
    whole = tl.permute(tl.where(own, t[:, None, :, :], 0.0), (0, 2, 1, 3))
    return _doubled(tl.reshape(whole, (ROWS, ROWS)), a, one, BLOCK, ROWS)


@triton.jit
def _doubled(t, a, row, FROM: tl.constexpr, TO: tl.constexpr):
    """The inverse of blocks of `TO` rows of I + a, of that of blocks of `FROM` rows, both powers of two."""
    for step in tl.static_range(STEPS):
        if FROM <= 2**step and 2**step < TO:
            block = row >> step
            below = (block[:, None] != block[None, :]) & (block[:, None] >> 1 == block[None, :] >> 1)
            product = tl.dot(tl.dot(t, a, input_precision="tf32"), t, input_precision="tf32")
            t -= tl.where(below, product, 0.0)
    return t


@plain_kernel(num_warps=4)
@triton.jit
def invert_chunks(
    Q, K, BETA, ENDS, G, T, P, B, sequences, group, slots, dim, q_row, q_head, k_row, k_head, b_row, b_head,
    DIM: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """T, P and B of `GatedDeltaNet`, of Q, K (rows, H, dim) and BETA (rows, HV) of these strides. Grid: slots, HV."""
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    i, d, home = tl.arange(0, ROWS), tl.arange(0, DIM), head * slots + slot
    if tl.sum(inside.to(tl.int32)) > 0:
        of_chunk = (home * ROWS + i)[:, None] * ROWS + i[None, :]
        exists = inside[:, None] & (d < dim)[None, :]
        q = tl.load(Q + (row * q_row + head // group * q_head)[:, None] + d[None, :], mask=exists, other=0)
        k = tl.load(K + (row * k_row + head // group * k_head)[:, None] + d[None, :], mask=exists, other=0)
        beta = tk.cast(tl.load(BETA + row * b_row + head * b_head, mask=inside, other=0), tk.fp32)
        sums, last = tl.load(G + home * ROWS + i), tl.load(G + home * ROWS + ROWS - 1)
        tl.store(B + home * 4 * ROWS + i, beta)
        tl.store(B + home * 4 * ROWS + ROWS + i, tl.exp2(sums))
        tl.store(B + home * 4 * ROWS + 2 * ROWS + i, tl.exp2(last - sums))
        fading = tl.exp2(tl.where(i[:, None] >= i[None, :], sums[:, None] - sums[None, :], float("-inf")))
        tl.store(P + of_chunk, tk.cast(tl.dot(q, tl.trans(k)) * fading, P.dtype.element_ty))
        t = _inverse(tl.dot(k, tl.trans(k)) * tl.where(i[:, None] > i[None, :], fading, 0.0) * beta[:, None])
        tl.store(T + of_chunk, tk.cast(t, T.dtype.element_ty))


class GatedDeltaNet(LinearAttention):
    """The result, and the states after (`ends_wanted`).

    T, and P = (Q Kᵀ) ∘ e^{G_i - G_j} for j ≤ i: (heads, slots · 64, 64). B: (heads, slots, 256) fp32, β, e^G and
    e^{G_last - G} of the rows of a chunk, one after another. All is transposed, so that what depends on the state stays
    in registers: it is the A operand of products with rows of K and Q.
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
        load_chunk(ctx, input)
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        tk.load_async(input.P, ctx.globals.P, (ctx.head, ctx.first + chunk(ctx), 0), input.full)

    @triton.jit
    def compute(ctx, state, input, output):
        before = tk.cast(state.s, ctx.config.dtype)
        corrected = correct(ctx, input, before)
        o = tk.mm_ABt(before, input.Q, wait=False)
        corrected = tk.mma_wait(corrected, leave=(o,))
        s = write(ctx, input, state.s, corrected)
        o = tk.mul_col(tk.mma_wait(o, leave=(s,)), of_rows(ctx, input, 1))
        o = tk.mma_ABt(tk.cast(corrected, ctx.config.dtype), input.P, o, wait=False)
        o, s = tk.mma_wait(o, s)
        tk.store(columns(ctx, output.O), o * ctx.args.scale)
        return state.replace(s=s)


@triton.jit
def load_chunk(ctx, input):
    """Load all but Q and P."""
    slot = ctx.first + chunk(ctx)
    load_rows(ctx, input)
    tk.load_async(input.T, ctx.globals.T, (ctx.head, slot, 0), input.full)
    tk.load_async(input.B, ctx.globals.B, (ctx.head, slot, 0), input.full)


@triton.jit
def of_rows(ctx, input, PART: tl.constexpr):
    """The numbers of a part of B."""
    return tk.load(input.B, tk.row_vec(tk.rt(tk.fp32, ctx.config.cols, 64)), 64 * PART)


@triton.jit
def columns(ctx, tile):
    """A consumer's columns, as rows."""
    return tk.transpose(tk.subtile(tile, 64, ctx.config.cols, 0, ctx.consumer))


@triton.jit
def correct(ctx, input, before):
    """V' of the state before, in 16 bits; it is being computed."""
    r = tk.mm_ABt(before, input.K, wait=False)
    beta = of_rows(ctx, input, 0)
    v = tk.mul_col(tk.cast(tk.load(columns(ctx, input.V)), tk.fp32), beta)
    missing = v - tk.mul_col(tk.mma_wait(r), beta * of_rows(ctx, input, 1))
    return tk.mm_ABt(tk.cast(missing, ctx.config.dtype), input.T, wait=False)


@triton.jit
def write(ctx, input, s, corrected):
    """The state after, which is being computed."""
    written = tk.cast(tk.mul_col(corrected, of_rows(ctx, input, 2)), ctx.config.dtype)
    return tk.mma_AB(written, input.K, s * tk.load_scalar(input.B, 127), wait=False)
