"""Storage of a wgmma accumulator in the order of its register fragments.

The layout serves sums in memory that only this library's kernels read, moved as bytes. Each thread of the warpgroup
stores its next four numbers (two columns of two rows) as 16 contiguous bytes, next to its neighbours' 16 bytes.
So every store is 16 bytes wide, has no bank conflicts, and uses addresses that differ by constants. A swizzled tile
needs twice as many stores, and a register for every second address.
The 16 rows × 32 columns of one warp are 2 KB of contiguous memory.
Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk*".
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import pieces_of, shape_of
from tritonkittens.lang.memory.shared_tiles import piece_shared_layout, shared
from tritonkittens.lang.register.accumulator_masks import ROWS, is_fragment
from tritonkittens.lang.types.tiles import sv

BAND = 16  # rows of an accumulator in one warp
WIDE = tl.constexpr(32)  # columns of a band that are contiguous in memory
NUMBERS = [[0, 1], [8, 0]]  # (row, column) steps between the four numbers of one thread
THREADS = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]  # (row, column) steps between the threads of a warp


def _across(begin: int, end: int) -> list[list[int]]:
    """Return the (row, column) steps of the columns `begin` … `end` − 1, both powers of two."""
    return [[0, 1 << bit] for bit in range(begin.bit_length() - 1, end.bit_length() - 1)]


def _order(rows: int, cols: int) -> gl.SharedLinearLayout:
    """Return the shared layout of accumulators of `rows` × `cols`."""
    together = min(cols, WIDE.value)
    warps = [[1 << bit, 0] for bit in range(BAND.bit_length() - 1, rows.bit_length() - 1)]
    return gl.SharedLinearLayout([*NUMBERS, *THREADS, *_across(8, together), *warps, *_across(together, cols)])


def _accumulator(name: str, tile: Traced) -> Traced:
    """Return the only piece of an fp32 accumulator of 64 rows; refuse other tiles."""
    pieces = pieces_of(tile)
    if len(pieces) != 1 or not is_fragment(pieces[0]):
        raise TileError(
            f"{name} of a tile of shape {list(shape_of(tile))}: takes an fp32 accumulator of wgmma of {ROWS} rows and "
            "a power of two of columns"
        )
    return pieces[0]


def _plain(memory: Traced) -> bool:
    """Whether `memory` is one fp32 shared tile or vector of one piece."""
    return (
        isinstance(memory, shared) and len(memory.pieces) == 1 and memory.stages is None and memory.dtype == tl.float32
    )


@op
def store_fragments(t: Trace, memory: Traced, tile: Traced) -> Traced:
    """Store an fp32 wgmma accumulator to shared memory in the order of its register fragments.

    Args:
        memory: a shared tile or vector of fp32 with 64 × cols elements.
        tile: an accumulator of 64 rows; its columns are a power of two.

    Returns:
        `memory` as a vector, for bulk copies of bytes (`store_add_bytes_async`). `fragment_place` gives the index of
        an element.

    Raises:
        TileError: for another tile or memory.
    """
    accumulator = _accumulator("store_fragments", tile)
    cols = int(unwrap(accumulator.shape[1]))
    number = ROWS * cols
    if not _plain(memory) or math.prod(memory.shape) != number:
        raise TileError(
            f"store_fragments to {getattr(memory, 'spec', memory)!r}: takes a shared tile or vector of {number} "
            "numbers in fp32"
        )
    t.call(t.call(memory.pieces[0].reinterpret, tl.float32, [ROWS, cols], _order(ROWS, cols)).store, accumulator)
    return t.call(as_fragments, memory)


@op
def as_fragments(t: Trace, memory: Traced) -> Traced:
    """Return the fp32 shared tile or vector `memory` as a vector, for bulk copies after `store_fragments`.

    Raises `TileError` for another dtype, a ring, or extents that are no powers of two.
    """
    if not _plain(memory):
        raise TileError(f"as_fragments of {getattr(memory, 'spec', memory)!r}: takes a shared tile or vector in fp32")
    number = math.prod(memory.shape)
    vector = t.call(memory.pieces[0].reinterpret, tl.float32, [number], piece_shared_layout(tl.float32, 0, 1))
    return shared(sv(tl.float32, number), ((number,),), None, (vector,))


@triton.jit
def fragment_place(row, col, COLS: tl.constexpr):
    """Return the index of element (`row`, `col`) in the vector of `store_fragments`, for an accumulator of 64 rows
    and `COLS` columns.
    """
    TOGETHER: tl.constexpr = min(COLS, WIDE)
    in_band = (col & 1) + ((row & 8) >> 3) * 2 + (col & 6) * 2 + (row & 7) * 16 + ((col % TOGETHER) >> 3) * 128
    return in_band + ((row >> 4) + col // TOGETHER * 4) * (16 * TOGETHER)


__all__ = ["as_fragments", "fragment_place", "store_fragments"]
