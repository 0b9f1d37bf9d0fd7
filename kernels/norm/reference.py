"""The norms in plain torch, in float64 unless said otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_torch(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rms: bool,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    rowscale: Tensor | None = None,
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
    dropout_p: float = 0.0,
    zero_centered_weight: bool = False,
    eps: float = 1e-6,
    z_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return y, y1 and z of `rms_norm` or `layer_norm` in float64.

    `masks`: which elements of x and x1 dropout keeps. `z_dtype`: z is rounded to it before its norm is taken; gradients
    pass unchanged. Other arguments are those of `layer_norm`.
    """

    def dropped(t: Tensor, mask: Tensor | None) -> Tensor:
        return t if mask is None else t * mask / (1 - dropout_p)

    z = x.double() if rowscale is None else x.double() * rowscale.double().unsqueeze(-1)
    z = dropped(z, masks[0])
    if x1 is not None:
        z = z + dropped(x1.double(), masks[1])
    if residual is not None:
        z = z + residual.double()
    if z_dtype is not None:
        z = z + (z.to(z_dtype).double() - z).detach()
    centred = z if rms else z - z.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)

    def scaled(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = normal if weight is None else normal * (weight.double() + float(zero_centered_weight))
        return y if bias is None else y + bias.double()

    return scaled(weight, bias), None if weight1 is None else scaled(weight1, bias1), z
