"""Quantisers to block-scaled formats for PyTorch tensors: `quantize_mxfp8`, `quantize_nvfp4`, `nvfp4_tensor_scale`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_gradient, check_tensors, is_plain
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.quantize.call_plan import run_mxfp8, run_nvfp4, run_tensor_scale
from tritonkittens.kernels.quantize.checks import check_axes, check_mxfp8_options, check_nvfp4_options
from tritonkittens.kernels.quantize.operators import ADVICE


class Mxfp8(NamedTuple):
    """A matrix in MXFP8: `values` in e4m3 or e5m2, and `scales` in e8m0, one for 32 values along a row or column."""

    values: Tensor
    scales: Tensor


class Nvfp4(NamedTuple):
    """A matrix in NVFP4: `values` in e2m1, two in a byte, `scales` in e4m3, one for 16 values along a row or
    column, and `tensor_scale` in fp32, which multiplies all of them."""

    values: Tensor
    scales: Tensor
    tensor_scale: Tensor


def _check(name: str, x: Tensor, **others: Tensor | None) -> None:
    check_tensors(name, x=x)
    check_tensors(name, optional=True, **others)
    if is_distributed(type(x)):
        raise TypeError(f"{name}: x is a DTensor; quantise its shard, x.to_local()")
    check_no_gradient(name, ADVICE, x=x, **others)


def quantize_mxfp8(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    axes: str = "rows",
    scaling: str = "up",
    layout: str = "blocked",
) -> Mxfp8 | tuple[Mxfp8, Mxfp8]:
    """Quantise to MXFP8: 8-bit values, and a power of two for each 32 of them (OCP Microscaling Formats 1.0).

    Args:
        x: (…, M, K) in bf16, fp16 or fp32, any strides. The last block of a row or column may be shorter than 32.
        dtype: of the values, e4m3 or e5m2.
        axes: "rows" for blocks along K, "cols" for blocks along M, "both" for both in one pass. Values of columns are
            transposed, (…, K, M), as a product along M reads them.
        scaling: "up" for the least scale with which no value saturates (as PTX `cvt.rp.satfinite.ue8m0x2` of the
            largest magnitude of a block / the largest value of `dtype`, TransformerEngine, torchao's RCEIL). "floor"
            for that of OCP, with which a value may saturate.
        layout: of the scales. "blocked" as tcgen05 and `torch._scaled_mm` read them, padded by zeros to 128 rows and 4
            scales. "plain" for (…, M, ⌈K/32⌉), of columns (…, K, ⌈M/32⌉).

    Returns `Mxfp8(values, scales)`, for "both" a pair of them. Blocked scales are (…, ⌈M/128⌉, ⌈K/128⌉, 32, 16), of
    columns (…, ⌈K/128⌉, ⌈M/128⌉, 32, 16): scale j of row (column) i of 128 is at [i mod 32, 4 · (i div 32) + j].

    Values are rounded to nearest even. A block of zeros has scale 2**-127. A block with an infinity has scale 2**127,
    and its infinities become the largest value. A block with NaN has scale NaN (0xFF) and NaN values. No gradient.

    Raises TypeError or ValueError for what it does not take.
    """
    check_mxfp8_options(dtype, axes, scaling, layout)
    _check("quantize_mxfp8", x)
    args = (x, dtype, axes, scaling, layout)
    found = run_mxfp8(*args) if is_plain(x) else call("quantize_mxfp8", *args)
    return Mxfp8(*found) if len(found) == 2 else (Mxfp8(*found[:2]), Mxfp8(*found[2:]))


def quantize_nvfp4(
    x: Tensor,
    tensor_scale: Tensor | None = None,
    *,
    axes: str = "rows",
    layout: str = "blocked",
    random_bits: Tensor | None = None,
    hadamard: Tensor | None = None,
) -> Nvfp4 | tuple[Nvfp4, Nvfp4]:
    """Quantise to NVFP4: e2m1 values, an e4m3 scale for each 16 of them, and one fp32 scale.

    Args:
        x: (…, M, K) in bf16, fp16 or fp32, any strides; K even, or for "cols" M.
        tensor_scale: fp32, one positive number on the device of x; None: `nvfp4_tensor_scale(x, axes=…, hadamard=…)`.
        axes, layout: as of `quantize_mxfp8`, with blocks of 16; plain scales are (…, M, ⌈K/16⌉), blocked ones
            (…, ⌈M/128⌉, ⌈K/64⌉, 32, 16).
        random_bits: int32 or uint32, (…, M, ⌈K/4⌉), for stochastic rounding: byte k mod 4 of word k div 4 of a row,
            from the lowest, is u of element k. A magnitude between two values is rounded up if ⌊256 f⌋ + u ≥ 256, where
            f is its distance from the lower one in parts of that between them (as `cvt.rs.satfinite.e2m1x4`).
        hadamard: (16,) of ±1, integers or floats. Blocks of 16 along the quantised axis are multiplied by them, by the
            Hadamard matrix of 16 and by 1/4 first, in fp32.

    Returns `Nvfp4(values, scales, tensor_scale)`, for "both" a pair of them. `values` have dtype float4_e2m1fn_x2, and
    half as many columns: the first number of a pair is in the low four bits.

    With r = 1 / tensor_scale, a block's scale s is (its largest magnitude) · (r / 6) in e4m3, saturating, and its
    values are x · (r / s) in e2m1, saturating, rounded to nearest even; each step is rounded to fp32. Where s is 0, so
    are the values. A block with NaN has scale NaN (0x7F) and values 6. No gradient.

    Raises TypeError or ValueError for what it does not take.
    """
    check_nvfp4_options(axes, layout)
    _check("quantize_nvfp4", x, tensor_scale=tensor_scale, random_bits=random_bits, hadamard=hadamard)
    if tensor_scale is None:
        tensor_scale = nvfp4_tensor_scale(x, axes=axes, hadamard=hadamard)
    args = (x, tensor_scale, axes, layout, random_bits, hadamard)
    found = run_nvfp4(*args) if is_plain(x, tensor_scale, random_bits, hadamard) else call("quantize_nvfp4", *args)
    if len(found) == 2:
        return Nvfp4(found[0], found[1], tensor_scale)
    return Nvfp4(found[0], found[1], tensor_scale), Nvfp4(found[2], found[3], tensor_scale)


def nvfp4_tensor_scale(x: Tensor, *, axes: str = "rows", hadamard: Tensor | None = None) -> Tensor:
    """Return the scale with which `quantize_nvfp4` saturates no block: (the largest magnitude of x) / (448 · 6).

    Args:
        x, axes, hadamard: as of `quantize_nvfp4`; `axes` matters with `hadamard` only, which transforms x first.

    Returns fp32 without dimensions, at least 2**-126, the smallest normal number; of an x with infinities infinity, and
    with NaN NaN. The same bits in every run. No gradient.

    Raises TypeError or ValueError for what it does not take.
    """
    check_axes("nvfp4_tensor_scale", axes)
    _check("nvfp4_tensor_scale", x, hadamard=hadamard)
    if is_plain(x, hadamard):
        return run_tensor_scale(x, axes, hadamard)
    return call("nvfp4_tensor_scale", x, axes, hadamard)
