"""Gated activations in plain torch, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_torch(a: Tensor, b: Tensor | None = None, *, kind: str, interleaved: bool = False) -> Tensor:
    """Return `swiglu` (kind "silu") or `geglu` ("gelu" or "gelu_tanh") in float64."""
    if b is None:
        a, b = (a[..., 0::2], a[..., 1::2]) if interleaved else a.chunk(2, -1)
    a, b = a.double(), b.double()
    if kind == "silu":
        return torch.nn.functional.silu(a) * b
    return torch.nn.functional.gelu(a, approximate="tanh" if kind == "gelu_tanh" else "none") * b
