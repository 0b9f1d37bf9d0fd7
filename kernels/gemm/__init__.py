"""Matrix products: `gemm` for PyTorch tensors, its reference `gemm_torch`, its configurations, and the templates behind it."""
from tritonkittens.kernels.gemm.blockwise import BlockwiseGemm
from tritonkittens.kernels.gemm.config import Config, Problem, family
from tritonkittens.kernels.gemm.epilogue import Epilogue
from tritonkittens.kernels.gemm.operator import gemm_operator
from tritonkittens.kernels.gemm.product import gemm, tune_gemm
from tritonkittens.kernels.gemm.reference import gemm_torch
from tritonkittens.kernels.gemm.template import Gemm
