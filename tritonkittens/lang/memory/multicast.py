"""TMA copies by address: multicast loads, L2 prefetches, and loads without compiler-inserted barriers.

Gluon's own multicast assumes that a cluster is one program. Gluon also has no prefetch, and does not expose the
address of a descriptor.
So the PTX shim issues these copies, with the address of the kernel parameter that holds the descriptor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

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

MAX_ROWS = 256  # rows of one copy
BASE_ROWS = 16  # rows of the base tile; a slice must start at a swizzle pattern, which repeats after 8 rows


@triton.jit
def _thread_of(thread, rank, BLOCK: tl.constexpr):
    """Return the thread's number in its role in CTA `BLOCK` of the cluster, and 1 elsewhere, so that no thread
    issues copies there.
    """
    return tl.where(rank == BLOCK, thread, 1)


@triton.jit
def _thread_below(thread, rank, BLOCKS: tl.constexpr):
    """Return the thread's number in its role in the first `BLOCKS` CTAs of the cluster, and 1 elsewhere."""
    return tl.where(rank < BLOCKS, thread, 1)


@triton.jit
def _place_of(rank, NBYTES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DOWN: tl.constexpr):
    """Return the offset (bytes, rows, columns) of a CTA's part in its region. `DOWN` parts, line by line, share the
    same columns.
    """
    return rank * NBYTES, rank % DOWN * ROWS, rank // DOWN * COLS


@triton.jit
def _issue(map, destination, bar, coordinates, mask, POLICY: tl.constexpr, thread, PAIR: tl.constexpr):
    if thread == 0:
        hint = None if POLICY is None else ptx_tma.create_policy(POLICY)
        ptx_tma.load_tensor(
            destination, map, coordinates, bar, multicast=mask, cache_hint=hint, issuer="thread", pair=PAIR
        )


@triton.jit
def _issue_alone(map, destination, bar, coordinates, POLICY: tl.constexpr):
    hint = None if POLICY is None else ptx_tma.create_policy(POLICY)
    ptx_tma.load_tensor(destination, map, coordinates, bar, cache_hint=hint, issuer="first")


def slices_of(tile: st, blocks: int, name: str) -> tuple[tuple[st, ...], ...]:
    """Return, for each contiguous region of a shared tile, the parts that `blocks` CTAs load for all of them.

    Each CTA loads at most one part. The parts follow each other in memory. A part is several swizzle lines of
    columns where there are enough lines, else some rows of a line, split as evenly as whole base tiles allow.
    A contiguous tile is split as it lies on Hopper. Raises `TileError` for a vector.
    """
    if not isinstance(tile, st):
        raise TileError(
            f"{name}: {tile!r} cannot be loaded in {blocks} parts, one by each block of the cluster: only tiles have "
            "such parts"
        )
    return tuple(_parts(stretch, blocks) for _, _, stretch in _stretches(tile, together=True))


def _stretches(tile: st, together: bool) -> list[tuple[int, int, st]]:
    """Return the contiguous regions of a tile in shared memory: (first row, first column, tile).

    A region is a contiguous tile of one line, or one piece. `together`: a contiguous tile stores its pieces one after
    the other.
    """
    if tile.contiguous and together and tile.rows_in_pieces:
        return [(0, 0, tile)]
    return [(row, col, st(tile.dtype, rows, cols, tile.piece_swizzle(cols))) for row, col, rows, cols in tile.pieces()]


def _parts(stretch: st, blocks: int) -> tuple[st, ...]:
    swizzle = stretch.piece_swizzle(stretch.cols)
    lines, units = stretch.cols * itemsize(stretch.dtype) // swizzle, stretch.rows // BASE_ROWS
    if lines >= blocks:  # both are powers of two; a line is contiguous with all its rows
        return (st(stretch.dtype, stretch.rows, stretch.cols // blocks, swizzle),) * blocks
    down = min(blocks // lines, units)
    ends = [BASE_ROWS * (units * part // down) for part in range(down + 1)]
    return (
        tuple(st(stretch.dtype, end - start, stretch.cols // lines, swizzle) for start, end in itertools.pairwise(ends))
        * lines
    )


class StoredPiece(NamedTuple):
    """How a piece lies in shared memory: rows × width elements of `size` bytes.

    A piece wider than its swizzle (bytes) is stored as blocks of columns, each with all its rows.
    """

    rows: int
    width: int
    swizzle: int
    size: int


@dataclass(frozen=True)
class _Issue:
    """How copies are issued.

    Args:
        arrived: the semaphore on which they complete.
        mask: the blocks of the cluster that receive them, a bit each; None for this block.
        policy: the L2 policy of the lines, or None.
        thread: the thread's number in its role; number 0 issues. None: one thread of the CTA's first warp issues.
        pair: they complete on the semaphore of the pair's CTA of even rank.
    """

    arrived: semaphore
    mask: Traced
    policy: Traced
    thread: Traced
    pair: bool = False


def load_slice(
    t: Trace,
    dst: shared,
    src: Traced,
    coord: list[Traced],
    maps_of: Callable[[st], list[int]],
    arrived: semaphore,
    policy: Traced,
) -> None:
    """Load this CTA's part of a tile into all `dst.loaders` CTAs of the cluster.

    `maps_of` returns the descriptor numbers of a part's pieces. `policy` is the L2 policy of these lines, or None.
    """
    rank, thread = t.call(ptx_cluster.ctarank), role_thread(t)
    issue = _Issue(arrived, (1 << dst.loaders) - 1, policy, thread)
    # a contiguous tile begins with its first piece
    for (row, col, stretch), piece in zip(_stretches(dst.spec, dst.together), dst.pieces):
        parts = _parts(stretch, dst.loaders)
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)
        corner = list(coord)
        for axis, extent, offset in ((-2, dst.spec.rows, row), (-1, dst.spec.cols, col)):
            corner[axis] = t.method(t.method(t.scalar(coord[axis]), "__mul__", extent), "__add__", offset)
        if len(set(parts)) == 1:
            part = parts[0]
            place = t.call(_place_of, rank, part.nbytes, part.rows, part.cols, stretch.rows // part.rows)
            loader = thread if len(parts) == dst.loaders else t.call(_thread_below, thread, rank, len(parts))
            _load_part(t, replace(issue, thread=loader), src, part, maps_of(part), address, (corner, list(place)))
            continue
        place = [0, 0, 0]
        for block, part in enumerate(parts):
            loader = t.call(_thread_of, thread, rank, block)
            _load_part(t, replace(issue, thread=loader), src, part, maps_of(part), address, (corner, place))
            place = [place[0] + part.nbytes, place[1] + part.rows, 0]


def _load_part(
    t: Trace,
    issue: _Issue,
    src: Traced,
    part: st,
    numbers: list[int],
    region: Traced,
    where: tuple[list[Traced], list[Traced]],
) -> None:
    """Load a part of the region at address `region`.

    `where`: the region's first element in the tensor, and the part's offset (bytes, rows, columns) in the region.
    """
    corner, offset = where
    address = t.method(region, "__add__", offset[0])
    first_row, column = (t.method(place, "__add__", o) for place, o in zip(corner[-2:], offset[1:], strict=True))
    size = itemsize(part.dtype)
    for number, (row, _, rows, cols) in zip(numbers, part.pieces(), strict=True):
        destination = t.method(address, "__add__", row * cols * size)
        place = [*corner[:-2], t.method(first_row, "__add__", row), column]
        stored = StoredPiece(rows, cols, part.piece_swizzle(cols), size)
        _boxes(t, issue, stored, destination, place, _parameter(t, src, number))


def load_by_address(
    t: Trace,
    dst: shared,
    src: Traced,
    copies: list[tuple[Traced, list[Traced], Traced]],
    extents: list[tuple[int, ...]],
    arrived: semaphore,
    mask: Traced,
    policy: Traced,
) -> None:
    """Issue the copies (descriptor, element coordinates, view) of a tile whose pieces have these extents.

    They write to the CTAs whose bit is set in `mask` (None: this CTA), and complete on the same barrier of each.
    `policy` is the L2 policy of these lines, or None.
    """
    order = {id(m): i for i, m in enumerate(src.maps)}
    for (m, place, piece), extent in zip(copies, extents, strict=True):
        rows = extent[0] if len(dst.axes) == 2 else 1
        width = extent[-1]
        swizzle = piece.layout.swizzle_byte_width
        if rows > MAX_ROWS or (not swizzle and width > MAX_ROWS):
            raise TileError(
                f"load_async(multicast=…) of {dst.spec!r}: a piece of {rows} rows and {width} columns; one copy moves "
                f"at most {MAX_ROWS} of each"
            )
        address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)
        # rows of the tile of which this is a view
        tall = int(unwrap(piece.type.alloc_shape[-2])) if len(dst.axes) == 2 else 1
        stored = StoredPiece(tall, width, swizzle, itemsize(dst.dtype))
        source = _parameter(t, src, order[id(m)])
        thread = None if dst.alone and unwrap(mask) is None else role_thread(t)
        _boxes(t, _Issue(arrived, mask, policy, thread, dst.pair is not None), stored, address, place, source)


def _parameter(t: Trace, src: Traced, number: int) -> Traced:
    """Return the address of descriptor `number` of a global layout."""
    first = unwrap(getattr(src, "parameter", ()))
    if not isinstance(first, int):
        raise TileError(
            "load_async to several blocks, or prefetch: the tensor must be an argument of the kernel, tk.gl(tensor, "
            "tile types)"
        )
    return t.call(parameter_address, first + number * (1 + 2 * rank_of(src)))


def _boxes(t: Trace, issue: _Issue, stored: StoredPiece, address: Traced, place: list[Traced], source: Traced) -> None:
    """Issue the copies of a piece by the descriptor at address `source`, from the element coordinates `place`."""
    policy = tl.constexpr(unwrap(issue.policy))
    for column, coordinates in _copies(t, stored, place):
        destination = t.method(address, "__add__", column * stored.rows * stored.size)
        if issue.thread is None:
            t.call(_issue_alone, source, destination, issue.arrived, coordinates, policy)
            continue
        into = tl.constexpr(None) if unwrap(issue.mask) is None else t.scalar(issue.mask)
        pair = tl.constexpr(issue.pair)
        t.call(_issue, source, destination, issue.arrived, coordinates, into, policy, issue.thread, pair)


def _copies(t: Trace, stored: StoredPiece, place: list[Traced]) -> Iterator[tuple[int, Traced]]:
    """Return (first column, coordinates with the fastest first) of each copy of a piece: one for each block of
    columns."""
    step = stored.swizzle // stored.size if stored.swizzle else stored.width
    for column in range(0, stored.width, step):
        fastest = t.method(t.scalar(place[-1]), "__add__", column)
        yield column, tl.tuple([fastest, *[t.scalar(p) for p in reversed(place[:-1])]])


@triton.jit
def _issue_prefetch(map, coordinates, thread):
    if thread == 0:
        ptx_tma.prefetch_tensor(map, coordinates, issuer="thread")


def prefetch_boxes(t: Trace, stored: StoredPiece, place: list[Traced], src: Traced, number: int) -> None:
    """Prefetch into L2 the data that descriptor `number` of a global layout would load into a piece."""
    for _, coordinates in _copies(t, stored, place):
        t.call(_issue_prefetch, _parameter(t, src, number), coordinates, role_thread(t))
