"""Matrix products: `gemm` for PyTorch tensors, its reference `gemm_torch`, its configurations, and the templates behind
it."""

from tritonkittens.kernels.gemm.autograd import gemm_operator
from tritonkittens.kernels.gemm.choice import family
from tritonkittens.kernels.gemm.config import Config, Problem
from tritonkittens.kernels.gemm.device.block_scaled import BlockScaledGemm
from tritonkittens.kernels.gemm.device.blockwise import BlockwiseGemm
from tritonkittens.kernels.gemm.device.gemm import Gemm
from tritonkittens.kernels.gemm.epilogue import Epilogue
from tritonkittens.kernels.gemm.interface import gemm, tune_gemm
from tritonkittens.kernels.gemm.reference import gemm_torch

__all__ = [
    "BlockScaledGemm", "BlockwiseGemm", "Config", "Epilogue", "Gemm", "Problem", "family", "gemm", "gemm_operator",
    "gemm_torch", "tune_gemm",
]  # fmt: skip
