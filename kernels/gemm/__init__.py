"""Matrix products: `gemm` for PyTorch tensors, its reference `gemm_torch`, its configurations, and the templates behind it."""
import functools

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.blockwise import BlockwiseGemm
from tritonkittens.kernels.gemm.config import Config, Problem, family
from tritonkittens.kernels.gemm.epilogue import Epilogue
from tritonkittens.kernels.gemm.operator import gemm_operator
from tritonkittens.kernels.gemm.product import gemm, tune_gemm
from tritonkittens.kernels.gemm.reference import gemm_torch
from tritonkittens.kernels.gemm.template import Gemm


def _compiled(arch: str, dtype: torch.dtype = torch.bfloat16, **knobs: object) -> object:
    x, y = torch.empty(4096, 4096, dtype=dtype, device="meta"), torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    return Gemm(dtype=tk.from_torch(dtype), **knobs).compile(x, x, y, arch=arch)


inspectable = {
    "gemm": _compiled,
    "gemm_transposed": functools.partial(_compiled, b_stored_nk=True),
    "gemm_cluster": functools.partial(_compiled, cluster=2),
    "gemm_fp8_turns": functools.partial(_compiled, dtype=torch.float8_e4m3fn, b_stored_nk=True, depth=128, rows=128, cols=128, independent=True, panel=32,
                                        passing="evict_first"),
}
