"""Copies between registers and global memory: pointers, masks, loads and stores.

Coordinates are in units of the tile, one per dimension of the tensor. Leading dimensions (batch, depth) count single
steps.
`load`, `store`, `load_async` and `store_async` choose the instruction by the memory of their operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import BULK, unwrap
from tritonkittens.lang.core.dtypes import constant, itemsize, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import assemble, axes_of, pieces_of, shape_of
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.shared_tiles import load_shared, shared, store_shared
from tritonkittens.lang.memory.tensor_memory import load_tensor_memory, store_tensor_memory, tensor_tile
from tritonkittens.lang.register.construction import (
    _column,
    _row,
    indices,
    make,
    memory_layout,
    vector_indices,
    vector_layout,
)
from tritonkittens.lang.types.global_layout import check_global, extents_of, is_aligned, is_even, is_ragged, strides_of
from tritonkittens.lang.types.tiles import TileType, rt, st, sv, tt
from tritonkittens.lang.types.varlen import dimensions, end_of, split_sequence


@triton.jit
def _tile_pointers(pointer, rows, cols, row_stride, col_stride):
    return pointer + rows.to(tl.int64) * row_stride + cols.to(tl.int64) * col_stride


@triton.jit
def _vector_pointers(pointer, index, stride):
    return pointer + index.to(tl.int64) * stride


@triton.jit
def _inside(index, extent):
    return (index < extent) & (index >= 0)


@triton.jit
def _whole(n, unit: tl.constexpr):
    return n // unit * unit  # equals n, in a form that shows the divisibility to the compiler


@triton.jit
def _both(a, b):
    return a & b


def _coordinates(t: Trace, g: Traced, coord: Traced, what: str, sequences: bool = False) -> list[Traced]:
    """Return the coordinates as a list. With `sequences`, a sequence may precede the others."""
    coord = unwrap(coord)
    coord = list(coord) if isinstance(coord, (tuple, list, tl.tuple)) else [coord]
    sequence, places = split_sequence(coord)
    if sequence is not None and not sequences:
        raise TileError(f"{what}: takes no tk.sequence")
    if sequence is None and is_ragged(g):
        raise TileError(
            f"{what}: the tensor is ragged; the first coordinate is a tk.sequence, in front of one for each dimension"
        )
    if len(places) != dimensions(g):
        raise TileError(
            f"{what}: {len(places)} coordinates for a tensor of {dimensions(g)} dimensions; give one per dimension, "
            "in tiles"
        )
    return coord


def _base(t: Trace, g: Traced, coord: list[Traced], kept: int) -> tuple[Traced, Traced]:
    """Return the pointer to the slice of the last `kept` dimensions that the leading coordinates select, and whether
    the slice exists (None: always).
    """
    pointer, exists = g.pointer, None
    for c, extent, stride in zip(coord[:-kept], *_pitch(t, g, len(coord)), strict=False):
        step = t.method(t.method(t.scalar(c), "to", tl.int64), "__mul__", stride)
        pointer = t.method(pointer, "__add__", step)
        inside = t.condition(t.call(_inside, t.scalar(c), extent))
        exists = inside if exists is None else t.call(_both, exists, inside)
    return pointer, exists


def _start(t: Trace, c: Traced, extent: int) -> Traced:
    return t.method(t.scalar(c), "__mul__", extent)


def _pitch(t: Trace, g: Traced, rank: int) -> tuple[list[Traced], list[Traced]]:
    """Return extents and strides of the last `rank` dimensions, with their divisibility. Only so does the compiler
    merge accesses into 16-byte ones.
    """
    extents, strides = extents_of(g)[-rank:], strides_of(g)[-rank:]
    unit = max(1, BULK // itemsize(g.pointer.dtype.element_ty))
    if is_even(g):
        extents[-1] = t.call(_whole, extents[-1], unit)
    if is_aligned(g):
        strides = [*(t.call(_whole, s, unit) for s in strides[:-1]), strides[-1]]
    return extents, strides


def _access(t: Trace, g: Traced, tile: Traced, coord: list[Traced], rows: Traced = None) -> list[tuple[Traced, Traced]]:
    """Return, for every piece of a register tile or vector, its pointers into the tensor and the mask of the elements
    inside.

    `rows` is a vector of row numbers that replaces the coordinate along rows.
    """
    sequence, coord = split_sequence(coord)
    shape, (extents, strides) = shape_of(tile), _pitch(t, g, len(coord))
    base, exists = _base(t, g, coord, len(shape))
    along = [_start(t, c, extent) for c, extent in zip(coord[-len(shape) :], shape, strict=True)]
    if sequence is not None:
        along[0], extents[-len(shape)] = t.method(along[0], "__add__", sequence.begin), end_of(t, sequence)
    out = []
    if len(shape) == 1:
        first = 0
        for piece, n in zip(pieces_of(tile), axes_of(tile)[0], strict=True):
            index = t.call(gl.arange, 0, n, piece.type.layout) if t.explicit else t.call("arange", 0, n)
            index = t.method(t.method(index, "__add__", first), "__add__", along[0])
            first += n
            out.append((t.call(_vector_pointers, base, index, strides[-1]), t.call(_inside, index, extents[-1])))
    else:
        across = len(axes_of(tile)[1])
        if rows is None:
            row_indices = indices(t, tile, 0, along[0])
        else:
            row_indices = [t.vector(pieces_of(rows)[i // across], 0, p) for i, p in enumerate(pieces_of(tile))]
        for r, c in zip(row_indices, indices(t, tile, 1, along[1]), strict=True):
            r, c = t.call(_column, r), t.call(_row, c)
            mask = t.call(_both, t.call(_inside, r, extents[-2]), t.call(_inside, c, extents[-1]))
            out.append((t.call(_tile_pointers, base, r, c, strides[-2], strides[-1]), mask))
    return out if exists is None else [(p, t.call(_both, m, exists)) for p, m in out]


def _frame(t: Trace, dst: shared) -> Traced:
    """Return an int32 tile of the shape of a shared one, in the layout of coalesced access to elements of its dtype."""
    if len(dst.axes) == 1:
        return assemble(dst.axes, [t.full((n,), 0, tl.int32, vector_layout(t)) for n in dst.axes[0]])
    size = itemsize(dst.dtype)
    return assemble(
        dst.axes, [t.full((r, c), 0, tl.int32, memory_layout(t, r, c, size)) for r in dst.axes[0] for c in dst.axes[1]]
    )


def _same_type(g: Traced, dtype: tl.dtype, what: str) -> None:
    have = g.pointer.dtype.element_ty
    if have != dtype:
        raise TileError(f"{what} and a tensor of {name_of(have)}: element types differ; cast in registers")


def _register_type(what: Traced, name: str) -> TileType:
    what = unwrap(what)
    if isinstance(what, st):
        return rt(what.dtype, what.rows, what.cols, "memory")
    if not isinstance(what, TileType) or isinstance(what, (sv, tt)):
        raise TileError(
            f"{name} from global memory: give the register tile or vector type to load (rt, rv, col_vec, row_vec), got "
            f"{what!r}"
        )
    return what


def _fill(fill: Traced, dtype: tl.dtype, name: str) -> Traced:
    if not isinstance(fill, (bool, int, float, tl.tensor)):
        raise TileError(f"{name}(fill={fill!r}): must be a number or a scalar")
    fill = constant(fill, dtype, f"{name}(fill=…)")
    return float(fill) if dtype.is_floating() and not isinstance(fill, tl.tensor) else fill


def _load_global(
    t: Trace, g: Traced, coord: Traced, what: Traced, fill: Traced, rows: Traced = None, name: str = "load"
) -> Traced:
    spec = _register_type(what, name)
    _same_type(g, spec.dtype, f"{name} of {spec!r}")
    coord = _coordinates(t, g, coord, f"{name} of {spec!r}", sequences=rows is None)
    if len(spec.shape) > dimensions(g):
        raise TileError(f"{name} of {spec!r} from a tensor of one dimension: load a vector (tk.rv)")
    frame = make(t, spec, 0)
    fill = _fill(fill, spec.dtype, name)
    loader = gl.load if t.explicit else "load"
    return assemble(axes_of(frame), [t.call(loader, p, mask, fill) for p, mask in _access(t, g, frame, coord, rows)])


@op
def load(
    t: Trace,
    src: Traced,
    what: Traced = None,
    coord: Traced = None,
    fill: Traced = 0.0,
    layout: Traced = "mma",
    like: Traced = None,
    fenced: Traced = False,
) -> Traced:
    """Load a register tile from shared, tensor or global memory.

    Args:
        src: the source. A shared tile or vector: `tk.load(tile)`. Tensor memory: `tk.load(tt)`. A global layout:
            `tk.load(g, tk.rt(tk.bf16, 64, 96), (r, c), fill=0)`. A register tile is returned unchanged, so
            accumulators read alike on every architecture.
        what: the register type, for a global layout or a shared vector (`tk.row_vec(tk.rt(tk.fp32, 64, 128))`).
        coord: the coordinates in the global layout, in tiles, one per dimension. With a shared vector of 4-byte
            elements whose length is a power of two: the element, an int32 scalar, from which on `what` is read. All of
            `what` must lie inside.
        fill: the value of elements outside the tensor.
        layout: registers of a shared tile: "mma", "row" or "memory"; see `rt`.
        like: a register tile, whose layout the result of a shared load takes.
        fenced: the caller calls `fence_async` after this read of a shared tile, and before TMA overwrites the tile.
            `arrive` and `consumer_release` then need no fence. Useful where reads are in a rare branch. Without
            `arrive` and `consumer_release`, `fence_async` is always needed before TMA overwrites the tile.

    Returns:
        A register tile or vector of the source's dtype.

    Raises:
        TileError: for a ring (take a slot first), another type, or coordinates that do not fit.
    """
    if isinstance(src, shared):
        if unwrap(coord) is not None:
            return _load_from(t, src, unwrap(what), coord)
        like = make(t, unwrap(what), 0) if isinstance(unwrap(what), TileType) else unwrap(like)
        return load_shared(t, src, unwrap(layout), like, bool(unwrap(fenced)))
    if isinstance(src, tensor_tile):
        return load_tensor_memory(t, src)
    if axes_of(src):
        return src
    check_global(src, "load")
    return _load_global(t, src, coord, what, unwrap(fill))


def _load_from(t: Trace, src: shared, what: Traced, first: Traced) -> Traced:
    """Load a vector from a run-time element of a shared vector on. TMA fills shared memory from multiples of 16 bytes
    of global memory only.
    """
    if not isinstance(what, TileType) or len(what.shape) != 1 or isinstance(what, sv):
        raise TileError(f"load of {src.spec!r} from an element on: give the register vector type to load, got {what!r}")
    if len(src.axes) != 1 or len(src.pieces) != 1 or src.stages is not None or itemsize(src.dtype) != 4:
        raise TileError(
            f"load of {src.spec!r} from an element on: takes a shared vector of 4-byte elements whose length is a "
            "power of two"
        )
    if what.dtype != src.dtype:
        raise TileError(f"load of {src.spec!r} as {what!r}: element types differ; cast in registers")
    bill().reads_shared += 1
    frame, address = make(t, what, 0), t.call(ptx_shared.address, src.pieces[0])
    text, constraints = ptx_shared.load_text("shared", src.dtype), ptx_shared.load_constraints(src.dtype)
    out = []
    for index in vector_indices(t, frame, t.scalar(first)):
        places = t.method(t.method(index, "__mul__", itemsize(src.dtype)), "__add__", address)
        out.append(
            t.call("inline_asm_elementwise", text, constraints, [places], dtype=src.dtype, is_pure=False, pack=1)
        )
    return assemble(axes_of(frame), out)


@op
def load_scalar(t: Trace, src: Traced, coord: Traced) -> Traced:
    """Load one element as a scalar.

    Args:
        src: a global layout, or a shared vector whose length is a power of two.
        coord: the coordinates in elements, one per dimension, or the index in the vector. The element must lie
            inside.

    Raises:
        TileError: for another source.

    Example::

        decay = tk.load_scalar(ctx.globals.DECAY, (head,))
    """
    if isinstance(src, shared):
        if len(src.axes) != 1 or len(src.pieces) != 1 or src.stages is not None:
            raise TileError(
                f"load_scalar of {src.spec!r}: takes a shared vector whose length is a power of two, or a global layout"
            )
        bill().reads_shared += 1
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [src.pieces[0]], tl.int32)
        place = t.method(t.scalar(coord), "__mul__", itemsize(src.dtype))
        return t.call(ptx_shared.load, t.method(address, "__add__", place), src.dtype)
    return t.call(gl.load if t.explicit else "load", _element(t, src, coord, "load_scalar"))


def _element(t: Trace, src: Traced, coord: Traced, what: str) -> Traced:
    check_global(src, what)
    pointer = src.pointer
    for c, stride in zip(_coordinates(t, src, coord, what), strides_of(src), strict=True):
        pointer = t.method(pointer, "__add__", t.method(t.method(t.scalar(c), "to", tl.int64), "__mul__", stride))
    return pointer


@op
def pointer_to(t: Trace, src: Traced, coord: Traced) -> Traced:
    """Return the address of one element of the global layout `src`.

    `coord` holds the coordinates in elements, one per dimension. A coordinate that is a block of integers gives a
    block of addresses.
    """
    return _element(t, src, coord, "pointer_to")


@op
def store(t: Trace, dst: Traced, value: Traced, coord: Traced = None) -> Traced:
    """Store a register tile or vector, converted to the destination's dtype.

    Args:
        dst: a shared tile or vector, tensor memory, or a global layout.
        value: a register tile or vector of the destination's shape. A shared tile goes to a global layout through
            registers, for any strides, without TMA.
        coord: the coordinates in a global layout, in tiles, one per dimension. Elements outside the tensor are
            skipped.

    Raises:
        TileError: for a ring, another shape, or coordinates that do not fit.

    Before TMA or a tensor core reads the shared memory, call `fence_async`.

    Example::

        tk.store(C, acc, (row, col))
    """
    if isinstance(dst, shared):
        return store_shared(t, dst, value)
    if isinstance(dst, tensor_tile):
        return store_tensor_memory(t, dst, value)
    check_global(dst, "store")
    if isinstance(value, shared):
        value = load_shared(t, value, "memory", None)
    if not 1 <= len(shape_of(value)) <= dimensions(dst):
        raise TileError(
            f"store of shape {list(shape_of(value))} to a tensor of {dimensions(dst)} dimensions: needs a tile or "
            "vector of no more dimensions"
        )
    coord = _coordinates(t, dst, coord, f"store of a tile of shape {list(shape_of(value))}", sequences=True)
    storer = gl.store if t.explicit else "store"
    for v, (pointers, mask) in zip(pieces_of(value), _access(t, dst, value, coord), strict=True):
        t.call(storer, pointers, t.method(v, "to", dst.pointer.dtype.element_ty), mask)
    return None


@op
def load_into(t: Trace, dst: Traced, src: Traced, coord: Traced, fill: Traced = 0.0) -> None:
    """Copy a tile or vector from a global layout to shared memory through registers, for any strides and without TMA.

    Args:
        dst: a shared tile or vector.
        src: a global layout of the same dtype.
        coord: the coordinates in tiles, one per dimension.
        fill: the value of elements outside the tensor.

    Raises:
        TileError: for another destination or dtype.

    Call `sync` before other threads read the tile. Call `fence_async` before that, if TMA or a tensor core reads it.
    """
    if not isinstance(dst, shared):
        raise TileError(f"load_into({dst!r}): the destination must be a shared tile or vector; tk.load gives registers")
    check_global(src, "load_into")
    what = f"load_into of {dst.spec!r}"
    _same_type(src, dst.dtype, what)
    coord = _coordinates(t, src, coord, what, sequences=True)
    if len(dst.axes) > dimensions(src):
        raise TileError(f"{what} from a tensor of one dimension: use a shared vector (sv)")
    _load_into(t, dst, src, coord, unwrap(fill), what)


def _load_into(t: Trace, dst: shared, src: Traced, coord: list[Traced], fill: Traced, what: str) -> None:
    frame, fill = _frame(t, dst), _fill(fill, dst.dtype, what)
    store_shared(
        t, dst, assemble(dst.axes, [t.call(gl.load, p, mask, fill) for p, mask in _access(t, src, frame, coord)])
    )
