"""Quantisers to block-scaled formats: `quantize_mxfp8`, `quantize_nvfp4`, `nvfp4_tensor_scale`, and their references in
plain torch."""

from tritonkittens.kernels.quantize.interface import Mxfp8, Nvfp4, nvfp4_tensor_scale, quantize_mxfp8, quantize_nvfp4
from tritonkittens.kernels.quantize.operators import mxfp8_operator, nvfp4_operator, tensor_scale_operator
from tritonkittens.kernels.quantize.reference import (
    blocked_scales,
    dequantize_mxfp8,
    dequantize_nvfp4,
    hadamard_torch,
    nvfp4_tensor_scale_torch,
    plain_scales,
    quantize_mxfp8_torch,
    quantize_nvfp4_torch,
)

__all__ = [
    "Mxfp8", "Nvfp4", "blocked_scales", "dequantize_mxfp8", "dequantize_nvfp4", "hadamard_torch", "mxfp8_operator",
    "nvfp4_operator", "nvfp4_tensor_scale", "nvfp4_tensor_scale_torch", "plain_scales", "quantize_mxfp8",
    "quantize_mxfp8_torch", "quantize_nvfp4", "quantize_nvfp4_torch", "tensor_scale_operator",
]  # fmt: skip
