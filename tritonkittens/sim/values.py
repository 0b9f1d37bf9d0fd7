"""What operations hand to each other beside numbers: views of shared and tensor memory, tensor maps, values that are not there (yet)."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .layouts import SHARED_STRIDE
from .ttgir import Op, Type


class NotComputed(TypeError):
    """A value was used that is not there."""


class Poison:
    """The result of `ub.poison`, or of arithmetic on it. Using it for an address, a decision or a result in memory is reported."""

    def __init__(self, op: Op, why: str = ""):
        self.op = op
        self.why = why or f"{op.name} gave no value"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise NotComputed("poison has no value")


class InFlight:
    """The accumulator of a wgmma that nobody has waited for. Only a further wgmma and a wait may take it."""

    __slots__ = ("product", "type")

    def __init__(self, product: Any, type: Type):
        self.product, self.type = product, type

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise NotComputed("a product in flight has no value")


class Spans:
    """Pieces of global memory of `nbytes` each, at these addresses."""

    __slots__ = ("starts", "nbytes")

    def __init__(self, starts: np.ndarray, nbytes: int):
        self.starts: np.ndarray = np.sort(starts.reshape(-1))
        self.nbytes = nbytes

    def meets(self, other: Spans) -> bool:
        """Do they have a byte in common?"""
        if not self.starts.size or not other.starts.size or not self.nbytes or not other.nbytes:
            return False
        behind = np.asarray(np.searchsorted(other.starts, self.starts - other.nbytes, side="right"))  # the first piece that ends behind each start
        found = behind < other.starts.size
        return bool((other.starts[behind[found]] < self.starts[found] + self.nbytes).any())


class AddressMap:
    """Byte offsets of a view's elements from its base; immutable, and shared by all views made in the same way.

    `replicas` are the places of every copy where a layout keeps several. With several CTAs an offset has the rank in the bits from SHARED_STRIDE up.
    """

    __slots__ = ("offsets", "nbytes", "replicas", "_derived", "_runs", "_elements", "spread")

    def __init__(self, offsets: np.ndarray, nbytes: int, replicas: np.ndarray | None = None):
        self.offsets, self.nbytes, self.replicas = offsets, nbytes, replicas
        self._derived: dict[Any, AddressMap] = {}
        self._runs: Any = None
        self._elements: Any = None
        self.spread = bool(offsets.size) and int(offsets.max()) >= SHARED_STRIDE or replicas is not None and int(replicas.max()) >= SHARED_STRIDE

    @property
    def shape(self) -> tuple[int, ...]:
        return self.offsets.shape

    def derive(self, key: Any, change: Any) -> AddressMap:
        """The map after `change` (an index, a transposition, a reshape) of the array of offsets; made once for a key."""
        found = self._derived.get(key)
        if found is None:
            replicas = None if self.replicas is None else np.stack([change(r) for r in self.replicas])
            found = self._derived[key] = AddressMap(np.ascontiguousarray(change(self.offsets)), self.nbytes, replicas)
        return found

    @property
    def elements(self) -> np.ndarray:
        """Offsets counted in elements; every offset is a multiple of an element's size."""
        if self._elements is None:
            self._elements = self.offsets // self.nbytes
        return self._elements

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The bytes covered, as intervals in rising order."""
        if self._runs is None:
            places = self.offsets if self.replicas is None else self.replicas
            starts = np.unique(places.reshape(-1))
            if starts.size == 0:
                self._runs = []
                return self._runs
            breaks = np.flatnonzero(starts[1:] > starts[:-1] + self.nbytes)
            begin = starts[np.concatenate([[0], breaks + 1])]
            end = starts[np.concatenate([breaks, [len(starts) - 1]])] + self.nbytes
            self._runs = list(zip(begin.tolist(), end.tolist()))
        return self._runs

    @property
    def total(self) -> int:
        """Bytes of the elements."""
        return self.offsets.size * self.nbytes


@dataclass(eq=False)
class Allocation:
    """Where a buffer comes from, for reports."""

    name: str
    op: Op
    base: int
    size: int
    stage_bytes: int | None = None  # of one buffer, where the allocation has several

    def describe(self, address: int) -> str:
        """`input.A[1]`: the buffer, and the stage that an address lies in."""
        if self.stage_bytes and self.size > self.stage_bytes:
            return f"{self.name}[{(address - self.base) % SHARED_STRIDE // self.stage_bytes}]"
        return self.name


@dataclass(eq=False)
class View:
    """A memory descriptor at run time: `space` is shared or tensor; `base` a byte address with the CTA's rank from SHARED_STRIDE up."""

    space: str
    base: int
    map: AddressMap
    type: Any
    allocation: Allocation

    def __repr__(self) -> str:
        return f"{self.name}{list(self.map.shape)}"

    @property
    def name(self) -> str:
        return self.allocation.describe(self.base)


@dataclass(eq=False)
class TensorMap:
    """A TMA descriptor: a strided tensor in global memory and the box that a copy moves (CUDA driver API, "Tensor Map Object Management")."""

    address: int
    element: str  # MLIR name
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    fill: float = 0.0
    name: str = "tensor"
    im2col: dict[str, Any] | None = None
    owner: Any = field(default=None, repr=False)
    swizzle: int = 0  # bytes; where the map itself places the box (copies by inline PTX), not a layout
    spec: Any = field(default=None, repr=False)  # of a kernel's parameter: the tile that it was made for
