"""Gated activations, forward and backward: `swiglu`, `geglu`, and their reference in plain torch."""

from tritonkittens.kernels.activation.interface import geglu, swiglu
from tritonkittens.kernels.activation.operators import backward_operator, gated_operator
from tritonkittens.kernels.activation.reference import gated_torch

__all__ = ["backward_operator", "gated_operator", "gated_torch", "geglu", "swiglu"]
