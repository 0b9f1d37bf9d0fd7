"""Tensor memory (Blackwell): tiles, their allocation, and copies between them and registers."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from tritonkittens.arch import WARP
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.inline_ptx.tcgen05 import transfer_asm
from tritonkittens.lang.core.backend import (
    Semantic,
    TensorMemoryLayout,
    Trace,
    Traced,
    allocate_tensor_memory,
    base_type,
    base_value,
    gl,
    op,
)
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import itemsize
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, axes_of, pieces_of, shape_of, type_of_members
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.register.construction import row_layout
from tritonkittens.lang.types.tiles import split, tt

RESCALED = 32  # columns that `rescale_row` holds in registers at a time


class tensor_tile_type(type_of_members):
    """The type of a `tensor_tile`: its attributes, with the types of its pieces and of `counts`."""

    def __init__(
        self,
        spec: tt,
        pieces: tuple[base_type, ...],
        stages: int | None,
        counts: base_type | None,
        complete: bool,
        pair: bool,
    ):
        self.spec, self.stages, self.counted = spec, stages, counts is not None
        self.complete, self.pair = complete, pair
        self.members = pieces if counts is None else (*pieces, counts)

    def __repr__(self) -> str:
        return repr(self.spec)

    def mangle(self) -> str:
        of = f"{self.spec.mangle()}_{self.stages}_{self.counted}_{self.complete}_{self.pair}_"
        return f"T{of}" + self._mangled_members() + "T"

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[tensor_tile, int]:
        found, cursor = self._members_from(handles, cursor)
        pieces, counts = (found[:-1], found[-1]) if self.counted else (found, None)
        return tensor_tile(self.spec, pieces, self.stages, counts, self.complete, self.pair), cursor


class tensor_tile(base_value):
    """A tile in tensor memory, or a ring of `stages` tiles, stored as power-of-two column pieces. `tensor_allocator`
    makes it.

    Args:
        spec: the tile type (`tt`).
        pieces: Gluon's descriptors of tensor memory.
        stages: the stages of a ring; None for one tile.
        counts: of an accumulator whose products a template completes (see `is_completed_by_template`), whether its
            values count. The next product adds to them, or overwrites what does not count.
        complete: the template has waited for its products.
        pair: the tile is the accumulator of a CTA pair's products; this CTA has its half of the rows.
    """

    def __init__(
        self,
        spec: tt,
        pieces: tuple[Traced, ...],
        stages: int | None = None,
        counts: Traced | None = None,
        complete: bool = False,
        pair: bool = False,
    ):
        self.spec, self.pieces, self.stages, self.counts = spec, pieces, stages, counts
        self.complete, self.pair = complete, pair

    def __repr__(self) -> str:
        return repr(self.type)

    @property
    def type(self) -> tensor_tile_type:
        counts = None if self.counts is None else self.counts.type
        pieces = tuple(p.type for p in self.pieces)
        return tensor_tile_type(self.spec, pieces, self.stages, counts, self.complete, self.pair)

    @property
    def outside_registers(self) -> str:
        return f"{self.spec!r} lies in tensor memory; load it first, tk.load"

    def _with(self, **changes: Any) -> tensor_tile:
        """Return a copy with some attributes changed."""
        kept: dict[str, Any] = dict(
            spec=self.spec,
            pieces=self.pieces,
            stages=self.stages,
            counts=self.counts,
            complete=self.complete,
            pair=self.pair,
        )
        return tensor_tile(**(kept | changes))

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
    def is_completed_by_template(self) -> bool:
        """Whether a template completes the products into this tile: `mma_*` neither waits for them nor signals."""
        return self.counts is not None

    @property
    def __asm_operand__(self) -> Traced:
        return self.pieces[0] if len(self.pieces) == 1 else self.pieces

    def counting(self, counts: Traced) -> tensor_tile:
        """Return the same memory with another `counts`."""
        return self._with(counts=counts)

    def completed(self) -> tensor_tile:
        """Return the same memory for threads to read: the template has waited for its products."""
        return self._with(counts=None, complete=True)

    def view(self, cols: int, pieces: tuple[Traced, ...]) -> tensor_tile:
        """Return a view of some columns."""
        return self._with(spec=tt(self.dtype, self.spec.rows, cols), pieces=pieces)

    def fill(self, t: Trace, value: Traced) -> tensor_tile:
        """Set every element to `value`. Zeros of an accumulator that a template completes take no store: its values no
        longer count."""
        if self.is_completed_by_template and unwrap(value) == 0:
            return self.counting(t.scalar(False))
        _check_access(t, self, "fill")
        for p in self.pieces:
            t.call(p.store, t.full(tuple(p.shape), value, self.dtype, t.call(p.get_reg_layout)))
        return self

    def rescale_rows(self, t: Trace, factor: Traced) -> tensor_tile:
        """Multiply each row by its factor in place; see `rescale_row`."""
        _check_access(t, self, "rescale_row")
        if self.dtype != tl.float32 or self.spec.rows != WARP * t.num_warps or axes_of(factor) != ((self.spec.rows,),):
            raise TileError(
                f"rescale_row of {self.spec!r} by {t.num_warps} warps and a vector of shape {list(shape_of(factor))}: "
                "needs an fp32 tile of a row for each thread, 128 rows for four warps, and a factor for each row"
            )
        (factors,) = pieces_of(factor)
        for p in self.pieces:
            cols = int(unwrap(p.shape[1]))
            one_row = t.full((self.spec.rows, cols), 0, tl.float32, row_layout(t, cols))
            t.call(asm, _rescale_asm(cols), "r,f", [p, t.vector(factors, 0, one_row)])
        return self

    def split_cols(self, t: Trace, cols: int | None) -> tuple[tensor_tile, ...]:
        """Return views of `cols` columns each, or one for each piece."""
        if cols is None:
            return tuple(self.view(c, (p,)) for c, p in zip(split(self.spec.cols), self.pieces, strict=True))
        return tuple(tensor_subtile(t, self, self.spec.rows, cols, 0, i) for i in range(self.spec.cols // cols))

    def __getitem__(self, slot: Traced, _semantic: Semantic = None, _generator: Any = None) -> tensor_tile:
        t = Trace(_semantic, _generator)
        if self.stages is None:
            raise TileError(f"{self.spec!r}: this is one tile, not a ring; subtile() makes views")
        index = unwrap(slot)
        if isinstance(index, int) and not 0 <= index < self.stages:
            raise TileError(f"slot {index} of a ring of {self.stages} stages")
        return self._with(pieces=tuple(t.call(p.index, slot) for p in self.pieces), stages=None)

    def _flatten_ir(self, handles: list[Any]) -> None:
        for p in (*self.pieces, *(() if self.counts is None else (self.counts,))):
            p._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for i, p in enumerate(self.pieces):
            p._set_name(builder, f"{name}.{i}")


def _check_access(t: Trace, tile: tensor_tile, what: str) -> None:
    """Raise `TileError` for threads that cannot access a tile of tensor memory, and for a ring."""
    if tile.stages is not None:
        raise TileError(f"{what} of a ring of {tile.spec!r}: take a slot first, ring[slot]")
    if tile.is_completed_by_template:
        raise TileError(
            f"{what} of {tile.spec!r}: on chips with tensor memory one warp runs the hooks that multiply into the "
            "layout's `accumulators`, and products are in flight; only `finish` reads them. A sum that `compute` reads "
            "is a register tile: begin it with tk.zero(tk.rt(…)), and declare no accumulator"
        )
    if t.num_warps % 4:
        raise TileError(
            f"{what} of {tile.spec!r} by {t.num_warps} warp(s): a warp reaches a quarter of the lanes only; tensor "
            "memory is accessed by whole warpgroups"
        )


def _check_vector(t: Trace, tile: tensor_tile, what: str) -> None:
    """Raise `TileError` for a role that does not have a thread for each row of a tile of one column."""
    if tile.spec.rows != WARP * t.num_warps:
        raise TileError(
            f"{what} of {tile.spec!r} by {t.num_warps} warps: a vector in tensor memory needs a thread for each row, "
            "128 rows for four warps"
        )


@op
def tensor_allocator(t: Trace, spec: Traced, stages: Traced = None, pair: Traced = False) -> Traced:
    """Allocate a tile of tensor memory, or a ring of them, for the kernel's lifetime. The kernel calls it before its
    roles start, and passes the tile to them.

    Args:
        spec: a `tt` type.
        stages: the stages of a ring, a compile-time integer; None for one tile.
        pair: the tile is an accumulator of a CTA pair, 128 rows in each CTA. Launch with an even `cluster_size`. Either
            all tensor memory of a kernel is of pairs, or none.

    Returns:
        A tile. `ring[stage]` is one stage of a ring; the stage may be an int32 scalar.

    Raises:
        TileError: for another type or chip, or for more than 512 columns; the error lists all allocations.

    Source: PTX ISA, tcgen05.alloc.
    """
    spec, stages = unwrap(spec), unwrap(stages)
    if not isinstance(spec, tt):
        raise TileError(f"tensor_allocator({spec!r}): tensor memory holds tt types")
    if stages is not None and (not isinstance(stages, int) or stages < 1):
        raise TileError(f"tensor_allocator({spec!r}, stages={stages!r}): a ring has at least one stage")
    if unwrap(pair) and spec.rows != 128:
        raise TileError(f"tensor_allocator({spec!r}, pair=True): each CTA of a pair has 128 rows")
    t.require_explicit("tensor_allocator")
    t.require("tensor memory (tcgen05)", "tcgen05")
    number = 1 if stages is None else stages
    bill().charge_tmem(repr(spec) + (f" × {stages} stages" if stages is not None else ""), spec.columns * number)
    lead = [] if stages is None else [stages]
    shapes = [[spec.rows, c] for c in split(spec.cols)]
    pieces = tuple(
        t.call(allocate_tensor_memory, spec.dtype, lead + s, TensorMemoryLayout(s, col_stride=1)) for s in shapes
    )
    if bill().pairs not in (None, bool(unwrap(pair))):
        raise TileError(
            f"tensor_allocator({spec!r}, pair={bool(unwrap(pair))}): all tensor memory of a kernel is of CTA pairs, or "
            "none of it"
        )
    bill().pairs = bool(unwrap(pair))
    return tensor_tile(spec, pieces, stages, pair=bool(unwrap(pair)))


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
    return tile.view(cols, tuple(t.call(piece.slice, first, n) for piece, first, n in cuts))


@op
def reinterpret(t: Trace, tile: Traced, spec: Traced, column: Traced = 0) -> Traced:
    """Return a view of columns of a tensor-memory tile as a tile of another type.

    Args:
        tile: a tensor-memory tile, not a ring. Its values there are overwritten by stores to the view.
        spec: the `tt` type of the view, of as many rows. Its columns are a power of two.
        column: the view's first column of the tile, counted in columns of 32 bits, a compile-time constant.

    Returns:
        A tile.

    Raises:
        TileError: for a view that does not lie within the tile, or cuts its pieces.

    Example::

        p = tk.reinterpret(s, tk.tt(tk.bf16, 128, 128))  # over the first 64 of 128 fp32 columns
    """
    spec, column = unwrap(spec), unwrap(column)
    if not isinstance(tile, tensor_tile) or not isinstance(spec, tt):
        raise TileError(
            f"reinterpret({getattr(tile, 'spec', tile)!r}, {spec!r}): takes a tensor-memory tile and a type of one (tt)"
        )
    name = f"reinterpret({tile.spec!r}, {spec!r}, column={column!r})"
    if tile.stages is not None:
        raise TileError(f"{name}: this is a ring; take a slot first, ring[slot]")
    if tile.is_completed_by_template:
        raise TileError(f"{name}: products of a template into this accumulator are in flight")
    if spec.rows != tile.spec.rows:
        raise TileError(f"{name}: a view of tensor memory has all {tile.spec.rows} rows")
    if len(split(spec.cols)) > 1:
        raise TileError(f"{name}: the columns of the view must be a power of two")
    wide, width, start = itemsize(tile.dtype), spec.cols * itemsize(spec.dtype) // 4, 0
    if not isinstance(column, int) or column < 0:
        raise TileError(f"{name}: the column must be a compile-time constant from 0 on")
    if (column + width) * 4 > tile.spec.cols * wide:
        raise TileError(f"{name}: the view needs {width} columns of 32 bits; the tile has {tile.spec.cols * wide // 4}")
    for piece, cols in zip(tile.pieces, split(tile.spec.cols), strict=True):
        if start <= column and (column + width - start) * 4 <= cols * wide:
            part = t.call(piece.slice, (column - start) * 4 // wide, width * 4 // wide)
            layout = TensorMemoryLayout([spec.rows, spec.cols], col_stride=1)
            return tensor_tile(spec, (t.call(part.reinterpret, spec.dtype, [spec.rows, spec.cols], layout),))
        start += cols * wide // 4
    raise TileError(f"{name}: the view cuts the tile's pieces of {', '.join(map(str, split(tile.spec.cols)))} columns")


def load_tensor_memory(t: Trace, src: tensor_tile) -> Traced:
    """Load registers from tensor memory (tcgen05.ld and its wait), in the layout "row" where a thread has a row."""
    _check_access(t, src, "load")
    rows_of_threads = src.spec.rows == WARP * t.num_warps
    if src.spec.cols == 1:
        _check_vector(t, src, "load")
        return t.call("sum", t.call(src.pieces[0].load, row_layout(t, 1)), 1)
    return assemble(
        src.axes,
        [t.call(p.load, row_layout(t, int(unwrap(p.shape[1]))) if rows_of_threads else None) for p in src.pieces],
    )


def store_tensor_memory(t: Trace, dst: tensor_tile, value: Traced) -> None:
    """Store registers to tensor memory (tcgen05.st and its wait)."""
    _check_access(t, dst, "store")
    if dst.spec.cols == 1 and axes_of(value) == ((dst.spec.rows,),):
        _check_vector(t, dst, "store")
        one = t.convert(pieces_of(value)[0], gl.SliceLayout(1, row_layout(t, 1)))
        value = t.call("expand_dims", one, 1)
    if axes_of(value) != dst.axes:
        raise TileError(f"store of a tile of shape {list(shape_of(value))} to {dst.spec!r}: shapes differ")
    for d, v in zip(dst.pieces, pieces_of(value), strict=True):
        v = v if v.dtype == dst.dtype else t.method(v, "to", dst.dtype)
        t.call(d.store, t.convert(v, t.call(d.get_reg_layout)))


def _rescale_asm(cols: int) -> str:
    """Return assembly that multiplies the rows of a tile at address $0, of `cols` columns, by a thread's factor $1, in
    warps in which a factor is not 1."""
    width = min(cols, RESCALED)
    words = [f"r{i}" for i in range(width)]
    lines = [
        f".reg .pred p; .reg .b32 a, {', '.join(words)}; .reg .b64 f, x;",
        "setp.neu.f32 p, $1, 0f3F800000; vote.sync.any.pred p, p, 0xffffffff; @!p bra SAME;",
        "mov.b64 f, {$1, $1};",
    ]
    for first in range(0, cols, width):
        lines.append(f"add.u32 a, $0, {first};")
        lines.append(transfer_asm("ld", "32x32b", words, "a", False, 0) + " tcgen05.wait::ld.sync.aligned;")
        for a, b in zip(words[::2], words[1::2], strict=True):
            lines.append(f"mov.b64 x, {{{a}, {b}}}; mul.rn.f32x2 x, x, f; mov.b64 {{{a}, {b}}}, x;")
        lines.append(transfer_asm("st", "32x32b", words, "a", False, 0))
    return "{ " + " ".join(lines) + " tcgen05.wait::st.sync.aligned; SAME: }"


def _load_reduced(t: Trace, src: Traced, name: str) -> Traced:
    if not isinstance(src, tensor_tile) or len(src.pieces) != 1:
        raise TileError(f"{name}: needs a tensor-memory tile whose columns are a power of two")
    _check_access(t, src, name)
    t.require(f"{name} (tcgen05.ld.red)", "tcgen05_load_max")
    return tl.tuple(list(t.call(getattr(src.pieces[0], name))))


@op
def load_max(t: Trace, src: Traced) -> Traced:
    """Load a tensor-memory tile and its row maxima by one instruction, on sm_103a. NaN does not count.

    `src` is an fp32 tile (rows × cols) whose columns are a power of two. Returns (register tile, column vector), both
    of its dtype. Raises `TileError` for another tile, `ArchitectureError` for another chip. Source: PTX ISA,
    tcgen05.ld.red.
    """
    return _load_reduced(t, src, "load_max")


@op
def load_min(t: Trace, src: Traced) -> Traced:
    """Load a tensor-memory tile and its row minima by one instruction, on sm_103a: as in `load_max`, with minima."""
    return _load_reduced(t, src, "load_min")
