"""The order of a wgmma accumulator's elements in a thread's registers, put to use in memory.

For sums in memory that only kernels of ours see, moved as bytes, element (row, column) of an accumulator of 64 rows lies where the thread that holds it writes
its next four numbers: two columns of two rows, 16 bytes, side by side for the threads of the warpgroup. So a store is as wide as it can be, free of bank
conflicts, and its addresses differ by constants, where a swizzled tile takes twice as many stores and a register for every other of them. What a warp writes of
32 columns, its 16 rows of them, lies together: 2 KB.
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

BAND = 16  # rows that a warp has of an accumulator
WIDE = tl.constexpr(32)  # columns of a band that lie together
NUMBERS = [[0, 1], [8, 0]]  # bits of a place among those of one thread: a column, 8 rows
THREADS = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]  # those of a warp


def _across(begin: int, end: int) -> list[list[int]]:
    """Bits of a place that are columns from `begin` on, before `end`, both powers of two."""
    return [[0, 1 << bit] for bit in range(begin.bit_length() - 1, end.bit_length() - 1)]


def _order(rows: int, cols: int) -> gl.SharedLinearLayout:
    """That of accumulators of `rows` × `cols`."""
    together = min(cols, WIDE.value)
    warps = [[1 << bit, 0] for bit in range(BAND.bit_length() - 1, rows.bit_length() - 1)]
    return gl.SharedLinearLayout([*NUMBERS, *THREADS, *_across(8, together), *warps, *_across(together, cols)])


def _accumulator(name: str, tile: Traced) -> Traced:
    """The one piece of an fp32 accumulator of 64 rows, or a refusal."""
    pieces = pieces_of(tile)
    if len(pieces) != 1 or not is_fragment(pieces[0]):
        raise TileError(f"{name} of a tile of shape {list(shape_of(tile))}: takes an fp32 accumulator of wgmma of {ROWS} rows and a power of two of columns")
    return pieces[0]


def _plain(memory: Traced) -> bool:
    """Is it one shared tile or vector of fp32, of one piece?"""
    return isinstance(memory, shared) and len(memory.pieces) == 1 and memory.stages is None and memory.dtype == tl.float32


@op
def store_fragments(t: Trace, memory: Traced, tile: Traced) -> Traced:
    """Store an fp32 accumulator of wgmma, 64 rows and a power of two of columns, in the order of its fragments to the memory of a shared tile or vector of as
    many numbers: `fragment_place` says where an element lies. Returns that memory as a vector, for copies of bytes (`store_add_bytes_async`)."""
    accumulator = _accumulator("store_fragments", tile)
    cols = int(unwrap(accumulator.shape[1]))
    number = ROWS * cols
    if not _plain(memory) or math.prod(memory.shape) != number:
        raise TileError(f"store_fragments to {getattr(memory, 'spec', memory)!r}: takes a shared tile or vector of {number} numbers in fp32")
    t.call(t.call(memory.pieces[0].reinterpret, tl.float32, [ROWS, cols], _order(ROWS, cols)).store, accumulator)
    return t.call(as_fragments, memory)


@op
def as_fragments(t: Trace, memory: Traced) -> Traced:
    """The memory of a shared tile or vector as a vector, for copies of bytes of what `store_fragments` stored there."""
    if not _plain(memory):
        raise TileError(f"as_fragments of {getattr(memory, 'spec', memory)!r}: takes a shared tile or vector in fp32")
    number = math.prod(memory.shape)
    vector = t.call(memory.pieces[0].reinterpret, tl.float32, [number], piece_shared_layout(tl.float32, 0, 1))
    return shared(sv(tl.float32, number), ((number,),), None, (vector,))


@triton.jit
def fragment_place(row, col, COLS: tl.constexpr):
    """The number of element (row, col) of an accumulator of 64 rows and COLS columns among those that `store_fragments` stored."""
    TOGETHER: tl.constexpr = min(COLS, WIDE)
    in_band = (col & 1) + ((row & 8) >> 3) * 2 + (col & 6) * 2 + (row & 7) * 16 + ((col % TOGETHER) >> 3) * 128
    return in_band + ((row >> 4) + col // TOGETHER * 4) * (16 * TOGETHER)


__all__ = ["as_fragments", "fragment_place", "store_fragments"]
