"""Rotary embeddings of q and k, forward and backward: `rotary`, and its reference in plain torch."""

from tritonkittens.kernels.rotary.interface import rotary
from tritonkittens.kernels.rotary.operators import inplace_operator, norm_backward_operator, rotary_operator
from tritonkittens.kernels.rotary.reference import rotary_torch

__all__ = ["inplace_operator", "norm_backward_operator", "rotary", "rotary_operator", "rotary_torch"]
