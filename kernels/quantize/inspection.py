"""Kernels of the quantisers for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.quantize.config import AXES
from tritonkittens.kernels.quantize.interface import nvfp4_tensor_scale, quantize_mxfp8, quantize_nvfp4

SIDE = 4096


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _mxfp8(**options: Any) -> Any:
    return quantize_mxfp8(_empty(SIDE, SIDE), **options)


def _nvfp4(axes: str, stochastic: bool = False, transformed: bool = False) -> Any:
    return quantize_nvfp4(
        _empty(SIDE, SIDE),
        _empty(dtype=torch.float32),
        axes=axes,
        random_bits=_empty(SIDE, SIDE // 4, dtype=torch.int32) if stochastic else None,
        hadamard=_empty(16) if transformed else None,
    )


def _tensor_scale() -> Any:
    return nvfp4_tensor_scale(_empty(SIDE, SIDE))


inspectable: dict[str, Inspectable] = {
    **{
        name: kernel
        for axes in AXES
        for name, kernel in {
            **launches_of(functools.partial(_mxfp8, axes=axes), f"quantize_mxfp8_{axes}"),
            **launches_of(functools.partial(_nvfp4, axes), f"quantize_nvfp4_{axes}"),
            **launches_of(functools.partial(_nvfp4, axes, stochastic=True), f"quantize_nvfp4_{axes}_stochastic"),
            **launches_of(functools.partial(_nvfp4, axes, transformed=True), f"quantize_nvfp4_{axes}_hadamard"),
        }.items()
    },
    **launches_of(_tensor_scale, "nvfp4_tile_amax", "nvfp4_tensor_scale"),
}
