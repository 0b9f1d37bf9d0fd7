"""Gated products: `gated_gemm` for PyTorch tensors, its reference `gated_gemm_torch`, and the template behind it."""

from tritonkittens.kernels.gated_gemm.choice import family
from tritonkittens.kernels.gated_gemm.device.gated import GatedGemm
from tritonkittens.kernels.gated_gemm.interface import gated_gemm
from tritonkittens.kernels.gated_gemm.operators import gated_gemm_operator
from tritonkittens.kernels.gated_gemm.reference import gated_gemm_torch
from tritonkittens.kernels.gemm.config import Config

__all__ = ["Config", "GatedGemm", "family", "gated_gemm", "gated_gemm_operator", "gated_gemm_torch"]
