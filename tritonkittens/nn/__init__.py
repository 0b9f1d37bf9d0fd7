"""PyTorch modules on the shipped kernels: `Linear`, `GroupedLinear`, `RMSNorm`, `LayerNorm`, and `replace_linears`,
which replaces a model's Linears."""
"""PyTorch modules on the shipped kernels: `Linear`, `RMSNorm`, `LayerNorm`, `CrossEntropyLoss`,
`LinearCrossEntropyLoss`, and `replace_linears`, which replaces a model's Linears."""

from tritonkittens.nn.grouped_linear import GroupedLinear
from tritonkittens.nn.linear import Linear, replace_linears
from tritonkittens.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from tritonkittens.nn.norm import LayerNorm, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "Linear", "RMSNorm", "replace_linears"]
__all__ = ["CrossEntropyLoss", "LayerNorm", "Linear", "LinearCrossEntropyLoss", "RMSNorm", "replace_linears"]
