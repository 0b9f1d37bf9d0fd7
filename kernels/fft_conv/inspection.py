"""Kernels of FFT convolution for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.fft_conv.call_plan import run, run_correlation
from tritonkittens.kernels.fft_conv.config import SIDE, filter_dtype


def _run(length: int, n: int, dtype: torch.dtype = torch.bfloat16, gated: bool = False) -> Any:
    u = torch.empty(16, 1024, length, dtype=dtype, device="meta")
    k = torch.empty(2, 1024, n // SIDE, SIDE, dtype=filter_dtype(dtype), device="meta")
    gate = u if gated else None
    return run(u, k, gate, gate, length < n, False)


def _correlate(length: int, n: int) -> Any:
    u = torch.empty(16, 1024, length, dtype=torch.bfloat16, device="meta")
    return run_correlation(u, u, length, length < n)


inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 4096, 4096), "fft_conv"),
    **launches_of(functools.partial(_run, 2048, 4096), "fft_conv_padded"),
    **launches_of(functools.partial(_run, 4096, 8192), "fft_conv_long"),
    **launches_of(functools.partial(_run, 4096, 4096, torch.float16), "fft_conv_fp16"),
    **launches_of(functools.partial(_run, 4096, 4096, gated=True), "fft_conv_gated"),
    **launches_of(functools.partial(_run, 2048, 4096, gated=True), "fft_conv_padded_gated"),
    **launches_of(functools.partial(_correlate, 4096, 4096), "fft_conv_filter_gradient"),
    **launches_of(functools.partial(_correlate, 2048, 4096), "fft_conv_filter_gradient_padded"),
    **launches_of(functools.partial(_correlate, 4096, 8192), "fft_conv_filter_gradient_long"),
}
