"""Kernels of gated products for `python -m tritonkittens inspect`."""

from __future__ import annotations

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.gated_gemm.interface import gated_gemm

TOKENS, HIDDEN, INTERMEDIATE = 8192, 4096, 14336


def _run() -> torch.Tensor:
    shapes = (TOKENS, HIDDEN), (INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN)
    a, gate, up = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    return gated_gemm(a, gate.T, up.T)


inspectable: dict[str, Inspectable] = launches_of(_run, "gated_gemm")
