"""Shared memory: tiles and vectors, views of them, and copies between them and registers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton.language as tl

from tritonkittens.lang.core.backend import Semantic, Trace, Traced, base_type, base_value, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import itemsize
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, axes_of, pieces_of, shape_of, type_of_members
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.scales import scale_pieces
from tritonkittens.lang.memory.tensor_memory import tensor_subtile, tensor_tile
from tritonkittens.lang.register.construction import memory_layout, piece_layout, vector_layout
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import rt, split, st, sv

TMA_ALIGNMENT = 128  # bytes; alignment of shared memory for a tensor copy. PTX ISA, cp.async.bulk.tensor
SWIZZLE_ROWS = 8  # rows of a swizzle atom
VECTOR = 16  # bytes of one access by a thread


class shared_type(type_of_members):
    """The type of a `shared` value: its attributes, with the types of the pieces."""

    def __init__(
        self,
        spec: st | sv,
        axes: tuple[tuple[int, ...], ...],
        stages: int | None,
        pieces: tuple[base_type, ...],
        whole: bool,
        loaders: int = 1,
        together: bool = False,
        alone: bool = False,
        pair: str | None = None,
    ):
        self.spec, self.axes, self.stages, self.members, self.whole = spec, axes, stages, pieces, whole
        self.loaders, self.together, self.alone, self.pair = loaders, together, alone, pair

    def __repr__(self) -> str:
        return f"shared {self.spec!r}" + (f" × {self.stages}" if self.stages is not None else "")

    def mangle(self) -> str:
        return (
            f"M{self.spec.mangle()}_{self.axes}_{self.stages}_{self.whole}_{self.loaders}_{self.together}_{self.alone}_"
            + f"{self.pair}_"
            + self._mangled_members()
            + "M"
        )

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[shared, int]:
        pieces, cursor = self._members_from(handles, cursor)
        return shared(
            self.spec, self.axes, self.stages, pieces, self.whole, self.loaders, self.together, self.alone, self.pair
        ), cursor


class shared(base_value):
    """A shared tile or vector, or a ring of `stages` of them, in an explicit kernel. `tk.allocate` makes it.

    `ring[stage]` is the tile in one stage (a constant or int32 index).

    Args:
        spec: the tile type (`st`, `sv`).
        axes: the extents of the pieces along each axis.
        stages: the stages of a ring; None for one tile.
        pieces: Gluon's shared-memory descriptors.
        whole: False for a view that cuts a swizzle atom, which the tensor cores cannot read.
        loaders: the CTAs of a cluster that load the tile together, a part each.
        together: the pieces are contiguous (`st(contiguous=True)`). A ring is then one buffer. The pieces of a tile
            give their addresses, with the extents of `st.unit`.
        alone: one thread issues the copies into the tile, and the compiler adds no barriers for them. Nothing reads
            or writes the tile before the copies complete.
        pair: of an operand of a CTA pair's products. "own": this CTA's rows of A. "rows" or "cols": this CTA's half of
            a tile that the pair shares, by its rank. Copies complete on the semaphore of the pair's even CTA. None:
            another tile.
    """

    def __init__(
        self,
        spec: st | sv,
        axes: tuple[tuple[int, ...], ...],
        stages: int | None,
        pieces: tuple[Traced, ...],
        whole: bool = True,
        loaders: int = 1,
        together: bool = False,
        alone: bool = False,
        pair: str | None = None,
    ):
        self.spec, self.axes, self.stages, self.pieces, self.whole = spec, axes, stages, pieces, whole
        self.loaders, self.together, self.alone, self.pair = loaders, together, alone, pair

    def __repr__(self) -> str:
        return repr(self.type)

    @property
    def type(self) -> shared_type:
        return shared_type(
            self.spec,
            self.axes,
            self.stages,
            tuple(p.type for p in self.pieces),
            self.whole,
            self.loaders,
            self.together,
            self.alone,
            self.pair,
        )

    @property
    def dtype(self) -> tl.dtype:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(a) for a in self.axes)

    @property
    def outside_registers(self) -> str:
        return f"{self.spec!r} lies in shared memory; load it first, tk.load"

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of one tile (not of the ring)."""
        total = itemsize(self.dtype)
        for extent in self.shape:
            total *= extent
        return total

    @property
    def __asm_operand__(self) -> Traced:
        return self.pieces[0] if len(self.pieces) == 1 else self.pieces

    def _flatten_ir(self, handles: list[Any]) -> None:
        for p in self.pieces:
            p._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for i, p in enumerate(self.pieces):
            p._set_name(builder, f"{name}.{i}" if len(self.pieces) > 1 else name)

    def map(
        self,
        fn: Callable[[Traced], Traced],
        axes: tuple[tuple[int, ...], ...] | None = None,
        stages: int | None = None,
        whole: bool | None = None,
    ) -> shared:
        """Return the tile with `fn` of each piece, and with other `axes` or `whole` where given. It is a ring only with
        `stages`."""
        return self._with(
            axes=axes or self.axes,
            stages=stages,
            pieces=tuple(fn(p) for p in self.pieces),
            whole=self.whole if whole is None else whole,
        )

    def _with(self, **changes: Any) -> shared:
        """Return a copy with some attributes changed."""
        kept = dict(
            spec=self.spec,
            axes=self.axes,
            stages=self.stages,
            pieces=self.pieces,
            whole=self.whole,
            loaders=self.loaders,
            together=self.together,
            alone=self.alone,
            pair=self.pair,
        )
        return shared(**(kept | changes))

    def loaded_by(self, blocks: int) -> shared:
        """Return the same memory, loaded together by `blocks` CTAs of a cluster, a part each. 1: every CTA loads
        its own tile.
        """
        return self._with(loaders=blocks)

    def of_pair(self, part: str) -> shared:
        """Return the same memory as an operand of a CTA pair's products; `part` as in `pair`."""
        return self._with(pair=part)

    def loaded_alone(self) -> shared:
        """Return the same memory with `alone` set: one thread issues its copies."""
        return self._with(alone=True)

    def __getitem__(self, slot: Traced, _semantic: Semantic = None, _generator: Any = None) -> shared:
        t = Trace(_semantic, _generator)
        if self.stages is None:
            raise TileError(f"{self.spec!r}: this is one tile, not a ring; subtile() makes views")
        index = unwrap(slot)
        if isinstance(index, int) and not 0 <= index < self.stages:
            raise TileError(f"slot {index} of a ring of {self.stages} stages")
        if self.together:
            return self._with(stages=None, pieces=_pieces_at(t, self.spec, self.pieces[0], slot))
        if isinstance(self.spec, st):
            return self.map(lambda p: t.call(p.index, slot))
        steps = [int(unwrap(p.shape[0])) // self.stages for p in self.pieces]
        taken = [
            t.call(p.index, slot if step == 1 else t.method(t.scalar(slot), "__mul__", step))
            for p, step in zip(self.pieces, steps, strict=True)
        ]
        return self._with(stages=None, pieces=tuple(taken))

    def transposed_view(self, t: Trace) -> shared:
        """Return the same memory with rows and columns exchanged."""
        down, across = len(self.axes[0]), len(self.axes[1])
        order = [self.pieces[i * across + j] for j in range(across) for i in range(down)]
        axes, exchanged = (self.axes[1], self.axes[0]), {"rows": "cols", "cols": "rows"}
        pair = exchanged.get(self.pair or "", self.pair)
        view = shared(self.spec, axes, self.stages, tuple(order), self.whole, together=self.together, pair=pair)
        return view.map(lambda p: t.call(p.permute, (1, 0)), axes=view.axes)


def piece_shared_layout(dtype: tl.dtype, swizzle: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of a piece for TMA and wgmma: `swizzle` bytes, innermost dimension contiguous."""
    return gl.NVMMASharedLayout(swizzle, dtype.primitive_bitwidth, rank=rank)


def _pieces_at(t: Trace, spec: st, buffer: Traced, slot: Traced) -> tuple[Traced, ...]:
    """Return the first unit of each piece in stage `slot` of a buffer of (stages · units) × the rows and columns of a
    unit.
    """
    first = t.method(t.scalar(slot), "__mul__", _units(spec))
    rows, cols = spec.unit
    return tuple(
        t.call(buffer.index, t.method(first, "__add__", row // rows + col // cols)) for row, col, _, _ in spec.pieces()
    )


def _units(spec: st) -> int:
    return spec.rows * spec.cols // math.prod(spec.unit)


def allocate_pieces(t: Trace, spec: st | sv | scale_tile, stages: int | None, name: str) -> shared:
    """Allocate one tile or a ring of them, and charge the kernel's shared-memory budget."""
    t.require_explicit(f"allocate({spec!r})")
    bill().charge_shared(name, spec.nbytes * (1 if stages is None else stages))
    if isinstance(spec, scale_tile):
        return shared(spec, tuple((n,) for n in spec.shape), stages, scale_pieces(t, spec, stages, name))
    lead = [] if stages is None else [stages]
    if isinstance(spec, sv):
        sizes = split(spec.length)
        pieces: list[Traced] = []
        for n in sizes:  # a stage of a ring is padded with vectors, so that the next stage is aligned for TMA
            rows = [] if stages is None else [stages * max(1, TMA_ALIGNMENT // (n * itemsize(spec.dtype)))]
            pieces.append(
                t.call(gl.allocate_shared_memory, spec.dtype, [*rows, n], piece_shared_layout(spec.dtype, 0, 1))
            )
        return shared(spec, (sizes,), stages, tuple(pieces))
    if spec.contiguous and t.chip.wgmma:
        home = piece_shared_layout(spec.dtype, spec.piece_swizzle(spec.unit[1]), 2)
        buffer = t.call(gl.allocate_shared_memory, spec.dtype, [(stages or 1) * _units(spec), *spec.unit], home)
        pieces_of_one = (buffer,) if stages is not None else _pieces_at(t, spec, buffer, 0)
        return shared(spec, (split(spec.rows), split(spec.cols)), stages, pieces_of_one, together=True)
    tiles = tuple(
        t.call(
            gl.allocate_shared_memory,
            spec.dtype,
            [*lead, r, c],
            piece_shared_layout(spec.dtype, spec.piece_swizzle(c), 2),
        )
        for _, _, r, c in spec.pieces()
    )
    return shared(spec, (split(spec.rows), split(spec.cols)), stages, tiles)


@op
def allocate(t: Trace, spec: Traced, stages: Traced = None) -> Traced:
    """Allocate shared memory for a tile or vector, or for a ring of them. Call it before the warp roles start.

    Args:
        spec: a tile or vector type (`st`, `sv`, `scale_tile`).
        stages: the stages of a ring, a compile-time integer; None for one tile.

    Returns:
        A shared tile or vector. `ring[stage]` is one stage of a ring.

    Raises:
        TileError: for another type, or with the itemised bill where the CTA's shared memory is exceeded.

    Example::

        a = tk.allocate(tk.st(tk.bf16, 128, 64), 4)
    """
    spec, stages = unwrap(spec), unwrap(stages)
    if not isinstance(spec, (st, sv, scale_tile)):
        raise TileError(f"allocate({spec!r}): shared memory holds st, sv and scale_tile types")
    if stages is not None and (not isinstance(stages, int) or stages < 1):
        raise TileError(f"allocate({spec!r}, stages={stages!r}): a ring has at least one stage")
    return allocate_pieces(t, spec, stages, f"{spec!r}" + (f" × {stages}" if stages is not None else ""))


@op
def subtile(t: Trace, tile: Traced, rows: Traced, cols: Traced, row: Traced = 0, col: Traced = 0) -> Traced:
    """Return a view of a shared or tensor-memory tile.

    Args:
        tile: a shared tile (`st`) or a tensor-memory tile (`tt`), not a ring.
        rows: the rows of the view: a power of two that divides the tile's or is one of its pieces, or all. A tile of
            192 rows has three views of 64, and one of 128. A view of tensor memory has all rows.
        cols: the columns of the view, in the same way.
        row: the view's number along the rows, counted in views. It may be an int32 scalar if the view has all columns
            (one swizzle line) and cuts no swizzle atom. All other arguments are compile-time constants.
        col: the view's number along the columns.

    Raises:
        TileError: for a view outside the tile, a ring or a contiguous tile.

    A shared view whose columns cut a swizzle atom can be loaded and stored, but the tensor cores refuse it. TMA moves
    other views, with the descriptor of a tile of the view's extents (and the same swizzle).

    Example::

        half = tk.subtile(tile, 64, 64, row=1)
    """
    rows, cols, row, col = (unwrap(x) for x in (rows, cols, row, col))
    if isinstance(row, tl.tensor) and isinstance(tile, shared):
        return _rows_at(t, tile, rows, cols, row, col)
    _check_view(tile, rows, cols, row, col)
    if isinstance(tile, tensor_tile):
        return tensor_subtile(t, tile, rows, cols, row, col)
    return _view(t, tile, rows, cols, row, col)


def _check_view(tile: Traced, rows: Traced, cols: Traced, row: Traced, col: Traced) -> None:
    """Check that the tile has such a view, at constant indices."""
    if not all(isinstance(x, int) for x in (rows, cols, row, col)):
        raise TileError("subtile: extents and indices must be compile-time constants")
    if not hasattr(tile, "spec") or len(tile.shape) != 2:
        raise TileError(
            f"subtile of {getattr(tile, 'spec', tile)!r}: only shared tiles (st) and tensor-memory tiles (tt) have "
            "views"
        )
    if getattr(tile, "stages", None) is not None:
        raise TileError(f"subtile of a ring of {tile.spec!r}: take a slot first, ring[slot]")
    axes = ((tile.shape[0], rows, row), (tile.shape[1], cols, col))
    if any(n <= 0 or not 0 <= i < extent // n or extent % n and n not in split(extent) for extent, n, i in axes):
        raise TileError(
            f"subtile({rows}, {cols}) number ({row}, {col}) of {tile.spec!r} lies outside it or does not divide it"
        )
    if isinstance(tile, tensor_tile):  # its columns may be cut anywhere
        return
    if tile.together:
        raise TileError(f"subtile of {tile.spec!r}: a contiguous tile is read as a whole; it has no views")
    for what, n, extent in (("rows", rows, tile.shape[0]), ("columns", cols, tile.shape[1])):
        if n != extent and len(split(n)) > 1:
            raise TileError(
                f"subtile({rows}, {cols}) number ({row}, {col}) of {tile.spec!r}: {n} {what} are neither a power of "
                f"two nor all {extent}"
            )


def _view(t: Trace, tile: shared, rows: int, cols: int, row: int, col: int) -> shared:
    """`subtile` of a shared tile at constant indices."""
    down, across = _cuts(tile.axes[0], rows, row), _cuts(tile.axes[1], cols, col)
    cuts = [
        (tile.pieces[i * len(tile.axes[1]) + j], *of_rows, *of_cols) for i, *of_rows in down for j, *of_cols in across
    ]
    whole = tile.whole and all(_keeps_atoms(piece, r, c) for piece, _, r, _, c in cuts)
    views = [_part(t, _part(t, piece, row0, r, 0), col0, c, 1) for piece, row0, r, col0, c in cuts]
    axes = (tuple(r for *_, r in down), tuple(c for *_, c in across))
    return shared(tile.spec, axes, None, tuple(views), whole, alone=tile.alone, pair=tile.pair)


def _part(t: Trace, piece: Traced, begin: int, extent: int, axis: int) -> Traced:
    """Return the part of a piece along an axis, or the piece itself where the part is all of it."""
    return piece if extent == piece.shape[axis] else t.call(piece.slice, begin, extent, axis)


def _cuts(pieces: tuple[int, ...], n: int, number: int) -> list[tuple[int, int, int]]:
    """Return (piece, first element in it, elements) of view `number` of `n` elements of an axis.

    A view is the whole axis, or a power of two inside one piece: pieces shrink along the axis and `n` divides their
    sum.
    """
    if n == sum(pieces):
        return [(i, 0, extent) for i, extent in enumerate(pieces)]
    start = number * n
    for i, extent in enumerate(pieces):
        if start < extent:
            return [(i, start, n)]
        start -= extent
    raise AssertionError(f"view {number} of {n} elements lies outside {pieces}")


def _is_one_piece(tile: shared) -> bool:
    """Whether a tile owns all memory between its first and last byte: neither several pieces nor a view at constant
    indices.
    """
    one = len(tile.axes) == 2 and len(tile.pieces) == 1 and tile.stages is None and not tile.together
    return one and list(tile.pieces[0].type.alloc_shape)[-2:] == list(tile.pieces[0].type.shape)


def _rows_at(t: Trace, tile: shared, rows: Traced, cols: Traced, row: Traced, col: Traced) -> shared:
    """`subtile` at an int32 scalar `row`."""
    piece = tile.pieces[0]
    fits = (
        _is_one_piece(tile)
        and isinstance(rows, int)
        and rows > 0
        and tile.rows % rows == 0
        and cols == tile.cols
        and col == 0
    )
    # the swizzle lines of a wider row are not adjacent
    line = fits and not piece.layout.transposed and cols * itemsize(tile.dtype) == piece.layout.swizzle_byte_width
    if not line or not _keeps_atoms(piece, rows, cols):
        raise TileError(
            f"subtile({rows}, {cols}) of {tile.spec!r} at a row of the run time: its rows must divide the tile's and "
            "be whole swizzle atoms, and it has all columns, one swizzle line, of a tile whose extents are powers of "
            "two and which is no view"
        )
    views = t.call(piece.reinterpret, tile.dtype, [tile.rows // rows, rows, cols], piece.layout)
    return shared(tile.spec, ((rows,), (cols,)), None, (t.call(views.index, row),), tile.whole, alone=tile.alone)


def _keeps_atoms(piece: Traced, rows: int, cols: int) -> bool:
    """Whether a view of these extents cuts no swizzle atom of a piece."""
    # elements along and across the contiguous axis
    line, across = (rows, cols) if piece.layout.transposed else (cols, rows)
    return line * itemsize(piece.dtype) % piece.layout.swizzle_byte_width == 0 and across % SWIZZLE_ROWS == 0


@op
def subvector(t: Trace, vector: Traced, length: Traced, index: Traced = 0) -> Traced:
    """Return view number `index`, of `length` elements each, of the shared vector `vector`. Both are compile-time
    constants.

    A view must lie in one power-of-two piece of the vector. Raises `TileError` for a view outside the vector or
    across pieces.
    """
    length, index = unwrap(length), unwrap(index)
    if not isinstance(vector, shared) or len(vector.axes) != 1 or vector.stages is not None:
        raise TileError(f"subvector of {getattr(vector, 'spec', vector)!r}: takes a shared vector")
    total = vector.shape[0]
    if (
        not isinstance(length, int)
        or not isinstance(index, int)
        or length <= 0
        or total % length
        or not 0 <= index < total // length
    ):
        raise TileError(
            f"subvector({length!r}) number {index!r} of {vector.spec!r} lies outside it or does not divide it"
        )
    start = index * length
    for piece, extent in zip(vector.pieces, vector.axes[0], strict=True):
        if 0 <= start <= extent - length:
            return shared(vector.spec, ((length,),), None, (t.call(piece.slice, start, length, 0),), vector.whole)
        start -= extent
    raise TileError(
        f"subvector({length}) number {index} of {vector.spec!r} lies in several of its pieces, {vector.axes[0]}"
    )


def load_shared(t: Trace, src: shared, layout: str, like: Traced, fenced: bool = False) -> Traced:
    """Load registers from shared memory, each piece in the requested layout.

    `fenced`: the caller's fence orders the reads before later copies into that memory.
    """
    bill().reads_shared += not fenced
    if src.stages is not None:
        raise TileError(f"load of a ring of {src.spec!r}: take a slot first, ring[slot]")
    if isinstance(src.spec, scale_tile):
        raise TileError(f"load of {src.spec!r}: only products read scales")
    if src.together:
        raise TileError(f"load of {src.spec!r}: a contiguous tile is filled by TMA and read by products only")
    if like is not None and axes_of(like) != src.axes:
        raise TileError(f"load of {src.spec!r} like a tile of shape {list(shape_of(like))}: shapes differ")
    if like is not None:
        layouts = [p.type.layout for p in pieces_of(like)]
    elif len(src.axes) == 1:
        layouts = [vector_layout(t) for _ in src.pieces]
    else:
        layouts = [piece_layout(t, layout, r, c, itemsize(src.dtype)) for r in src.axes[0] for c in src.axes[1]]
    return assemble(src.axes, [t.call(p.load, layout) for p, layout in zip(src.pieces, layouts, strict=True)])


def store_shared(t: Trace, dst: shared, value: Traced) -> None:
    """Store a register tile to shared memory, converted to the destination's dtype."""
    if dst.stages is not None:
        raise TileError(f"store to a ring of {dst.spec!r}: take a slot first, ring[slot]")
    if dst.together:
        raise TileError(f"store to {dst.spec!r}: a contiguous tile is filled by TMA and read by products only")
    if axes_of(value) != dst.axes:
        raise TileError(f"store of a tile of shape {list(shape_of(value))} to {dst.spec!r}: shapes differ")
    for d, v in zip(dst.pieces, pieces_of(value), strict=True):
        t.call(d.store, v if v.dtype == dst.dtype else t.method(v, "to", dst.dtype))


def _elements(t: Trace, tile: Traced, part: Traced, parts: Traced, what: str) -> tuple[Traced, Traced]:
    """Return (memory of one of the equal parts of a shared tile, register layout of its elements). A thread holds 16
    contiguous bytes at a time.
    """
    parts = unwrap(parts)
    if not isinstance(tile, shared) or not _is_one_piece(tile):
        raise TileError(
            f"{what} of {getattr(tile, 'spec', tile)!r}: takes a shared tile whose extents are powers of two, and no "
            "view at constant indices"
        )
    unit, threads = VECTOR // itemsize(tile.dtype), 32 * t.num_warps
    if not isinstance(parts, int) or parts < 1 or tile.rows * tile.cols % (parts * threads * unit):
        raise TileError(
            f"{what}(parts={parts!r}) of {tile.spec!r} by {threads} threads: each takes {VECTOR} bytes or a multiple "
            "of each part"
        )
    lines = tile.rows * tile.cols // parts // unit
    flat = t.call(
        tile.pieces[0].reinterpret, tile.dtype, [parts, lines, unit], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    return t.call(flat.index, part), gl.BlockedLayout([1, unit], [32, 1], [t.num_warps, 1], [1, 0])


@op
def load_elements(t: Trace, tile: Traced, part: Traced = 0, parts: Traced = 1) -> Traced:
    """Load a part of a shared tile as registers in storage order, for element-wise work that ignores positions.

    Threads read 16 bytes at a time, without bank conflicts for any swizzle. The positions of the elements are
    unspecified. `store_elements` with the same numbers stores each element back to its own position.

    Args:
        tile: a shared tile whose extents are powers of two.
        part: the number of the part, a constant or an int32 scalar.
        parts: the number of equal parts, a constant. All parts together are the tile.

    Returns:
        A register tile (elements / 8 × 8 for 2-byte dtypes) of the tile's dtype.

    Raises:
        TileError: for a view at constant indices, or parts smaller than 16 bytes a thread.
    """
    memory, layout = _elements(t, tile, part, parts, "load_elements")
    bill().reads_shared += 1
    return t.call(memory.load, layout)


@op
def store_elements(t: Trace, tile: Traced, values: Traced, part: Traced = 0, parts: Traced = 1) -> None:
    """Store `values`, made element by element from `load_elements(tile, part, parts)`, back to their positions.

    They are converted to the tile's dtype. Errors as in `load_elements`.
    """
    memory, _ = _elements(t, tile, part, parts, "store_elements")
    t.call(memory.store, values if values.dtype == tile.dtype else t.method(values, "to", tile.dtype))


@op
def bank_conflicts(t: Trace, tile: Traced, register: Traced = None) -> Traced:
    """Return the extra shared-memory wavefronts of an access between `tile` and registers, a compile-time constant (0
    is ideal).

    `register` is a register tile of the same shape, or None for the layout of coalesced global access.
    """
    worst = 0
    for i, piece in enumerate(tile.pieces):
        if register is not None:
            layout = pieces_of(register)[i].type.layout
        else:
            extents = [int(unwrap(s)) for s in piece.shape]
            layout = (
                memory_layout(t, extents[0], extents[1], itemsize(tile.dtype))
                if len(extents) == 2
                else vector_layout(t)
            )
        worst = max(
            worst,
            unwrap(t.call(gl.bank_conflicts, gl.distributed_type(tile.dtype, list(piece.shape), layout), piece.type)),
        )
    return tl.constexpr(worst)


__all__ = [
    "allocate",
    "allocate_pieces",
    "bank_conflicts",
    "load_shared",
    "piece_shared_layout",
    "rt",
    "shared",
    "shared_type",
    "store_shared",
    "subtile",
]
