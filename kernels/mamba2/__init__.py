"""The scan of Mamba-2: `mamba_chunk_scan` for PyTorch tensors, and its reference `mamba_chunk_scan_torch`."""

from tritonkittens.kernels.mamba2.interface import mamba_chunk_scan
from tritonkittens.kernels.mamba2.operators import mamba_chunk_scan_operator
from tritonkittens.kernels.mamba2.reference import mamba_chunk_scan_torch

__all__ = ["mamba_chunk_scan", "mamba_chunk_scan_operator", "mamba_chunk_scan_torch"]
