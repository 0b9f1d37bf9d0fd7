"""Moving tiles: registers ↔ global memory, registers ↔ shared memory, cp.async, and TMA between global and shared memory.

Coordinates are in units of the tile that moves, one per dimension of the tensor; leading dimensions (batch, depth) count single steps. One
name serves every depth: `load`, `store`, `load_async`, `store_async` look at where their operands live.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import memory as ptx_memory
from tritonkittens.inline_ptx import shared as ptx_shared
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang._backend import Trace, async_copy, gl, hopper, op, tma
from tritonkittens.lang.budget import WARP, bill
from tritonkittens.lang.dtypes import constant, itemsize, name_of, names_of
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.globals import check_global, extents_of, is_aligned, is_even, is_ragged, rank_of, strides_of
from tritonkittens.lang.multicast import load_by_address, load_slice, prefetch_boxes
from tritonkittens.lang.ragged import check_sequence, dimensions, end_of, ragged_place, split_sequence
from tritonkittens.lang.shared import load_shared, shared, store_shared
from tritonkittens.lang.sync import HOPPER_AND_BLACKWELL, role_thread, semaphore
from tritonkittens.lang.tensor_memory import load_tensor_memory, store_tensor_memory, tensor_tile
from tritonkittens.lang.tiles import _column, _row, indices, make, memory_layout, vector_layout
from tritonkittens.lang.types import TileType, rt, split, st, sv, tt, unwrap
from tritonkittens.lang.values import assemble, axes_of, pieces_of, shape_of

LINE = 128  # bytes of an L2 line
BULK = 16  # bytes: unit and alignment of bulk copies
CP_ASYNC = 4  # bytes: smallest copy of cp.async
BULK_SUMS = {tl.float32: "f32", tl.bfloat16: "bf16", tl.float16: "f16"}  # PTX ISA, cp.reduce.async.bulk
POLICIES = ("evict_first", "evict_last", "evict_normal")
# What TMA can combine with global memory. PTX ISA, cp.reduce.async.bulk.tensor; integers by their signed tensor-map types.
REDUCTIONS = {"add": (tl.float32, tl.bfloat16, tl.float16, tl.int32), "min": (tl.bfloat16, tl.float16, tl.int32, tl.int64),
              "max": (tl.bfloat16, tl.float16, tl.int32, tl.int64)}


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
    return n // unit * unit  # the value it has anyway, in a form from which the compiler sees the divisibility


@triton.jit
def _both(a, b):
    return a & b


def _coordinates(t: Trace, g: Any, coord: Any, what: str, sequences: bool = False) -> list[Any]:
    """As a list, where `sequences` are allowed with one in front of the others."""
    coord = unwrap(coord)
    coord = list(coord) if isinstance(coord, (tuple, list, tl.tuple)) else [coord]
    sequence, places = split_sequence(coord)
    if sequence is not None and not sequences:
        raise TileError(f"{what}: takes no tk.sequence")
    if sequence is None and is_ragged(g):
        raise TileError(f"{what}: the tensor is ragged; the first coordinate is a tk.sequence, in front of one for each dimension")
    if len(places) != dimensions(g):
        raise TileError(f"{what}: {len(places)} coordinates for a tensor of {dimensions(g)} dimensions; give one per dimension, in tiles")
    return coord


def _base(t: Trace, g: Any, coord: list[Any], kept: int) -> tuple[Any, Any]:
    """Pointer to the slice of the last `kept` dimensions that the leading coordinates select, and whether it exists (None: always)."""
    pointer, exists = g.pointer, None
    for c, extent, stride in zip(coord[:-kept], *_pitch(t, g, len(coord)), strict=False):
        step = t.method(t.method(t.scalar(c), "to", tl.int64), "__mul__", stride)
        pointer = t.method(pointer, "__add__", step)
        inside = t.condition(t.call(_inside, t.scalar(c), extent))
        exists = inside if exists is None else t.call(_both, exists, inside)
    return pointer, exists


def _start(t: Trace, c: Any, extent: int) -> Any:
    return t.method(t.scalar(c), "__mul__", extent)


def _pitch(t: Trace, g: Any, rank: int) -> tuple[list[Any], list[Any]]:
    """Extents and strides of the last `rank` dimensions, with what is known of their divisibility: only so are accesses merged into 16-byte ones."""
    extents, strides = extents_of(g)[-rank:], strides_of(g)[-rank:]
    unit = max(1, BULK // itemsize(g.pointer.dtype.element_ty))
    if is_even(g):
        extents[-1] = t.call(_whole, extents[-1], unit)
    if is_aligned(g):
        strides = [*(t.call(_whole, s, unit) for s in strides[:-1]), strides[-1]]
    return extents, strides


def _access(t: Trace, g: Any, tile: Any, coord: list[Any], rows: Any = None) -> list[tuple[Any, Any]]:
    """For every piece of a register tile or vector its pointers into the tensor and the mask of what lies inside it.

    `rows`: a vector of row numbers in place of the coordinate along rows.
    """
    sequence, coord = split_sequence(coord)
    shape, (extents, strides) = shape_of(tile), _pitch(t, g, len(coord))
    base, exists = _base(t, g, coord, len(shape))
    along = [_start(t, c, extent) for c, extent in zip(coord[-len(shape):], shape, strict=True)]
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


def _frame(t: Trace, dst: shared) -> Any:
    """An int32 tile of the shape of a shared one, laid out for coalesced access to elements of its type."""
    if len(dst.axes) == 1:
        return assemble(dst.axes, [t.full((n,), 0, tl.int32, vector_layout(t)) for n in dst.axes[0]])
    size = itemsize(dst.dtype)
    return assemble(dst.axes, [t.full((r, c), 0, tl.int32, memory_layout(t, r, c, size)) for r in dst.axes[0] for c in dst.axes[1]])


def _same_type(g: Any, dtype: Any, what: str) -> None:
    have = g.pointer.dtype.element_ty
    if have != dtype:
        raise TileError(f"{what} and a tensor of {name_of(have)}: element types differ; cast in registers")


def _register_type(what: Any, name: str) -> TileType:
    what = unwrap(what)
    if isinstance(what, st):
        return rt(what.dtype, what.rows, what.cols, "memory")
    if not isinstance(what, TileType) or isinstance(what, (sv, tt)):
        raise TileError(f"{name} from global memory: give the register tile or vector type to load (rt, rv, col_vec, row_vec), got "
                        f"{what!r}")
    return what


def _fill(fill: Any, dtype: Any, name: str) -> Any:
    if not isinstance(fill, (bool, int, float, tl.tensor)):
        raise TileError(f"{name}(fill={fill!r}): must be a number or a scalar")
    fill = constant(fill, dtype, f"{name}(fill=…)")
    return float(fill) if dtype.is_floating() and not isinstance(fill, tl.tensor) else fill


def _load_global(t: Trace, g: Any, coord: Any, what: Any, fill: Any, rows: Any = None, name: str = "load") -> Any:
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
    t: Trace, src: Any, what: Any = None, coord: Any = None, fill: Any = 0.0, layout: Any = "mma", like: Any = None, fenced: Any = False,
) -> Any:  # fmt: skip
    """A register tile from where it lives.

    A shared tile that TMA will overwrite afterwards must have been read before: `arrive` and `consumer_release` see to it, by a fence in each of them; other
    ways of handing it back need `fence_async` first. `fenced`: the caller does that himself, behind this read, so that they need not: worth it where reads are
    in a branch that is seldom taken.

    - shared tile or vector: `tk.load(tile)`; `layout` ("mma", "row", "memory"), `like` (another register tile) or a type, such as
      `tk.row_vec(tk.rt(tk.fp32, 64, 128))` for a vector, says how registers hold it;
    - tensor memory: `tk.load(tt)`; a register tile comes back as it is, so that an accumulator is read the same way on every architecture;
    - global layout: `tk.load(g, tk.rt(tk.bf16, 64, 96), (r, c), fill=0)`, masked at the edges of the tensor, elements outside read `fill`;
      also vectors.
    """
    if isinstance(src, shared):
        like = make(t, unwrap(what), 0) if isinstance(unwrap(what), TileType) else unwrap(like)
        return load_shared(t, src, unwrap(layout), like, bool(unwrap(fenced)))
    if isinstance(src, tensor_tile):
        return load_tensor_memory(t, src)
    if axes_of(src):
        return src
    check_global(src, "load")
    return _load_global(t, src, coord, what, unwrap(fill))


@op
def load_scalar(t: Trace, src: Any, coord: Any) -> Any:
    """One element of a global layout (coordinates, one for each dimension) or of a shared vector (an index), a scalar; it must lie inside."""
    if isinstance(src, shared):
        if len(src.axes) != 1 or len(src.pieces) != 1 or src.stages is not None:
            raise TileError(f"load_scalar of {src.spec!r}: takes a shared vector whose length is a power of two, or a global layout")
        bill().reads_shared += 1
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [src.pieces[0]], tl.int32)
        place = t.method(t.scalar(coord), "__mul__", itemsize(src.dtype))
        return t.call(ptx_shared.load, t.method(address, "__add__", place), src.dtype)
    return t.call(gl.load if t.explicit else "load", _element(t, src, coord, "load_scalar"))


def _element(t: Trace, src: Any, coord: Any, what: str) -> Any:
    check_global(src, what)
    pointer = src.pointer
    for c, stride in zip(_coordinates(t, src, coord, what), strides_of(src), strict=True):
        pointer = t.method(pointer, "__add__", t.method(t.method(t.scalar(c), "to", tl.int64), "__mul__", stride))
    return pointer


@op
def pointer_to(t: Trace, src: Any, coord: Any) -> Any:
    """The address of one element of a global layout (coordinates, one for each dimension), or of many, where a coordinate is a block of numbers."""
    return _element(t, src, coord, "pointer_to")


@op
def store(t: Trace, dst: Any, value: Any, coord: Any = None) -> Any:
    """Store a register tile: to a shared tile or vector, to tensor memory, or to a global layout at `coord` (elements outside are not
    written).

    The tile is converted to the destination's element type. After a store to shared memory that TMA or a tensor core will read, call
    `fence_async`. A shared tile can be stored to a global layout as well, through registers: any strides, no TMA.
    """
    if isinstance(dst, shared):
        return store_shared(t, dst, value)
    if isinstance(dst, tensor_tile):
        return store_tensor_memory(t, dst, value)
    check_global(dst, "store")
    if isinstance(value, shared):
        value = load_shared(t, value, "memory", None)
    if not 1 <= len(shape_of(value)) <= dimensions(dst):
        raise TileError(f"store of shape {list(shape_of(value))} to a tensor of {dimensions(dst)} dimensions: needs a tile or vector of no "
                        f"more dimensions")
    coord = _coordinates(t, dst, coord, f"store of a tile of shape {list(shape_of(value))}", sequences=True)
    storer = gl.store if t.explicit else "store"
    for v, (pointers, mask) in zip(pieces_of(value), _access(t, dst, value, coord), strict=True):
        t.call(storer, pointers, t.method(v, "to", dst.pointer.dtype.element_ty), mask)
    return None


@op
def load_into(t: Trace, dst: Any, src: Any, coord: Any, fill: Any = 0.0) -> Any:
    """A shared tile or vector from a global layout, through registers and at once: any strides, no TMA; elements outside the tensor read
    `fill`.

    `sync` before other threads read it; `fence_async` before that where TMA or a tensor core will read it.
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


def _load_into(t: Trace, dst: shared, src: Any, coord: list[Any], fill: Any, what: str) -> None:
    frame, fill = _frame(t, dst), _fill(fill, dst.dtype, what)
    store_shared(t, dst, assemble(dst.axes, [t.call(gl.load, p, mask, fill) for p, mask in _access(t, src, frame, coord)]))


def _row_numbers(t: Trace, g: Any, rows: Any, extent: int, cuts: tuple[int, ...], col: Any, name: str) -> list[Any]:
    """Checks of a gather or scatter; the coordinates with a place for the rows."""
    t.require_explicit(name)
    if rank_of(g) < 2:
        raise TileError(f"{name}: the tensor has one dimension; rows need two")
    if axes_of(rows) != (cuts,) or not rows.dtype.is_int():
        have = f"shape {list(shape_of(rows))} of {name_of(rows.dtype)}" if axes_of(rows) else repr(rows)
        raise TileError(f"{name}: needs a vector of {extent} integer row numbers, one for each row of the tile, got {have}")
    col = unwrap(col)
    col = list(col) if isinstance(col, (tuple, list, tl.tuple)) else [col]
    if len(col) != rank_of(g) - 1:
        raise TileError(f"{name}: {len(col)} coordinates besides the rows for a tensor of {rank_of(g)} dimensions; give one for each "
                        f"other dimension")
    return [*col[:-1], 0, col[-1]]


@op
def gather_rows(t: Trace, src: Any, what: Any, rows: Any, col: Any = 0, fill: Any = 0.0) -> Any:
    """A register tile of type `what` (rt) whose row i is row `rows[i]` of a global layout; rows and columns outside the tensor read `fill`.

    `rows` is an integer vector of one number per row; `col` the coordinate along columns, in tiles: a tuple with the leading coordinates
    where the tensor has more than two dimensions.
    """
    check_global(src, "gather_rows")
    spec = _register_type(what, "gather_rows")
    if not isinstance(spec, rt):
        raise TileError(f"gather_rows of {spec!r}: gathers the rows of a register tile (rt)")
    coord = _row_numbers(t, src, rows, spec.rows, split(spec.rows), col, "gather_rows")
    return _load_global(t, src, tuple(coord), spec, unwrap(fill), rows, "gather_rows")


@op
def scatter_rows(t: Trace, dst: Any, value: Any, rows: Any, col: Any = 0) -> Any:
    """Store row i of a register tile as row `rows[i]` of a global layout (rows and columns outside the tensor are not written); see
    `gather_rows`.

    Where two rows have the same number, one of them stays, no one knows which.
    """
    check_global(dst, "scatter_rows")
    if len(axes_of(value)) != 2:
        raise TileError(f"scatter_rows of {value!r}: needs a register tile")
    coord = _row_numbers(t, dst, rows, shape_of(value)[0], axes_of(value)[0], col, "scatter_rows")
    for v, (pointers, mask) in zip(pieces_of(value), _access(t, dst, value, coord, rows), strict=True):
        t.call(gl.store, pointers, t.method(v, "to", dst.pointer.dtype.element_ty), mask)


@op
def prefetch(t: Trace, src: Any, what: Any, coord: Any) -> Any:
    """Start fetching a tile or vector (a type: st, sv, rt, rv) of a global layout into L2; what lies outside the tensor is not touched.
    sm_80 or newer.

    By TMA, one request for each copy that would load it, where it is a tile (st) that the layout has descriptors for. Else one request for each 128-byte line
    of a row, or for each element where the columns are not contiguous. Source: PTX ISA, cp.async.bulk.prefetch.tensor; prefetch.
    """
    t.require_explicit("prefetch")
    check_global(src, "prefetch")
    t.require("prefetch", 80, 999, "sm_80 or newer")
    what = unwrap(what)
    if not isinstance(what, TileType):
        raise TileError(f"prefetch({what!r}): give the type of the tile that will be loaded")
    if isinstance(what, st) and len(src.maps):
        return _prefetch_by_tma(t, src, what, coord)
    if len(what.shape) > dimensions(src):
        raise TileError(f"prefetch of {what!r} from a tensor of one dimension: give a vector type")
    coord = _coordinates(t, src, coord, f"prefetch of {what!r}")
    extents, strides = extents_of(src), strides_of(src)
    step = LINE // itemsize(what.dtype) if isinstance(strides[-1], int) else 1
    rows, cols = (1, *what.shape)[-2:]
    base, exists = _base(t, src, coord, len(what.shape))
    requests = triton.next_power_of_2(-(-cols // step) + (step > 1))
    for r0, height in _starts(rows):
        tall = max(height, t.num_warps * WARP // min(WARP, requests))  # so that no thread repeats what another requests
        like = t.full((tall, requests), 0, tl.int32, memory_layout(t, tall, requests, BULK))
        first = _start(t, coord[-2], rows) if len(what.shape) == 2 else t.scalar(0)
        row, asked = t.call(_requested, t.arange(tall, 0, like), t.method(first, "__add__", r0), height, extents[-2] if len(what.shape) == 2 else 1, 1)
        col, wanted = t.call(_requested, t.arange(requests, 1, like), _start(t, coord[-1], cols), cols, extents[-1], step)
        mask = t.call(_both, t.call(_column, asked), t.call(_row, wanted))
        row_stride = strides[-2] if len(what.shape) == 2 else 0
        pointers = t.call(_tile_pointers, base, t.call(_column, row), t.call(_row, col), row_stride, strides[-1])
        t.call(ptx_memory.prefetch, pointers, "L2", mask if exists is None else t.call(_both, mask, exists))


@triton.jit
def _requested(number, first, length, extent, STEP: tl.constexpr):
    """(element, is it wanted?) of request `number` of a stretch of elements, of which every `STEP`th is requested, and behind them the last: a row that does
    not start a line reaches into one more."""
    there = tl.minimum(extent - first, length)
    wanted = number * STEP < there + STEP - 1
    return first + tl.minimum(number * STEP, there - 1), wanted & (first >= 0) & (there > 0)


def _prefetch_by_tma(t: Trace, src: Any, what: st, coord: Any) -> None:
    name = f"prefetch of {what!r}"
    pieces = what.pieces()
    places = _piece_places(t, src, coord, what.shape, [(row, col) for row, col, _, _ in pieces], name)
    for number, place, (_, _, _, cols) in zip(_map_numbers(src, pieces, what, name), places, pieces, strict=True):
        prefetch_boxes(t, cols, what.piece_swizzle(cols), itemsize(what.dtype), place, src, number)


def _starts(extent: int) -> list[tuple[int, int]]:
    """(start, length) of the power-of-two pieces of an extent."""
    return [(sum(split(extent)[:i]), n) for i, n in enumerate(split(extent))]


def _extents(tile: shared) -> list[tuple[int, ...]]:
    """Those of each piece of a shared tile or vector."""
    return list(itertools.product(*tile.axes))


def _tma_maps(t: Trace, g: Any, tile: shared, what: str) -> list[Any]:
    """The descriptor for each piece of a shared tile."""
    maps = {}
    for m in g.maps:
        block = tuple(int(unwrap(s)) for s in m.block_shape)
        maps[block, m.layout.swizzle_byte_width] = m
    found, lead = [], (1,) * (rank_of(g) - len(tile.axes))
    for extents, piece in zip(_extents(tile), tile.pieces, strict=True):
        key = (*lead, *extents), piece.layout.swizzle_byte_width
        if key not in maps:
            have = ", ".join(f"{'×'.join(map(str, b))} (swizzle {s})" for b, s in maps) or "none: pass tk.gl(tensor, tile types)"
            raise TileError(f"{what} of {tile.spec!r}: the global layout has no descriptor for its {'×'.join(map(str, key[0]))} piece "
                            f"(swizzle {key[1]}); it has {have}")
        found.append(maps[key])
    return found


def _tma_copies(t: Trace, g: Any, tile: shared, coord: Any, what: str) -> list[tuple[Any, list[Any], Any]]:
    """(descriptor, element coordinates, shared piece) of each copy that moves a shared tile."""
    t.require(f"{what} (TMA)", *HOPPER_AND_BLACKWELL)
    if tile.stages is not None:
        raise TileError(f"{what} of a ring of {tile.spec!r}: take a slot first, ring[slot]")
    check_global(g, what)
    starts = [[sum(a[:i]) for i in range(len(a))] for a in tile.axes]
    places = _piece_places(t, g, coord, tile.shape, list(itertools.product(*starts)), what)
    return list(zip(_tma_maps(t, g, tile, what), places, tile.pieces, strict=True))


def _piece_places(t: Trace, g: Any, coord: Any, shape: tuple[int, ...], offsets: Sequence[tuple[int, ...]], what: str) -> list[list[Any]]:
    """Element coordinates of each piece of a tile of this shape, from the coordinates of the tile and where in it the pieces begin."""
    sequence, coord = split_sequence(_coordinates(t, g, coord, what, sequences=True))
    check_sequence(g, sequence, len(shape) == 2, what)
    lead = len(coord) - len(shape)
    out = []
    for offset in offsets:
        place = list(coord[:lead])
        for c, extent, start in zip(coord[lead:], shape, offset, strict=True):
            element = c * extent if isinstance(c, int) else t.method(c, "__mul__", extent)
            place.append(element + start if isinstance(element, int) else t.method(element, "__add__", start))
        if sequence is not None:
            place = ragged_place(t, sequence, place)
        out.append([tl.constexpr(p) if isinstance(p, int) else p for p in place])
    return out


def _map_numbers(g: Any, pieces: Sequence[tuple[int, int, int, int]], tile: st, what: str) -> list[int]:
    """The numbers of the descriptors that move these pieces of a tile (row, column, rows, columns)."""
    numbers = {(tuple(int(unwrap(s)) for s in m.block_shape), m.layout.swizzle_byte_width): number for number, m in enumerate(g.maps)}
    wanted = [((1,) * (rank_of(g) - 2) + (rows, cols), tile.piece_swizzle(cols)) for _, _, rows, cols in pieces]
    if any(w not in numbers for w in wanted):
        raise TileError(f"{what}: the global layout has no descriptor for {tile!r}")
    return [numbers[w] for w in wanted]


def _maps_of_parts(g: Any, tile: shared) -> Callable[[st], list[int]]:
    """Gives the numbers of the descriptors that move the pieces of a block's part of a tile that the cluster loads together."""
    return lambda part: _map_numbers(g, part.pieces(), part, f"load_async of {tile.spec!r} by {tile.loaders} blocks")


def _policy(cache_policy: Any, name: str) -> Any:
    cache_policy = unwrap(cache_policy)
    if cache_policy is None:
        return None
    if cache_policy not in POLICIES:
        raise TileError(f"{name}(cache_policy={cache_policy!r}): must be one of {', '.join(map(repr, POLICIES))}")
    return hopper.CachePolicy(l2=hopper.FractionalEvictionPolicy(cache_policy, 1.0))


@op
def load_async(t: Trace, dst: Any, src: Any, coord: Any, arrived: Any = None, cache_policy: Any = None, multicast: Any = None) -> Any:
    """Start copying a tile from global to shared memory, without waiting.

    With a `semaphore` the copy is TMA: it completes on `arrived`, which must expect its bytes (`expect`). Without one it is cp.async by
    all threads of the role: `load_async_wait` waits for it (element types of less than 4 bytes go through registers where the columns of
    the tensor are not contiguous or not a multiple of 16 bytes). Coordinates in tiles, one per dimension. `cache_policy` says how L2
    treats the lines ("evict_first", "evict_last", "evict_normal"; TMA only).

    `multicast` is a mask (one bit for each rank of the cluster, int32): the tile is written to the same place in each of those blocks and completes on the same
    semaphore of each, which must expect its bytes (`cluster_size=` at launch). A ring tile that a template's layout names in `multicast` is loaded by all
    blocks of the cluster together, each its part. Source: PTX ISA, cp.async.bulk.tensor; cp.async.
    """
    if not isinstance(dst, shared):
        raise TileError(f"load_async: the destination must be a shared tile or vector, got {dst!r}")
    policy = _policy(cache_policy, "load_async")
    if arrived is None or unwrap(arrived) is None:
        if policy is not None:
            raise TileError(f"load_async(cache_policy={unwrap(cache_policy)!r}) without a semaphore: cp.async has no cache policy here; "
                            f"give a semaphore")
        return _cp_async(t, dst, src, coord)
    if not isinstance(arrived, semaphore):
        raise TileError(f"load_async(arrived={unwrap(arrived)!r}): needs a semaphore")
    bill().copied += dst.nbytes
    if dst.loaders > 1:
        if unwrap(multicast) is not None:
            raise TileError(f"load_async of {dst.spec!r}, which all blocks of the cluster load together: takes no multicast")
        check_global(src, "load_async")
        return load_slice(t, dst, src, _coordinates(t, src, coord, "load_async"), _maps_of_parts(src, dst), arrived, cache_policy)
    if dst.together and unwrap(multicast) is not None:
        raise TileError(f"load_async of {dst.spec!r}: a contiguous tile takes no multicast")
    copies = _tma_copies(t, src, dst, coord, "load_async")
    if dst.together or dst.alone or unwrap(multicast) is not None:
        return load_by_address(t, dst, src, copies, _extents(dst), arrived, multicast, cache_policy)
    for m, place, view in copies:
        t.call(tma.async_load, m, place, arrived.barrier(t), view, cache_policy=policy)
    return None


def _cp_async(t: Trace, dst: shared, src: Any, coord: Any) -> None:
    t.require_explicit("load_async")
    t.require("load_async without a semaphore (cp.async)", 80, 999, "sm_80 or newer")
    what = f"load_async of {dst.spec!r} without a semaphore"
    check_global(src, "load_async")
    coord = _coordinates(t, src, coord, "load_async")
    _same_type(src, dst.dtype, what)
    if len(dst.axes) != 2 or rank_of(src) < 2:
        raise TileError(f"{what}: cp.async moves tiles of tensors of two or more dimensions; use load_into or TMA for vectors")
    if is_even(src) or itemsize(dst.dtype) >= CP_ASYNC:
        for piece, (pointers, mask) in zip(dst.pieces, _access(t, src, _frame(t, dst), coord), strict=True):
            t.call(async_copy.async_load, piece, pointers, mask=mask)
    else:  # an edge may cut the smallest copy: through registers
        _load_into(t, dst, src, coord, 0, what)
    t.call(async_copy.commit_group)


@op
def load_async_wait(t: Trace, outstanding: Any = 0) -> Any:
    """Wait until at most `outstanding` of the role's cp.async tiles are under way, then synchronise the role's threads."""
    t.require_explicit("load_async_wait")
    t.require("load_async_wait (cp.async)", 80, 999, "sm_80 or newer")
    t.call(async_copy.wait_group, unwrap(outstanding))
    t.call(gl.barrier)


def _store_tma(t: Trace, what: str, fn: Any, dst: Any, src: Any, coord: Any, **options: Any) -> None:
    if not isinstance(src, shared):
        raise TileError(f"{what}: the source must be a shared tile or vector, got {src!r}; tk.store writes registers")
    if src.together:
        raise TileError(f"{what} of {src.spec!r}: a contiguous tile is filled by TMA and read by products only")
    for m, place, view in _tma_copies(t, dst, src, coord, what):
        t.call(fn, m, place, view, **options)
        bill().stored += 1


@op
def store_async(t: Trace, dst: Any, src: Any, coord: Any, cache_policy: Any = None) -> Any:
    """Start copying a shared tile to global memory by TMA (committed as a group); what lies outside the tensor is not written.

    TMA writes whole pieces of 16 bytes: the innermost extent should be a multiple of 16 bytes, or the rest of the last piece, which lies between the row's end
    and the next row, is overwritten (seen on the H200; loads end exactly). Written to by registers before? `fence_async` first.
    Wait with `store_wait` or `store_read_wait`. Source: PTX ISA, cp.async.bulk.tensor.
    """
    _store_tma(t, "store_async", tma.async_store, dst, src, coord, cache_policy=_policy(cache_policy, "store_async"))


def _reduce_tma(t: Trace, kind: str, fn: Any, dst: Any, src: Any, coord: Any) -> None:
    if isinstance(src, shared) and src.dtype not in REDUCTIONS[kind]:
        raise TileError(f"store_{kind}_async of {src.spec!r}: TMA takes the {kind} of {names_of(REDUCTIONS[kind])} only")
    _store_tma(t, f"store_{kind}_async", fn, dst, src, coord)


@op
def store_add_async(t: Trace, dst: Any, src: Any, coord: Any) -> Any:
    """Start adding a shared tile (fp32, bf16, fp16, int32) to global memory, element by element and atomically.

    Source: PTX ISA, cp.reduce.async.bulk.tensor.
    """
    _reduce_tma(t, "add", tma.async_atomic_add, dst, src, coord)


@op
def store_min_async(t: Trace, dst: Any, src: Any, coord: Any) -> Any:
    """Start taking the element-wise minimum of global memory and a shared tile (bf16, fp16, int32, int64; atomic)."""
    _reduce_tma(t, "min", tma.async_atomic_min, dst, src, coord)


@op
def store_max_async(t: Trace, dst: Any, src: Any, coord: Any) -> Any:
    """Start taking the element-wise maximum of global memory and a shared tile (bf16, fp16, int32, int64; atomic)."""
    _reduce_tma(t, "max", tma.async_atomic_max, dst, src, coord)


@triton.jit
def _load_bulk(dst, pointer, nbytes, bar, thread):
    if thread == 0:
        ptx_tma.load_bulk(dst, pointer, nbytes, bar, issuer="thread")


@triton.jit
def _store_bulk(pointer, src, nbytes, thread):
    if thread == 0:
        ptx_tma.store_bulk(pointer, src, nbytes, issuer="thread")


@triton.jit
def _add_bulk(pointer, src, nbytes, KIND: tl.constexpr, thread):
    if thread == 0:
        ptx_tma.reduce_bulk(pointer, src, nbytes, "add", KIND, issuer="thread")


def bulk_pieces(t: Trace, vector: Any, pointer: Any, nbytes: Any, name: str) -> list[tuple[Any, Any, Any]]:
    """(shared piece, pointer, bytes) of each copy between a shared vector and consecutive global memory."""
    t.require_explicit(name)
    t.require(f"{name} (cp.async.bulk)", *HOPPER_AND_BLACKWELL)
    if not isinstance(vector, shared) or len(vector.axes) != 1:
        have = repr(vector.spec) if isinstance(vector, shared) else repr(vector)
        raise TileError(f"{name}: moves bytes of a shared vector (sv), which lie one after the other, got {have}; tiles are swizzled: "
                        f"use load_async and store_async")
    if vector.stages is not None:
        raise TileError(f"{name} of a ring of {vector.spec!r}: take a slot first, ring[slot]")
    pointer = pointer.pointer if hasattr(pointer, "pointer") else pointer
    if not isinstance(pointer, tl.tensor) or not pointer.dtype.is_ptr():
        raise TileError(f"{name}: {unwrap(pointer)!r} is no pointer; pass a tensor to the kernel, or a global layout")
    nbytes = unwrap(nbytes)
    if nbytes is None:
        nbytes = vector.nbytes
    if isinstance(nbytes, int) and (not 0 < nbytes <= vector.nbytes or nbytes % BULK):
        raise TileError(f"{name}: {nbytes} bytes of {vector.spec!r}; must be a multiple of {BULK} (cp.async.bulk) up to its "
                        f"{vector.nbytes} bytes")
    if len(vector.pieces) > 1 and nbytes != vector.nbytes:
        raise TileError(f"{name}: {nbytes} bytes of {vector.spec!r}; a vector whose length is no power of two moves as a whole "
                        f"({vector.nbytes} bytes)")
    if len(vector.pieces) == 1:
        return [(vector.pieces[0], pointer, nbytes)]
    size, scale = itemsize(vector.dtype), itemsize(pointer.dtype.element_ty)
    places = zip(vector.pieces, _starts(vector.shape[0]), strict=True)
    return [(p, t.method(pointer, "__add__", start * size // scale), n * size) for p, (start, n) in places]


@op
def load_bytes_async(t: Trace, dst: Any, pointer: Any, arrived: Any, nbytes: Any = None) -> Any:
    """Start copying `nbytes` bytes (the whole vector if None) from `pointer` to a shared vector; they count on the semaphore `arrived`,
    which must expect them.

    `pointer` is a tensor argument plus an offset, or a global layout (its start), a multiple of 16 bytes; so is `nbytes`, also a run-time
    value. One thread of the role issues the copy. Source: PTX ISA, cp.async.bulk.
    """
    if not isinstance(arrived, semaphore):
        raise TileError(f"load_bytes_async(arrived={unwrap(arrived)!r}): needs a semaphore")
    for piece, source, count in bulk_pieces(t, dst, pointer, nbytes, "load_bytes_async"):
        t.call(_load_bulk, piece, source, t.scalar(count), arrived.barrier(t), role_thread(t))
        bill().copied += count if isinstance(count, int) else 0


@op
def store_bytes_async(t: Trace, pointer: Any, src: Any, nbytes: Any = None) -> Any:
    """Start copying `nbytes` bytes (the whole vector if None) of a shared vector to `pointer`, committed as a group: see
    `load_bytes_async`, `store_wait`.

    Written to by registers before? `fence_async` and `sync` first. Source: PTX ISA, cp.async.bulk.
    """
    for piece, target, count in bulk_pieces(t, src, pointer, nbytes, "store_bytes_async"):
        t.call(_store_bulk, target, piece, t.scalar(count), role_thread(t))
    t.call(ptx_tma.commit_group)


def bulk_sum_type(src: Any, name: str) -> tl.constexpr:
    """What PTX calls the numbers of a shared vector that a bulk copy adds."""
    if isinstance(src, shared) and src.dtype not in BULK_SUMS:
        raise TileError(f"{name} of {src.spec!r}: bulk copies add {names_of(BULK_SUMS)} only")
    return tl.constexpr(BULK_SUMS.get(src.dtype) if isinstance(src, shared) else None)


@op
def store_add_bytes_async(t: Trace, pointer: Any, src: Any, nbytes: Any = None) -> Any:
    """Start adding `nbytes` bytes (the whole vector if None) of a shared vector (fp32, bf16, fp16) to consecutive numbers from `pointer` on, one by one and
    atomically: as `store_bytes_async`.

    Source: PTX ISA, cp.reduce.async.bulk.
    """
    kind = bulk_sum_type(src, "store_add_bytes_async")
    for piece, target, count in bulk_pieces(t, src, pointer, nbytes, "store_add_bytes_async"):
        t.call(_add_bulk, target, piece, t.scalar(count), kind, role_thread(t))
    t.call(ptx_tma.commit_group)


@op
def store_wait(t: Trace, outstanding: Any = 0) -> Any:
    """Wait until at most `outstanding` stores of this role are incomplete: their data is in global memory."""
    t.require_explicit("store_wait")
    t.require("store_wait (cp.async.bulk.wait_group)", *HOPPER_AND_BLACKWELL)
    t.call(tma.store_wait, unwrap(outstanding), read_only=False)


@op
def store_read_wait(t: Trace, outstanding: Any = 0) -> Any:
    """Wait until at most `outstanding` stores still read their shared tiles, for the whole role: the others' memory may be overwritten."""
    t.require_explicit("store_read_wait")
    t.require("store_read_wait (cp.async.bulk.wait_group)", *HOPPER_AND_BLACKWELL)
    t.call(tma.store_wait, unwrap(outstanding), read_only=True)
    t.call(gl.barrier)  # one thread issued the stores and waits for them; the barrier lets the others know


@op
def fence_async(t: Trace) -> Any:
    """Make this role's writes to shared memory visible to TMA and the tensor cores (fence.proxy.async). Nothing on architectures before
    Hopper, where neither reads shared memory."""
    t.require_explicit("fence_async")
    if t.arch >= 90:
        t.call(hopper.fence_async_shared)


__all__ = [
    "fence_async", "gather_rows", "load", "load_async", "load_async_wait", "load_bytes_async", "load_into", "load_scalar", "prefetch", "scatter_rows",
    "split", "store", "store_add_async", "store_add_bytes_async", "store_async", "store_bytes_async", "store_max_async", "store_min_async",
    "store_read_wait", "store_wait", "sv",
]
