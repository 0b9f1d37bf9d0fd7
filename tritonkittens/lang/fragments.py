"""The order of a wgmma accumulator's elements in a thread's registers, put to use in memory.

For sums in memory that only kernels of ours see, moved as bytes, element (row, column) of an accumulator of 64 rows lies where the thread that holds it writes
its next four numbers: two columns of two rows, 16 bytes, side by side for the threads of the warpgroup. So a store is as wide as it can be, free of bank
conflicts, and its addresses differ by constants, where a swizzled tile takes twice as many stores and a register for every other of them.
Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk*".
"""
from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang._backend import Trace, gl, op
from tritonkittens.lang.errors import TileError
from tritonkittens.lang.fragment_masks import ROWS, is_fragment
from tritonkittens.lang.shared import piece_shared_layout, shared
from tritonkittens.lang.types import sv, unwrap
from tritonkittens.lang.values import pieces_of, shape_of

# Bits of a place: a column, 8 rows; then the threads: columns 2 and 4, rows 1, 2, 4 of a warp, 16 and 32 of the warps; then groups of 8 columns
_BITS = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]


def _accumulator(name: str, tile: Any) -> Any:
    """The one piece of an fp32 accumulator of 64 rows, or a refusal."""
    pieces = pieces_of(tile)
    if len(pieces) != 1 or not is_fragment(pieces[0]):
        raise TileError(f"{name} of a tile of shape {list(shape_of(tile))}: takes an fp32 accumulator of wgmma of {ROWS} rows and a power of two of columns")
    return pieces[0]


@op
def store_fragments(t: Trace, memory: Any, tile: Any) -> Any:
    """Store an fp32 accumulator of wgmma, 64 rows and a power of two of columns, in the order of its fragments to the memory of a shared tile or vector of as
    many numbers: `fragment_place` says where an element lies. Returns that memory as a vector, for copies of bytes (`store_add_bytes_async`)."""
    accumulator = _accumulator("store_fragments", tile)
    cols = int(unwrap(accumulator.shape[1]))
    number = ROWS * cols
    fits = isinstance(memory, shared) and len(memory.pieces) == 1 and memory.stages is None and memory.dtype == tl.float32
    if not fits or math.prod(memory.shape) != number:
        raise TileError(f"store_fragments to {getattr(memory, 'spec', memory)!r}: takes a shared tile or vector of {number} numbers in fp32")
    order = gl.SharedLinearLayout([*_BITS, *([0, 8 << i] for i in range((cols // 8).bit_length() - 1))])
    piece = memory.pieces[0]
    t.call(t.call(piece.reinterpret, tl.float32, [ROWS, cols], order).store, accumulator)
    return shared(sv(tl.float32, number), ((number,),), None, (t.call(piece.reinterpret, tl.float32, [number], piece_shared_layout(tl.float32, 0, 1)),))


@triton.jit
def fragment_place(row, col):
    """The number of element (row, col) of an accumulator of 64 rows among those that `store_fragments` stored."""
    return (col & 1) + ((row & 8) >> 3) * 2 + (col & 6) * 2 + (row & 7) * 16 + (row >> 4) * 128 + (col >> 3) * 512


__all__ = ["fragment_place", "store_fragments"]
