"""Tensor maps: the Tensor Memory Accelerator's (TMA) descriptors of one tensor and one tile shape.

A tensor map (``CUtensorMap``, 128 opaque bytes) holds the tensor's address, extents and strides, and the box of one
copy. Rules and limits: CUDA driver API, ``cuTensorMapEncodeTiled``; PTX ISA, "Tensor-map".
"""

import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .clock_cache import ClockCache
from .device import device_facts
from .encoding import LAST_WRONG_VERSION, correct_small_tensor
from .im2col import Im2colSpec, check_im2col
from .libcuda import CudaDriver, cuda_driver

MAX_RANK = 5
MAX_BOX = 256  # elements along one dimension of one copy
MAX_EXTENT = 1 << 32  # elements along one dimension of the tensor
MAX_STRIDE_BYTES = 1 << 40
ALIGNMENT = 16  # bytes: address, strides and inner box
SWIZZLES = (0, 32, 64, 128)  # bytes
SPAN = 1 << 30  # rows of a ragged map
WRAP = 1 << 34  # elements
RAGGED_EXTENT = 0x7FFF0000  # larger than any leading coordinate

_SWIZZLE_CODE = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
_FILL_CODE = {"zero": 0, "nan": 1}  # CUtensorMapFloatOOBfill
_L2_PROMOTION_CODE = {128: 2, 256: 3}  # CUtensorMapL2promotion
_FIVE_STACKS = 80 << 30  # bytes of memory
_RECIPE = struct.Struct(f"<9I{MAX_RANK}I")

# CUtensorMapDataType. fp8 has no type of its own: bytes are bytes.
_TYPE_CODE = {
    torch.uint8: 0, torch.int8: 0, torch.bool: 0,
    torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float8_e8m0fnu: 0,
    torch.float4_e2m1fn_x2: 0,
    torch.uint16: 1, torch.int16: 1, torch.uint32: 2, torch.int32: 3, torch.uint64: 4, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip


class TensorMapSpec(NamedTuple):
    """The tile of a tensor map.

    Args:
        box: the tile's extents in elements, one per dimension of the tensor.
        swizzle: the width in bytes of the shared-memory swizzle: 0, 32, 64 or 128.
        fill: the value of a read outside the tensor: ``"zero"`` or ``"nan"`` (floating point only).
        ragged: the map has :func:`ragged` extents, with two dimensions more than the tensor.

    One copy moves at most 256 elements along a dimension, and the swizzle width along the last one. A larger tile
    takes several copies, as in Triton's TMA lowering; :func:`hardware_box` gives the extents of one copy.
    """

    box: tuple[int, ...]
    swizzle: int
    fill: str = "zero"
    ragged: bool = False


MapSpec = TensorMapSpec | Im2colSpec


def hardware_box(spec: MapSpec, itemsize: int) -> tuple[int, ...]:
    """Return the extents in elements of one TMA copy of the tile `spec`.

    They are at most 256 each (1024 pixels of im2col), and exactly the swizzle width in the last dimension. `itemsize`
    is in bytes.
    """
    box = list(spec.box) if isinstance(spec, Im2colSpec) else [min(extent, MAX_BOX) for extent in spec.box]
    if spec.swizzle:
        box[-1] = spec.swizzle // itemsize
    return tuple(box)


def ragged(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return extents and strides (elements) of a map that bounds every copy by its own number of rows.

    The tensor holds sequences packed end to end. It has two or three dimensions; the last two are rows and columns.

    A box at (SPAN, last, …, SPAN − n + row, col) lies at row ``last`` − n + ``row``. Rows from ``last`` on are
    outside, because the hardware compares with the extent SPAN of the rows. The two leading dimensions subtract SPAN
    again: SPAN · 2³⁴ elements are a multiple of 2⁶⁴ bytes, and addresses are sums modulo 2⁶⁴.
    Source: Triton, ``triton/tools/ragged_tma.py``.
    """
    strides = addressable_strides(shape, strides, itemsize)
    row = strides[-2]
    return (RAGGED_EXTENT, RAGGED_EXTENT, *shape[:-2], SPAN, shape[-1]), (WRAP - row, row, *strides)


def mapped(tensor: torch.Tensor, spec: MapSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return extents and strides (elements) of a tensor in its map."""
    if isinstance(spec, TensorMapSpec) and spec.ragged:
        return ragged(tensor.shape, tensor.stride(), tensor.itemsize)
    return tuple(tensor.shape), tensor.stride()


def addressable_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return ``strides`` (elements) with those of size-1 dimensions replaced by ones that TMA accepts.

    torch leaves arbitrary strides on dimensions of size 1. No address uses them, but TMA checks them.
    """
    legal = list(strides)
    quantum = max(ALIGNMENT // itemsize, 1)
    for i in reversed(range(len(shape))):
        if shape[i] != 1:
            continue
        if i == len(shape) - 1:
            legal[i] = 1
        elif legal[i] * itemsize % ALIGNMENT or not 0 < legal[i] * itemsize < MAX_STRIDE_BYTES:
            legal[i] = max(-(-shape[i + 1] * legal[i + 1] // quantum) * quantum, quantum)
    return tuple(legal)


def check_tensor_map(
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    address: int | None,
    spec: MapSpec,
    name: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse a tensor or tile that TMA cannot address. Needs no GPU.

    Args:
        shape: extents in elements.
        strides: strides in elements.
        itemsize: bytes of an element.
        address: the address, or None for a tensor without storage (meta).
        spec: the tile.
        name: the tensor's name in messages.
        dtype: the torch dtype, for the check of ``fill``.

    Raises:
        TypeError: for a spec or extents of the wrong type.
        ValueError: for a broken rule.
    """
    if not isinstance(spec, MapSpec):
        raise TypeError(f"{name}: a tile is described by a TensorMapSpec, got {type(spec).__name__}: {spec!r}")
    what = f"{name}: shape {tuple(shape)}, strides {tuple(strides)}, {itemsize}-byte elements"
    if isinstance(spec, TensorMapSpec) and spec.ragged:
        if not 2 <= len(shape) <= MAX_RANK - 2 or shape[-2] > SPAN:
            raise ValueError(f"{what}: a ragged map is of two or three dimensions and at most 2**30 rows")
        shape, strides = ragged(shape, strides, itemsize)
    rank = len(shape)
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{what}: {rank} dimensions; TMA addresses 1 to {MAX_RANK}")
    if itemsize not in (1, 2, 4, 8):
        raise ValueError(f"{what}: TMA moves elements of 1, 2, 4 or 8 bytes")
    if len(strides) != rank:
        raise ValueError(f"{what}: {rank} extents but {len(strides)} strides")
    _check_tile(spec, shape, itemsize, name)
    if spec.fill == "nan" and dtype is not None and (not dtype.is_floating_point or itemsize < 2):
        raise ValueError(
            f"{name}: fill 'nan' with {dtype}; TMA fills NaN only for floating-point types of 2, 4 or 8 bytes"
        )
    if address is not None and address % ALIGNMENT:
        raise ValueError(
            f"{what}: address {address:#x} is not a multiple of {ALIGNMENT} bytes, as TMA needs (a sliced tensor?)"
        )
    _check_extents(shape, addressable_strides(shape, strides, itemsize), itemsize, what)


def _check_tile(spec: MapSpec, shape: Sequence[int], itemsize: int, name: str) -> None:
    """Check the box, the swizzle and the fill for a tensor of these extents."""
    rank = len(shape)
    tile = f"{name}: box {spec.box}, swizzle {spec.swizzle}, {itemsize}-byte elements"
    if isinstance(spec, Im2colSpec):
        check_im2col(spec, rank, name, shape)
    elif len(spec.box) != rank:
        raise ValueError(
            f"{tile}: the box has {len(spec.box)} dimensions, the tensor {rank} (shape {tuple(shape)}); they must agree"
        )
    for i, extent in enumerate(spec.box):
        if not isinstance(extent, int):
            raise TypeError(f"{tile}: extent {i} of the box is a {type(extent).__name__}; box extents are ints")
        if extent < 1:
            raise ValueError(
                f"{tile}: extent {extent} of dimension {i}; a box has at least one element along every dimension"
            )
    if spec.swizzle not in SWIZZLES:
        raise ValueError(f"{tile}: the swizzle must be one of {SWIZZLES} bytes")
    if spec.fill not in _FILL_CODE:
        raise ValueError(f"{name}: fill {spec.fill!r}; a read outside the tensor gives 'zero' or 'nan'")
    row_bytes = spec.box[-1] * itemsize
    if row_bytes % ALIGNMENT:
        raise ValueError(f"{tile}: a row of the box is {row_bytes} bytes; TMA needs a multiple of {ALIGNMENT} bytes")
    if spec.swizzle and row_bytes % spec.swizzle:
        raise ValueError(
            f"{tile}: a row of the box is {row_bytes} bytes; with a {spec.swizzle}-byte swizzle it must be a multiple "
            f"of {spec.swizzle}"
        )


def _check_extents(shape: Sequence[int], strides: Sequence[int], itemsize: int, what: str) -> None:
    """Check the extents and strides (elements) of a map. `what` names the tensor."""
    for i, extent in enumerate(shape):
        if not 1 <= extent <= MAX_EXTENT:
            raise ValueError(
                f"{what}: extent {extent} of dimension {i}; TMA addresses 1 to 2**32 elements along a dimension"
            )
    if strides[-1] != 1:
        raise ValueError(f"{what}: the last dimension has stride {strides[-1]}; TMA needs it contiguous (stride 1)")
    for i, stride in enumerate(strides[:-1]):
        if stride * itemsize % ALIGNMENT:
            raise ValueError(
                f"{what}: stride {stride} of dimension {i} is {stride * itemsize} bytes; TMA needs a multiple of "
                f"{ALIGNMENT} bytes"
            )
        if not 0 <= stride * itemsize < MAX_STRIDE_BYTES:
            raise ValueError(f"{what}: stride {stride} of dimension {i}; TMA needs 0 <= stride < 2**40 bytes")


class _Encoded:
    """A cached tensor map; ``used`` belongs to the cache."""

    __slots__ = ("data", "used")

    def __init__(self, data: bytes):
        self.data, self.used = data, False


_cache = ClockCache(4096)
_lock = threading.Lock()


def encode(
    tensor: torch.Tensor,
    spec: MapSpec,
    *,
    name: str = "tensor",
    box: tuple[int, ...] | None = None,
    driver: CudaDriver | None = None,
) -> bytes:
    """Return the 128 bytes of the tensor map of ``tensor`` (rank 1 to 5) for the tile ``spec``.

    Args:
        tensor: a CUDA tensor.
        spec: the tile.
        name: the tensor's name in messages.
        box: replaces :func:`hardware_box`, for a compiled kernel with its own box.
        driver: the CUDA driver.

    Raises:
        TypeError: as in :func:`check_tensor_map`.
        ValueError: as in :func:`check_tensor_map`.
        RuntimeError: if the driver refuses.

    The cache key is address, dtype, shape, strides, device and tile, not the tensor. So the cache keeps no tensor
    alive, and a reused address with another shape gets another map.
    """
    driver = driver or cuda_driver()
    key = (id(driver), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, spec, box)
    entry = _cache.table.get(key)
    if entry is None:
        data = _encode(driver, tensor, spec, name, box)
        with _lock:
            entry = _cache.table.get(key)
            if entry is None:
                entry = _Encoded(data)
                _cache.insert(key, entry)
    entry.used = True
    return entry.data


def l2_promotion(tensor: torch.Tensor) -> int:
    """Return the least bytes that a copy fetches into L2, 128 or 256.

    With five stacks of HBM3 (H100), one fetch of 256 bytes is faster than two of 128. So 256 bytes are fetched for
    tensors that exceed L2 and have such rows. Six stacks of HBM3e (H200) show no gain. Measured:
    docs/notes/launch.md.
    """
    if not tensor.is_cuda or tensor.shape[-1] * tensor.itemsize < 256:
        return 128
    facts = device_facts(tensor.device)
    return 256 if facts.memory_bytes <= _FIVE_STACKS and tensor.nbytes > facts.l2_bytes else 128


def _encode(driver: CudaDriver, tensor: torch.Tensor, spec: MapSpec, name: str, box: tuple[int, ...] | None) -> bytes:
    itemsize, address = tensor.itemsize, tensor.data_ptr()
    check_tensor_map(tuple(tensor.shape), tensor.stride(), itemsize, address, spec, name, tensor.dtype)
    shape, steps = mapped(tensor, spec)
    strides = [stride * itemsize for stride in addressable_strides(shape, steps, itemsize)[:-1]]
    copied = list(reversed(box or hardware_box(spec, itemsize)))
    where = type_code(tensor.dtype, name), address, list(reversed(shape)), list(reversed(strides))
    modes = _SWIZZLE_CODE[spec.swizzle], _L2_PROMOTION_CODE[l2_promotion(tensor)], _FILL_CODE[spec.fill]
    if isinstance(spec, Im2colSpec):
        corners, apart = (
            (list(reversed(spec.lower)), list(reversed(spec.upper))),
            [1, *reversed(spec.element_strides), 1],
        )
        data = driver.encode_im2col(*where, *corners, copied[0], copied[1], apart, *modes)
    else:
        data = driver.encode_tiled(*where, copied, *modes)
    span = sum((extent - 1) * stride for extent, stride in zip(shape, [*strides, itemsize]))
    return correct_small_tensor(data, span, driver.version)


def recipe(
    owner: int, offset: int, tensor: torch.Tensor, spec: MapSpec, box: tuple[int, ...], driver: CudaDriver
) -> bytes:
    """Return how native.c encodes a map like that of ``tensor`` for one of other extents and strides (its `Recipe`).

    ``owner`` is the tensor's number in a call, ``offset`` the place of the map among the parameters. Raises TypeError
    for an im2col or a ragged map, whose extents are not those of the tensor.
    """
    if isinstance(spec, Im2colSpec) or spec.ragged:
        raise TypeError(f"{spec}: only the map of a plain tile can be encoded for other extents")
    copied = [*reversed(box), *[1] * (MAX_RANK - len(box))]
    modes = _SWIZZLE_CODE[spec.swizzle], _L2_PROMOTION_CODE[l2_promotion(tensor)], _FILL_CODE[spec.fill]
    corrected = driver.version <= LAST_WRONG_VERSION
    return _RECIPE.pack(
        owner, offset, type_code(tensor.dtype), tensor.ndim, tensor.itemsize, *modes, corrected, *copied
    )


def type_code(dtype: torch.dtype, name: str = "tensor") -> int:
    """Return the CUtensorMapDataType of a torch dtype. Raises TypeError for a dtype that TMA does not move."""
    if dtype not in _TYPE_CODE:
        raise TypeError(f"{name}: TMA does not move {dtype}")
    return _TYPE_CODE[dtype]
