"""Register tiles as operands of wgmma: accumulators and A, the words that they are packed into, and which element each
thread holds (PTX ISA 9.7.15.5.2, "Register fragments")."""

from collections.abc import Iterable, Sequence

import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from .._asm import builtin, unwrap
from .._tile_operands import explicit_only, registers, tiles_of
from .._traced import Semantic, Traced
from .shapes import OPERANDS


def accumulator_shape(tiles: Sequence[Traced], integer: bool) -> tuple[int, str]:
    """(N, PTX accumulator type) of checked accumulator pieces; int32 tiles are packed float16 pairs unless the operands
    are integers."""
    kinds = {str(tile.dtype) for tile in tiles}
    if kinds not in ({"fp32"}, {"int32"}):
        raise TypeError(
            f"wgmma accumulator of {', '.join(sorted(kinds))}: float32, int32 for 8-bit integers, or float16 pairs "
            "packed to int32 (pack)"
        )
    d = "f32" if kinds == {"fp32"} else "s32" if integer else "f16"
    columns = sum(_accumulator_columns(tile) for tile in tiles)
    return columns * (2 if d == "f16" else 1), d


def _accumulator_columns(tile: Traced) -> int:
    """Columns of one checked piece of an accumulator, in elements of the tile."""
    rows, columns = (unwrap(size) for size in tile.type.shape)
    layout = tile.type.layout
    fits = (
        isinstance(layout, (gl.NVMMADistributedLayout, gl.DistributedLinearLayout))
        and list(getattr(layout, "warps_per_cta", [4, 1])) == [4, 1]
        and list(getattr(layout, "version", [3, 0])) == [3, 0]
    )
    if rows != 64 or not fits:
        raise ValueError(
            f"wgmma accumulator {tile.type}: a piece has 64 rows in NVMMADistributedLayout([3, 0], [4, 1], [16, "
            "columns, K]), or is the packed form of one"
        )
    if isinstance(layout, gl.NVMMADistributedLayout) and unwrap(layout.instr_shape)[1] > columns:
        raise ValueError(
            f"wgmma accumulator {tile.type}: instr_shape names {unwrap(layout.instr_shape)[1]} columns, the piece has "
            f"{columns}"
        )
    return int(columns)


def fragment_steps(tile: Traced, kind: str, semantic: Semantic) -> tuple[int, int]:
    """(elements a word, K steps) of the register operand `tile`, checked: a fragment of PTX type `kind`, or int32 words
    that `pack` made of one.
    """
    layout, per_word = tile.type.layout, 32 // tile.dtype.primitive_bitwidth
    wanted = 32 // OPERANDS[kind][0]
    plain = (
        isinstance(layout, gl.DotOperandLayout)
        and layout.operand_index == 0
        and layout.k_width == wanted
        and per_word == wanted
    )
    packed = isinstance(layout, gl.DistributedLinearLayout) and per_word == 1
    if not (plain or packed) or unwrap(tile.type.shape[0]) != 64 or registers(tile.type, semantic) % (4 * per_word):
        raise ValueError(
            f"wgmma A fragment {tile.type} as {kind}: it is 64 x K in DotOperandLayout(0, accumulator layout, "
            f"k_width={wanted}), or pack of such a tile"
        )
    return per_word, registers(tile.type, semantic) // (4 * per_word)


def pack_asm(word: str, elements: Sequence[str], scratch: str) -> str:
    """One 32-bit `word` from two 16-bit or four 8-bit elements in 16-bit registers; `scratch` prefixes two 32-bit
    registers."""
    if len(elements) == 2:
        return f"mov.b32 {word}, {{{elements[0]}, {elements[1]}}};"
    low, high = (f"mov.b32 {scratch}{i}, {{{elements[2 * i]}, {elements[2 * i + 1]}}};" for i in range(2))
    return f"{low} {high} prmt.b32 {word}, {scratch}0, {scratch}1, 0x6420;"


def fragment_asm(first: int, per_word: int, step: int, prefix: str) -> tuple[list[str], list[str]]:
    """(PTX lines, the four 32-bit registers) of K step `step` of a register operand whose elements are the references
    $`first`…, `per_word` a word.
    """
    words, lines = [], []
    for i in range(4):
        elements = [f"${first + (4 * step + i) * per_word + j}" for j in range(per_word)]
        words.append(elements[0] if per_word == 1 else f"{prefix}{i}")
        if per_word > 1:
            lines.append(pack_asm(words[-1], elements, "t"))
    return lines, words


def packed_layout(layout: gl.DistributedLinearLayout, factor: int) -> gl.DistributedLinearLayout:
    """The layout of int32 words that hold `factor` neighbouring columns of a tile in `layout` (a
    DistributedLinearLayout), register by register.
    """
    bits = factor.bit_length() - 1
    reg = [list(basis) for basis in layout.reg_bases]
    if reg[:bits] != [[0, 1 << i] for i in range(bits)]:
        raise ValueError(
            f"pack by {factor}: the first registers of a thread must hold neighbouring columns; {layout} does not"
        )

    def shrink(bases: Iterable[list[int]]) -> list[list[int]]:
        return [[row, column // factor] for row, column in bases]

    shape = [layout.shape[0], layout.shape[1] // factor]
    return gl.DistributedLinearLayout(
        shrink(reg[bits:]), shrink(layout.lane_bases), shrink(layout.warp_bases), shrink(layout.block_bases), shape
    )


@builtin
def _pack(tile: Traced, _semantic: Semantic = None) -> Traced:
    explicit_only(_semantic, "wgmma.pack")
    (tile,), _ = tiles_of(tile)
    factor = 32 // tile.dtype.primitive_bitwidth
    if factor not in (2, 4) or len(tile.type.shape) != 2:
        raise TypeError(f"wgmma.pack({tile.type}): a 2-D tile of 16-bit or 8-bit elements")
    shape = [unwrap(size) for size in tile.type.shape]
    layout = packed_layout(unwrap(_semantic.to_linear_layout(tile.type.layout, shape)), factor)
    type_ = gl.distributed_type(gl.int32, [shape[0], shape[1] // factor], layout)
    count = registers(type_, _semantic)
    words = [pack_asm(f"${i}", [f"${count + factor * i + j}" for j in range(factor)], "t") for i in range(count)]
    constraints = ["=&r"] * count + ["h"] * (count * factor)
    return _semantic.inline_asm(
        "{ .reg .b32 t0, t1; " + " ".join(words) + " }", ",".join(constraints), (tile,), type_, True
    )


@builtin
def _unpack(words: Traced, dtype: Traced, layout: Traced, _semantic: Semantic = None) -> Traced:
    explicit_only(_semantic, "wgmma.unpack")
    (words,), _ = tiles_of(words)
    dtype = unwrap(dtype)
    if dtype.primitive_bitwidth != 16 or str(words.dtype) != "int32":
        raise TypeError(f"wgmma.unpack({words.type}, {dtype}): int32 words into a 16-bit type")
    rows, columns = (unwrap(size) for size in words.type.shape)
    type_ = gl.distributed_type(dtype, [rows, 2 * columns], unwrap(layout))
    given = unwrap(_semantic.to_linear_layout(words.type.layout, [rows, columns]))
    if packed_layout(unwrap(_semantic.to_linear_layout(unwrap(layout), [rows, 2 * columns])), 2) != given:
        raise ValueError(
            f"wgmma.unpack({words.type}) to {unwrap(layout)}: its packed form is another layout than that of the words"
        )
    count = registers(words.type, _semantic)
    moves = " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, ${2 * count + i};" for i in range(count))
    return _semantic.inline_asm(moves, ",".join(["=&h"] * (2 * count) + ["r"] * count), (words,), type_, True)


@triton.jit
def pack(tile):
    """int32 tile of 32-bit words, each of 2 (4) neighbouring columns of a 16-bit (8-bit) register tile: an A fragment
    or a float16 accumulator.

    The words stay in the threads that hold the elements, so nothing moves. Explicit kernels. PTX ISA 9.7.9 `mov.b32`
    (pack), `prmt`.
    """
    return _pack(tile)


@triton.jit
def unpack(words, dtype: tl.constexpr, layout: tl.constexpr):
    """The 16-bit tile of type `dtype` in `layout` whose `pack` is `words`, e.g. a float16 accumulator after the wait.
    Explicit kernels."""
    return _unpack(words, dtype, layout)


def accumulator_places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) [128, n / 2]: which element of the 64 x n accumulator each thread's i-th element is (PTX ISA
    9.7.15.5.2, "Register fragments")."""
    thread, i = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    return row + 0 * i, 8 * (i // 4) + 2 * (thread % 4) + i % 2


def fragment_places(per_word: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) [128, 4, per_word] of the elements of A in the four registers of each thread: 64 rows, 8 per_word
    columns."""
    thread, register, element = (
        np.arange(128)[:, None, None],
        np.arange(4)[None, :, None],
        np.arange(per_word)[None, None, :],
    )
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2) + 0 * element
    return row, per_word * (thread % 4) + 4 * per_word * (register // 2) + element
