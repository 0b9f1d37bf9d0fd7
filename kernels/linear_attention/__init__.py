"""Linear attention with decays: `linear_attention` for PyTorch tensors, and its reference `linear_attention_torch`."""

from tritonkittens.kernels.linear_attention.interface import linear_attention
from tritonkittens.kernels.linear_attention.operators import linear_attention_operator
from tritonkittens.kernels.linear_attention.reference import linear_attention_torch

__all__ = ["linear_attention", "linear_attention_operator", "linear_attention_torch"]
