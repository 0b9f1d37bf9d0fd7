"""TMA loads that write into several blocks of a cluster at once.

Gluon's own multicast belongs to a model in which a cluster is one program, and Gluon does not give out the address of a descriptor. So the copies are issued
by the PTX shim, with the address of the kernel parameter that the descriptor is.
"""
from __future__ import annotations

import itertools
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
BASE_ROWS = 16  # of the base tile; a swizzle pattern, at whose beginning a slice must start, repeats after 8


@triton.jit
def _thread_of(thread, rank, BLOCK: tl.constexpr):
    """The number of a thread in its role, where the block is this one of the cluster: none issues copies in the others."""
    return tl.where(rank == BLOCK, thread, 1)


@triton.jit
def _issue(map, destination, bar, coordinates, mask, thread):
    if thread == 0:
        ptx_tma.load_tensor(destination, map, coordinates, bar, multicast=mask, issuer="thread")


def slices_of(tile: st, blocks: int, name: str) -> tuple[st, ...]:
    """The parts of a tile that `blocks` blocks load for all of them, one each: some of its columns where it is wider than its swizzle, else some of its rows,
    as equally as whole base tiles allow.

    Each part is one stretch of shared memory, and they follow each other. Raises `TileError` where the tile cannot be divided so.
    """
    if isinstance(tile, st) and (tile.contiguous or len(tile.pieces()) == 1):
        swizzle = tile.piece_swizzle(tile.cols)
        lines = tile.cols * itemsize(tile.dtype) // swizzle
        if not tile.contiguous and lines % blocks == 0:
            return (st(tile.dtype, tile.rows, tile.cols // blocks, swizzle),) * blocks
        if lines == 1 and tile.rows >= BASE_ROWS * blocks:
            ends = [BASE_ROWS * (tile.rows // BASE_ROWS * block // blocks) for block in range(blocks + 1)]
            return tuple(st(tile.dtype, end - start, tile.cols, swizzle) for start, end in itertools.pairwise(ends))
    raise TileError(f"{name}: {tile!r} cannot be loaded in {blocks} parts, one by each block of the cluster: its columns must be a multiple of {blocks} "
                    f"swizzle lines, or one line and its rows at least {BASE_ROWS * blocks}; its extents powers of two")


def load_slice(t: Trace, dst: shared, src: Any, coord: list[Any], numbers: list[list[int]], arrived: semaphore) -> None:
    """Load this block's part of a tile that all `dst.loaders` blocks of the cluster need into all of them; `numbers`: the descriptors of the parts' pieces."""
    parts = slices_of(dst.spec, dst.loaders, "load_async")
    rank, thread = t.call(ptx_cluster.ctarank), role_thread(t)
    tile = t.call(asm, "mov.b32 $0, $1;", "=r,r", [dst.pieces[0]], tl.int32)
    corner = list(coord)
    for axis, extent in ((-2, dst.spec.rows), (-1, dst.spec.cols)):
        corner[axis] = t.method(t.scalar(coord[axis]), "__mul__", extent)
    if len(set(parts)) == 1:
        part = parts[0]
        _load_part(t, dst, src, part, numbers[0], tile, corner, [t.method(rank, "__mul__", n) for n in _steps(dst.spec, part)], arrived, thread)
        return
    place = [0, 0, 0]
    for block, part in enumerate(parts):
        _load_part(t, dst, src, part, numbers[block], tile, corner, place, arrived, t.call(_thread_of, thread, rank, block))
        place = [place[0] + part.nbytes, place[1] + part.rows, 0]


def _steps(tile: st, part: st) -> tuple[int, int, int]:
    """From one part of a tile to the next: bytes, rows, columns."""
    return part.nbytes, part.rows if part.rows != tile.rows else 0, part.cols if part.cols != tile.cols else 0


def _load_part(t: Trace, dst: shared, src: Any, part: st, numbers: list[int], tile: Any, corner: list[Any], offset: list[Any], arrived: semaphore,
               thread: Any) -> None:  # fmt: skip
    """Load a part, `offset` (bytes, rows, columns) behind the beginning of the tile."""
    address = t.method(tile, "__add__", offset[0])
    first_row, column = (t.method(place, "__add__", o) for place, o in zip(corner[-2:], offset[1:], strict=True))
    mask = (1 << dst.loaders) - 1
    for number, (row, _, rows, cols) in zip(numbers, part.pieces(), strict=True):
        destination = t.method(address, "__add__", row * cols * itemsize(part.dtype))
        place = [*corner[:-2], t.method(first_row, "__add__", row), column]
        _boxes(t, rows, cols, part.piece_swizzle(cols), itemsize(part.dtype), destination, place, _parameter(t, src, number), arrived, mask, thread)


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
        _boxes(t, tall, width, swizzle, itemsize(dst.dtype), address, place, _parameter(t, src, order[id(m)]), arrived, mask, role_thread(t))


def _parameter(t: Trace, src: Any, number: int) -> Any:
    """The address of descriptor `number` of a global layout."""
    first = unwrap(getattr(src, "parameter", ()))
    if not isinstance(first, int):
        raise TileError("load_async to several blocks: the tensor must be an argument of the kernel, tk.gl(tensor, tile types)")
    return t.call(parameter_address, first + number * (1 + 2 * rank_of(src)))


def _boxes(t: Trace, rows: int, width: int, swizzle: int, size: int, address: Any, place: list[Any], source: Any, arrived: semaphore, mask: Any,
           thread: Any) -> None:  # fmt: skip
    """A tile wider than its swizzle lies in memory as blocks of columns, each of all its `rows`, and each is a copy."""
    step = swizzle // size if swizzle else width
    for block in range(width // step):
        destination = t.method(address, "__add__", block * rows * step * size)
        fastest = t.method(t.scalar(place[-1]), "__add__", block * step)
        coordinates = tl.tuple([fastest, *[t.scalar(p) for p in reversed(place[:-1])]])
        t.call(_issue, source, destination, arrived, coordinates, tl.constexpr(None) if mask is None else t.scalar(mask), thread)
