"""Attention forward with e4m3 operands: both products at twice the rate of 16 bits."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.forward import AttentionForward
from tritonkittens.launch import plain_kernel

KEYS = tl.constexpr(128)  # of a program of `transposed_values`


class AttentionForwardFp8(AttentionForward):
    """8-bit MMAs need both operands with contiguous depth, so V comes transposed.

    Q: (B, H, S, head_dim), K: (B, H_kv, S_kv, head_dim), V: (B, H_kv, value_dim, S_kv) from `transposed_values`, O: (B,
    H, S, value_dim) of dtype `result`. descales: (3, B, H_kv) fp32, the scales of Q, K and V.

    The keys of V come in the order in which a thread's accumulators hold them (`tk.byte_operand`), so that P needs no
    shuffle between the MMAs. P is multiplied by 2⁸, which uses most of e4m3's range.
    Source: FlashAttention-3 (Shah et al., 2024), section 3.3.
    """

    raised: float = 8.0

    def layout(self) -> tk.layout:
        plan, v = super().layout(), tk.st(self.dtype, self.value_dim, self.tile_n)
        return replace(plan, globals=dict(plan.globals) | dict(V=v, descales=None), lagged=dict(V=v))

    @triton.jit
    def load_params(ctx):
        heads = tk.extent(ctx.globals.Q, 0) * tk.extent(ctx.globals.K, 1)
        place = ctx.globals.descales.pointer + ctx.batch * tk.extent(ctx.globals.K, 1) + ctx.kv_head
        return tk.struct(scores=tl.load(place) * tl.load(place + heads), values=tl.load(place + 2 * heads))

    @triton.jit
    def load_lagged(ctx, lagged):
        tk.load_async(lagged.V, ctx.globals.V, (ctx.batch, ctx.kv_head, 0, ctx.config._block(ctx)), lagged.full)

    @triton.jit
    def _descaled(ctx, factor):
        return factor * ctx.params.scores

    @triton.jit
    def _share(ctx, total):
        return tk.where(total > 0, ctx.params.values / total, 0.0)

    @triton.jit
    def _times_values(ctx, p, tiles, o, first):
        return tk.mma_ABt(p, tiles.V, o, wait=False)

    @triton.jit
    def _operand(ctx, p):
        return tk.byte_operand(p, ctx.config.dtype)


@plain_kernel
@triton.jit
def transposed_values(V, out, stride_b, stride_h, stride_s, stride_d, keys, DIM: tl.constexpr):
    """V transposed, keys in the order of `tk.byte_operand`, zeros after the last.

    Grid: parts of 128 keys, key heads, batch. V: (B, H_kv, keys, DIM) with these strides. out: (B, H_kv, DIM, parts ·
    128), contiguous.
    """
    place, width = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.num_programs(0) * KEYS
    key = tk.byte_operand_column(place)
    head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    source = V + tl.program_id(2).to(tl.int64) * stride_b + tl.program_id(1).to(tl.int64) * stride_h
    for first in tl.static_range(0, DIM, 32):
        col = first + tl.arange(0, 32)
        v = tl.load(
            source + key[:, None].to(tl.int64) * stride_s + col[None, :] * stride_d,
            mask=(key < keys)[:, None],
            other=0.0,
        )
        tl.store(out + (head * DIM + col[:, None]) * width + place[None, :], tl.trans(v))
