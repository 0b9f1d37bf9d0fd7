"""Grouped matrix products: `grouped_gemm` for PyTorch tensors, its reference `grouped_gemm_torch`, `ends_of_groups` of
rows that carry the number of their group, and the templates behind them."""

from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.grouped_gemm.autograd import grouped_gemm_operator
from tritonkittens.kernels.grouped_gemm.choice import family
from tritonkittens.kernels.grouped_gemm.device.grouped import (
    BlockwiseGroupedGemm,
    DepthGroupedGemm,
    GatedGroupedGemm,
    RowGroupedGemm,
)
from tritonkittens.kernels.grouped_gemm.interface import ends_of_groups, grouped_gemm
from tritonkittens.kernels.grouped_gemm.reference import grouped_gemm_torch

__all__ = [
    "BlockwiseGroupedGemm", "Config", "DepthGroupedGemm", "GatedGroupedGemm", "RowGroupedGemm", "ends_of_groups",
    "family", "grouped_gemm", "grouped_gemm_operator", "grouped_gemm_torch",
]  # fmt: skip
