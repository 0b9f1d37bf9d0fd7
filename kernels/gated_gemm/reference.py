"""What `gated_gemm` computes, in plain torch."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels.activation import gated_torch


def gated_gemm_torch(a: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(a·gate) · (a·up), in the dtype of the operands."""
    return gated_torch(a @ gate, a @ up, kind=activation)
