"""Attention forward with e4m3 operands: both products at twice the rate of 16 bits."""
from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels._dispatch import announce_write, call, check_no_gradient, check_tensors, is_plain, overlaps, requires_grad
from tritonkittens.kernels._tensors import check_operands, check_small
from tritonkittens.kernels.attention.call_plan import check_shapes, check_window, handed_out, launch_forward, scores_of, see_nothing
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.device.forward import AttentionForward
from tritonkittens.launch import plain_kernel

HEAD_DIMS = range(32, 257, 32)  # the depth of an 8-bit wgmma is 32
OUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)
KEYS = tl.constexpr(128)  # of a program of `transposed_values`


class AttentionForwardFp8(AttentionForward):
    """8-bit products take both operands with their depth contiguous, so V comes transposed, and with its keys in the order in which a thread's accumulators
    hold them (`tk.byte_operand`): then P goes from one product to the next in registers. P is multiplied by 2⁸, which uses most of e4m3's range.
    Source: FlashAttention-3 (Shah et al., 2024), section 3.3.

    Q: (B, H, S, head_dim), K: (B, H_kv, S_kv, head_dim), V: (B, H_kv, value_dim, S_kv) as `transposed_values` leaves it, O: (B, H, S, value_dim) in `result`,
    descales: (3, B, H_kv) fp32, what Q, K and V are to be multiplied by.
    """

    raised: float = 8.0

    def layout(self):
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
    """V transposed, keys in the order of `tk.byte_operand`, with zeros behind the last. Grid: parts of 128 keys, key heads, batch. V: (B, H_kv, keys, DIM) with
    these strides; out: (B, H_kv, DIM, parts · 128), contiguous."""
    place, width = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.num_programs(0) * KEYS
    key = tk.byte_operand_column(place)
    head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    source = V + tl.program_id(2).to(tl.int64) * stride_b + tl.program_id(1).to(tl.int64) * stride_h
    for first in tl.static_range(0, DIM, 32):
        col = first + tl.arange(0, 32)
        v = tl.load(source + key[:, None].to(tl.int64) * stride_s + col[None, :] * stride_d, mask=(key < keys)[:, None], other=0.0)
        tl.store(out + (head * DIM + col[:, None]) * width + place[None, :], tl.trans(v))


@functools.lru_cache
def forward_fp8(
    result: torch.dtype, head_dim: int, value_dim: int, causal: bool, window: bool, softcap: bool, shifted: bool, lse: bool, config: Config,
) -> AttentionForwardFp8:  # fmt: skip
    """The kernel for the result's type, dimensions and features."""
    return AttentionForwardFp8(dtype=tk.fp8e4m3, head_dim=head_dim, value_dim=value_dim, causal=causal, window=window, softcap=softcap,
                               shifted=shifted, lse=lse, result=tk.from_torch(result), **config.knobs(causal))


def attention_fp8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_scale: torch.Tensor | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, causal: bool = False, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
    softcap: float | None = None, return_lse: bool = False, out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention` of e4m3 tensors, which stand for q · q_scale, k · k_scale and v · v_scale; not differentiable.

    q: (batch, heads, queries, D); k: (batch, kv_heads, keys, D), v: (batch, kv_heads, keys, D_v), torch.float8_e4m3fn, D and D_v multiples of 32 up to 256.
    Scales: (batch, kv_heads) fp32 on the same device, one for all query heads of a group; 1 where not given. V is copied once, transposed. Returns
    (batch, heads, queries, D_v) of `out_dtype` (bf16, fp16, fp32), or `out`, whose type counts then. Everything else, results and errors as for `attention`.
    Traced by torch.compile as the operator `tritonkittens::attention_fp8`.
    """
    scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    check_no_gradient("attention_fp8", "use attention of 16-bit operands", q=q, k=k, v=v, **scales)
    if is_plain(q, k, v, *scales.values(), out):
        return of_fp8(q, k, v, q_scale, k_scale, v_scale, causal, window, scale, softcap, return_lse, out_dtype, out, config)
    check_tensors("attention_fp8", q=q, k=k, v=v)
    check_tensors("attention_fp8", optional=True, **scales, out=out)
    check_window(causal, window, "attention_fp8")
    kind = out_dtype if out is None else out.dtype
    found = call("attention_fp8", q, k, v, q_scale, k_scale, v_scale, causal, *(window or (None, None)), scale, softcap, kind)
    return handed_out(found, out, return_lse)


def of_fp8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_scale: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, causal: bool,
    window: tuple[int | None, int | None] | None, scale: float | None, softcap: float | None, return_lse: bool, out_dtype: torch.dtype,
    out: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attention_fp8` of plain tensors; arguments as there."""
    sides = check_window(causal, window, "attention_fp8")
    check_operands("attention_fp8", (torch.float8_e4m3fn,), 4, q=q, k=k, v=v)
    check_shapes(q, k, v, out, head_dims=HEAD_DIMS)
    if out is not None:
        check_operands("attention_fp8", OUT_TYPES, 4, out=out)
        out_dtype = out.dtype
        if requires_grad(out) or overlaps(out, q, k, v, q_scale, k_scale, v_scale):
            found = of_fp8(q, k, v, q_scale, k_scale, v_scale, causal, window, scale, softcap, True, out_dtype, None, config)
            return handed_out(found, out, return_lse)  # type: ignore[arg-type]
        announce_write(out)
    if out_dtype not in OUT_TYPES:
        raise TypeError(f"attention_fp8: out_dtype={out_dtype}; it must be one of {', '.join(map(str, OUT_TYPES))}")
    (batch, heads, queries, _), (kv_heads, keys, value_dim) = q.shape, v.shape[1:]
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    for name, x in given.items():
        if x is not None:
            check_small("attention_fp8", name, x, q, torch.float32, (batch, kv_heads), f"({batch}, {kv_heads})")
    scores = scores_of(q, scale, softcap, *sides, "attention_fp8")
    result = q.new_empty(batch, heads, queries, value_dim, dtype=out_dtype) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    if result.numel() == 0 or keys == 0:
        see_nothing(result, lse)
        return result if lse is None else (result, lse)
    descales = torch.ones(3, batch, kv_heads, dtype=torch.float32, device=q.device)
    if any(x is not None for x in given.values()):
        descales = torch.stack([one if x is None else x for one, x in zip(descales, given.values(), strict=True)])
    parts = -(-keys // KEYS.value)
    values = v.new_empty(batch, kv_heads, value_dim, parts * KEYS.value)
    transposed_values[parts, kv_heads, batch](v, values, *v.stride(), keys, value_dim)
    launch_forward(forward_fp8, out_dtype, q, k, values, result, lse, (descales,), scores, config)
    return result if lse is None else (result, lse)
