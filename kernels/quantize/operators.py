"""The quantisers as torch sees them: operators of torch.library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import describes, refusing, register, vmap_by_loop
from tritonkittens.kernels.quantize.call_plan import run_mxfp8, run_nvfp4, run_tensor_scale
from tritonkittens.kernels.quantize.checks import check_beside, check_matrix, check_pairs
from tritonkittens.kernels.quantize.config import MXFP8, NVFP4, result_shapes

ADVICE = "detach its operands"


@torch.library.custom_op("tritonkittens::quantize_mxfp8", mutates_args=())
def mxfp8_operator(x: Tensor, dtype: torch.dtype, axes: str, scaling: str, layout: str) -> list[Tensor]:
    """The operator behind `quantize_mxfp8`; returns values and scales of rows, then of columns."""
    return run_mxfp8(x, dtype, axes, scaling, layout)


@describes(mxfp8_operator)
def _(x: Tensor, dtype: torch.dtype, axes: str, scaling: str, layout: str) -> list[Tensor]:
    check_matrix("quantize_mxfp8", x)
    return [x.new_empty(shape, dtype=kind) for shape, kind in result_shapes(x, MXFP8[dtype], axes, layout)]


@torch.library.custom_op("tritonkittens::quantize_nvfp4", mutates_args=())
def nvfp4_operator(
    x: Tensor, tensor_scale: Tensor, axes: str, layout: str, random_bits: Tensor | None, hadamard: Tensor | None
) -> list[Tensor]:
    """The operator behind `quantize_nvfp4`; returns values and scales of rows, then of columns."""
    return run_nvfp4(x, tensor_scale, axes, layout, random_bits, hadamard)


@describes(nvfp4_operator)
def _(
    x: Tensor, tensor_scale: Tensor, axes: str, layout: str, random_bits: Tensor | None, hadamard: Tensor | None
) -> list[Tensor]:
    check_matrix("quantize_nvfp4", x)
    check_pairs(x, axes)
    check_beside("quantize_nvfp4", x, tensor_scale, random_bits, hadamard)
    return [x.new_empty(shape, dtype=kind) for shape, kind in result_shapes(x, NVFP4, axes, layout)]


@torch.library.custom_op("tritonkittens::nvfp4_tensor_scale", mutates_args=())
def tensor_scale_operator(x: Tensor, axes: str, hadamard: Tensor | None) -> Tensor:
    """The operator behind `nvfp4_tensor_scale`."""
    return run_tensor_scale(x, axes, hadamard)


@describes(tensor_scale_operator)
def _(x: Tensor, axes: str, hadamard: Tensor | None) -> Tensor:
    check_matrix("nvfp4_tensor_scale", x)
    return x.new_empty((), dtype=torch.float32)


def _vmap(operator: Any, dims: tuple[int | None, ...], size: int, *args: Any) -> tuple[Any, Any]:
    """Samples one by one: each may have a tensor scale of its own. torch stacks 4-bit numbers as bytes."""
    kinds: list[torch.dtype] = []

    def as_bytes(*given: Any) -> tuple[Tensor, ...]:
        found = operator(*given)
        kinds[:] = [t.dtype for t in found]
        return tuple(t.view(torch.uint8) for t in found)

    found, _ = vmap_by_loop(as_bytes, dims, size, *args)
    return [t.view(kind) for t, kind in zip(found, kinds, strict=True)], [0] * len(found)


register(mxfp8_operator, _vmap, refusing(f"quantize_mxfp8 has no gradient; {ADVICE}"))
register(nvfp4_operator, _vmap, refusing(f"quantize_nvfp4 has no gradient; {ADVICE}"))
register(tensor_scale_operator, vmap_by_loop, refusing(f"nvfp4_tensor_scale has no gradient; {ADVICE}"))
