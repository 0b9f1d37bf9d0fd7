"""Tensor maps as 128 bytes in memory, in a format of the simulator (the hardware's is undocumented).

A map that a kernel copies, or changes by `tensormap.replace`, stays a map.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

from tritonkittens.inline_ptx.tensormap import ELEMENT_TYPES

from .values import TensorMap

NBYTES = 128
_MAGIC = b"tkmap\0"
# magic, element, rank, address, bytes of an element, swizzle / 16, NaN fill, nothing, extents - 1, strides, box; the
# slowest dimension first
_FORM = struct.Struct("<6sBBQBBBB5I4Q5H")
_ELEMENTS = (
    "i8",
    "i16",
    "i32",
    "i64",
    "f16",
    "bf16",
    "f32",
    "f64",
    "f8E4M3FN",
    "f8E5M2",
    "tf32",
    "u8",
    "u16",
    "u32",
    "u64",
)
# names of `inline_ptx.tensormap` → number format, bytes
FORMATS = {
    "uint8": ("u8", 1),
    "uint16": ("u16", 2),
    "uint32": ("u32", 4),
    "int32": ("i32", 4),
    "uint64": ("u64", 8),
    "int64": ("i64", 8),
    "float16": ("f16", 2),
    "float32": ("f32", 4),
    "float64": ("f64", 8),
    "bfloat16": ("bf16", 2),
    "float32_ftz": ("f32", 4),
    "tfloat32": ("tf32", 4),
    "tfloat32_ftz": ("tf32", 4),
}
SWIZZLES = (0, 32, 64, 128)  # bytes, in the order of swizzle_mode


def pack(tensor: TensorMap) -> bytes:
    rank = len(tensor.shape)
    shape = [*(n - 1 for n in tensor.shape), *[0] * (5 - rank)]
    strides = [*tensor.strides[:-1], *[0] * (5 - rank)]
    box = [*tensor.box, *[0] * (5 - rank)]
    head = (
        _ELEMENTS.index(tensor.element),
        rank,
        tensor.address,
        tensor.nbytes,
        tensor.swizzle // 16,
        int(math.isnan(tensor.fill)),
        0,
    )
    data = _FORM.pack(_MAGIC, *head, *shape, *strides, *box)
    return data.ljust(NBYTES, b"\0")


def unpack(data: bytes, name: str) -> TensorMap | None:
    """Return the map in these bytes, or None where they hold none. `name` is its tensor's name in reports."""
    magic, element, rank, address, nbytes, swizzle, nan, _, *rest = _FORM.unpack(data[: _FORM.size])
    if magic != _MAGIC:
        return None
    shape, strides, box = rest[:rank], rest[5 : 4 + rank], rest[9 : 9 + rank]
    extents, fill = tuple(n + 1 for n in shape), math.nan if nan else 0.0
    return TensorMap(
        address, _ELEMENTS[element], nbytes, extents, (*strides, nbytes), tuple(box), fill, name, swizzle=16 * swizzle
    )


def changed(tensor: TensorMap, field: str, ordinal: int, value: int) -> TensorMap:
    """Return the map after `tensormap.replace`. `ordinal` counts dimensions from the fastest (strides from the
    second). Raises ValueError for unsupported fields.
    """
    axis = len(tensor.shape) - 1 - ordinal

    def put(old: tuple[int, ...], at: int) -> tuple[int, ...]:
        if not 0 <= at < len(old):
            raise ValueError(f"tensormap.replace.{field} of dimension {ordinal} of a tensor of {len(old)}")
        return (*old[:at], value, *old[at + 1 :])

    fields: dict[str, Any] = {}
    if field == "global_address":
        fields = dict(address=value)
    elif field == "global_dim":
        fields = dict(shape=put(tensor.shape, axis))
    elif field == "box_dim":
        fields = dict(box=put(tensor.box, axis))
    elif field == "global_stride":
        fields = dict(strides=put(tensor.strides, axis - 1))
    elif field == "elemtype" and value < len(ELEMENT_TYPES):
        element, nbytes = FORMATS[ELEMENT_TYPES[value]]
        fields = dict(element=element, nbytes=nbytes, strides=(*tensor.strides[:-1], nbytes))
    elif field == "swizzle_mode" and value < len(SWIZZLES):
        fields = dict(swizzle=SWIZZLES[value])
    elif field == "fill_mode" and value < 2:
        fields = dict(fill=(0.0, math.nan)[value])
    elif (field, value) not in (("rank", len(tensor.shape) - 1), ("element_stride", 1), ("interleave_layout", 0)):
        raise ValueError(f"tensormap.replace.{field} with {value}")
    return replace(tensor, **fields)
