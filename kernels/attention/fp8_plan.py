"""What a call of `attention_fp8` does: V transposed, the scales in one tensor, the forward kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._dispatch import announce_write, overlaps, requires_grad
from tritonkittens.kernels.attention.call_plan import (
    Scores,
    fill_empty,
    launch_forward,
    packed_by_group,
    scores_of,
    write_results,
)
from tritonkittens.kernels.attention.checks import check_fp8, check_window
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.device.fp8 import KEYS, AttentionForwardFp8, transposed_values

Window = tuple[int | None, int | None]


@functools.lru_cache
def forward_fp8(
    result: torch.dtype,
    head_dim: int,
    value_dim: int,
    causal: bool,
    window: bool,
    softcap: bool,
    shifted: bool,
    lse: bool,
    config: Config,
) -> AttentionForwardFp8:
    """The forward kernel for the dtype of the result, dimensions and features."""
    return AttentionForwardFp8(
        dtype=tk.fp8e4m3,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
        window=window,
        softcap=softcap,
        shifted=shifted,
        lse=lse,
        result=tk.from_torch(result),
        **config.knobs(causal),
    )


def run_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_fp8` of plain tensors; arguments as there."""
    sides, scales = (
        check_window(causal, window, "attention_fp8"),
        dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale),
    )
    out_dtype = check_fp8(q, k, v, scales, out_dtype, out)
    scores = scores_of(q, scale, softcap, *sides, "attention_fp8")
    if out is not None and (requires_grad(out) or overlaps(out, q, k, v, *scales.values())):
        found = run_fp8(
            q, k, v, q_scale, k_scale, v_scale, causal, window, scale, softcap, True, out_dtype, None, config
        )
        return write_results(found, out, return_lse)
    if out is not None:
        announce_write(out)
    result = q.new_empty(*q.shape[:3], v.shape[3], dtype=out_dtype) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    _launch(q, k, v, result, lse, list(scales.values()), scores, config)
    return result if lse is None else (result, lse)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scales: list[Tensor | None],
    scores: Scores,
    config: Config | None,
) -> None:
    """Write the output and, where given, the log-sum-exp."""
    batch, kv_heads, keys, value_dim = v.shape
    if out.numel() == 0 or keys == 0:
        return fill_empty(out, lse)
    descales = torch.ones(3, batch, kv_heads, dtype=torch.float32, device=q.device)
    if any(x is not None for x in scales):
        descales = torch.stack([one if x is None else x for one, x in zip(descales, scales, strict=True)])
    programs = -(-keys // KEYS.value)
    values = v.new_empty(batch, kv_heads, value_dim, programs * KEYS.value)
    transposed_values[programs, kv_heads, batch](v, values, *v.stride(), keys, value_dim)
    q, out, lse, scores = packed_by_group(q, k, out, lse, scores)
    launch_forward(forward_fp8, out.dtype, q, k, values, out, lse, (descales,), scores, config)
