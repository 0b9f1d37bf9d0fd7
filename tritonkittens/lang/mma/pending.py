"""The value of a product in flight."""

from __future__ import annotations

from typing import Any

from tritonkittens.lang.core.backend import Traced, base_type, base_value
from tritonkittens.lang.core.records import type_of_members


class pending_type(type_of_members):
    """The type of `pending`: the extents, the types of the accumulators and of the kept operands, and the groups."""

    def __init__(
        self, axes: tuple[tuple[int, ...], ...], parts: tuple[base_type, ...], kept: tuple[base_type, ...], groups: int
    ):
        self.axes, self.parts, self.kept, self.groups, self.members = axes, parts, kept, groups, (*parts, *kept)

    def __str__(self) -> str:
        return f"product in flight<{', '.join(map(str, self.parts))}>"

    def mangle(self) -> str:
        return f"W{self.groups}_" + self._mangled_members() + "W"

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[pending, int]:
        values, cursor = self._members_from(handles, cursor)
        n = len(self.parts)
        return pending(self.axes, values[:n], values[n:], self.groups), cursor


class pending(base_value):
    """A product in flight (`wait=False`): the tensor cores own the accumulator registers until `mma_wait`.

    Further products may accumulate into it. `kept` are the register operands that the tensor cores still read.
    `groups` is the number of wgmma groups in the product.
    """

    def __init__(
        self, axes: tuple[tuple[int, ...], ...], parts: tuple[Traced, ...], kept: tuple[Traced, ...], groups: int
    ):
        self.axes, self.parts, self.kept, self.groups = axes, parts, kept, groups

    @property
    def type(self) -> pending_type:
        return pending_type(self.axes, tuple(p.type for p in self.parts), tuple(k.type for k in self.kept), self.groups)

    @property
    def outside_registers(self) -> str:
        return "this product is in flight (wait=False, mma_zero, mma_begin); wait for it first, tk.mma_wait"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(a) for a in self.axes)

    def _flatten_ir(self, handles: list[Any]) -> None:
        for p in (*self.parts, *self.kept):
            p._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for p in self.parts:
            p._set_name(builder, name)
