"""What the quantisers refuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import check_tensor
from tritonkittens.kernels.quantize.config import AXES, FP8, INPUTS, LAYOUTS, LINES, SCALINGS, sides

BITS = (torch.int32, torch.uint32)
SIGNS = (torch.int8, torch.int32, *INPUTS)
MOST = 65535  # programs along the second and third dimension of a grid


def _check_option(name: str, option: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {option}={value!r}; it must be {' or '.join(map(repr, allowed))}")


def check_mxfp8_options(dtype: torch.dtype, axes: str, scaling: str, layout: str) -> None:
    """Raise ValueError for an option of `quantize_mxfp8` that does not exist."""
    for option, value, allowed in (
        ("dtype", dtype, FP8),
        ("axes", axes, AXES),
        ("scaling", scaling, SCALINGS),
        ("layout", layout, LAYOUTS),
    ):
        _check_option("quantize_mxfp8", option, value, allowed)


def check_nvfp4_options(axes: str, layout: str) -> None:
    """Raise ValueError for an option of `quantize_nvfp4` that does not exist."""
    _check_option("quantize_nvfp4", "axes", axes, AXES)
    _check_option("quantize_nvfp4", "layout", layout, LAYOUTS)


def check_axes(name: str, axes: str) -> None:
    _check_option(name, "axes", axes, AXES)


def check_matrix(name: str, x: Tensor) -> None:
    """Raise TypeError or ValueError for what is no matrix, or batch of matrices, of a dtype to quantise."""
    if x.dtype not in INPUTS:
        raise TypeError(f"{name}: x has dtype {x.dtype}; it must be {' or '.join(map(str, INPUTS))}")
    if x.ndim < 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it must have at least 2 dimensions, (…, M, K)")


def check_reachable(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor that no kernel reaches, or that needs a larger grid than there is."""
    check_tensor(name, "x", x, INPUTS, "x", x)
    matrices, rows = x.shape[:-2].numel(), max(x.shape[-2:])
    if matrices > MOST or rows > MOST * LINES:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; there may be {MOST} matrices, of {MOST * LINES} rows and columns"
        )


def check_pairs(x: Tensor, axes: str) -> None:
    """Raise ValueError where e2m1 numbers of a line do not fill whole bytes."""
    for extent, side, letter in zip((x.shape[-1], x.shape[-2]), sides(axes), "KM", strict=True):
        if side and extent % 2:
            raise ValueError(
                f"quantize_nvfp4: x has shape {tuple(x.shape)}; with axes={axes!r} {letter} must be even, since two "
                "numbers share a byte"
            )


def check_beside(
    name: str, x: Tensor, tensor_scale: Tensor | None, random_bits: Tensor | None, hadamard: Tensor | None
) -> None:
    """Raise TypeError or ValueError for operands beside x."""
    words = (*x.shape[:-1], -(-x.shape[-1] // 4))
    for argument, given, dtypes, shapes, wanted in (
        ("tensor_scale", tensor_scale, (torch.float32,), ((), (1,)), "one number"),
        ("random_bits", random_bits, BITS, (words,), f"{words}, a word for four elements of x"),
        ("hadamard", hadamard, SIGNS, ((16,),), "(16,), a sign for each number of a block"),
    ):
        if given is None:
            continue
        if given.dtype not in dtypes:
            raise TypeError(f"{name}: {argument} has dtype {given.dtype}; it must be {' or '.join(map(str, dtypes))}")
        if tuple(given.shape) not in shapes:
            raise ValueError(f"{name}: {argument} has shape {tuple(given.shape)}; it must be {wanted}")
        if given.device != x.device:
            raise ValueError(
                f"{name}: {argument} is on {given.device}, x on {x.device}; all tensors must be on one device"
            )
