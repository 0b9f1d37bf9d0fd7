"""Tiles of scales: their shared memory, their place in tensor memory, and the copy between the two."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx import tcgen05 as ptx_tcgen05
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    Trace,
    Traced,
    allocate_tensor_memory,
    gl,
    tcgen05_copy,
)
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.resources import bill
from tritonkittens.lang.types.scales import BLOCK_BYTES, BLOCK_COLS, scale_tile

LANES = 128  # of tensor memory
LINES, ROWS_OF_LINE = 32, 4  # a block is 32 lines of 16 bytes: the scales of rows i, i + 32, i + 64 and i + 96


def scale_pieces(t: Trace, spec: scale_tile, stages: int | None, name: str) -> tuple[Traced, Traced]:
    """Allocate (shared memory, tensor memory) for tiles of scales, and charge the budget of both.

    Each stage of a ring has tensor memory of its own: no instruction orders a copy behind a product that still reads
    the scales before (PTX ISA, "Pipelined tcgen05 instructions").
    """
    t.require(f"{spec!r} (tcgen05, block_scale)", "tcgen05")
    lead = [] if stages is None else [stages]
    bill().charge_tmem(name, spec.columns * (stages or 1))
    home = gl.NVMMASharedLayout(0, spec.dtype.primitive_bitwidth, rank=len(spec.shape))
    # Triton has no rings in its layout of scales
    columns = TensorMemoryLayout((LANES, spec.columns), col_stride=1)
    return (
        t.call(gl.allocate_shared_memory, spec.dtype, [*lead, *spec.shape], home),
        t.call(allocate_tensor_memory, tl.int32, [*lead, LANES, spec.columns], columns),
    )


def copy_scales(t: Trace, spec: scale_tile, pieces: tuple[Traced, ...]) -> Traced:
    """Start copying a tile of scales to its tensor memory, and return that. Later products of the same thread read the
    copy. Source: PTX ISA, tcgen05.cp, 32x128b.warpx4."""
    memory, columns = pieces
    down, across = spec.blocks
    blocks = t.call(memory.reshape, [down, across, LINES, ROWS_OF_LINE, BLOCK_COLS])
    matrix = t.call(t.call(blocks.permute, (0, 3, 2, 1, 4)).reshape, [spec.rows, spec.cols])
    home = t.call(columns.reinterpret, spec.dtype, [spec.rows, spec.cols], TensorMemoryScalesLayout())
    t.call(tcgen05_copy, matrix, home)
    return home


@triton.jit
def _copy_block(columns, blocks, COLUMN: tl.constexpr, OFFSET: tl.constexpr):
    ptx_tcgen05.cp(columns + COLUMN, blocks + (OFFSET >> 4), "32x128b", "warpx4", issuer="warp", ctas=2)


def copy_scales_of_pair(t: Trace, spec: scale_tile, pieces: tuple[Traced, ...]) -> Traced:
    """Start copying a tile of scales to its tensor memory in both CTAs of a pair, each from its own shared memory.
    Returns the address, a block of columns after the other, each with all rows. Source: as of `copy_scales`."""
    memory, columns = pieces
    address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [columns], tl.int32)
    down, across = spec.blocks
    line = ROWS_OF_LINE * BLOCK_COLS
    blocks = t.call(ptx_tcgen05.shared_descriptor, memory, line, 8 * line, 0)  # eight lines are a core matrix
    for i in range(down):
        for j in range(across):
            column, offset = j * spec.block_columns + i * ROWS_OF_LINE, (i * across + j) * LINES * line
            t.call(_copy_block, address, blocks, tl.constexpr(column), tl.constexpr(offset))
    return address


def place_of_scales(coord: Traced) -> tuple[Traced, ...]:
    """Return the coordinates of a tile of scales, given without those inside of a block, with them."""
    given = unwrap(coord)
    return (*(given if isinstance(given, (tuple, tl.tuple)) else (given,)), *(0 for _ in BLOCK_BYTES))
