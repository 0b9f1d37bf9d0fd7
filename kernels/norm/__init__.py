"""Norms of rows, forward and backward: `rms_norm`, `layer_norm`, and their reference in plain torch."""

from tritonkittens.kernels.norm.interface import layer_norm, rms_norm
from tritonkittens.kernels.norm.operators import backward_operator, mask_operator, norm_operator
from tritonkittens.kernels.norm.reference import norm_torch

__all__ = ["backward_operator", "layer_norm", "mask_operator", "norm_operator", "norm_torch", "rms_norm"]
