"""Modules that drop into a PyTorch model: `Linear`, and `replace_linears`, which puts it in place of a model's own."""

from tritonkittens.nn.linear import Linear, replace_linears

__all__ = ["Linear", "replace_linears"]
