"""A mixture of experts in plain torch, in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def experts_torch(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, activation: str = "silu"
) -> Tensor:
    """Return `experts` in float64, expert by expert."""
    x, weights, gate_up, down = (t.double() for t in (x, weights, gate_up, down))
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, choice = torch.where(index == e)
        a, b = (x[token] @ gate_up[e].T).chunk(2, -1)
        a = functional.silu(a) if activation == "silu" else functional.gelu(a, approximate="tanh")
        out = out.index_add(0, token, (a * b) @ down[e].T * weights[token, choice, None])
    return out
