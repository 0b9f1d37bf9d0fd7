"""Tensor memory (Blackwell): tiles, their allocation, and copies between them and registers."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from tritonkittens.lang.core.backend import (
    TensorMemoryLayout,
    Trace,
    Traced,
    allocate_tensor_memory,
    base_type,
    base_value,
    op,
)
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, axes_of, pieces_of, shape_of, type_of_members
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.types.tiles import split, tt


class tensor_tile_type(type_of_members):
    """The type of a `tensor_tile`: the tile type and the types of its pieces."""

    def __init__(self, spec: tt, pieces: tuple[base_type, ...]):
        self.spec, self.members = spec, pieces

    def __repr__(self) -> str:
        return repr(self.spec)

    def mangle(self) -> str:
        return f"T{self.spec.mangle()}_" + self._mangled_members() + "T"

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[tensor_tile, int]:
        pieces, cursor = self._members_from(handles, cursor)
        return tensor_tile(self.spec, pieces), cursor


class tensor_tile(base_value):
    """A tile in tensor memory, stored as power-of-two column pieces. `tensor_allocator` makes it."""

    def __init__(self, spec: tt, pieces: tuple[Traced, ...]):
        self.spec, self.pieces = spec, pieces

    @property
    def type(self) -> tensor_tile_type:
        return tensor_tile_type(self.spec, tuple(p.type for p in self.pieces))

    @property
    def dtype(self) -> tl.dtype:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.spec.shape

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.spec.rows,), split(self.spec.cols))

    @property
    def __asm_operand__(self) -> Traced:
        return self.pieces[0] if len(self.pieces) == 1 else self.pieces

    def fill(self, t: Trace, value: Traced) -> tensor_tile:
        """Set every element to `value`."""
        for p in self.pieces:
            t.call(p.store, t.full(tuple(p.shape), value, self.dtype, t.call(p.get_reg_layout)))
        return self

    def _flatten_ir(self, handles: list[Any]) -> None:
        for p in self.pieces:
            p._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for i, p in enumerate(self.pieces):
            p._set_name(builder, f"{name}.{i}")


@op
def tensor_allocator(t: Trace, spec: Traced) -> Traced:
    """Allocate a tile of tensor memory for the kernel's lifetime.

    `spec` is a `tt` type. Raises `TileError` for another type or chip, or with the itemised bill beyond 512 columns.
    Source: PTX ISA, tcgen05.alloc.
    """
    spec = unwrap(spec)
    if not isinstance(spec, tt):
        raise TileError(f"tensor_allocator({spec!r}): tensor memory holds tt types")
    t.require_explicit("tensor_allocator")
    t.require("tensor memory (tcgen05)", "tcgen05")
    bill().charge_tmem(repr(spec), spec.columns)
    shapes = [[spec.rows, c] for c in split(spec.cols)]
    pieces = tuple(t.call(allocate_tensor_memory, spec.dtype, s, TensorMemoryLayout(s, col_stride=1)) for s in shapes)
    return tensor_tile(spec, pieces)


def tensor_subtile(t: Trace, tile: tensor_tile, rows: int, cols: int, row: int, col: int) -> tensor_tile:
    """Return view number `col`, of `cols` columns, of a tensor-memory tile. Rows are lanes, which a view cannot
    divide.
    """
    if rows != tile.spec.rows or row != 0:
        raise TileError(
            f"subtile({rows}, {cols}) number ({row}, {col}) of {tile.spec!r}: a view of tensor memory has all "
            f"{tile.spec.rows} rows; divide its columns"
        )
    low, high, start, cuts = col * cols, (col + 1) * cols, 0, []
    for piece, width in zip(tile.pieces, split(tile.spec.cols), strict=True):
        first, last = max(low, start), min(high, start + width)
        if first < last:
            cuts.append((piece, first - start, last - first))
        start += width
    if tuple(n for _, _, n in cuts) != split(cols):
        raise TileError(
            f"subtile({rows}, {cols}) number ({row}, {col}) of {tile.spec!r} cuts its pieces of "
            f"{', '.join(map(str, split(tile.spec.cols)))} columns"
        )
    return tensor_tile(
        tt(tile.spec.dtype, rows, cols), tuple(t.call(piece.slice, first, n) for piece, first, n in cuts)
    )


def load_tensor_memory(t: Trace, src: tensor_tile) -> Traced:
    """Load registers from tensor memory (tcgen05.ld and its wait)."""
    return assemble(src.axes, [t.call(p.load) for p in src.pieces])


def store_tensor_memory(t: Trace, dst: tensor_tile, value: Traced) -> None:
    """Store registers to tensor memory (tcgen05.st and its wait)."""
    if axes_of(value) != dst.axes:
        raise TileError(f"store of a tile of shape {list(shape_of(value))} to {dst.spec!r}: shapes differ")
    for d, v in zip(dst.pieces, pieces_of(value), strict=True):
        v = v if v.dtype == dst.dtype else t.method(v, "to", dst.dtype)
        t.call(d.store, t.convert(v, t.call(d.get_reg_layout)))


@op
def load_max(t: Trace, src: Traced) -> Traced:
    """Load a tensor-memory tile and its row maxima by one instruction.

    `src` is a tile (rows × cols) whose columns are a power of two. Returns (register tile, column vector), both of
    its dtype. Raises `TileError` for another tile or chip. Source: PTX ISA, tcgen05.ld.red.
    """
    if not isinstance(src, tensor_tile) or len(src.pieces) != 1:
        raise TileError("load_max: needs a tensor-memory tile whose columns are a power of two")
    t.require("tcgen05.ld.red", "tcgen05_load_max")
    return tl.tuple(list(t.call(src.pieces[0].load_max)))
