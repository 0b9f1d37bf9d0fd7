"""Causal convolutions of channels: `causal_conv1d` for PyTorch tensors, and its reference `causal_conv1d_torch`."""

from tritonkittens.kernels.causal_conv.interface import causal_conv1d
from tritonkittens.kernels.causal_conv.operators import causal_conv1d_operator
from tritonkittens.kernels.causal_conv.reference import causal_conv1d_torch

__all__ = ["causal_conv1d", "causal_conv1d_operator", "causal_conv1d_torch"]
