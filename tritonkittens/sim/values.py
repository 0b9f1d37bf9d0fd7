"""Values of operations besides numbers: views of shared and tensor memory, tensor maps, and missing values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .layouts import SHARED_STRIDE
from .ttgir import Op, Type


class NotComputed(TypeError):
    """An operation used a missing value."""


class Poison:
    """The result of `ub.poison`, or of arithmetic on it. Its use for an address, a decision or a result in memory is
    a finding.
    """

    def __init__(self, op: Op, why: str = ""):
        self.op = op
        self.why = why or f"{op.name} has no value"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise NotComputed("poison has no value")


class InFlight:
    """The accumulator of a wgmma in flight. Only a further wgmma and a wait may take it."""

    __slots__ = ("product", "type")

    def __init__(self, product: Any, type: Type):
        self.product, self.type = product, type

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise NotComputed("a product in flight has no value")


class Spans:
    """Pieces of global memory of `nbytes` each, at these addresses."""

    __slots__ = ("starts", "nbytes")

    def __init__(self, starts: np.ndarray, nbytes: int):
        self.starts: np.ndarray = starts.reshape(-1)
        self.nbytes = nbytes


class AddressMap:
    """Byte offsets of a view's elements from its base. It is immutable, and equal views share it.

    `replicas` are the offsets of all copies where a layout keeps several. With several CTAs, an offset has the rank
    in the bits from SHARED_STRIDE up.
    """

    __slots__ = ("offsets", "nbytes", "replicas", "_derived", "_runs", "_elements", "_parts", "spread")

    def __init__(self, offsets: np.ndarray, nbytes: int, replicas: np.ndarray | None = None):
        self.offsets, self.nbytes, self.replicas = offsets, nbytes, replicas
        self._derived: dict[Any, AddressMap] = {}
        self._parts: dict[Any, list[tuple[int, AddressMap]]] = {}
        self._runs: Any = None
        self._elements: Any = None
        self.spread = (
            bool(offsets.size)
            and int(offsets.max()) >= SHARED_STRIDE
            or replicas is not None
            and int(replicas.max()) >= SHARED_STRIDE
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.offsets.shape

    def derive(self, key: Any, change: Any) -> AddressMap:
        """Return the map after `change` (an index, a transposition, a reshape) of the array of offsets; cached by
        key.
        """
        found = self._derived.get(key)
        if found is None:
            replicas = None if self.replicas is None else np.stack([change(r) for r in self.replicas])
            found = self._derived[key] = AddressMap(np.ascontiguousarray(change(self.offsets)), self.nbytes, replicas)
        return found

    def parts(self, key: Any, held: np.ndarray, write: bool) -> list[tuple[int, AddressMap]]:
        """Return what the threads of each CTA access, or nothing where every CTA accesses only its own memory; cached
        by key.

        Args:
            held: (CTAs, elements), whether the CTA's threads have the element. They access their own CTA's copy, or
                else the first one. Of several CTAs that hold an element for another one, the first stores it.
        """
        found = self._parts.get(key)
        if found is None:
            copies = (self.offsets if self.replicas is None else self.replicas).reshape(-1, self.offsets.size)
            own = [copies // SHARED_STRIDE == rank for rank in range(len(held))]
            remote = held & ~np.array([o.any(0) for o in own])
            if write:
                remote &= ~(held & ~remote).any(0)
                remote &= np.cumsum(remote, 0) == 1
            found = self._parts[key] = []
            if remote.any():
                first = self.offsets.reshape(-1)
                for rank, mine in enumerate(held):
                    places = np.concatenate([copies[own[rank] & mine], first[remote[rank]]])
                    if places.size:
                        found.append((rank, AddressMap(places, self.nbytes)))
        return found

    @property
    def elements(self) -> np.ndarray:
        """Offsets counted in elements. Every offset is a multiple of an element's size."""
        if self._elements is None:
            self._elements = self.offsets // self.nbytes
        return self._elements

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The covered bytes, as ascending intervals."""
        if self._runs is None:
            places = self.offsets if self.replicas is None else self.replicas
            starts = places.reshape(-1)
            if not (starts[1:] > starts[:-1]).all():  # tensor memory is mostly in order
                starts = np.unique(starts)
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
    """The origin of a buffer, for reports."""

    name: str
    op: Op
    base: int
    size: int
    stage_bytes: int | None = None  # of one buffer, where the allocation has several

    def describe(self, address: int) -> str:
        """Return `input.A[1]`: the buffer, and the stage of an address."""
        if self.stage_bytes and self.size > self.stage_bytes:
            return f"{self.name}[{(address - self.base) % SHARED_STRIDE // self.stage_bytes}]"
        return self.name


@dataclass(eq=False)
class View:
    """A memory descriptor at run time: `space` is shared or tensor; `base` a byte address with the CTA's rank from
    SHARED_STRIDE up."""

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
    """A TMA descriptor: a strided tensor in global memory and the box that a copy moves (CUDA driver API, "Tensor Map
    Object Management")."""

    address: int
    element: str  # MLIR's name
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    fill: float = 0.0
    name: str = "tensor"
    im2col: dict[str, Any] | None = None
    owner: Any = field(default=None, repr=False)
    swizzle: int = 0  # bytes; for copies by inline PTX, where the map defines the order of the box, not a layout
    spec: Any = field(default=None, repr=False)  # of a kernel's parameter: its tile
