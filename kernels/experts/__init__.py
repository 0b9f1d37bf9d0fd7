"""Mixtures of experts: `experts`, the steps that it is made of, and its reference in plain torch."""

from tritonkittens.kernels.experts.interface import Routing, combine_tokens, experts, gather_tokens, route
from tritonkittens.kernels.experts.operators import backward_operator, combine_operator, gather_operator
from tritonkittens.kernels.experts.reference import experts_torch

__all__ = [
    "Routing",
    "backward_operator",
    "combine_operator",
    "combine_tokens",
    "experts",
    "experts_torch",
    "gather_operator",
    "gather_tokens",
    "route",
]
