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
    causal,
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
    K, BETA, ENDS, G, T, B, sequences, group, slots, dim, k_row, k_head, b_row, b_head,
    DIM: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """T (HV, slots · ROWS, ROWS) for K (rows, H, dim) and BETA (rows, HV), with these strides, and B (HV, slots, ROWS),
    which is BETA in fp32. Grid: slots, HV."""
    slot, head = tl.program_id(0), tl.program_id(1)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    i, d, home = tl.arange(0, ROWS), tl.arange(0, DIM), head.to(tl.int64) * slots + slot
    if tl.sum(inside.to(tl.int32)) > 0:
        sums, beta = (
            tl.load(G + home * ROWS + i),
            tk.cast(tl.load(BETA + row * b_row + head * b_head, mask=inside, other=0), tk.fp32),
        )
        place = (row * k_row + head // group * k_head)[:, None] + d[None, :]
        k = tl.load(K + place, mask=inside[:, None] & (d < dim)[None, :], other=0)
        fading = tl.exp2(tl.where(i[:, None] > i[None, :], sums[:, None] - sums[None, :], float("-inf")))
        t = _inverse(tl.dot(k, tl.trans(k)) * fading * beta[:, None])
        tl.store(T + (home * ROWS + i)[:, None] * ROWS + i[None, :], tk.cast(t, T.dtype.element_ty))
        tl.store(B + home * ROWS + i, beta)


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


class GatedDeltaNet(DeltaChunks):
    """The result, and the states after (`ends_wanted`)."""

    @property
    def scratch(self) -> dict[str, Any]:
        state = tk.st(self.dtype, self.cols, self.key_dim)
        return dict(S=state, **super().scratch, V=tk.st(self.dtype, 64, self.cols))

    @triton.jit
    def compute(ctx, state, input, output):
        begun, _, kept = gates(ctx, input)
        tk.store(ctx.scratch.S, state.s)
        tk.fence_async()
        r = tk.mm_ABt(input.K, ctx.scratch.S, wait=False)
        p = tk.mm_ABt(input.Q, input.K, wait=False)
        o = tk.mm_ABt(input.Q, ctx.scratch.S, wait=False)
        corrected = correct(ctx, input, tk.mma_wait(r, leave=(p, o)))
        tk.store(ctx.scratch.V, corrected)
        tk.fence_async()
        s = tk.mma_AtB(ctx.scratch.W, input.K, state.s * kept, wait=False)
        p, o = tk.mma_wait(p, o, leave=(s,))
        p = tk.cast(causal(ctx, input, p), ctx.config.dtype)
        o, s = tk.mma_wait(tk.mma_AB(p, ctx.scratch.V, tk.mul_row(o, begun), wait=False), s)
        tk.store(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer), o * ctx.args.scale)
        return state.replace(s=s)
