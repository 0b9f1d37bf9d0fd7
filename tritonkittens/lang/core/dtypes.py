"""Element types, under the names that PyTorch and the PTX ISA use."""

import math
from collections.abc import Iterable

import torch
import triton.language as tl

from tritonkittens.inline_ptx._traced import Traced
from tritonkittens.lang.core.errors import TileError

fp32 = tl.float32
bf16 = tl.bfloat16
fp16 = tl.float16
fp8e4m3 = tl.float8e4nv
fp8e5m2 = tl.float8e5
int8 = tl.int8
uint8 = tl.uint8
int32 = tl.int32
int64 = tl.int64
# Triton has no such types: both are bytes. Of fp4 a byte holds two, the first in its low bits
fp8e8m0 = uint8
fp4e2m1x2 = uint8

_TORCH = {
    torch.float32: fp32,
    torch.bfloat16: bf16,
    torch.float16: fp16,
    torch.float8_e4m3fn: fp8e4m3,
    torch.float8_e5m2: fp8e5m2,
    torch.int8: int8,
    torch.uint8: uint8,
    torch.int32: int32,
    torch.int64: int64,
}
_TRITON = {v: k for k, v in _TORCH.items()}
_TORCH |= {torch.float8_e8m0fnu: fp8e8m0, torch.float4_e2m1fn_x2: fp4e2m1x2}
ELEMENT_TYPES = tuple(_TRITON)
FP8 = (fp8e4m3, fp8e5m2)
_NAMES = {fp8e4m3: "fp8e4m3", fp8e5m2: "fp8e5m2"}  # where Triton's names differ from ours


def from_torch(dtype: torch.dtype) -> tl.dtype:
    """Return the element type of a torch dtype `dtype`. Raises `TileError` for one that no tile can hold (float64,
    complex, bool).
    """
    if dtype not in _TORCH:
        raise TileError(f"{dtype}: tiles hold {names_of(ELEMENT_TYPES)}")
    return _TORCH[dtype]


def name_of(dtype: object) -> str:
    """Return an element type's name for messages: the one in `tritonkittens.lang`, else its own."""
    return _NAMES.get(dtype, str(dtype)) if isinstance(dtype, tl.dtype) else str(dtype)


def names_of(dtypes: Iterable[object]) -> str:
    """Return the names of several element types, as messages list them."""
    return ", ".join(map(name_of, dtypes))


def to_torch(dtype: tl.dtype) -> torch.dtype:
    """Return the torch dtype of an element type `dtype`."""
    return _TRITON[dtype]


def itemsize(dtype: tl.dtype) -> int:
    """Return the bytes of one element."""
    return dtype.primitive_bitwidth // 8


def base_columns(dtype: tl.dtype) -> int:
    """Return the columns of the base tile: 16, or 32 for one-byte types, whose tensor-core instructions have twice
    the K.
    """
    return 32 if itemsize(dtype) == 1 else 16


def constant(value: Traced, dtype: tl.dtype, what: str) -> Traced:
    """Convert a Python number to the value that `dtype` holds; a run-time scalar is returned unchanged.

    Integer types hold whole numbers in their range. e4m3 has no infinity (PTX ISA, "Alternate floating point data
    formats"). Raises `TileError` for a number that the type cannot hold.
    """
    if not isinstance(value, (bool, int, float)):
        return value
    if dtype.is_floating():
        if dtype == fp8e4m3 and math.isinf(value):
            raise TileError(f"{what}: {name_of(dtype)} has no infinity; its largest value is 448")
        return value
    bits = dtype.primitive_bitwidth
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.is_int_signed() else (0, (1 << bits) - 1)
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise TileError(f"{what}: {value!r} is no {name_of(dtype)}; it must be a whole number from {low} to {high}")
    return int(value)
