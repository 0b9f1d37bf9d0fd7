"""A launch's arguments as values of the lowered kernel's parameters: addresses, numbers, and tensor maps with their
extents and strides.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tritonkittens.launch import check_tensor_map
from tritonkittens.launch.arguments import GlobalArg, Names, name_at, names_inside
from tritonkittens.launch.im2col import Im2colSpec
from tritonkittens.launch.tensormap import mapped

from .memory import READ_ONLY, Global
from .operations.global_memory import as_scalar
from .ttgir import Descriptor, Pointer, Scalar
from .values import TensorMap

_ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.uint8: "i8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i8",
    torch.float8_e8m0fnu: "i8",
    torch.float4_e2m1fn_x2: "i8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",  # TMA reductions depend on the sign
}


class ArgumentError(TypeError):
    """The arguments of a launch do not fit the kernel."""


def as_tensor(value: Any) -> Any:
    """Convert a numpy array to a torch tensor of the same memory; return anything else unchanged.

    The tensor of a read-only array has the attribute `read_only`: a kernel may only read it.
    """
    if not isinstance(value, np.ndarray):
        return value
    if value.flags.writeable or not value.size:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    spans = [(n - 1) * step for n, step in zip(value.shape, value.strides)]
    low, high = (
        value.ctypes.data + sum(min(0, s) for s in spans),
        value.ctypes.data + sum(max(0, s) for s in spans) + value.itemsize,
    )
    memory = (ctypes.c_uint8 * (high - low)).from_address(low)
    tensor = torch.from_numpy(np.ndarray(value.shape, value.dtype, memory, value.ctypes.data - low, value.strides))
    setattr(tensor, READ_ONLY, value)  # torch has no read-only tensors; the attribute also keeps the memory alive
    return tensor


def tensor_map(tensor: torch.Tensor, spec: Any, name: str) -> TensorMap:
    """Return the simulator's tensor map of a tensor and a tile, as cuTensorMapEncode does."""
    element = _ELEMENTS[tensor.dtype]
    size = tensor.element_size()
    fill = math.nan if getattr(spec, "fill", "zero") == "nan" else 0.0
    im2col = None
    if isinstance(spec, Im2colSpec):
        im2col = dict(lower=spec.lower, upper=spec.upper, element_strides=spec.element_strides)
    shape, steps = mapped(tensor, spec)
    strides = tuple(s * size for s in steps)
    return TensorMap(
        tensor.data_ptr(), element, size, shape, strides, tuple(spec.box), fill, name, im2col, tensor, spec=spec
    )


def _descriptor_values(value: Any, name: str, memory: Global) -> Iterator[Any]:
    """Return the values of a Triton TensorDescriptor: the map, its extents, and its strides in elements."""
    tensor = as_tensor(value.base)
    memory.add_tensor(tensor, name)
    size = tensor.element_size()
    fill = math.nan if getattr(value, "padding", "zero") == "nan" else 0.0
    im2col = None
    if hasattr(value, "pixel_box_lower_corner"):
        steps = tuple(value.element_strides or (1,) * len(value.shape))[1:-1]
        im2col = dict(
            lower=tuple(value.pixel_box_lower_corner), upper=tuple(value.pixel_box_upper_corner), element_strides=steps
        )
    shape, strides = tuple(int(n) for n in value.shape), tuple(int(s) for s in value.strides)
    element, apart = _ELEMENTS[tensor.dtype], tuple(s * size for s in strides)
    yield TensorMap(
        tensor.data_ptr(), element, size, shape, apart, tuple(value.block_shape), fill, name, im2col, tensor
    )
    yield from shape
    yield from strides


def flatten(values: Sequence[Any], kinds: Sequence[Any], names: Names, memory: Global) -> Iterator[Any]:
    """Return the arguments in parameter order, without compiled-in ones. `kinds` is Triton's signature, nested as the
    arguments are.
    """
    for i, (value, kind) in enumerate(zip(values, kinds)):
        name = name_at(names, i)
        if isinstance(value, tuple) and isinstance(kind, tuple) and not isinstance(value, GlobalArg):
            yield from flatten(value, kind, names_inside(name, value), memory)
            continue
        if kind == "constexpr" or (isinstance(kind, tuple) and not kind):
            continue
        value = as_tensor(value)
        if isinstance(value, GlobalArg):
            memory.add_tensor(value.tensor, name)
            for spec in value.specs:
                tensor = value.tensor
                check_tensor_map(
                    tuple(tensor.shape), tensor.stride(), tensor.itemsize, tensor.data_ptr(), spec, name, tensor.dtype
                )
                yield tensor_map(value.tensor, spec, name)
                shape, strides = mapped(tensor, spec)
                yield from shape
                yield from (s if n > 1 else 1 for n, s in zip(shape, strides))
        elif isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise ArgumentError(
                    f"{name}: a tensor on {value.device}; the simulator takes CPU tensors and numpy arrays"
                )
            memory.add_tensor(value, name)
            yield value.data_ptr()
        elif hasattr(value, "block_shape"):
            yield from _descriptor_values(value, name, memory)
        elif hasattr(value, "data_ptr"):
            yield value.data_ptr()
        elif isinstance(value, (bool, int, float, np.generic)):
            yield value
        elif value is None:
            yield 0
        else:
            raise ArgumentError(
                f"{name}: {type(value).__name__} {value!r}; a kernel takes tensors, numbers and tuples of these"
            )


def convert(flat: Sequence[Any], types: Sequence[Any], kernel: str) -> list[Any]:
    """Return numbers in the run-time form of each parameter's type."""
    if len(flat) != len(types):
        raise ArgumentError(f"{kernel}: {len(flat)} values for {len(types)} parameters of the compiled kernel")
    out: list[Any] = []
    for value, kind in zip(flat, types):
        if isinstance(kind, Descriptor):
            if not isinstance(value, TensorMap):
                raise ArgumentError(f"{kernel}: {value!r} where the kernel takes a tensor descriptor")
            out.append(value)
        elif isinstance(kind, Pointer):
            out.append(int(value))
        elif isinstance(kind, Scalar) and kind.is_float:
            out.append(as_scalar(value, kind))
        else:
            bits = kind.bits if isinstance(kind, Scalar) else 64
            whole = int(value) & ((1 << bits) - 1)
            out.append(whole - (1 << bits) if bits > 1 and whole >> (bits - 1) else whole)
    return out
