"""TMA loads that write into several blocks of a cluster at once.

Gluon's own multicast belongs to a model in which a cluster is one program, and Gluon does not give out the address of a descriptor. So the copies are issued
by the PTX shim, with the address of the kernel parameter that the descriptor is.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.inline_ptx.tensormap import parameter_address
from tritonkittens.lang._backend import Trace
from tritonkittens.lang.dtypes import itemsize
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.globals import rank_of
from tritonkittens.lang.shared import shared
from tritonkittens.lang.sync import role_thread, semaphore
from tritonkittens.lang.types import st, unwrap

MAX_ROWS = 256  # of one copy
ATOM_ROWS = 8  # a swizzle pattern repeats after so many rows: a slice of a tile must start at one


@triton.jit
def _issue(map, destination, bar, coordinates, mask, thread):
    if thread == 0:
        ptx_tma.load_tensor(destination, map, coordinates, bar, multicast=mask, issuer="thread")


def slice_of(tile: st, blocks: int, name: str) -> st:
    """The part of a tile that each of `blocks` blocks loads for all of them: some of its columns where it is wider than its swizzle, else some of its rows.

    Either way the part is one stretch of shared memory. Raises `TileError` where the tile cannot be divided so.
    """
    if isinstance(tile, st) and tile.contiguous and tile.rows % (16 * blocks) == 0:
        return st(tile.dtype, tile.rows // blocks, tile.cols, tile.piece_swizzle(tile.cols))
    if isinstance(tile, st) and len(tile.pieces()) == 1:
        lines = tile.cols * itemsize(tile.dtype) // tile.piece_swizzle(tile.cols)
        if lines % blocks == 0:
            return st(tile.dtype, tile.rows, tile.cols // blocks, tile.piece_swizzle(tile.cols))
        if lines == 1 and tile.rows % (blocks * ATOM_ROWS) == 0 and tile.rows // blocks % 16 == 0:
            return st(tile.dtype, tile.rows // blocks, tile.cols, tile.piece_swizzle(tile.cols))
    raise TileError(f"{name}: {tile!r} cannot be loaded in {blocks} equal parts, one by each block of the cluster: its columns must be a multiple of {blocks} "
                    f"swizzle lines, or one line and its rows a multiple of {16 * blocks}; its extents powers of two")


def load_slice(t: Trace, dst: shared, src: Any, coord: list[Any], numbers: list[int], arrived: semaphore) -> None:
    """Load this block's part of a tile that all `dst.loaders` blocks of the cluster need into all of them; `numbers`: the descriptors of its pieces."""
    part = slice_of(dst.spec, dst.loaders, "load_async")
    rank = t.call(ptx_cluster.ctarank)
    place = list(coord)
    for axis, extent in ((-2, part.rows), (-1, part.cols)):
        whole = dst.spec.rows if axis == -2 else dst.spec.cols
        start = t.method(t.scalar(coord[axis]), "__mul__", whole)
        if extent != whole:
            start = t.method(start, "__add__", t.method(rank, "__mul__", extent))
        place[axis] = start
    address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [dst.pieces[0]], tl.int32)
    address = t.method(address, "__add__", t.method(rank, "__mul__", part.nbytes))
    mask = (1 << dst.loaders) - 1
    for number, (row, _, rows, cols) in zip(numbers, part.pieces(), strict=True):
        destination = t.method(address, "__add__", row * cols * itemsize(part.dtype))
        corner = [*place[:-2], t.method(t.scalar(place[-2]), "__add__", row), place[-1]]
        _boxes(t, rows, cols, part.piece_swizzle(cols), itemsize(part.dtype), destination, corner, _parameter(t, src, number), arrived, mask)


def load_by_address(
    t: Trace, dst: shared, src: Any, copies: list[tuple[Any, list[Any], Any]], extents: list[tuple[int, ...]], arrived: semaphore, mask: Any,
) -> None:  # fmt: skip
    """Issue the copies (descriptor, element coordinates, view) of a tile whose pieces have these extents, into the blocks whose bit is set in `mask` (None:
    this one), on the same barrier of each."""
    order = {id(m): i for i, m in enumerate(src.maps)}
    for (m, place, _), piece, extent in zip(copies, dst.pieces, extents, strict=True):
        rows = extent[0] if len(dst.axes) == 2 else 1
        width = extent[-1]
        swizzle = piece.layout.swizzle_byte_width
        if rows > MAX_ROWS or (not swizzle and width > MAX_ROWS):
            raise TileError(f"load_async(multicast=…) of {dst.spec!r}: a piece of {rows} rows and {width} columns; one copy moves at most {MAX_ROWS} of each")
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)
        tall = int(unwrap(piece.type.alloc_shape[-2])) if len(dst.axes) == 2 else 1  # the rows of the tile that this is a view of
        _boxes(t, tall, width, swizzle, itemsize(dst.dtype), address, place, _parameter(t, src, order[id(m)]), arrived, mask)


def _parameter(t: Trace, src: Any, number: int) -> Any:
    """The address of descriptor `number` of a global layout."""
    first = unwrap(getattr(src, "parameter", ()))
    if not isinstance(first, int):
        raise TileError("load_async to several blocks: the tensor must be an argument of the kernel, tk.gl(tensor, tile types)")
    return t.call(parameter_address, first + number * (1 + 2 * rank_of(src)))


def _boxes(t: Trace, rows: int, width: int, swizzle: int, size: int, address: Any, place: list[Any], source: Any, arrived: semaphore, mask: Any) -> None:
    """A tile wider than its swizzle lies in memory as blocks of columns, each of all its `rows`, and each is a copy."""
    step = swizzle // size if swizzle else width
    for block in range(width // step):
        destination = t.method(address, "__add__", block * rows * step * size)
        fastest = t.method(t.scalar(place[-1]), "__add__", block * step)
        coordinates = tl.tuple([fastest, *[t.scalar(p) for p in reversed(place[:-1])]])
        t.call(_issue, source, destination, arrived, coordinates, tl.constexpr(None) if mask is None else t.scalar(mask), role_thread(t))
