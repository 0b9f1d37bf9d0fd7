"""The gated delta rule, chunk by chunk: S ← e^g S, S ← S + β k (v - Sᵀk)ᵀ, o = scale · Sᵀq.

With the sums G of g from a chunk's first row on, and A the lower triangle of β (K Kᵀ) ∘ e^{G_i - G_j}, rows of a chunk
depend on each other by M = (I + A)⁻¹ β: the corrected values are V' = M (V - e^G K S). Then O = e^G Q S + (Q Kᵀ ∘
e^{G_i - G_j}) V', and the state after the chunk is e^{G_last} S + (e^{G_last - G} K)ᵀ V'. `invert_chunks` computes M
of all chunks at once, `GatedDeltaNet` the rest. Source: Yang et al., Gated Delta Networks (2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.linear_attention.device.chunks import (
    ROWS,
    Chunks,
    causal,
    chunk_of_slot,
    gates,
    load_rows,
    place_of_keys,
    place_of_state,
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
    K, B, ENDS, G, M, sequences, group, slots, dim, k_row, k_head, b_row, b_head,
    DIM: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """M (HV, slots · ROWS, ROWS) for K (rows, H, dim) and B (rows, HV), with these strides. Grid: slots, HV."""
    slot, head = tl.program_id(0), tl.program_id(1)
    row, inside = chunk_of_slot(ENDS, slot, sequences, MOST)
    i, d, home = tl.arange(0, ROWS), tl.arange(0, DIM), head.to(tl.int64) * slots + slot
    if tl.sum(inside.to(tl.int32)) > 0:
        sums, beta = (
            tl.load(G + home * ROWS + i),
            tk.cast(tl.load(B + row * b_row + head * b_head, mask=inside, other=0), tk.fp32),
        )
        place = (row * k_row + head // group * k_head)[:, None] + d[None, :]
        k = tl.load(K + place, mask=inside[:, None] & (d < dim)[None, :], other=0)
        fading = tl.exp2(tl.where(i[:, None] > i[None, :], sums[:, None] - sums[None, :], float("-inf")))
        m = _inverse(tl.dot(k, tl.trans(k)) * fading * beta[:, None]) * beta[None, :]
        tl.store(M + (home * ROWS + i)[:, None] * ROWS + i[None, :], tk.cast(m, M.dtype.element_ty))


class GatedDeltaNet(Chunks, tk.lcsf):
    """M: (heads, slots · 64, 64). S1, the states after (`ends_wanted`): as S0."""

    ends_wanted: bool = False

    def layout(self) -> tk.layout:
        q, part, m = (tk.st(self.dtype, 64, n) for n in (self.key_dim, self.cols, 64))
        loaded = dict(Q=q, **self.operands, M=m)
        return self.chunked(
            dict(**loaded, O=self.operands["V"], **({"S1": None} if self.ends_wanted else {})),
            input=loaded,
            scratch=dict(S=tk.st(self.dtype, self.cols, self.key_dim), R=part, V=part, W=part),
            output=dict(O=self.operands["V"]),
        )

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.Q, ctx.globals.Q, place_of_keys(ctx), input.full)
        tk.load_async(input.M, ctx.globals.M, (ctx.head, ctx.first + ctx.iter, 0), input.full)
        load_rows(ctx, input)

    @triton.jit
    def compute(ctx, state, input, output):
        v, (begun, left, kept) = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer), gates(ctx, input)
        tk.store(ctx.scratch.S, state.s)
        tk.fence_async()
        r = tk.mm_ABt(input.K, ctx.scratch.S, wait=False)
        p = tk.mm_ABt(input.Q, input.K, wait=False)
        o = tk.mm_ABt(input.Q, ctx.scratch.S, wait=False)
        r = tk.mma_wait(r, leave=(p, o))
        tk.store(ctx.scratch.R, tk.cast(tk.load(v), tk.fp32) - tk.mul_row(r, begun))
        tk.fence_async()
        corrected = tk.mm_AB(input.M, ctx.scratch.R)
        tk.store(ctx.scratch.V, corrected)
        tk.store(ctx.scratch.W, tk.mul_row(corrected, left))
        tk.fence_async()
        s = tk.mma_AtB(ctx.scratch.W, input.K, state.s * kept, wait=False)
        p, o = tk.mma_wait(p, o, leave=(s,))
        p = tk.cast(causal(ctx, input, p), ctx.config.dtype)
        o, s = tk.mma_wait(tk.mma_AB(p, ctx.scratch.V, tk.mul_row(o, begun), wait=False), s)
        tk.store(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer), o * ctx.args.scale)
        return state.replace(s=s)

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.O, output.O, (ctx.sequence, ctx.head, ctx.iter, ctx.col))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            tk.store(ctx.globals.S1, state.s, place_of_state(ctx))
