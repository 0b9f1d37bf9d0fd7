"""Tensor maps from plain numbers, by the driver's `cuTensorMapEncodeTiled`: every mode of the driver, for any memory.

Everything is in the hardware's order: the fastest dimension first. Source: CUDA Driver API, "Tensor Map Object
Management".
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
import triton.language as tl

from .target import simulator

Dtype: TypeAlias = str | torch.dtype | tl.dtype
Choice = TypeVar("Choice", int, str)

LAST_WRONG_VERSION = 13010  # CUDA version of the drivers that `correct_small_tensor` corrects
NBYTES = 128  # size of a tensor map; its address is a multiple of 64 for the driver, of 128 for tensormap.replace

# name -> (CUtensorMapDataType, bytes, is a floating-point type); fp8 and fp4 travel as bytes
_DTYPES = {
    "uint8": (0, 1, False),
    "uint16": (1, 2, False),
    "uint32": (2, 4, False),
    "int32": (3, 4, False),
    "uint64": (4, 8, False),
    "int64": (5, 8, False),
    "float16": (6, 2, True),
    "float32": (7, 4, True),
    "float64": (8, 8, True),
    "bfloat16": (9, 2, True),
    "tfloat32": (11, 4, True),
}
_ALIASES = {
    "int8": "uint8",
    "int16": "uint16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "bfloat16",
    "tf32": "tfloat32",
    "fp8e4nv": "uint8",
    "fp8e5": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_INTERLEAVES = {0: 0, 16: 1, 32: 2}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_FILLS = {"zero": 0, "nan": 1}


def dtype_name(dtype: Dtype) -> str:
    """Return the key in _DTYPES of a dtype given by name, as a `tl.dtype` or as a `torch.dtype`."""
    name = str(dtype).removeprefix("torch.").removeprefix("tl.")
    name = _ALIASES.get(name, name)
    if name not in _DTYPES:
        raise ValueError(
            f"encode_tiled(dtype={dtype}): a tensor map holds one of {', '.join(_DTYPES)} or an 8-bit float"
        )
    return name


def dtype_entry(dtype: Dtype) -> tuple[int, int, bool]:
    """Return (CUtensorMapDataType, bytes, floating) of such a dtype."""
    return _DTYPES[dtype_name(dtype)]


def _choice(name: str, value: Choice, table: Mapping[Choice, int]) -> int:
    if value not in table:
        raise ValueError(f"encode_tiled({name}={value!r}): one of {', '.join(repr(key) for key in table)}")
    return table[value]


def check_tiled(
    address: int,
    dtype: Dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 0,
    interleave: int = 0,
    fill: str = "zero",
    l2_promotion: int = 128,
    element_strides: Sequence[int] | None = None,
) -> None:
    """Raise ValueError where arguments of `encode_tiled` break the driver's rules. Needs no GPU and no driver."""
    rank = len(shape)
    _choice("swizzle", swizzle, _SWIZZLES)
    _choice("interleave", interleave, _INTERLEAVES)
    _choice("l2_promotion", l2_promotion, _PROMOTIONS)
    _choice("fill", fill, _FILLS)
    if interleave == 32 and swizzle != 32:
        raise ValueError(f"encode_tiled(interleave=32, swizzle={swizzle}): interleave 32 needs swizzle 32")
    if fill == "nan" and not dtype_entry(dtype)[2]:
        raise ValueError(f"encode_tiled(fill='nan', dtype={dtype}): only floating-point tensors can be filled with NaN")
    _check_tensor(address, shape, strides, interleave)
    _check_box(box, shape, dtype, swizzle, interleave)
    steps = tuple(element_strides) if element_strides is not None else (1,) * rank
    if len(steps) != rank or not all(0 < step <= 8 for step in steps):
        raise ValueError(f"encode_tiled(element_strides={steps}): {rank} steps of 1 to 8 elements")


def _check_tensor(address: int, shape: Sequence[int], strides: Sequence[int], interleave: int) -> None:
    rank = len(shape)
    if not 1 <= rank <= 5:
        raise ValueError(f"encode_tiled(shape={tuple(shape)}): {rank} dimensions; a tensor map has 1 to 5")
    if interleave and rank < 3:
        raise ValueError(
            f"encode_tiled(interleave={interleave}, shape={tuple(shape)}): an interleaved tensor has at least 3 "
            "dimensions"
        )
    if len(strides) != rank - 1:
        raise ValueError(
            f"encode_tiled(strides={tuple(strides)}): {rank - 1} strides in bytes for {rank} dimensions; the fastest "
            "one is contiguous and has none"
        )
    alignment = 32 if interleave == 32 else 16
    if address % alignment:
        raise ValueError(
            f"encode_tiled(address={address:#x}): the tensor's address must be a multiple of {alignment} bytes"
        )
    for extent in shape:
        if not 0 < extent <= 1 << 32:
            raise ValueError(f"encode_tiled(shape={tuple(shape)}): every extent is 1 to 2**32")
    for stride in strides:
        if stride % alignment or not 0 <= stride < 1 << 40:
            raise ValueError(
                f"encode_tiled(strides={tuple(strides)}): {stride} bytes; every stride is a multiple of {alignment} "
                "bytes and below 2**40"
            )


def _check_box(box: Sequence[int], shape: Sequence[int], dtype: Dtype, swizzle: int, interleave: int) -> None:
    rank, itemsize = len(shape), dtype_entry(dtype)[1]
    if len(box) != rank:
        raise ValueError(
            f"encode_tiled(box={tuple(box)}): {rank} extents for the {rank} dimensions of shape {tuple(shape)}"
        )
    for extent in box:
        if not 0 < extent <= 256:
            raise ValueError(f"encode_tiled(box={tuple(box)}): every extent of the box is 1 to 256 elements")
    row = box[0] * itemsize
    if not interleave and row % 16:
        raise ValueError(
            f"encode_tiled(box={tuple(box)}): {box[0]} elements of {itemsize} bytes are {row} bytes; the box's fastest "
            "extent is a multiple of 16 bytes"
        )
    if not interleave and swizzle and row > swizzle:
        raise ValueError(
            f"encode_tiled(box={tuple(box)}, swizzle={swizzle}): {box[0]} elements of {itemsize} bytes are {row} "
            f"bytes; a {swizzle}-byte swizzle spans at most {swizzle}"
        )


@functools.cache
def driver() -> ctypes.CDLL:
    """Return libcuda, through ctypes. Raises RuntimeError on a machine without NVIDIA's driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(
            f"encode_tiled needs NVIDIA's driver library libcuda.so.1, which this machine does not have ({error})"
        ) from None


def encode_tiled(
    address: int,
    dtype: Dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 0,
    interleave: int = 0,
    fill: str = "zero",
    l2_promotion: int = 128,
    element_strides: Sequence[int] | None = None,
) -> bytes:
    """The 128 bytes of a tensor map (tiled mode), by the driver's `cuTensorMapEncodeTiled`.

    address          of the tensor in global memory, a multiple of 16 bytes
    dtype            a name ("bfloat16", "bf16"), `tl.dtype` or `torch.dtype`; 8-bit floats travel as bytes
    shape            extents in elements, fastest dimension first (`tensor.shape[::-1]`), rank 1 to 5
    strides          in bytes, of all dimensions but the fastest (which is contiguous): multiples of 16, below 2**40
    box              extents of the tile in elements, each at most 256; the fastest one a multiple of 16 bytes, at most
                     the swizzle's span
    swizzle          0, 32, 64 or 128 bytes
    interleave       0, 16 or 32 bytes
    fill             the value outside the tensor: "zero" or "nan"
    l2_promotion     0, 64, 128 or 256 bytes: the granularity of L2 fetches
    element_strides  step between elements along each dimension, 1 to 8

    A kernel argument cannot carry it here: put it in global memory (128 bytes, 128-byte aligned) and let each CTA that
    uses it execute `tma.fence_tensormap_acquire` once. ValueError: a rule is broken; RuntimeError: no driver, or the
    driver refuses."""
    check_tiled(address, dtype, shape, strides, box, swizzle, interleave, fill, l2_promotion, element_strides)
    simulated = simulator.get()
    if simulated is not None:
        if interleave or any(step != 1 for step in element_strides or ()):
            raise NotImplementedError(
                f"encode_tiled(interleave={interleave}, element_strides={element_strides}): the simulator knows neither"
            )
        return simulated.encode_tiled(address, dtype_name(dtype), shape, strides, box, swizzle, fill)
    steps = element_strides if element_strides is not None else (1,) * len(shape)
    modes = (_INTERLEAVES[interleave], _SWIZZLES[swizzle], _PROMOTIONS[l2_promotion], _FILLS[fill])
    return _encode_by_driver(address, dtype, shape, strides, box, steps, modes)


def _encode_by_driver(
    address: int,
    dtype: Dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int],
    modes: tuple[int, int, int, int],
) -> bytes:
    """The tensor map of checked arguments. `modes`: the driver's numbers of interleave, swizzle, L2 promotion, fill."""
    storage = ctypes.create_string_buffer(NBYTES + 64)
    start = -ctypes.addressof(storage) % 64
    rank, library = len(shape), driver()
    status = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(storage) + start),
        ctypes.c_int(dtype_entry(dtype)[0]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*steps),
        *(ctypes.c_int(mode) for mode in modes),
    )
    if status != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled returned error {status} for dtype={dtype}, shape={tuple(shape)}, "
            f"strides={tuple(strides)}, box={tuple(box)} and modes {modes} (interleave, swizzle, L2 promotion, fill)"
        )
    steps_in_bytes = [dtype_entry(dtype)[1], *strides]
    span = sum((extent - 1) * step for extent, step in zip(shape, steps_in_bytes, strict=True))
    return correct_small_tensor(storage.raw[start : start + NBYTES], span, driver_version(library))


def driver_version(library: ctypes.CDLL) -> int:
    """Return the CUDA version that the driver supports, for example 13000 for 13.0."""
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def correct_small_tensor(data: bytes, span: int, version: int) -> bytes:
    """Return the tensor map with a driver bug corrected.

    Drivers up to CUDA 13.1 set a wrong bit for tensors that span less than 128 KiB, and a copy then ends in an
    illegal instruction. Bit 21 of the second word is cleared, as in Triton and CUTLASS. `span` is the offset in bytes
    of the last element.
    """
    if version > LAST_WRONG_VERSION or span + 1 >= 128 * 1024:
        return data
    word = int.from_bytes(data[8:16], "little") & ~(1 << 21)
    return data[:8] + word.to_bytes(8, "little") + data[16:]
