"""Grouped matrix products: `grouped_gemm` for PyTorch tensors, its reference `grouped_gemm_torch`, and the templates
behind it."""

from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.grouped_gemm.autograd import grouped_gemm_operator
from tritonkittens.kernels.grouped_gemm.choice import family
from tritonkittens.kernels.grouped_gemm.device.grouped import DepthGroupedGemm, GatedGemm, RowGroupedGemm
from tritonkittens.kernels.grouped_gemm.interface import grouped_gemm
from tritonkittens.kernels.grouped_gemm.reference import grouped_gemm_torch

__all__ = [
    "Config", "DepthGroupedGemm", "GatedGemm", "RowGroupedGemm", "family", "grouped_gemm", "grouped_gemm_operator",
    "grouped_gemm_torch",
]  # fmt: skip
