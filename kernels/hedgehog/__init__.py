"""Hedgehog attention: `hedgehog_attention` for PyTorch tensors, and its reference `hedgehog_attention_torch`."""

from tritonkittens.kernels.hedgehog.interface import hedgehog_attention
from tritonkittens.kernels.hedgehog.operators import hedgehog_attention_operator
from tritonkittens.kernels.hedgehog.reference import hedgehog_attention_torch

__all__ = ["hedgehog_attention", "hedgehog_attention_operator", "hedgehog_attention_torch"]
