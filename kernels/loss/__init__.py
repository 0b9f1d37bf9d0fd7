"""Softmax and losses of rows: `softmax`, `cross_entropy`, `linear_cross_entropy`, and a reference in plain torch."""

from tritonkittens.kernels.loss.interface import cross_entropy, linear_cross_entropy, softmax
from tritonkittens.kernels.loss.linear_operators import (
    linear_cross_entropy_backward_operator,
    linear_cross_entropy_operator,
)
from tritonkittens.kernels.loss.operators import (
    cross_entropy_backward_operator,
    cross_entropy_operator,
    softmax_backward_operator,
    softmax_operator,
)
from tritonkittens.kernels.loss.reference import cross_entropy_torch

__all__ = [
    "cross_entropy", "cross_entropy_backward_operator", "cross_entropy_operator", "cross_entropy_torch",
    "linear_cross_entropy", "linear_cross_entropy_backward_operator", "linear_cross_entropy_operator", "softmax",
    "softmax_backward_operator", "softmax_operator",
]  # fmt: skip
