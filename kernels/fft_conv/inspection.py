"""Kernels of FFT convolution for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.fft_conv.call_plan import run, run_correlation
from tritonkittens.kernels.fft_conv.config import NARROW, SIDE, filter_dtype


def _run(length: int, causal: bool, dtype: torch.dtype = torch.bfloat16, gated: bool = False, heads: int = 1024) -> Any:
    u = torch.empty(16, heads, length, dtype=dtype, device="meta")
    width = NARROW if causal else SIDE
    k = torch.empty(2, heads, length // width, width, dtype=filter_dtype(dtype), device="meta")
    gate = u if gated else None
    return run(u, k, gate, gate, causal, False)


def _correlate(length: int, causal: bool) -> Any:
    u = torch.empty(16, 1024, length, dtype=torch.bfloat16, device="meta")
    return run_correlation(u, u, length, causal)


inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 4096, False), "fft_conv"),
    **launches_of(functools.partial(_run, 4096, True), "fft_conv_causal"),
    **launches_of(functools.partial(_run, 4096, False, torch.float16), "fft_conv_fp16"),
    **launches_of(functools.partial(_run, 4096, False, gated=True), "fft_conv_gated"),
    **launches_of(functools.partial(_run, 4096, True, gated=True), "fft_conv_causal_gated"),
    **launches_of(
        functools.partial(_run, 32768, True, gated=True, heads=64), "fft_conv_outer", None, "fft_conv_outer_inverse"
    ),
    **launches_of(
        functools.partial(_run, 40960, False, heads=64),
        "fft_conv_outer_circular", None, "fft_conv_outer_inverse_circular",
    ),
    **launches_of(functools.partial(_correlate, 4096, False), "fft_conv_filter_gradient"),
    **launches_of(functools.partial(_correlate, 4096, True), "fft_conv_filter_gradient_causal"),
}  # fmt: skip
