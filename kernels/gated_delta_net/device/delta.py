"""The gated delta rule, chunk by chunk: S ← e^g S, S ← S + β k (v - Sᵀk)ᵀ, o = scale · Sᵀq.

With the sums G of g from a chunk's first row on, and A the lower triangle of β (K Kᵀ) ∘ e^{G_i - G_j}, rows of a chunk
depend on each other by M = (I + A)⁻¹ β: the corrected values are V' = M (V - e^G K S). Then O = e^G Q S + (Q Kᵀ ∘
e^{G_i - G_j}) V', and the state after the chunk is e^{G_last} S + (e^{G_last - G} K)ᵀ V'. `invert_chunks` computes M
and G of all chunks at once, `GatedDeltaNet` the rest. Source: Yang et al., Gated Delta Networks (2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.launch import plain_kernel

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _inverse(a, ROWS: tl.constexpr):
    """(I + a)⁻¹ of a lower triangle without its diagonal, ROWS × ROWS, by rows: row i is eᵢ - aᵢ · (the rows above)."""
    i = tl.arange(0, ROWS)
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, ROWS):
        of_row = tl.sum(tl.where(i[:, None] == row, a, 0.0), 0)  # a[row, :]
        changed = tl.sum(of_row[:, None] * found, 0)
        found = tl.where(i[:, None] == row, found - changed[None, :], found)
    return found


@plain_kernel(num_warps=4)
@triton.jit
def invert_chunks(
    K, G, B, ENDS, M, SUMS, sequences, group, slots, dim, k_row, k_head, g_row, g_head, b_row, b_head,
    ROWS: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """M (HV, slots, ROWS, ROWS) and SUMS (HV, slots, ROWS), in base 2. K (rows, H, dim), G and B (rows, HV) with these
    strides. Grid: slots, HV."""
    slot, head = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, MOST)
    ends = tl.load(ENDS + n, mask=n < sequences, other=0)
    number = tl.sum(((ends // ROWS + n + 1 <= slot) & (n < sequences)).to(tl.int32))
    begin = tl.load(ENDS + number - 1, mask=(number > 0) & (number < sequences), other=0)
    end = tl.load(ENDS + number, mask=number < sequences, other=0)
    i = tl.arange(0, ROWS)
    row = (begin + (slot - begin // ROWS - number) * ROWS + i).to(tl.int64)
    inside = row < end
    if tl.sum(inside.to(tl.int32)) > 0:
        sums = tl.cumsum(tk.cast(tl.load(G + row * g_row + head * g_head, mask=inside, other=0), tk.fp32) * LOG2_E, 0)
        beta = tk.cast(tl.load(B + row * b_row + head * b_head, mask=inside, other=0), tk.fp32)
        d = tl.arange(0, DIM)
        k = tl.load(
            K + (row * k_row + head // group * k_head)[:, None] + d[None, :],
            mask=inside[:, None] & (d < dim)[None, :],
            other=0,
        )
        fading = tl.exp2(tl.where(i[:, None] > i[None, :], sums[:, None] - sums[None, :], float("-inf")))
        a = tl.dot(k, tl.trans(k)) * fading * beta[:, None]
        m = _inverse(a, ROWS) * beta[None, :]
        home = head.to(tl.int64) * slots + slot
        tl.store(M + home * ROWS * ROWS + i[:, None] * ROWS + i[None, :], tk.cast(m, M.dtype.element_ty))
        tl.store(SUMS + home * ROWS + i, sums)


class GatedDeltaNet(tk.lcsf):
    """A task is a sequence, a head of V and a block of its columns, an iteration a chunk of 64 rows. Q, K: (H, rows of
    all sequences, key_dim), V, O: (HV, rows, value columns), M: (HV, slots · 64, 64), G: (HV, slots, 64). S0, S1, the
    states before and after: (sequences, HV, value columns, key_dim) fp32. ends: (sequences,) int32.

    Consumers share the columns of V. The state of each stays in registers, in fp32.
    """

    dtype: tl.dtype = tk.bf16
    consumers: int = 2
    key_dim: int = 128
    value_dim: int = 128
    begins: bool = False
    ends_wanted: bool = False

    @property
    def cols(self) -> int:
        """Columns of V of a consumer."""
        return self.value_dim // self.consumers

    def layout(self) -> tk.layout:
        k, v, m = (tk.st(self.dtype, 64, n) for n in (self.key_dim, self.value_dim, 64))
        g, part = tk.sv(tk.fp32, 64), tk.st(self.dtype, 64, self.cols)
        states = {"S0": self.begins, "S1": self.ends_wanted}
        return tk.layout(
            globals=dict(Q=k, K=k, V=v, O=v, M=m, G=g, **{n: None for n, there in states.items() if there}, ends=None),
            input=dict(Q=k, K=k, V=v, M=m, G=g),
            scratch=dict(S=tk.st(self.dtype, self.cols, self.key_dim), R=part, V=part, W=part),
            output=dict(O=v),
            args=("scale", "group"),
            ragged=("Q", "K", "V", "O"),
        )

    @triton.jit
    def setup(ctx):
        heads, blocks = tk.extent(ctx.globals.V, 0), tk.ceil_div(tk.extent(ctx.globals.V, 2), ctx.config.value_dim)
        number, count = ctx.task_id // (blocks * heads), tk.extent(ctx.globals.ends, 0)
        last = tl.minimum(number, count - 1)
        begin = tl.where(last > 0, tk.load_scalar(ctx.globals.ends, (tl.maximum(last - 1, 0),)), 0)
        rows = tk.load_scalar(ctx.globals.ends, (last,)) - begin
        return tk.task(
            tk.ceil_div(rows, 64),
            when=number < count,
            sequence=tk.sequence(begin, rows),
            number=number,
            first=begin // 64 + number,
            head=ctx.task_id // blocks % heads,
            col=ctx.task_id % blocks,
        )

    @triton.jit
    def load(ctx, input):
        of_keys = (ctx.sequence, ctx.head // ctx.args.group, ctx.iter, 0)
        tk.load_async(input.Q, ctx.globals.Q, of_keys, input.full)
        tk.load_async(input.K, ctx.globals.K, of_keys, input.full)
        tk.load_async(input.V, ctx.globals.V, (ctx.sequence, ctx.head, ctx.iter, ctx.col), input.full)
        tk.load_async(input.M, ctx.globals.M, (ctx.head, ctx.first + ctx.iter, 0), input.full)
        tk.load_async(input.G, ctx.globals.G, (ctx.head, ctx.first + ctx.iter, 0), input.full)

    @triton.jit
    def start(ctx):
        s = tk.rt(tk.fp32, ctx.config.cols, ctx.config.key_dim)
        place = (ctx.number, ctx.head, ctx.col * ctx.config.consumers + ctx.consumer, 0)
        return tk.struct(s=tk.load(ctx.globals.S0, s, place) if ctx.config.begins else tk.zero(s))

    @triton.jit
    def compute(ctx, state, input, output):
        v = tk.subtile(input.V, 64, ctx.config.cols, 0, ctx.consumer)
        tk.store(ctx.scratch.S, state.s)
        tk.fence_async()
        r = tk.mm_ABt(input.K, ctx.scratch.S, wait=False)
        p = tk.mm_ABt(input.Q, input.K, wait=False)
        o = tk.mm_ABt(input.Q, ctx.scratch.S, wait=False)
        rows = tl.minimum(ctx.sequence.rows - ctx.iter * 64, 64)
        g, last = tk.load(input.G, tk.col_vec(tk.rt(tk.fp32, 64, 64))), tk.load_scalar(input.G, rows - 1)
        r = tk.mma_wait(r, leave=(p, o))
        tk.store(ctx.scratch.R, tk.cast(tk.load(v), tk.fp32) - tk.mul_row(r, tk.exp2(g)))
        tk.fence_async()
        corrected = tk.mm_AB(input.M, ctx.scratch.R)
        tk.store(ctx.scratch.V, corrected)
        tk.store(ctx.scratch.W, tk.mul_row(corrected, tk.exp2(tk.minimum(last - g, 0))))
        tk.fence_async()
        s = tk.mma_AtB(ctx.scratch.W, input.K, state.s * tl.exp2(last), wait=False)
        p, o = tk.mma_wait(p, o, leave=(s,))
        p = tk.tril(
            tk.mul(p, tk.exp2(tk.sub_col(tk.broadcast_row(p, g), tk.load(input.G, tk.row_vec(tk.rt(tk.fp32, 64, 64))))))
        )
        o, s = tk.mma_wait(
            tk.mma_AB(tk.cast(p, ctx.config.dtype), ctx.scratch.V, tk.mul_row(o, tk.exp2(g)), wait=False), s
        )
        tk.store(tk.subtile(output.O, 64, ctx.config.cols, 0, ctx.consumer), o * ctx.args.scale)
        return state.replace(s=s)

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.O, output.O, (ctx.sequence, ctx.head, ctx.iter, ctx.col))

    @triton.jit
    def finish(ctx, state, epilogue):
        if ctx.config.ends_wanted:
            place = (ctx.number, ctx.head, ctx.col * ctx.config.consumers + ctx.consumer, 0)
            tk.store(ctx.globals.S1, state.s, place)
