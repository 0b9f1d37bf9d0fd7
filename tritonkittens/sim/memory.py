"""Bytes: a CTA's shared and tensor memory, poisoned until written, and global memory as the tensors of a launch."""

from __future__ import annotations

import ctypes
import gc
from bisect import bisect_right, insort
from typing import Any

import numpy as np

from .clocks import Shadow
from .values import AddressMap

POISON_BYTE = 0xAB  # the contents of unwritten memory, so that a result is visibly wrong even if a finding is ignored
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


READ_ONLY = "read_only"  # the attribute of a tensor that holds its read-only array


class ReadOnlyError(RuntimeError):
    """A kernel writes an argument that is a read-only array."""


class Bytes:
    """One memory of one CTA: its bytes, its written bytes, and the last accesses of each."""

    def __init__(self, size: int):
        size += -size % 16
        self.size = size
        self.bytes: np.ndarray = np.full(size, POISON_BYTE, np.uint8)
        self.written: np.ndarray = np.zeros(size, bool)
        self.shadow = Shadow(size)

    def read(self, base: int, map: AddressMap) -> np.ndarray:
        """Return the bits of the elements, as unsigned words of their size."""
        word: np.ndarray = self.bytes[: self.size // map.nbytes * map.nbytes].view(_WORD[map.nbytes])
        return word[map.elements + base // map.nbytes]

    def write(self, base: int, map: AddressMap, bits: np.ndarray) -> None:
        word: np.ndarray = self.bytes[: self.size // map.nbytes * map.nbytes].view(_WORD[map.nbytes])
        if map.replicas is not None:
            for replica in map.replicas:
                word[(replica + base) // map.nbytes] = bits
        else:
            word[map.elements + base // map.nbytes] = bits
        for start, end in map.runs:
            self.written[base + start : base + end] = True

    def unwritten(self, base: int, map: AddressMap) -> int | None:
        """Return the first byte of the view that was never written."""
        runs = map.runs if map.replicas is None else [(int(map.offsets.min()), int(map.offsets.max()) + map.nbytes)]
        if map.replicas is not None:
            missing = ~self.written[base + map.offsets]
            return int((base + map.offsets)[missing][0]) if missing.any() else None
        for start, end in runs:
            part = self.written[base + start : base + end]
            if not part.all():
                return base + start + int(np.argmin(part))
        return None

    def grow(self, size: int) -> None:
        """Append unwritten memory at the end."""
        size += -size % 16
        if size <= self.size:
            return
        more = size - self.size
        self.bytes = np.concatenate([self.bytes, np.full(more, POISON_BYTE, np.uint8)])
        self.written = np.concatenate([self.written, np.zeros(more, bool)])
        self.shadow.grow(size)
        self.size = size

    def forget(self, start: int, end: int) -> None:
        """Discard the contents for a new allocation."""
        self.written[start:end] = False
        self.bytes[start:end] = POISON_BYTE


class Global:
    """The tensors that a launch may access, by address. The addresses are those of the CPU tensors themselves."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ranges: dict[int, tuple[int, np.ndarray, str, Any]] = {}
        self.last: tuple[int, int, np.ndarray] = (0, 0, np.empty(0, np.uint8))
        self.read_only: set[int] = set()  # the starts of ranges that no kernel may write
        self.watching: list[Any] = []  # observers of reads (`spinning.Watch`)
        # whether an address may name a tensor that is no argument, as in kernels that make pointers of numbers
        self.discovers = False

    def add(self, address: int, size: int, name: str, owner: Any = None) -> None:
        """Register `size` bytes at `address`, and keep `owner` alive."""
        if size <= 0:
            return
        known = self.ranges.get(address)
        if known is not None:
            if known[0] >= size:
                return
            del self.ranges[address]
            self.starts.remove(address)
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        insort(self.starts, address)
        self.ranges[address] = (size, data, name, owner)

    def add_tensor(self, tensor: Any, name: str) -> None:
        storage = tensor.untyped_storage()
        if not tensor.numel():
            return
        start, is_new = storage.data_ptr(), storage.data_ptr() not in self.ranges
        self.add(start, storage.nbytes(), name, tensor)
        if not hasattr(tensor, READ_ONLY):
            self.read_only.discard(start)  # the same memory is also passed as writable
        elif is_new:
            self.read_only.add(start)

    def check_writable(self, start: int) -> None:
        """Raise ReadOnlyError for a store to the range that begins there, if it is read-only."""
        if start in self.read_only:
            raise ReadOnlyError(
                f"{self.ranges[start][2]}: the kernel writes it, and the array is read-only; pass a copy"
            )

    def find(self, address: int) -> tuple[int, int, np.ndarray] | None:
        """Return (start, size, bytes) of the tensor that contains an address."""
        start, size, _ = self.last
        if start <= address < start + size:
            return self.last
        found = self._find(address)
        if found is None and self.discovers and self._discover(address):
            found = self._find(address)
        if found is not None:
            self.last = found
        return found

    def _find(self, address: int) -> tuple[int, int, np.ndarray] | None:
        i = bisect_right(self.starts, address) - 1
        if i >= 0:
            start = self.starts[i]
            size, data, _, _ = self.ranges[start]
            if address < start + size:
                return start, size, data
        return None

    def _nearest(self, address: int) -> int:
        """Return the start of the tensor that contains an address, or of the nearest one."""
        return self.starts[max(bisect_right(self.starts, address) - 1, 0)]

    def name(self, address: int) -> str:
        """Return the name of the tensor that contains an address, or of the nearest one, with the byte."""
        if not self.starts:
            return "no tensor"
        start = self._nearest(address)
        size, _, name, _ = self.ranges[start]
        return f"{name} ({size} bytes), byte {address - start}"

    def name_only(self, address: int) -> str:
        """Return the name of the tensor that contains an address."""
        return self.ranges[self._nearest(address)][2]

    def element(self, address: int) -> str:
        """Return the element at an address that lies in a tensor, as `C[3, 64]`."""
        start = self._nearest(address)
        _, _, name, owner = self.ranges[start]
        if not hasattr(owner, "stride"):
            return f"{name}, byte {address - start}"
        left = (address - owner.data_ptr()) // owner.element_size()
        index = [0] * owner.ndim
        for d in sorted(range(owner.ndim), key=lambda d: -owner.stride(d)):
            if owner.stride(d) > 0:
                index[d], left = divmod(left, owner.stride(d))
        inside = left == 0 and all(0 <= i < n for i, n in zip(index, owner.shape))
        return f"{name}[{', '.join(map(str, index))}]" if inside else f"{name}, byte {address - start} of its memory"

    def _discover(self, address: int) -> bool:
        """Find a live tensor that is no argument, for a pointer that was read from memory (a tensor of addresses)."""
        import torch

        for thing in gc.get_objects():
            try:
                if type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.numel():
                    storage = thing.untyped_storage()
                    if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                        self.add_tensor(thing, "tensor found by address")
                        return True
            except (RuntimeError, ReferenceError):
                continue
        return False

    def gather(self, addresses: np.ndarray, nbytes: int) -> tuple[np.ndarray, int | None]:
        """Return words at flat `addresses`, and the first address that lies in no tensor (its words are zero)."""
        out, bad = self._gather(addresses, nbytes)
        for watch in self.watching:
            watch.saw(addresses, out)
        return out, bad

    def peek(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Return words at flat `addresses`, without informing observers."""
        return self._gather(addresses, nbytes)[0]

    def _gather(self, addresses: np.ndarray, nbytes: int) -> tuple[np.ndarray, int | None]:
        out = np.zeros(addresses.shape, _WORD[nbytes])
        rest = np.arange(addresses.size)
        while rest.size:
            found = self.find(int(addresses[rest[0]]))
            if found is None:
                return out, int(addresses[rest[0]])
            start, size, data = found
            here = (addresses[rest] >= start) & (addresses[rest] + nbytes <= start + size)
            if not here[0]:
                return out, int(addresses[rest[0]])
            places = rest[here]
            offsets = addresses[places] - start
            out[places] = self._words(data, offsets, nbytes)
            rest = rest[~here]
        return out, None

    def scatter(self, addresses: np.ndarray, words: np.ndarray) -> int | None:
        """Write words at flat `addresses`. Return the first address that lies in no tensor."""
        nbytes = words.dtype.itemsize
        rest = np.arange(addresses.size)
        while rest.size:
            found = self.find(int(addresses[rest[0]]))
            if found is None:
                return int(addresses[rest[0]])
            start, size, data = found
            self.check_writable(start)
            here = (addresses[rest] >= start) & (addresses[rest] + nbytes <= start + size)
            if not here[0]:
                return int(addresses[rest[0]])
            places = rest[here]
            offsets = addresses[places] - start
            if (offsets % nbytes == 0).all():
                data[: data.size // nbytes * nbytes].view(words.dtype)[offsets // nbytes] = words[places]
            else:
                for byte in range(nbytes):
                    data[offsets + byte] = (words[places] >> words.dtype.type(8 * byte)).astype(np.uint8)
            rest = rest[~here]
        return None

    @staticmethod
    def _words(data: np.ndarray, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        if (offsets % nbytes == 0).all():
            return data[: data.size // nbytes * nbytes].view(_WORD[nbytes])[offsets // nbytes]
        parts = data[offsets[:, None] + np.arange(nbytes)]
        return np.ascontiguousarray(parts).view(_WORD[nbytes])[:, 0]
