"""Operand A of 8-bit products, made from a wgmma accumulator: four elements a register.

An 8-bit product reads four neighbouring columns of a row in a register; an accumulator holds two. A permutation of
K (`byte_operand_column`) makes each register from values that its thread already holds.
The registers are made once, by two-element conversions, and a loop carries them as words. If the loop carried bytes,
the compiler would unpack and repack each of them (measured: docs/notes/attention_forward.md).
Source: FlashAttention-3 (Shah et al., 2024), section 3.3; PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32",
cvt.e4m3x2.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, base_type, base_value, gl, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import pieces_of, shape_of, type_of_members
from tritonkittens.lang.register.accumulator_masks import ROWS, is_fragment

DEPTH = 32  # K of an 8-bit wgmma
PACKED = {tl.float8e4nv: "e4m3x2", tl.float8e5: "e5m2x2"}
# (row, word) steps of the layout. Registers: 8 rows, 4 words, then further products; lanes: words 1 and 2, rows 1, 2,
# 4; warps: rows 16, 32
_REGISTERS, _LANES, _WARPS = [[8, 0], [0, 4]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]


class packed_bytes_type(type_of_members):
    """The type of `packed_bytes`: the element type and the types of its pieces."""

    def __init__(self, dtype: tl.dtype, pieces: tuple[base_type, ...]):
        self.dtype, self.members = dtype, pieces

    def mangle(self) -> str:
        return f"B{self.dtype}_{self._mangled_members()}B"

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[packed_bytes, int]:
        pieces, cursor = self._members_from(handles, cursor)
        return packed_bytes(self.dtype, pieces), cursor


class packed_bytes(base_value):
    """A tile of 64 rows of 8-bit floats in the registers of operand A. Each of the `pieces`, side by side, holds
    words (int32) of four columns.
    """

    def __init__(self, dtype: tl.dtype, pieces: tuple[Traced, ...]):
        self.dtype, self.pieces = dtype, pieces

    @property
    def type(self) -> packed_bytes_type:
        return packed_bytes_type(self.dtype, tuple(p.type for p in self.pieces))

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        return (ROWS,), tuple(4 * int(unwrap(p.shape[1])) for p in self.pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(a) for a in self.axes)

    def _flatten_ir(self, handles: list[Any]) -> None:
        for p in self.pieces:
            p._flatten_ir(handles)

    def _set_name(self, builder: Any, name: str) -> None:
        for p in self.pieces:
            p._set_name(builder, name)


@op
def byte_operand(t: Trace, tile: Traced, dtype: Traced) -> Traced:
    """Convert a wgmma accumulator to operand A of 8-bit products.

    Args:
        tile: an fp32 accumulator of 64 rows; its columns are a multiple of 32.
        dtype: fp8e4m3 or fp8e5m2. Finite values beyond its range become its largest value.

    Returns:
        An operand (M × K) for `mma_AB` and `mma_ABt`. Its column k is column `byte_operand_column(k)` of the tile, so
        K of B must have the same order.

    Raises:
        TileError: for another tile or dtype.
    """
    tile, dtype = unwrap(tile), unwrap(dtype)
    pieces = pieces_of(tile)
    if dtype not in PACKED or not all(is_fragment(p) and int(unwrap(p.shape[1])) % DEPTH == 0 for p in pieces):
        raise TileError(
            f"byte_operand(dtype={name_of(dtype)}) of a tile of {name_of(pieces[0].dtype)} and shape "
            f"{list(shape_of(tile))}: takes an fp32 accumulator of wgmma of {ROWS} rows and a multiple of {DEPTH} "
            f"columns, and {' or '.join(map(name_of, PACKED))}"
        )
    return packed_bytes(dtype, tuple(_words(t, piece, PACKED[dtype]) for piece in pieces))


def _words(t: Trace, piece: Traced, packed: str) -> Traced:
    """Return the words of one piece of an accumulator, by conversions to `packed` pairs."""
    cols = int(unwrap(piece.shape[1]))
    count = cols // 8  # words in a thread's registers
    lines = [".reg .b16 low, high;"]
    for word in range(count):
        # each group of 8 columns has two columns of a row, and two of the row 8 below
        first = count + 8 * (word // 2) + 2 * (word % 2)
        halves = (
            f"cvt.rn.satfinite.{packed}.f32 {half}, ${first + 4 * group + 1}, ${first + 4 * group};"
            for group, half in enumerate(("low", "high"))
        )
        lines += [*halves, f"mov.b32 ${word}, {{low, high}};"]
    layout = gl.DistributedLinearLayout(
        [*_REGISTERS, *([0, 8 << i] for i in range((cols // DEPTH).bit_length() - 1))],
        _LANES,
        _WARPS,
        [],
        [ROWS, cols // 4],
    )
    kind = gl.distributed_type(tl.int32, [ROWS, cols // 4], layout)
    constraints = ",".join(["=r"] * count + ["f"] * (4 * count))
    return t.call(asm, "{ " + " ".join(lines) + " }", constraints, [piece], kind, is_pure=True)


@triton.jit
def byte_operand_column(k):
    """Return the accumulator column that is column `k` of the result of `byte_operand`. The order repeats every 32
    columns.
    """
    return (k & -16) + ((k & 2) << 2) + ((k & 12) >> 1) + (k & 1)


__all__ = ["byte_operand", "byte_operand_column", "packed_bytes"]
