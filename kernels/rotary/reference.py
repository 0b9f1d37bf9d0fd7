"""Rotary embedding in plain torch, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_torch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    unsqueeze_dim: int = 1,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Return one tensor of `rotary` in float64.

    `cos` and `sin` have a row for each token of x, (S, rotary_dim/2) or (B, S, rotary_dim/2); for packed tokens,
    (total, H, D), unsqueeze_dim is 1. With a `weight`, heads are normalised first.
    """
    c, s = (t.double().unsqueeze(-2 if unsqueeze_dim == 2 or x.ndim == 3 else -3) for t in (cos, sin))
    x = x.double()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack([x1 * c - x2 * s, x2 * c + x1 * s], -1).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, -1)
        rotated = torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)
    return torch.cat([rotated, rest], -1)
