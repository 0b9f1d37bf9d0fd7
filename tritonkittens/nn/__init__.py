"""PyTorch modules on the shipped kernels: `Linear`, and `replace_linears`, which replaces a model's own."""

from tritonkittens.nn.linear import Linear, replace_linears

__all__ = ["Linear", "replace_linears"]
