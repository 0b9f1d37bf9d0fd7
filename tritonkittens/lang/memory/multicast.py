"""TMA loads that write into several blocks of a cluster at once, or, prefetched, into none, and those around which the compiler shall put no barriers.

Gluon's own multicast belongs to a model in which a cluster is one program, it has no prefetch, and does not give out the address of a descriptor. So the copies
are issued by the PTX shim, with the address of the kernel parameter that the descriptor is.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import triton
import triton.language as tl

from tritonkittens.inline_ptx import cluster as ptx_cluster
from tritonkittens.inline_ptx import tma as ptx_tma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.inline_ptx.tensormap import parameter_address
from tritonkittens.lang.core.backend import Trace, Traced
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import itemsize
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.sync.semaphores import role_thread, semaphore
from tritonkittens.lang.types.global_layout import rank_of
from tritonkittens.lang.types.tiles import st

MAX_ROWS = 256  # of one copy
BASE_ROWS = 16  # of the base tile; a swizzle pattern, at whose beginning a slice must start, repeats after 8


@triton.jit
def _thread_of(thread, rank, BLOCK: tl.constexpr):
    """The number of a thread in its role, where the block is this one of the cluster: none issues copies in the others."""
    return tl.where(rank == BLOCK, thread, 1)


@triton.jit
def _thread_below(thread, rank, BLOCKS: tl.constexpr):
    """The number of a thread in its role, where the block is one of the first of the cluster."""
    return tl.where(rank < BLOCKS, thread, 1)


@triton.jit
def _place_of(rank, NBYTES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DOWN: tl.constexpr):
    """Where the part of a block lies in its stretch: bytes, rows, columns. `DOWN` parts, line by line, have the same columns."""
    return rank * NBYTES, rank % DOWN * ROWS, rank // DOWN * COLS


@triton.jit
def _issue(map, destination, bar, coordinates, mask, POLICY: tl.constexpr, thread):
    if thread == 0:
        hint = None if POLICY is None else ptx_tma.create_policy(POLICY)
        ptx_tma.load_tensor(destination, map, coordinates, bar, multicast=mask, cache_hint=hint, issuer="thread")


@triton.jit
def _issue_alone(map, destination, bar, coordinates, POLICY: tl.constexpr):
    hint = None if POLICY is None else ptx_tma.create_policy(POLICY)
    ptx_tma.load_tensor(destination, map, coordinates, bar, cache_hint=hint, issuer="first")


def slices_of(tile: st, blocks: int, name: str) -> tuple[tuple[st, ...], ...]:
    """For each stretch of shared memory of a tile the parts that `blocks` blocks load for all of them, one each; the last blocks none where there are fewer.

    A part is one stretch itself, and they follow each other: swizzle lines of columns where there are as many, else some rows of a line, as equally as whole
    base tiles allow. Of a contiguous tile as it lies on Hopper. Raises `TileError` for a vector.
    """
    if not isinstance(tile, st):
        raise TileError(f"{name}: {tile!r} cannot be loaded in {blocks} parts, one by each block of the cluster: only tiles have such parts")
    return tuple(_parts(stretch, blocks) for _, _, stretch in _stretches(tile, together=True))


def _stretches(tile: st, together: bool) -> list[tuple[int, int, st]]:
    """What lies together in shared memory and a block has a part of, a contiguous tile of one line or each piece: (first row, first column, tile).
    `together`: does a contiguous tile's memory hold its pieces one behind the other?"""
    if tile.contiguous and together and tile.rows_in_pieces:
        return [(0, 0, tile)]
    return [(row, col, st(tile.dtype, rows, cols, tile.piece_swizzle(cols))) for row, col, rows, cols in tile.pieces()]


def _parts(stretch: st, blocks: int) -> tuple[st, ...]:
    swizzle = stretch.piece_swizzle(stretch.cols)
    lines, units = stretch.cols * itemsize(stretch.dtype) // swizzle, stretch.rows // BASE_ROWS
    if lines >= blocks:  # both are powers of two; a line lies in memory with all its rows
        return (st(stretch.dtype, stretch.rows, stretch.cols // blocks, swizzle),) * blocks
    down = min(blocks // lines, units)
    ends = [BASE_ROWS * (units * part // down) for part in range(down + 1)]
    return tuple(st(stretch.dtype, end - start, stretch.cols // lines, swizzle) for start, end in itertools.pairwise(ends)) * lines


def load_slice(t: Trace, dst: shared, src: Traced, coord: list[Traced], maps_of: Callable[[st], list[int]], arrived: semaphore, policy: Traced) -> None:
    """Load this block's part of a tile that all `dst.loaders` blocks of the cluster need into all of them; `maps_of` gives the numbers of the descriptors of a
    part's pieces. `policy`: of L2 for these lines, or None."""
    rank, thread = t.call(ptx_cluster.ctarank), role_thread(t)
    for (row, col, stretch), piece in zip(_stretches(dst.spec, dst.together), dst.pieces):  # a contiguous tile begins with its first piece
        parts = _parts(stretch, dst.loaders)
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)
        corner = list(coord)
        for axis, extent, offset in ((-2, dst.spec.rows, row), (-1, dst.spec.cols, col)):
            corner[axis] = t.method(t.method(t.scalar(coord[axis]), "__mul__", extent), "__add__", offset)
        if len(set(parts)) == 1:
            place = t.call(_place_of, rank, parts[0].nbytes, parts[0].rows, parts[0].cols, stretch.rows // parts[0].rows)
            loader = thread if len(parts) == dst.loaders else t.call(_thread_below, thread, rank, len(parts))
            _load_part(t, dst, src, parts[0], maps_of(parts[0]), address, corner, list(place), arrived, policy, loader)
            continue
        place = [0, 0, 0]
        for block, part in enumerate(parts):
            _load_part(t, dst, src, part, maps_of(part), address, corner, place, arrived, policy, t.call(_thread_of, thread, rank, block))
            place = [place[0] + part.nbytes, place[1] + part.rows, 0]


def _load_part(t: Trace, dst: shared, src: Traced, part: st, numbers: list[int], stretch: Traced, corner: list[Traced], offset: list[Traced],
               arrived: semaphore, policy: Traced, thread: Traced) -> None:  # fmt: skip
    """Load a part, `offset` (bytes, rows, columns) behind the beginning of its stretch."""
    address = t.method(stretch, "__add__", offset[0])
    first_row, column = (t.method(place, "__add__", o) for place, o in zip(corner[-2:], offset[1:], strict=True))
    mask = (1 << dst.loaders) - 1
    for number, (row, _, rows, cols) in zip(numbers, part.pieces(), strict=True):
        destination = t.method(address, "__add__", row * cols * itemsize(part.dtype))
        place = [*corner[:-2], t.method(first_row, "__add__", row), column]
        _boxes(t, rows, cols, part.piece_swizzle(cols), itemsize(part.dtype), destination, place, _parameter(t, src, number), arrived, mask, policy, thread)


def load_by_address(
    t: Trace, dst: shared, src: Traced, copies: list[tuple[Traced, list[Traced], Traced]], extents: list[tuple[int, ...]], arrived: semaphore, mask: Traced,
    policy: Traced,
) -> None:  # fmt: skip
    """Issue the copies (descriptor, element coordinates, view) of a tile whose pieces have these extents, into the blocks whose bit is set in `mask` (None:
    this one), on the same barrier of each. `policy`: of L2 for these lines, or None."""
    order = {id(m): i for i, m in enumerate(src.maps)}
    for (m, place, _), piece, extent in zip(copies, dst.pieces, extents, strict=True):
        rows = extent[0] if len(dst.axes) == 2 else 1
        width = extent[-1]
        swizzle = piece.layout.swizzle_byte_width
        if rows > MAX_ROWS or (not swizzle and width > MAX_ROWS):
            raise TileError(f"load_async(multicast=…) of {dst.spec!r}: a piece of {rows} rows and {width} columns; one copy moves at most {MAX_ROWS} of each")
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)
        tall = int(unwrap(piece.type.alloc_shape[-2])) if len(dst.axes) == 2 else 1  # the rows of the tile that this is a view of
        _boxes(t, tall, width, swizzle, itemsize(dst.dtype), address, place, _parameter(t, src, order[id(m)]), arrived, mask, policy,
               None if dst.alone and unwrap(mask) is None else role_thread(t))


def _parameter(t: Trace, src: Traced, number: int) -> Traced:
    """The address of descriptor `number` of a global layout."""
    first = unwrap(getattr(src, "parameter", ()))
    if not isinstance(first, int):
        raise TileError("load_async to several blocks, or prefetch: the tensor must be an argument of the kernel, tk.gl(tensor, tile types)")
    return t.call(parameter_address, first + number * (1 + 2 * rank_of(src)))


def _boxes(t: Trace, rows: int, width: int, swizzle: int, size: int, address: Traced, place: list[Traced], source: Traced, arrived: semaphore, mask: Traced,
           policy: Traced, thread: Traced) -> None:  # fmt: skip
    """The copies of a piece, which the thread issues that is number 0 by `thread`; None: one of the block's first warp."""
    for column, coordinates in _copies(t, width, swizzle, size, place):
        destination = t.method(address, "__add__", column * rows * size)
        if thread is None:
            t.call(_issue_alone, source, destination, arrived, coordinates, tl.constexpr(unwrap(policy)))
            continue
        into = tl.constexpr(None) if unwrap(mask) is None else t.scalar(mask)
        t.call(_issue, source, destination, arrived, coordinates, into, tl.constexpr(unwrap(policy)), thread)


def _copies(t: Trace, width: int, swizzle: int, size: int, place: list[Traced]) -> Iterator[tuple[int, Traced]]:
    """(first column, coordinates, the fastest first) of each copy that moves a tile at a place: one wider than its swizzle lies in memory as blocks of columns,
    each of all its rows, and each is a copy."""
    for column in range(0, width, swizzle // size if swizzle else width):
        yield column, tl.tuple([t.method(t.scalar(place[-1]), "__add__", column), *[t.scalar(p) for p in reversed(place[:-1])]])


@triton.jit
def _issue_prefetch(map, coordinates, thread):
    if thread == 0:
        ptx_tma.prefetch_tensor(map, coordinates, issuer="thread")


def prefetch_boxes(t: Trace, width: int, swizzle: int, size: int, place: list[Traced], src: Traced, number: int) -> None:
    """Have L2 fetch what the copies would load that descriptor `number` of a global layout makes, `width` columns of elements of `size` bytes."""
    for _, coordinates in _copies(t, width, swizzle, size, place):
        t.call(_issue_prefetch, _parameter(t, src, number), coordinates, role_thread(t))
