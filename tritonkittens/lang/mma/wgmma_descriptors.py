"""Products that Triton's own wgmma does not make: columns that are no power of two, and 8-bit operands A in packed
registers.

Triton's tensors have powers of two, so other column counts are several tensors. Triton's wgmma multiplies each of
them, and each product reads A again. The instruction itself takes any multiple of 8 columns.
Where B's pieces are contiguous in shared memory, the PTX shim multiplies by all of them at once. For 8-bit operands,
Triton packs registers before each product; `packed_bytes` are already packed.
Source: PTX ISA, wgmma.mma_async, "Shared memory matrix layout".
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx import wgmma as ptx_wgmma
from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, hopper
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.mma.fp8_a_operand import packed_bytes

ROWS = 64  # M of an instruction
MAX_COLUMNS = 256
STEP_BYTES = 32  # bytes of K of an instruction


def check(
    name: str, rows: tuple[int, ...], cols: tuple[int, ...], a: Traced, b_stored: shared, transposed_b: bool
) -> None:
    """Raise `TileError` unless A (M × K, in pieces of these rows) times the contiguous B is a sequence of single
    instructions.
    """
    n_by_k = b_stored.spec.rows_in_pieces
    if transposed_b != n_by_k or not isinstance(a, shared) or any(r != ROWS for r in rows) or sum(cols) > MAX_COLUMNS:
        raise TileError(
            f"{name}: B is the contiguous {b_stored.spec!r}: it must be stored {'N × K' if n_by_k else 'K × N'} with N "
            f"at most {MAX_COLUMNS}, and A 64 rows in shared memory"
        )


@triton.jit
def _descriptor(address, CONSTANT: tl.constexpr):
    return ((address & 0x3FFFF) >> 4).to(tl.uint64) | CONSTANT


@triton.jit
def _forward(descriptor, OFFSET: tl.constexpr):
    return descriptor + OFFSET


def _operand(t: Trace, piece: Traced, k_axis: int) -> tuple[Traced, Traced]:
    operand = ptx_wgmma.shared_operand(piece, k_axis)
    address = t.call(asm, "mov.b32 $0, $1;", "=r,r", [piece], tl.int32)
    return operand, t.call(_descriptor, address, tl.constexpr(operand.constant))


def _registers(accumulator: Traced) -> Traced:
    """Return the registers of an accumulator that may be in flight, as a tile."""
    if isinstance(accumulator, hopper.warpgroup_mma_accumulator):
        return tl.tensor(accumulator.handle, accumulator.type.tensor_type)
    return accumulator


def multiply(t: Trace, a: Traced, b: Traced, accumulators: list[Traced], adds: Traced, k_axis: int) -> list[Traced]:
    """Compute accumulators + A·B, issued as one group.

    `a` is a piece of 64 rows (M × K). `b` is the first piece of the stored B, whose depth runs along `k_axis`. The
    accumulators' columns follow each other. `adds` (a constant or a run-time condition): the instruction reads the
    accumulators.
    """
    operand_a, from_a = _operand(t, a, 1)
    operand_b, from_b = _operand(t, b, k_axis)
    tiles = t.call(ptx_wgmma.fence, tl.tuple([_registers(x) for x in accumulators]))
    for step in range(operand_a.k * operand_a.element_bytes // STEP_BYTES):
        places = [
            t.call(_forward, place, tl.constexpr(x.offset(step) >> 4))
            for x, place in ((operand_a, from_a), (operand_b, from_b))
        ]
        tiles = t.call(
            ptx_wgmma.mma_async,
            tiles,
            *places,
            a_type=tl.constexpr(operand_a.type),
            b_type=tl.constexpr(operand_b.type),
            scale_d=adds if step == 0 else 1,
            trans_a=tl.constexpr(not operand_a.k_major),
            trans_b=tl.constexpr(not operand_b.k_major),
        )
    t.call(ptx_wgmma.commit_group)
    return [t.call(hopper.warpgroup_mma_init, tile) for tile in tiles]


def multiply_words(t: Trace, a: packed_bytes, b: list[Traced], accumulator: Traced, adds: Traced) -> Traced:
    """Compute accumulator + A·B, issued as one group: `a` in registers (64 × K), B in pieces as wide as those of A,
    as they are stored (N × K).
    """
    tile = t.call(ptx_wgmma.fence, _registers(accumulator))
    for words, piece in zip(a.pieces, b, strict=True):
        operand, start = _operand(t, piece, 1)
        for step in range(operand.k * operand.element_bytes // STEP_BYTES):
            place = t.call(_forward, start, tl.constexpr(operand.offset(step) >> 4))
            tile = t.call(
                ptx_wgmma.mma_async,
                tile,
                words,
                place,
                a_type=tl.constexpr(a.dtype),
                b_type=tl.constexpr(operand.type),
                scale_d=adds,
                step=tl.constexpr(step),
            )
            adds = 1
    t.call(ptx_wgmma.commit_group)
    return t.call(hopper.warpgroup_mma_init, tile)
