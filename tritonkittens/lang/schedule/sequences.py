"""Tiles of packed sequences as tasks: the sequence that a task's tile belongs to is found on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.arch import WARP
from tritonkittens.lang.core.backend import Trace, Traced, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.types.global_layout import check_global, extents_of


@op
def sequence_of_tile(
    t: Trace, ends: Traced, tile: Traced, height: Traced, total: Traced, most: Traced, pitch: Traced = None
) -> Traced:
    """Find the sequence that has tile number `tile`, where each sequence of a packed tensor has tiles of its own.

    Each warp reads all ends, and finds the sequence by scans and reductions of its lanes, without shared memory.

    Args:
        ends: a global layout (sequences) of int32: the first row after each sequence. The first sequence begins at
            row 0.
        tile: an int32 scalar, counted over all sequences.
        height: the rows of a tile.
        total: the rows of the packed tensor. No sequence ends after it, whatever `ends` holds.
        most: a compile-time integer up to 1024: no tensor has more sequences.
        pitch: the rows from the beginning of a sequence to that of the next, an int32 scalar. `ends` then holds the
            numbers of rows of the sequences. None: each begins where the one before it ends.

    Returns:
        (number, sequence, first): the sequence's number, the `sequence`, and the number of its first tile. The number
        of sequences after the last tile.

    Raises:
        TileError: for another `most`.

    Example::

        expert, rows, first = tk.sequence_of_tile(ctx.globals.ends, ctx.task_id // cols, 128, ctx.args.rows, 256)
    """
    most = int(unwrap(most))
    if not 1 <= most <= WARP * WARP:
        raise TileError(f"sequence_of_tile(most={most}): must be 1 to {WARP * WARP}")
    check_global(ends, "sequence_of_tile")
    layout = gl.BlockedLayout([1], [WARP], [t.num_warps], [0])  # the same in each warp
    lane = t.semantic.arange(0, WARP, layout) if t.explicit else t.call("arange", 0, WARP)
    count = extents_of(ends)[0]
    each = tl.constexpr(-(-most // WARP))
    pitch = t.scalar(0 if unwrap(pitch) is None else pitch), tl.constexpr(unwrap(pitch) is not None)
    numbers = t.scalar(tile), t.scalar(height), t.scalar(total)
    number, begin, end, first = t.call(_find, ends.pointer, lane, count, *numbers, *pitch, each)
    return tl.tuple([number, struct(begin=begin, rows=t.method(end, "__sub__", begin)), first])


@triton.jit
def _bounds(ends, number, count, total, pitch, PITCHED: tl.constexpr):
    """(begin, end) of sequences; those that do not exist are empty. An end may lie before the beginning."""
    end = tl.load(ends + number, mask=number < count, other=0)
    if PITCHED:
        return number * pitch, number * pitch + tl.minimum(end, pitch)
    else:
        begin = tl.load(ends + number - 1, mask=(number > 0) & (number < count), other=0)
        return tl.maximum(begin, 0), tl.minimum(end, total)


@triton.jit
def _find(ends, lane, count, tile, height, total, pitch, PITCHED: tl.constexpr, EACH: tl.constexpr):
    """(number, begin, end, first tile) of the sequence with a tile. A lane counts the tiles of EACH sequences; then a
    warp looks at those of the lane that has the tile."""
    first, number = 0, 0
    if EACH > 1:
        tiles = lane * 0
        for i in range(EACH):
            begin, end = _bounds(ends, lane * EACH + i, count, total, pitch, PITCHED)
            tiles += (tl.maximum(end - begin, 0) + height - 1) // height
        behind = tl.cumsum(tiles)
        number = tl.sum((behind <= tile).to(tl.int32)) * EACH
        first = tl.max(tl.where(behind <= tile, behind, 0))
    begin, end = _bounds(ends, number + lane, count, total, pitch, PITCHED)
    behind = first + tl.cumsum((tl.maximum(end - begin, 0) + height - 1) // height)
    passed = behind <= tile
    others = passed | (number + lane >= count)
    first = tl.maximum(first, tl.max(tl.where(passed, behind, 0)))
    number = tl.minimum(number + tl.sum(passed.to(tl.int32)), count)
    begin = tl.min(tl.where(others, total, begin))
    return number, begin, tl.maximum(tl.min(tl.where(others, total, end)), begin), first
