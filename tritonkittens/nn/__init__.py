"""PyTorch modules on the shipped kernels: layers (`Linear`, `GroupedLinear`, `SwiGLU`), norms, losses, mixtures of
experts, and `replace_linears`, which replaces a model's Linears."""

from tritonkittens.nn.experts import Experts, MixtureOfExperts
from tritonkittens.nn.gated import SwiGLU
from tritonkittens.nn.grouped_linear import GroupedLinear
from tritonkittens.nn.linear import Linear, replace_linears
from tritonkittens.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from tritonkittens.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "CrossEntropyLoss",
    "Experts",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "MixtureOfExperts",
    "RMSNorm",
    "SwiGLU",
    "replace_linears",
]
