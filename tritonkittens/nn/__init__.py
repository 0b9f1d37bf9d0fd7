"""PyTorch modules on the shipped kernels: layers (`Linear`, `GroupedLinear`, `SwiGLU`), norms, losses, mixtures of
experts, mixers of sequences (`Mamba2`, `GatedDeltaNet`, `LinearAttention`, `Based`, `Hedgehog`, `FFTConv`), and
`replace_linears`, which replaces a model's Linears."""

from tritonkittens.nn.experts import Experts, MixtureOfExperts
from tritonkittens.nn.fft_conv import FFTConv
from tritonkittens.nn.gated import SwiGLU
from tritonkittens.nn.grouped_linear import GroupedLinear
from tritonkittens.nn.hedgehog import Hedgehog, HedgehogState
from tritonkittens.nn.linear import Linear, replace_linears
from tritonkittens.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from tritonkittens.nn.mixers import Based, GatedDeltaNet, LinearAttention, Mamba2, MixerState
from tritonkittens.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "Based",
    "CrossEntropyLoss",
    "Experts",
    "FFTConv",
    "GatedDeltaNet",
    "GroupedLinear",
    "Hedgehog",
    "HedgehogState",
    "LayerNorm",
    "Linear",
    "LinearAttention",
    "LinearCrossEntropyLoss",
    "Mamba2",
    "MixerState",
    "MixtureOfExperts",
    "RMSNorm",
    "SwiGLU",
    "replace_linears",
]
