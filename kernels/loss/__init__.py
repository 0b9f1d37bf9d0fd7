"""Softmax and losses of rows: `softmax`, `cross_entropy`, and their references in plain torch."""

from tritonkittens.kernels.loss.interface import cross_entropy, softmax
from tritonkittens.kernels.loss.operators import (
    cross_entropy_backward_operator,
    cross_entropy_operator,
    softmax_backward_operator,
    softmax_operator,
)
from tritonkittens.kernels.loss.reference import cross_entropy_torch

__all__ = [
    "cross_entropy", "cross_entropy_backward_operator", "cross_entropy_operator", "cross_entropy_torch", "softmax",
    "softmax_backward_operator", "softmax_operator",
]  # fmt: skip
