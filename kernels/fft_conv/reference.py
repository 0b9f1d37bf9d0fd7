"""What `fft_conv` computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def fft_conv_torch(
    u: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    pre_gate: Tensor | None = None,
    post_gate: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return `fft_conv` of a filter (H, Lk) by torch.fft in `dtype`."""
    length = u.shape[-1]
    n = length + k.shape[-1] if causal else length
    x = u.to(dtype) if pre_gate is None else u.to(dtype) * pre_gate.to(dtype)
    if x.numel():
        y = torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(k.to(dtype), n), n)[..., :length]
    else:  # torch.fft takes no empty tensors
        y = x * k.to(dtype).sum()
    return y if post_gate is None else y * post_gate.to(dtype)
