"""TMA loads that write into several blocks of a cluster at once.

Gluon does not give out the address of a descriptor that is a kernel argument, and its own multicast belongs to a model in which a cluster is one program.
So the descriptors of a `gl(…, multicast=True)` also lie in global memory, and the copies are issued by the PTX shim.
"""
from __future__ import annotations

import threading
from typing import Any

import torch
import triton
import triton.language as tl

from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang._backend import Trace
from tritonkittens.lang.dtypes import itemsize
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.shared import shared
from tritonkittens.lang.sync import role_thread, semaphore
from tritonkittens.lang.types import unwrap
from tritonkittens.launch import TensorMapSpec, encode, simulator
from tritonkittens.launch.clock_cache import ClockCache

MAP_BYTES = 128
MAX_ROWS = 256  # of one copy


class _Maps:
    """Descriptors in global memory; `used` belongs to the cache."""

    __slots__ = ("buffer", "used")

    def __init__(self, buffer: torch.Tensor):
        self.buffer, self.used = buffer, False


_cache = ClockCache(1024)
_lock = threading.Lock()


def device_maps(tensor: torch.Tensor, specs: tuple[TensorMapSpec, ...]) -> torch.Tensor:
    """The descriptors of a tensor, one after the other, on its device (bytes). Cached by address, shape and strides.

    The first call for a tensor copies to the device, which a CUDA graph cannot capture: call the kernel once before.
    """
    if tensor.is_meta or tensor.device.type != "cuda":
        buffer = torch.empty(MAP_BYTES * len(specs), dtype=torch.uint8, device=tensor.device)
        simulated = simulator.get()
        if simulated is not None and not tensor.is_meta:
            simulated.register_maps(buffer, tensor, specs)
        return buffer
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, specs)
    entry = _cache.table.get(key)
    if entry is None:
        data = b"".join(encode(tensor, spec) for spec in specs)
        made = _Maps(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(tensor.device))
        with _lock:
            entry = _cache.table.get(key)
            if entry is None:
                _cache.insert(key, made)
                entry = made
    entry.used = True
    return entry.buffer


@triton.jit
def _issue(map, destination, bar, coordinates, mask, thread):
    if thread == 0:
        ptx_tma.fence_tensormap_acquire(map, "gpu")
        ptx_tma.load_tensor(destination, map, coordinates, bar, multicast=mask, issuer="thread")


def load_multicast(t: Trace, dst: shared, src: Any, copies: list[tuple[Any, list[Any], Any]], arrived: semaphore, mask: Any) -> None:
    """Issue the copies (descriptor, element coordinates, view) of a tile into the blocks whose bit is set in `mask`, on the same barrier of each."""
    if not isinstance(getattr(src, "addresses", ()), tl.tensor):
        raise TileError("load_async(multicast=…): make the global layout with tk.gl(…, multicast=True)")
    thread = role_thread(t)
    order = {id(m): i for i, m in enumerate(src.maps)}
    for (m, place, _), piece in zip(copies, dst.pieces, strict=True):
        rows = int(unwrap(piece.shape[0])) if len(dst.axes) == 2 else 1
        width = int(unwrap(piece.shape[-1]))
        swizzle = piece.layout.swizzle_byte_width
        step = swizzle // itemsize(dst.dtype) if swizzle else width
        if rows > MAX_ROWS or step > MAX_ROWS:
            raise TileError(f"load_async(multicast=…) of {dst.spec!r}: a piece of {rows} rows and {width} columns; one copy moves at most {MAX_ROWS} of each")
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)
        source = t.method(src.addresses, "__add__", MAP_BYTES * order[id(m)])
        for block in range(width // step):
            # a tile wider than its swizzle lies in memory as blocks of columns, each of all rows
            destination = t.method(address, "__add__", block * rows * step * itemsize(dst.dtype))
            fastest = t.method(t.scalar(place[-1]), "__add__", block * step)
            coordinates = tl.tuple([fastest, *[t.scalar(p) for p in reversed(place[:-1])]])
            t.call(_issue, source, destination, arrived, coordinates, t.scalar(mask), thread)
