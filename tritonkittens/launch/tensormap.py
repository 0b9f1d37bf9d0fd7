"""Tensor maps: what the Tensor Memory Accelerator (TMA) knows about one tensor and one tile shape.

A tensor map (``CUtensorMap``, 128 opaque bytes) holds the tensor's address, extents and strides and the box that one copy moves. Rules
and limits: CUDA driver API, ``cuTensorMapEncodeTiled``; PTX ISA, "Tensor-map".
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .clock_cache import ClockCache
from .device import device_facts
from .encoding import correct_small_tensor
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
RAGGED_EXTENT = 0x7FFF0000  # more than any coordinate in front

_SWIZZLE_CODE = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
_FILL_CODE = {"zero": 0, "nan": 1}  # CUtensorMapFloatOOBfill
_L2_PROMOTION_CODE = {128: 2, 256: 3}  # CUtensorMapL2promotion
_FIVE_STACKS = 80 << 30  # bytes of memory

# CUtensorMapDataType. fp8 has no type of its own: bytes are bytes.
_TYPE_CODE = {
    torch.uint8: 0, torch.int8: 0, torch.bool: 0,
    torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float8_e8m0fnu: 0,
    torch.uint16: 1, torch.int16: 1, torch.uint32: 2, torch.int32: 3, torch.uint64: 4, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip


class TensorMapSpec(NamedTuple):
    """What the tensor map of one tile looks like.

    ``box``: the tile's extents in elements, as many as the tensor has dimensions. ``swizzle``: width in bytes of the shared-memory
    swizzle, 0, 32, 64 or 128. ``fill``: what a read outside the tensor gives, ``"zero"`` or ``"nan"`` (floating point only). ``ragged``: the
    map is of :func:`ragged` extents, of two dimensions more than the tensor has.

    A tile wider than one copy can be (256 elements, or the swizzle width along the last dimension) is moved by several copies, as
    Triton's TMA lowering does; :func:`hardware_box` says how large one copy is.
    """

    box: tuple[int, ...]
    swizzle: int
    fill: str = "zero"
    ragged: bool = False


MapSpec = TensorMapSpec | Im2colSpec


def hardware_box(spec: MapSpec, itemsize: int) -> tuple[int, ...]:
    """Extents in elements of one TMA copy of a tile: at most 256 each (1024 pixels of im2col), and exactly the swizzle width in the last
    dimension."""
    box = list(spec.box) if isinstance(spec, Im2colSpec) else [min(extent, MAX_BOX) for extent in spec.box]
    if spec.swizzle:
        box[-1] = spec.swizzle // itemsize
    return tuple(box)


def ragged(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents and strides (elements) of a map that bounds every copy by rows of its own: those of sequences packed end to end in a tensor
    of two or three dimensions, whose last two are rows and columns.

    A box at (SPAN, last, …, SPAN − n + row, col) lies at row ``last`` − n + ``row``, and what lies at or behind row ``last`` is outside:
    the hardware compares with the extent SPAN of the rows. Two dimensions in front take SPAN away again: SPAN · 2³⁴ elements are a multiple
    of 2⁶⁴ bytes, and addresses are sums modulo 2⁶⁴. Source: Triton, ``triton/tools/ragged_tma.py``.
    """
    strides = addressable_strides(shape, strides, itemsize)
    row = strides[-2]
    return (RAGGED_EXTENT, RAGGED_EXTENT, *shape[:-2], SPAN, shape[-1]), (WRAP - row, row, *strides)


def mapped(tensor: torch.Tensor, spec: MapSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents and strides (elements) of a tensor as its map has them."""
    if isinstance(spec, TensorMapSpec) and spec.ragged:
        return ragged(tensor.shape, tensor.stride(), tensor.itemsize)
    return tuple(tensor.shape), tensor.stride()


def addressable_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """``strides`` (elements) with those of size-1 dimensions replaced by ones that TMA accepts.

    torch leaves arbitrary strides on dimensions of size 1; they take part in no address, but TMA checks them.
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
    """Refuse a tensor or tile that TMA cannot address.

    ``shape`` and ``strides`` are in elements, ``itemsize`` in bytes; ``address`` is None for a tensor without storage (meta). ``name`` is
    what the message calls the tensor. Needs no GPU.

    Raises TypeError for a spec or extents of the wrong type, ValueError for a broken rule.
    """
    if not isinstance(spec, MapSpec):
        raise TypeError(f"{name}: a tile is described by a TensorMapSpec, got {type(spec).__name__}: {spec!r}")
    what = f"{name}: shape {tuple(shape)}, strides {tuple(strides)}, {itemsize}-byte elements"
    if isinstance(spec, TensorMapSpec) and spec.ragged:
        if not 2 <= len(shape) <= MAX_RANK - 2 or shape[-2] > SPAN:
            raise ValueError(f"{what}: a ragged map is of two or three dimensions and at most 2**30 rows")
        shape, strides = ragged(shape, strides, itemsize)
    tile = f"{name}: box {spec.box}, swizzle {spec.swizzle}, {itemsize}-byte elements"
    rank = len(shape)
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{what}: {rank} dimensions; TMA addresses 1 to {MAX_RANK}")
    if itemsize not in (1, 2, 4, 8):
        raise ValueError(f"{what}: TMA moves elements of 1, 2, 4 or 8 bytes")
    if len(strides) != rank:
        raise ValueError(f"{what}: {rank} extents but {len(strides)} strides")
    if isinstance(spec, Im2colSpec):
        check_im2col(spec, rank, name, shape)
    elif len(spec.box) != rank:
        raise ValueError(f"{tile}: the box has {len(spec.box)} dimensions, the tensor {rank} (shape {tuple(shape)}); they must agree")
    for i, extent in enumerate(spec.box):
        if not isinstance(extent, int):
            raise TypeError(f"{tile}: extent {i} of the box is a {type(extent).__name__}; box extents are ints")
        if extent < 1:
            raise ValueError(f"{tile}: extent {extent} of dimension {i}; a box has at least one element along every dimension")
    if spec.swizzle not in SWIZZLES:
        raise ValueError(f"{tile}: the swizzle must be one of {SWIZZLES} bytes")
    if spec.fill not in _FILL_CODE:
        raise ValueError(f"{name}: fill {spec.fill!r}; a read outside the tensor gives 'zero' or 'nan'")
    if spec.fill == "nan" and dtype is not None and (not dtype.is_floating_point or itemsize < 2):
        raise ValueError(f"{name}: fill 'nan' with {dtype}; TMA fills NaN only for floating-point types of 2, 4 or 8 bytes")
    row_bytes = spec.box[-1] * itemsize
    if row_bytes % ALIGNMENT:
        raise ValueError(f"{tile}: a row of the box is {row_bytes} bytes; TMA needs a multiple of {ALIGNMENT} bytes")
    if spec.swizzle and row_bytes % spec.swizzle:
        raise ValueError(
            f"{tile}: a row of the box is {row_bytes} bytes; with a {spec.swizzle}-byte swizzle it must be a multiple of {spec.swizzle}"
        )
    if address is not None and address % ALIGNMENT:
        raise ValueError(f"{what}: address {address:#x} is not a multiple of {ALIGNMENT} bytes, as TMA needs (a sliced tensor?)")
    for i, extent in enumerate(shape):
        if not 1 <= extent <= MAX_EXTENT:
            raise ValueError(f"{what}: extent {extent} of dimension {i}; TMA addresses 1 to 2**32 elements along a dimension")
    strides = addressable_strides(shape, strides, itemsize)
    if strides[-1] != 1:
        raise ValueError(f"{what}: the last dimension has stride {strides[-1]}; TMA needs it contiguous (stride 1)")
    for i, stride in enumerate(strides[:-1]):
        if stride * itemsize % ALIGNMENT:
            raise ValueError(
                f"{what}: stride {stride} of dimension {i} is {stride * itemsize} bytes; TMA needs a multiple of {ALIGNMENT} bytes"
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
    """The 128 bytes of the tensor map of ``tensor`` (rank 1 to 5) for the tile ``spec``.

    ``box`` overrides :func:`hardware_box` (a compiled kernel knows its own). Cached by address, dtype, shape, strides, device and tile,
    not by tensor: the cache keeps no tensor alive, and an address that comes back with another shape gets another map.

    Raises ValueError or TypeError as :func:`check_tensor_map`, RuntimeError if the driver refuses.
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
    """How many bytes a copy fetches into L2 at least, 128 or 256.

    Five stacks of HBM3 (H100) give 256 bytes of a row faster than 128 now and 128 when the next copy asks: there 256 are fetched of a
    tensor that L2 cannot hold, where its rows have as many. Six stacks of HBM3e (H200) do not. Measured: docs/notes/launch.md.
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
        corners, apart = (list(reversed(spec.lower)), list(reversed(spec.upper))), [1, *reversed(spec.element_strides), 1]
        data = driver.encode_im2col(*where, *corners, copied[0], copied[1], apart, *modes)
    else:
        data = driver.encode_tiled(*where, copied, *modes)
    span = sum((extent - 1) * stride for extent, stride in zip(shape, [*strides, itemsize]))
    return correct_small_tensor(data, span, driver.version)


def type_code(dtype: torch.dtype, name: str = "tensor") -> int:
    """CUtensorMapDataType of a torch dtype. TypeError for a dtype that TMA does not move."""
    if dtype not in _TYPE_CODE:
        raise TypeError(f"{name}: TMA does not move {dtype}")
    return _TYPE_CODE[dtype]
