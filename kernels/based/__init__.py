"""Based attention: `based_attention` for PyTorch tensors, and its reference `based_attention_torch`."""

from tritonkittens.kernels.based.interface import based_attention
from tritonkittens.kernels.based.operators import based_attention_operator
from tritonkittens.kernels.based.reference import based_attention_torch

__all__ = ["based_attention", "based_attention_operator", "based_attention_torch"]
