"""Copies by TMA between global and shared memory: loads, stores, reductions, prefetches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import triton
import triton.language as tl

from tritonkittens.arch import WARP
from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import memory as ptx_memory
from tritonkittens.lang.core.backend import Trace, Traced, async_copy, gl, hopper, op, tma
from tritonkittens.lang.core.constants import BULK, unwrap
from tritonkittens.lang.core.dtypes import itemsize, names_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.memory.global_access import (
    _access,
    _base,
    _both,
    _coordinates,
    _frame,
    _load_into,
    _same_type,
    _start,
    _tile_pointers,
)
from tritonkittens.lang.memory.multicast import StoredPiece, load_by_address, load_slice, prefetch_boxes
from tritonkittens.lang.memory.scales import place_of_scales
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.register.construction import _column, _row, memory_layout
from tritonkittens.lang.sync.semaphores import semaphore
from tritonkittens.lang.types.global_layout import check_global, extents_of, is_even, rank_of, strides_of
from tritonkittens.lang.types.scales import scale_tile
from tritonkittens.lang.types.tiles import TileType, split, st
from tritonkittens.lang.types.varlen import check_sequence, dimensions, ragged_place, split_sequence

LINE = 128  # bytes of an L2 line
HALVED_AXIS = {"rows": -2, "cols": -1}  # by `shared.pair`
CP_ASYNC = 4  # bytes: smallest copy of cp.async
POLICIES = ("evict_first", "evict_last", "evict_normal")
# dtypes of TMA reductions to global memory. PTX ISA, cp.reduce.async.bulk.tensor; integers by their signed tensor-map
# types.
REDUCTIONS = {
    "add": (tl.float32, tl.bfloat16, tl.float16, tl.int32),
    "min": (tl.bfloat16, tl.float16, tl.int32, tl.int64),
    "max": (tl.bfloat16, tl.float16, tl.int32, tl.int64),
}


@op
def prefetch(t: Trace, src: Traced, what: Traced, coord: Traced) -> Traced:
    """Start fetching a tile or vector of a global layout into L2. sm_80 or newer.

    Args:
        src: a global layout.
        what: the type of the tile (`st`, `sv`, `rt`, `rv`).
        coord: the coordinates in tiles, one per dimension. Memory outside the tensor is not touched.

    Raises:
        TileError: for another type or coordinates that do not fit.

    A tile (`st`) with descriptors in the layout takes one TMA request for each copy of its load. Other types take one
    request for each 128-byte line of a row, or for each element where columns are not contiguous.
    Source: PTX ISA, cp.async.bulk.prefetch.tensor; prefetch.
    """
    t.require_explicit("prefetch")
    check_global(src, "prefetch")
    t.require_capability("prefetch", 80)
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
        tall = max(height, t.num_warps * WARP // min(WARP, requests))  # so that no two threads request the same line
        like = t.full((tall, requests), 0, tl.int32, memory_layout(t, tall, requests, BULK))
        first = _start(t, coord[-2], rows) if len(what.shape) == 2 else t.scalar(0)
        row, asked = t.call(
            _requested,
            t.arange(tall, 0, like),
            t.method(first, "__add__", r0),
            height,
            extents[-2] if len(what.shape) == 2 else 1,
            1,
        )
        col, wanted = t.call(
            _requested, t.arange(requests, 1, like), _start(t, coord[-1], cols), cols, extents[-1], step
        )
        mask = t.call(_both, t.call(_column, asked), t.call(_row, wanted))
        row_stride = strides[-2] if len(what.shape) == 2 else 0
        pointers = t.call(_tile_pointers, base, t.call(_column, row), t.call(_row, col), row_stride, strides[-1])
        t.call(ptx_memory.prefetch, pointers, "L2", mask if exists is None else t.call(_both, mask, exists))


@triton.jit
def _requested(number, first, length, extent, STEP: tl.constexpr):
    """Return (element, whether it is needed) of request `number` of a range of elements.

    Every `STEP`th element is requested, and the last one as well: a row that does not start a line reaches into one
    more.
    """
    there = tl.minimum(extent - first, length)
    wanted = number * STEP < there + STEP - 1
    return first + tl.minimum(number * STEP, there - 1), wanted & (first >= 0) & (there > 0)


def _prefetch_by_tma(t: Trace, src: Traced, what: st, coord: Traced) -> None:
    name = f"prefetch of {what!r}"
    pieces = what.pieces()
    places = _piece_places(t, src, coord, what.shape, [(row, col) for row, col, _, _ in pieces], name)
    for number, place, (_, _, rows, cols) in zip(_map_numbers(src, pieces, what, name), places, pieces, strict=True):
        stored = StoredPiece(rows, cols, what.piece_swizzle(cols), itemsize(what.dtype))
        prefetch_boxes(t, stored, place, src, number)


def _starts(extent: int) -> list[tuple[int, int]]:
    """Return (start, length) of the power-of-two pieces of an extent."""
    return [(sum(split(extent)[:i]), n) for i, n in enumerate(split(extent))]


def _extents(tile: shared) -> list[tuple[int, ...]]:
    """Return the extents of each piece of a shared tile or vector."""
    return list(itertools.product(*tile.axes))


def _tma_maps(t: Trace, g: Traced, tile: shared, what: str) -> list[Traced]:
    """Return the descriptor of each piece of a shared tile."""
    maps = {}
    for m in g.maps:
        block = tuple(int(unwrap(s)) for s in m.block_shape)
        maps[block, m.layout.swizzle_byte_width] = m
    found, lead = [], (1,) * (rank_of(g) - len(tile.axes))
    for extents, piece in zip(_extents(tile), tile.pieces, strict=True):
        key = (*lead, *extents), piece.layout.swizzle_byte_width
        if key not in maps:
            have = (
                ", ".join(f"{'×'.join(map(str, b))} (swizzle {s})" for b, s in maps)
                or "none: pass tk.gl(tensor, tile types)"
            )
            raise TileError(
                f"{what} of {tile.spec!r}: the global layout has no descriptor for its {'×'.join(map(str, key[0]))} "
                f"piece (swizzle {key[1]}); it has {have}"
            )
        found.append(maps[key])
    return found


def _tma_copies(
    t: Trace, g: Traced, tile: shared, coord: Traced, what: str
) -> list[tuple[Traced, list[Traced], Traced]]:
    """Return (descriptor, element coordinates, shared piece) of each copy of a shared tile."""
    t.require(f"{what} (TMA)", "tma")
    if tile.stages is not None:
        raise TileError(f"{what} of a ring of {tile.spec!r}: take a slot first, ring[slot]")
    check_global(g, what)
    if isinstance(tile.spec, scale_tile):
        tile, coord = tile._with(pieces=tile.pieces[:1]), place_of_scales(coord)
    starts = [[sum(a[:i]) for i in range(len(a))] for a in tile.axes]
    places = _piece_places(t, g, coord, tile.shape, list(itertools.product(*starts)), what)
    return list(zip(_tma_maps(t, g, tile, what), places, tile.pieces, strict=True))


def _piece_places(
    t: Trace, g: Traced, coord: Traced, shape: tuple[int, ...], offsets: Sequence[tuple[int, ...]], what: str
) -> list[list[Traced]]:
    """Return the element coordinates of each piece of a tile of this shape, from the tile's coordinates and its
    pieces' offsets.
    """
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


def _map_numbers(g: Traced, pieces: Sequence[tuple[int, int, int, int]], tile: st, what: str) -> list[int]:
    """Return the numbers of the descriptors for these pieces (row, column, rows, columns) of a tile."""
    numbers = {
        (tuple(int(unwrap(s)) for s in m.block_shape), m.layout.swizzle_byte_width): number
        for number, m in enumerate(g.maps)
    }
    wanted = [((1,) * (rank_of(g) - 2) + (rows, cols), tile.piece_swizzle(cols)) for _, _, rows, cols in pieces]
    if any(w not in numbers for w in wanted):
        raise TileError(f"{what}: the global layout has no descriptor for {tile!r}")
    return [numbers[w] for w in wanted]


def _maps_of_parts(g: Traced, tile: shared) -> Callable[[st], list[int]]:
    """Return a function from a CTA's part of a cluster-loaded tile to the descriptor numbers of its pieces."""
    return lambda part: _map_numbers(g, part.pieces(), part, f"load_async of {tile.spec!r} by {tile.loaders} blocks")


def _policy(cache_policy: Traced, name: str) -> Traced:
    cache_policy = unwrap(cache_policy)
    if cache_policy is None:
        return None
    if cache_policy not in POLICIES:
        raise TileError(f"{name}(cache_policy={cache_policy!r}): must be one of {', '.join(map(repr, POLICIES))}")
    return hopper.CachePolicy(l2=hopper.FractionalEvictionPolicy(cache_policy, 1.0))


@op
def load_async(
    t: Trace,
    dst: Traced,
    src: Traced,
    coord: Traced,
    arrived: Traced = None,
    cache_policy: Traced = None,
    multicast: Traced = None,
) -> Traced:
    """Start copying a tile from global to shared memory, without waiting.

    Args:
        dst: a shared tile or vector, not a ring.
        src: a global layout of the same dtype.
        coord: the coordinates in tiles, one per dimension. Elements outside the tensor are read as 0, or as the `fill`
            of its `gl`.
        arrived: the semaphore on which the TMA copy completes. It must `expect` the bytes. With None the role's
            threads copy by cp.async; wait with `load_async_wait`. Dtypes below 4 bytes then need contiguous columns,
            a multiple of 16 bytes; otherwise the copy runs through registers.
        cache_policy: the L2 policy, "evict_first", "evict_last" or "evict_normal" (TMA only).
        multicast: an int32 mask with one bit per cluster rank (`cluster_size=` at launch). The tile is written to the
            same place in each of those CTAs, and completes on the same semaphore of each, which must expect its
            bytes.

    Raises:
        TileError: for a layout without a descriptor for the tile, or arguments that do not fit.

    All CTAs of a cluster together load a ring tile that a template's layout names in `multicast`, a part each.

    Example::

        tk.producer_commit(pipe, state, a)
        tk.load_async(a[state.index], A, (row, i), pipe.full[state.index])

    Source: PTX ISA, cp.async.bulk.tensor; cp.async.
    """
    if not isinstance(dst, shared):
        raise TileError(f"load_async: the destination must be a shared tile or vector, got {dst!r}")
    policy = _policy(cache_policy, "load_async")
    if arrived is None or unwrap(arrived) is None:
        if policy is not None:
            raise TileError(
                f"load_async(cache_policy={unwrap(cache_policy)!r}) without a semaphore: cp.async has no cache policy "
                "here; give a semaphore"
            )
        return _cp_async(t, dst, src, coord)
    if not isinstance(arrived, semaphore):
        raise TileError(f"load_async(arrived={unwrap(arrived)!r}): needs a semaphore")
    bill().copied += dst.nbytes
    _check_multicast(dst, multicast)
    if dst.loaders > 1:
        check_global(src, "load_async")
        place = _coordinates(t, src, coord, "load_async")
        return load_slice(t, dst, src, place, _maps_of_parts(src, dst), arrived, cache_policy)
    if dst.pair in HALVED_AXIS:
        coord = _half_of_pair(t, coord, HALVED_AXIS[dst.pair])
    copies = _tma_copies(t, src, dst, coord, "load_async")
    if dst.together or dst.alone or dst.pair or unwrap(multicast) is not None:
        return load_by_address(t, dst, src, copies, _extents(dst), arrived, multicast, cache_policy)
    for m, place, view in copies:
        t.call(tma.async_load, m, place, arrived.barrier(t), view, cache_policy=policy)
    return None


def _half_of_pair(t: Trace, coord: Traced, axis: int) -> Traced:
    """Return the coordinates of this CTA's half of a tile that a pair shares, in halves along `axis`."""
    places = list(coord)
    places[axis] = t.method(t.method(t.scalar(places[axis]), "__mul__", 2), "__add__", t.call(ptx_cluster.ctarank))
    return tl.tuple(places)


def _check_multicast(dst: shared, multicast: Traced) -> None:
    if unwrap(multicast) is None:
        return
    if dst.loaders > 1:
        raise TileError(
            f"load_async of {dst.spec!r}, which all blocks of the cluster load together: takes no multicast"
        )
    if dst.together:
        raise TileError(f"load_async of {dst.spec!r}: a contiguous tile takes no multicast")


def _cp_async(t: Trace, dst: shared, src: Traced, coord: Traced) -> None:
    t.require_explicit("load_async")
    t.require_capability("load_async without a semaphore (cp.async)", 80)
    what = f"load_async of {dst.spec!r} without a semaphore"
    check_global(src, "load_async")
    coord = _coordinates(t, src, coord, "load_async")
    _same_type(src, dst.dtype, what)
    if len(dst.axes) != 2 or rank_of(src) < 2:
        raise TileError(
            f"{what}: cp.async moves tiles of tensors of two or more dimensions; use load_into or TMA for vectors"
        )
    if is_even(src) or itemsize(dst.dtype) >= CP_ASYNC:
        for piece, (pointers, mask) in zip(dst.pieces, _access(t, src, _frame(t, dst), coord), strict=True):
            t.call(async_copy.async_load, piece, pointers, mask=mask)
    else:  # an edge may cut the smallest copy, so the tile passes through registers
        _load_into(t, dst, src, coord, 0, what)
    t.call(async_copy.commit_group)


@op
def load_async_wait(t: Trace, outstanding: Traced = 0) -> None:
    """Wait until at most `outstanding` of the role's cp.async tiles are in flight, then synchronise the role's
    threads.

    `outstanding` is a compile-time integer. Source: PTX ISA, cp.async.wait_group.
    """
    t.require_explicit("load_async_wait")
    t.require_capability("load_async_wait (cp.async)", 80)
    t.call(async_copy.wait_group, unwrap(outstanding))
    t.call(gl.barrier)


def _store_tma(
    t: Trace, what: str, fn: Callable[..., Traced], dst: Traced, src: Traced, coord: Traced, **options: Traced
) -> None:
    if not isinstance(src, shared):
        raise TileError(f"{what}: the source must be a shared tile or vector, got {src!r}; tk.store writes registers")
    if src.together:
        raise TileError(f"{what} of {src.spec!r}: a contiguous tile is filled by TMA and read by products only")
    for m, place, view in _tma_copies(t, dst, src, coord, what):
        t.call(fn, m, place, view, **options)
        bill().stored += 1
    bill().stored_bytes += src.nbytes


@op
def store_async(t: Trace, dst: Traced, src: Traced, coord: Traced, cache_policy: Traced = None) -> None:
    """Start copying a shared tile to global memory by TMA, committed as a group. Elements outside the tensor are
    skipped.

    Args:
        dst: a global layout of the same dtype, with a descriptor for the tile.
        src: a shared tile or vector. If registers wrote it, call `fence_async` first.
        coord: the coordinates in tiles, one per dimension.
        cache_policy: the L2 policy, as in `load_async`.

    Raises:
        TileError: for a layout without a descriptor for the tile, or a ring.

    Wait with `store_wait` or `store_read_wait`. TMA writes whole 16-byte pieces. If the innermost extent is no
    multiple of 16 bytes, the store overwrites memory between the row's end and the next row. Loads end exactly.
    Source: PTX ISA, cp.async.bulk.tensor.
    """
    _store_tma(t, "store_async", tma.async_store, dst, src, coord, cache_policy=_policy(cache_policy, "store_async"))


def _reduce_tma(t: Trace, kind: str, fn: Callable[..., Traced], dst: Traced, src: Traced, coord: Traced) -> None:
    if isinstance(src, shared) and src.dtype not in REDUCTIONS[kind]:
        raise TileError(
            f"store_{kind}_async of {src.spec!r}: TMA takes the {kind} of {names_of(REDUCTIONS[kind])} only"
        )
    _store_tma(t, f"store_{kind}_async", fn, dst, src, coord)


@op
def store_add_async(t: Trace, dst: Traced, src: Traced, coord: Traced) -> None:
    """Start adding a shared tile (fp32, bf16, fp16, int32) to global memory, element by element and atomically.

    Arguments, errors and waits as in `store_async`. Source: PTX ISA, cp.reduce.async.bulk.tensor.
    """
    _reduce_tma(t, "add", tma.async_atomic_add, dst, src, coord)


@op
def store_min_async(t: Trace, dst: Traced, src: Traced, coord: Traced) -> None:
    """Start the element-wise minimum of global memory and a shared tile (bf16, fp16, int32, int64), atomically.

    Arguments, errors and waits as in `store_async`. Source: PTX ISA, cp.reduce.async.bulk.tensor.
    """
    _reduce_tma(t, "min", tma.async_atomic_min, dst, src, coord)


@op
def store_max_async(t: Trace, dst: Traced, src: Traced, coord: Traced) -> None:
    """Start the element-wise maximum of global memory and a shared tile (bf16, fp16, int32, int64), atomically.

    Arguments, errors and waits as in `store_async`. Source: PTX ISA, cp.reduce.async.bulk.tensor.
    """
    _reduce_tma(t, "max", tma.async_atomic_max, dst, src, coord)


@op
def store_wait(t: Trace, outstanding: Traced = 0) -> None:
    """Wait until at most `outstanding` stores of this role are incomplete. The data of the others is in global
    memory.

    `outstanding` is a compile-time integer. Source: PTX ISA, cp.async.bulk.wait_group.
    """
    t.require_explicit("store_wait")
    t.require("store_wait (cp.async.bulk.wait_group)", "tma")
    t.call(tma.store_wait, unwrap(outstanding), read_only=False)


@op
def store_read_wait(t: Trace, outstanding: Traced = 0) -> None:
    """Wait, for the whole role, until at most `outstanding` stores still read their shared tiles. The other tiles may
    be overwritten.

    `outstanding` is a compile-time integer. Source: PTX ISA, cp.async.bulk.wait_group.read.
    """
    t.require_explicit("store_read_wait")
    t.require("store_read_wait (cp.async.bulk.wait_group)", "tma")
    t.call(tma.store_wait, unwrap(outstanding), read_only=True)
    t.call(gl.barrier)  # only the thread that issued the stores waits for them; the barrier holds the others


@op
def fence_async(t: Trace) -> None:
    """Make this role's writes to shared memory visible to TMA and the tensor cores.

    Call it between `store` and `store_async`, or a matrix product. docs/concepts/pipelines.md says where `sync` must
    follow.
    Before Hopper it does nothing: neither reads shared memory there. Source: PTX ISA, fence.proxy.async.
    """
    t.require_explicit("fence_async")
    if t.chip.tma:
        t.call(hopper.fence_async_shared)
