"""Moving tiles: registers ↔ global memory, registers ↔ shared memory, cp.async, and TMA between global and shared memory.

Coordinates are in units of the tile that moves, one per dimension of the tensor; leading dimensions (batch, depth) count single steps. One name serves
every depth: `load`, `store`, `load_async`, `store_async` look at where their operands live.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang._backend import Trace, async_copy, gl, hopper, op, tma
from tritonkittens.lang.budget import bill
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.globals import check_global, extents_of, rank_of, strides_of
from tritonkittens.lang.shared import load_shared, shared, store_shared
from tritonkittens.lang.sync import semaphore
from tritonkittens.lang.tensor_memory import load_tensor_memory, store_tensor_memory, tensor_tile
from tritonkittens.lang.tiles import _column, _row, indices, make, memory_layout
from tritonkittens.lang.types import rt, split, st, sv, unwrap
from tritonkittens.lang.values import assemble, axes_of, pieces_of, shape_of


@triton.jit
def _tile_pointers(pointer, rows, cols, row_stride, col_stride):
    return pointer + rows.to(tl.int64) * row_stride + cols.to(tl.int64) * col_stride


@triton.jit
def _inside(rows, cols, row_extent, col_extent):
    return (rows < row_extent) & (cols < col_extent) & (rows >= 0) & (cols >= 0)


def _coordinates(t: Trace, g: Any, coord: Any, what: str) -> list[Any]:
    coord = unwrap(coord)
    coord = list(coord) if isinstance(coord, (tuple, list, tl.tuple)) else [coord]
    if len(coord) != rank_of(g):
        raise TileError(f"{what}: {len(coord)} coordinates for a tensor of {rank_of(g)} dimensions; give one per dimension, in tiles")
    return coord


def _base(t: Trace, g: Any, coord: list[Any]) -> Any:
    """Pointer to the two-dimensional slice that the leading coordinates select."""
    pointer = g.pointer
    for c, stride in zip(coord[:-2], strides_of(g)[:-2], strict=True):
        step = t.method(t.method(t.scalar(c), "to", tl.int64), "__mul__", stride)
        pointer = t.method(pointer, "__add__", step)
    return pointer


def _access(t: Trace, g: Any, tile: Any, coord: list[Any]) -> list[tuple[Any, Any]]:
    """For every piece of a register tile its pointers into the tensor and the mask of what lies inside it."""
    shape, extents, strides = shape_of(tile), extents_of(g), strides_of(g)
    base = _base(t, g, coord)
    row = t.method(t.scalar(coord[-2]), "__mul__", shape[0])
    col = t.method(t.scalar(coord[-1]), "__mul__", shape[1])
    out = []
    for r, c in zip(indices(t, tile, 0, row), indices(t, tile, 1, col), strict=True):
        rows, cols = t.call(_column, r), t.call(_row, c)
        out.append((t.call(_tile_pointers, base, rows, cols, strides[-2], strides[-1]), t.call(_inside, rows, cols, extents[-2], extents[-1])))
    return out


def _load_global(t: Trace, g: Any, coord: Any, what: Any, fill: Any) -> Any:
    what = unwrap(what)
    if not isinstance(what, (rt, st)):
        raise TileError(f"load from global memory: give the tile type to load, got {what!r}")
    spec = rt(what.dtype, what.rows, what.cols, getattr(what, "layout", "memory"))
    if g.pointer.dtype.element_ty != spec.dtype:
        raise TileError(f"load of {spec!r} from a tensor of {g.pointer.dtype.element_ty}: element types differ; cast after loading")
    frame = make(t, rt(tl.int32, spec.rows, spec.cols, spec.layout) if spec.dtype.primitive_bitwidth >= 16 else spec, 0)
    coord = _coordinates(t, g, coord, f"load of {spec!r}")
    loader = gl.load if t.explicit else "load"
    pieces = [t.method(t.call(loader, p, mask, fill), "to", spec.dtype) for p, mask in _access(t, g, frame, coord)]
    return assemble(axes_of(frame), pieces)


@op
def load(t: Trace, src: Any, what: Any = None, coord: Any = None, fill: Any = 0.0, layout: Any = "mma", like: Any = None) -> Any:
    """A register tile from where it lives.

    - shared tile or vector: `tk.load(tile)`; `layout` ("mma", "row", "memory") or `like` (another register tile) says how registers hold it;
    - tensor memory: `tk.load(tt)`; a register tile comes back as it is, so that an accumulator is read the same way on every architecture;
    - global layout: `tk.load(g, tk.rt(tk.bf16, 64, 96), (r, c), fill=0)`, masked at the edges of the tensor, elements outside read `fill`.
    """
    if isinstance(src, shared):
        return load_shared(t, src, unwrap(layout), unwrap(like))
    if isinstance(src, tensor_tile):
        return load_tensor_memory(t, src)
    if axes_of(src):
        return src
    check_global(src, "load")
    return _load_global(t, src, coord, what, unwrap(fill))


@op
def store(t: Trace, dst: Any, value: Any, coord: Any = None) -> Any:
    """Store a register tile: to a shared tile or vector, to tensor memory, or to a global layout at `coord` (elements outside are not written).

    The tile is converted to the destination's element type. After a store to shared memory that TMA or a tensor core will read, call `fence_async`.
    """
    if isinstance(dst, shared):
        return store_shared(t, dst, value)
    if isinstance(dst, tensor_tile):
        return store_tensor_memory(t, dst, value)
    check_global(dst, "store")
    coord = _coordinates(t, dst, coord, f"store of a tile of shape {list(shape_of(value))}")
    storer = gl.store if t.explicit else "store"
    for v, (pointers, mask) in zip(pieces_of(value), _access(t, dst, value, coord), strict=True):
        t.call(storer, pointers, t.method(v, "to", dst.pointer.dtype.element_ty), mask)
    return None


def _tma_maps(t: Trace, g: Any, tile: shared, what: str) -> list[Any]:
    """The descriptor for each piece of a shared tile."""
    maps = {}
    for m in g.maps:
        block = tuple(int(unwrap(s)) for s in m.block_shape)
        maps[block, m.layout.swizzle_byte_width] = m
    found, lead = [], (1,) * (rank_of(g) - len(tile.axes))
    for piece in tile.pieces:
        key = (*lead, *(int(unwrap(s)) for s in piece.shape)), piece.layout.swizzle_byte_width
        if key not in maps:
            have = ", ".join(f"{'×'.join(map(str, b))} (swizzle {s})" for b, s in maps) or "none: pass tk.gl(tensor, tile types)"
            raise TileError(f"{what} of {tile.spec!r}: the global layout has no descriptor for its {'×'.join(map(str, key[0]))} piece "
                            f"(swizzle {key[1]}); it has {have}")
        found.append(maps[key])
    return found


def _tma_copies(t: Trace, g: Any, tile: shared, coord: Any, what: str) -> list[tuple[Any, list[Any], Any]]:
    """(descriptor, element coordinates, shared view) of each copy that moves a shared tile."""
    t.require(f"{what} (TMA)", 90, 119, "sm_90a (Hopper), sm_100a or sm_103a (Blackwell data centre)")
    if tile.stages is not None:
        raise TileError(f"{what} of a ring of {tile.spec!r}: take a slot first, ring[slot]")
    check_global(g, what)
    maps, coord = _tma_maps(t, g, tile, what), _coordinates(t, g, coord, what)
    starts = [[sum(a[:i]) for i in range(len(a))] for a in tile.axes]
    offsets = [(r, c) for r in starts[0] for c in starts[1]] if len(starts) == 2 else [(c,) for c in starts[0]]
    lead = len(coord) - len(tile.axes)
    out = []
    for m, piece, offset in zip(maps, tile.pieces, offsets, strict=True):
        place = list(coord[:lead])
        for c, extent, start in zip(coord[lead:], tile.shape, offset, strict=True):
            element = c * extent if isinstance(c, int) else t.method(c, "__mul__", extent)
            place.append(element + start if isinstance(element, int) else t.method(element, "__add__", start))
        view = t.call(piece.reshape, [1] * lead + [int(unwrap(s)) for s in piece.shape]) if lead else piece
        out.append((m, [tl.constexpr(p) if isinstance(p, int) else p for p in place], view))
    return out


@op
def load_async(t: Trace, dst: Any, src: Any, coord: Any, arrived: Any = None, cache_policy: Any = None) -> Any:
    """Start copying a tile from global to shared memory, without waiting.

    With a `semaphore` the copy is TMA: it completes on `arrived`, which must expect its bytes (`expect`). Without one it is cp.async by all threads of
    the role: `load_async_wait` waits for it. Coordinates in tiles, one per dimension. Source: PTX ISA, cp.async.bulk.tensor; cp.async.
    """
    if not isinstance(dst, shared):
        raise TileError(f"load_async: the destination must be a shared tile or vector, got {dst!r}")
    if arrived is None or unwrap(arrived) is None:
        return _cp_async(t, dst, src, coord)
    if not isinstance(arrived, semaphore):
        raise TileError(f"load_async(arrived={arrived!r}): needs a semaphore")
    for m, place, view in _tma_copies(t, src, dst, coord, "load_async"):
        t.call(tma.async_load, m, place, arrived.barrier(t), view, cache_policy=unwrap(cache_policy))
    bill().copied += dst.nbytes
    return None


def _cp_async(t: Trace, dst: shared, src: Any, coord: Any) -> None:
    t.require("load_async without a semaphore (cp.async)", 80, 999, "sm_80 or newer")
    check_global(src, "load_async")
    coord = _coordinates(t, src, coord, "load_async")
    if len(dst.axes) != 2:
        raise TileError(f"load_async of {dst.spec!r} without a semaphore: cp.async moves tiles; use TMA for vectors")
    size = dst.dtype.primitive_bitwidth // 8
    pieces = [t.full((r, c), 0, tl.int32, memory_layout(t, r, c, size)) for r in dst.axes[0] for c in dst.axes[1]]
    frame = assemble(dst.axes, pieces)
    for piece, (pointers, mask) in zip(dst.pieces, _access(t, src, frame, coord), strict=True):
        t.call(async_copy.async_load, piece, pointers, mask=mask)
    t.call(async_copy.commit_group)


@op
def load_async_wait(t: Trace, outstanding: Any = 0) -> Any:
    """Wait until at most `outstanding` of the role's cp.async tiles are under way, then synchronise the role's threads."""
    t.require_explicit("load_async_wait")
    t.call(async_copy.wait_group, unwrap(outstanding))
    t.call(gl.barrier)


def _store_tma(t: Trace, what: str, fn: Any, dst: Any, src: Any, coord: Any, **options: Any) -> None:
    if not isinstance(src, shared):
        raise TileError(f"{what}: the source must be a shared tile or vector, got {src!r}; tk.store writes registers")
    for m, place, view in _tma_copies(t, dst, src, coord, what):
        t.call(fn, m, place, view, **options)


@op
def store_async(t: Trace, dst: Any, src: Any, coord: Any, cache_policy: Any = None) -> Any:
    """Start copying a shared tile to global memory by TMA (committed as a group); elements outside the tensor are not written.

    Written to by registers before? `fence_async` first. Wait with `store_wait` or `store_read_wait`. Source: PTX ISA, cp.async.bulk.tensor.
    """
    _store_tma(t, "store_async", tma.async_store, dst, src, coord, cache_policy=unwrap(cache_policy))


@op
def store_add_async(t: Trace, dst: Any, src: Any, coord: Any) -> Any:
    """Start adding a shared tile to global memory, element by element and atomically. Source: PTX ISA, cp.reduce.async.bulk.tensor."""
    _store_tma(t, "store_add_async", tma.async_atomic_add, dst, src, coord)


@op
def store_min_async(t: Trace, dst: Any, src: Any, coord: Any) -> Any:
    """Start taking the element-wise minimum of global memory and a shared tile (atomic)."""
    _store_tma(t, "store_min_async", tma.async_atomic_min, dst, src, coord)


@op
def store_max_async(t: Trace, dst: Any, src: Any, coord: Any) -> Any:
    """Start taking the element-wise maximum of global memory and a shared tile (atomic)."""
    _store_tma(t, "store_max_async", tma.async_atomic_max, dst, src, coord)


@op
def store_wait(t: Trace, outstanding: Any = 0) -> Any:
    """Wait until at most `outstanding` stores of this role are incomplete: their data is in global memory."""
    t.require_explicit("store_wait")
    t.call(tma.store_wait, unwrap(outstanding), read_only=False)


@op
def store_read_wait(t: Trace, outstanding: Any = 0) -> Any:
    """Wait until at most `outstanding` stores still read their shared tiles, for the whole role: the others' memory may be overwritten."""
    t.require_explicit("store_read_wait")
    t.call(tma.store_wait, unwrap(outstanding), read_only=True)
    t.call(gl.barrier)  # one thread issued the stores and waits for them; the barrier lets the others know


@op
def fence_async(t: Trace) -> Any:
    """Make this role's writes to shared memory visible to TMA and the tensor cores (fence.proxy.async)."""
    t.require_explicit("fence_async")
    t.call(hopper.fence_async_shared)


__all__ = ["fence_async", "load", "load_async", "load_async_wait", "split", "store", "store_add_async", "store_async", "store_max_async", "store_min_async",
           "store_read_wait", "store_wait", "sv"]
