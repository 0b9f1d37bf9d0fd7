"""Asynchronous warpgroup matrix multiply (PTX ISA 9.7.15 `wgmma`): D = A B + D for a warpgroup of four warps; sm_90a
only.

The order of a multiplication is fence, mma_async (any number of them), commit_group, wait_group. Between mma_async and
the wait the accumulator's registers belong to the tensor core: pass tiles through `fence` and `wait_group`, so that no
use of them moves across.

Register tiles (explicit kernels only: a plain Triton tile has no layout that a kernel may rely on)
 - An accumulator is one tile, or a tuple of tiles whose columns follow each other: 64 rows, N columns together, N any
   multiple of 8 up to 256, each piece a power of two columns in `gl.NVMMADistributedLayout(version=[3, 0],
   warps_per_cta=[4, 1], instr_shape=[16, columns, 16])`. float32 or int32; float16 accumulators are tiles of packed
   pairs (`pack`, 64 x N/2 int32), since unpacking them is only allowed after the wait.
 - A in registers is a tile of 64 x K in `gl.DotOperandLayout(0, that layout, k_width=32 // bits)`, or `pack` of it.

Shared operands are 64-bit matrix descriptors (PTX ISA 9.7.15.5.1): `shared_descriptor` from an address,
`operand_descriptor` from a tile.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Sequence

import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from ._asm import asm, builtin, require, unwrap
from ._formats import decode, encode
from ._meaning import (
    Instruction,
    Machine,
    NoMeaning,
    PtxFault,
    Register,
    Waits,
    from_bytes,
    join,
    meaning,
    split,
    uniform,
    unsigned,
)
from ._tile_operands import explicit_only, is_tile, letter, pass_through, registers, tied, tiles_of
from ._traced import Semantic, Traced

# Triton's element type -> PTX's. float32 operands are read as tf32 (the low 13 mantissa bits are ignored).
PTX_TYPES = {
    "fp16": "f16",
    "bf16": "bf16",
    "fp32": "tf32",
    "fp8e4nv": "e4m3",
    "fp8e5": "e5m2",
    "int8": "s8",
    "uint8": "u8",
}
# PTX operand type -> (bits, accumulator types); the two operands' types must come from one row of GROUPS.
OPERANDS = {
    "f16": (16, ("f32", "f16")),
    "bf16": (16, ("f32",)),
    "tf32": (32, ("f32",)),
    "e4m3": (8, ("f32", "f16")),
    "e5m2": (8, ("f32", "f16")),
    "s8": (8, ("s32",)),
    "u8": (8, ("s32",)),
}
GROUPS = (("f16",), ("bf16",), ("tf32",), ("e4m3", "e5m2"), ("s8", "u8"))
SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes -> the descriptor's bits 62-63


class Multiply(NamedTuple):
    """One wgmma.mma_async: 64 x `n` accumulator of PTX type `d`, operands of PTX types `a` and `b`, and the
    immediates."""

    n: int
    d: str
    a: str
    b: str
    a_in_registers: bool = False
    trans_a: bool = False
    trans_b: bool = False
    scale_a: int = 1
    scale_b: int = 1
    saturate: bool = False

    @property
    def k(self) -> int:
        """Columns of A that one instruction consumes: 32 bytes of them."""
        return 256 // OPERANDS[self.a][0]

    @property
    def mnemonic(self) -> str:
        saturate = ".satfinite" if self.saturate else ""
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}{saturate}.{self.d}.{self.a}.{self.b}"

    @property
    def accumulators(self) -> int:
        """32-bit accumulator registers of one thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2


def valid_n(a: str) -> tuple[int, ...]:
    """The N that PTX ISA 9.7.15.2 allows for operand type `a`: every multiple of 8 up to 256; for integers multiples of
    16 above 24, and 8 and 24.
    """
    return tuple(n for n in range(8, 257, 8) if a not in ("s8", "u8") or n % 16 == 0 or n in (8, 24))


def check(multiply: Multiply) -> Multiply:
    """`multiply` itself. Errors: ValueError where the PTX ISA has no such instruction; the message states the rule."""
    m = multiply
    given = f"wgmma m64n{m.n} {m.d} += {m.a} x {m.b}"
    if not any(m.a in group and m.b in group for group in GROUPS):
        rows = "; ".join(" or ".join(group) for group in GROUPS)
        raise ValueError(f"{given}: both operands come from one of: {rows}")
    if m.d not in OPERANDS[m.a][1]:
        raise ValueError(f"{given}: {m.a} operands accumulate in {' or '.join(OPERANDS[m.a][1])}")
    if m.n not in valid_n(m.a):
        rule = "8, 16, 24 or a multiple of 16 from 32 to 256" if m.d == "s32" else "a multiple of 8 from 8 to 256"
        raise ValueError(f"{given}: N is {rule}, not {m.n}")
    if (m.trans_a or m.trans_b) and OPERANDS[m.a][0] != 16:
        raise ValueError(
            f"{given} with trans_a={m.trans_a}, trans_b={m.trans_b}: only 16-bit operands may be MN-major; {m.a} must "
            "be contiguous in K"
        )
    if m.trans_a and m.a_in_registers:
        raise ValueError(f"{given} with trans_a: a register operand has no major-ness")
    if m.scale_a not in (1, -1) or m.scale_b not in (1, -1):
        raise ValueError(f"{given} with scale_a={m.scale_a}, scale_b={m.scale_b}: the immediates are 1 or -1")
    if m.d == "s32" and (m.scale_a, m.scale_b) != (1, 1):
        raise ValueError(f"{given} with scale_a={m.scale_a}, scale_b={m.scale_b}: integer operands cannot be negated")
    if m.saturate and m.d != "s32":
        raise ValueError(f"{given} with saturate: only integer accumulators saturate")
    return m


def mma_async_asm(
    multiply: Multiply, accumulators: Sequence[str], a: str | Sequence[str], b: str, predicate: str
) -> str:
    """The instruction: 32-bit accumulator registers, A (a descriptor register, or four fragment registers), B's
    descriptor, scale-d predicate.
    """
    m = check(multiply)
    operand_a = a if isinstance(a, str) else "{" + ", ".join(a) + "}"
    operands = ["{" + ", ".join(accumulators) + "}", operand_a, b, predicate]
    if m.d != "s32":
        operands += [str(m.scale_a), str(m.scale_b)]
    if OPERANDS[m.a][0] == 16:
        operands += [] if m.a_in_registers else [str(int(m.trans_a))]
        operands += [str(int(m.trans_b))]
    return f"{m.mnemonic} {', '.join(operands)};"


def pack_asm(word: str, elements: Sequence[str], scratch: str) -> str:
    """One 32-bit `word` from two 16-bit or four 8-bit elements in 16-bit registers; `scratch` prefixes two 32-bit
    registers."""
    if len(elements) == 2:
        return f"mov.b32 {word}, {{{elements[0]}, {elements[1]}}};"
    low, high = (f"mov.b32 {scratch}{i}, {{{elements[2 * i]}, {elements[2 * i + 1]}}};" for i in range(2))
    return f"{low} {high} prmt.b32 {word}, {scratch}0, {scratch}1, 0x6420;"


def operand_strides(rows: int, columns: int, element_bytes: int, swizzle: int, k_major: bool) -> tuple[int, int]:
    """(leading, stride) byte offsets of a `rows` x `columns` operand, columns contiguous, in a swizzled
    NVMMASharedLayout or `core_matrix_layout`.

    These layouts cut the tile into panels of `swizzle` bytes of columns (16 bytes without swizzling), each with all
    rows, one row after the other, panel after panel. Groups of 8 rows of a panel are the core matrices of PTX ISA
    9.7.15.5.1. `k_major`: the columns are K.
    """
    panel = swizzle or 16
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle={swizzle}: it is 0, 32, 64 or 128 bytes")
    if rows % 8 or columns * element_bytes % panel:
        raise ValueError(
            f"a {rows} x {columns} operand of {element_bytes}-byte elements: rows come in eights and a row in panels "
            f"of {panel} bytes"
        )
    next_panel, next_group = rows * panel, 8 * panel
    if swizzle == 0 and not k_major:  # without swizzling, MN-major descriptors name the two the other way round
        return next_group, next_panel
    return next_panel, next_group


def operand_offset(step: int, rows: int, element_bytes: int, swizzle: int, k_major: bool) -> int:
    """Bytes from the operand's first element to its `step`-th K step (32 bytes of K), in the storage that
    `operand_strides` describes."""
    panel = swizzle or 16
    if k_major:  # along the columns: through the panel, then to the next one
        column = 32 * step
        return column // panel * rows * panel + column % panel
    return step * (32 // element_bytes) * panel


def descriptor_constant(leading: int, stride: int, swizzle: int) -> int:
    """The matrix descriptor without its address: leading >> 4 in bits 16-29, stride >> 4 in bits 32-45, the swizzle
    mode in bits 62-63."""
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle={swizzle}: it is 0, 32, 64 or 128 bytes")
    for name, value in (("leading_bytes", leading), ("stride_bytes", stride)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise ValueError(f"{name}={value}: it is a multiple of 16 below {1 << 18}")
    return leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[swizzle] << 62


def descriptor_asm(target: str, address: str, constant: int, scratch: str) -> str:
    """`target` (64 bits) = the descriptor of the 32-bit shared `address`; `scratch` is a 32-bit register."""
    field = f"and.b32 {scratch}, {address}, 0x3ffff; shr.u32 {scratch}, {scratch}, 4; cvt.u64.u32 {target}, {scratch};"
    return f"{field} or.b64 {target}, {target}, {constant:#x};"


@constexpr_function
def core_matrix_layout(shape: tuple[int, ...], element_bytes: int, contiguous: int = 1) -> gl.SharedLinearLayout:
    """The unswizzled shared layout that wgmma reads: panels of 16 bytes along axis `contiguous`, all of the other axis
    in each.

    Gluon's NVMMASharedLayout(0, ...) is row-major instead, which wgmma reads only where a row has 16 bytes. Swizzled
    layouts have fewer bank conflicts.
    """
    rows, columns = shape[1 - contiguous], shape[contiguous]
    unit = 16 // element_bytes
    order = [(1, 1 << i) for i in range((unit - 1).bit_length())] + [
        (0, 1 << i) for i in range((rows - 1).bit_length())
    ]
    order += [(1, unit << i) for i in range((columns // unit - 1).bit_length())]
    return gl.SharedLinearLayout(
        [[0, step] if (axis == 1) == (contiguous == 1) else [step, 0] for axis, step in order], alignment=128
    )


class Operand(NamedTuple):
    """A shared tile as a wgmma operand: its descriptor without the address, the extent along the other axis, K, the
    type, and K-major or not.
    """

    constant: int
    extent: int
    k: int
    type: str
    k_major: bool
    rows: int
    element_bytes: int
    swizzle: int

    def offset(self, step: int) -> int:
        return operand_offset(step, self.rows, self.element_bytes, self.swizzle, self.k_major)


def _storage(tile: Traced) -> tuple[int, int]:
    """(swizzle in bytes, contiguous axis) of a 2-D shared tile. Errors: TypeError for a layout that no matrix
    descriptor describes."""
    layout, shape = tile.layout, [unwrap(size) for size in tile.shape]
    size = tile.dtype.primitive_bitwidth // 8
    if isinstance(layout, gl.NVMMASharedLayout):
        contiguous = 0 if layout.transposed else 1
        if layout.swizzle_byte_width or shape[contiguous] * size == 16:
            return layout.swizzle_byte_width, contiguous
    if isinstance(layout, gl.SharedLinearLayout):
        for contiguous in (1, 0):
            if layout.offset_bases == core_matrix_layout(shape, size, contiguous).offset_bases:
                return 0, contiguous
    raise TypeError(
        f"wgmma operand {tile.type}: it is a 2-D shared tile in an NVMMASharedLayout with swizzling, or in "
        "core_matrix_layout without"
    )


def shared_operand(tile: Traced, k_axis: int) -> Operand:
    """Describe `tile` (a 2-D shared descriptor) as an operand whose K runs along `k_axis` (0 or 1).

    Errors: TypeError for a layout or type, ValueError for a shape or major-ness that wgmma cannot read.
    """
    shape = [unwrap(size) for size in tile.shape]
    allocated = [unwrap(size) for size in tile.type.alloc_shape][-2:]
    kind = PTX_TYPES.get(str(tile.dtype))
    if kind is None or len(shape) != 2 or k_axis not in (0, 1):
        raise TypeError(
            f"wgmma operand {tile.type} with k_axis={k_axis}: it has two axes, K along 0 or 1, and one of the types "
            f"{', '.join(PTX_TYPES)}"
        )
    swizzle, contiguous = _storage(tile)
    size, k_major = OPERANDS[kind][0] // 8, contiguous == k_axis
    if not k_major and size != 2:
        raise ValueError(
            f"wgmma operand {kind} {shape} with K along axis {k_axis}: only 16-bit operands may be MN-major; store it "
            "contiguous in K"
        )
    if shape[k_axis] * size % 32:
        raise ValueError(
            f"wgmma operand {kind} {shape}: K={shape[k_axis]} must be a multiple of {32 // size} (32 bytes)"
        )
    rows = allocated[1 - contiguous]
    constant = descriptor_constant(*operand_strides(rows, allocated[contiguous], size, swizzle, k_major), swizzle)
    return Operand(constant, shape[1 - k_axis], shape[k_axis], kind, k_major, rows, size, swizzle)


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


@triton.jit
def fence(tiles=()):
    """Orders earlier accesses to the registers of `tiles` (accumulators, A fragments) before the wgmma that follow.
    Returns the tiles.

    Needed before the first mma_async, and again after other code touched its registers. PTX ISA 9.7.15.7.1
    `wgmma.fence.sync.aligned`.
    """
    return pass_through("wgmma.fence.sync.aligned;", tiles, (90,))


@triton.jit
def commit_group():
    """Closes a group of the warpgroup's mma_async issued so far. PTX ISA 9.7.15.7.2
    `wgmma.commit_group.sync.aligned`."""
    pass_through("wgmma.commit_group.sync.aligned;", (), (90,))


@triton.jit
def wait_group(pending: tl.constexpr, tiles=()):
    """Waits until at most `pending` (0 to 7) of the latest groups are unfinished. Returns `tiles`, which may be used
    from here on.

    `tiles`: the accumulators, and the A fragments, of the groups that are now done. PTX ISA 9.7.15.7.3
    `wgmma.wait_group.sync.aligned`.
    """
    return pass_through(_wait_template(pending), tiles, (90,))


@builtin
def _wait_template(pending: Traced, _semantic: Semantic = None) -> Traced:
    pending = unwrap(pending)
    if not isinstance(pending, int) or not 0 <= pending <= 7:
        raise ValueError(f"wgmma.wait_group({pending}): the number of groups left unfinished is a constant from 0 to 7")
    return tl.constexpr(f"wgmma.wait_group.sync.aligned {pending};")


@builtin
def _descriptor(
    address: Traced, leading: Traced, stride: Traced, swizzle: Traced, _semantic: Semantic = None
) -> Traced:
    require("wgmma matrix descriptor", only=(90,), _semantic=_semantic)
    constant = descriptor_constant(unwrap(leading), unwrap(stride), unwrap(swizzle))
    template = "{ .reg .b32 t; " + descriptor_asm("$0", "$1", constant, "t") + " }"
    return asm(template, "=l,r", (address,), tl.uint64, _semantic=_semantic)


@triton.jit
def shared_descriptor(address, leading_bytes: tl.constexpr, stride_bytes: tl.constexpr, swizzle: tl.constexpr):
    """uint64 matrix descriptor of a shared operand (PTX ISA 9.7.15.5.1): address an int32 shared address or a
    descriptor, swizzle 0, 32, 64, 128.

    `operand_strides` computes the two strides for tiles in Gluon's layouts. The tile must start at a multiple of 8 *
    swizzle bytes (its base offset field is 0); a K step inside it may be added to the address in bytes, or to the
    descriptor in units of 16 bytes.
    """
    return _descriptor(address, leading_bytes, stride_bytes, swizzle)


@builtin
def _operand_descriptor(tile: Traced, k_axis: Traced, step: Traced, _semantic: Semantic = None) -> Traced:
    require("wgmma matrix descriptor", only=(90,), _semantic=_semantic)
    explicit_only(_semantic, "operand_descriptor")
    (tile,), _ = tiles_of(tile)
    operand = shared_operand(tile, unwrap(k_axis))
    step = unwrap(step)
    if not 0 <= step < operand.k * operand.element_bytes // 32:
        raise ValueError(
            f"operand_descriptor step={step}: K={operand.k} has {operand.k * operand.element_bytes // 32} steps of 32 "
            "bytes"
        )
    template = (
        "{ .reg .b32 t; "
        + descriptor_asm("$0", "$1", operand.constant, "t")
        + f" add.s64 $0, $0, {operand.offset(step) >> 4}; }}"
    )
    return asm(template, "=&l,r", (tile,), tl.uint64, _semantic=_semantic)


@triton.jit
def operand_descriptor(tile, k_axis: tl.constexpr, step: tl.constexpr = 0):
    """uint64 matrix descriptor of a shared tile's `step`-th K step (32 bytes of K): explicit kernels, a swizzled
    NVMMASharedLayout or core_matrix_layout.

    k_axis is the axis of K: 1 for A of [M, K], 0 for B of [K, N], 1 for B of [N, K]. Where it is not the contiguous
    axis the operand is MN-major: pass trans_a or trans_b to mma_async (16-bit types only).
    """
    return _operand_descriptor(tile, k_axis, step)


def _accumulator(tiles: Sequence[Traced], integer: bool) -> tuple[int, str]:
    """(N, PTX accumulator type) of checked accumulator pieces; int32 tiles are packed float16 pairs unless the operands
    are integers."""
    kinds = {str(tile.dtype) for tile in tiles}
    if kinds not in ({"fp32"}, {"int32"}):
        raise TypeError(
            f"wgmma accumulator of {', '.join(sorted(kinds))}: float32, int32 for 8-bit integers, or float16 pairs "
            "packed to int32 (pack)"
        )
    d = "f32" if kinds == {"fp32"} else "s32" if integer else "f16"
    n = 0
    for tile in tiles:
        rows, columns = (unwrap(size) for size in tile.type.shape)
        n += columns * (2 if d == "f16" else 1)
        layout = tile.type.layout
        fits = list(getattr(layout, "warps_per_cta", [4, 1])) == [4, 1] and list(
            getattr(layout, "version", [3, 0])
        ) == [3, 0]
        if rows != 64 or not fits or not isinstance(layout, (gl.NVMMADistributedLayout, gl.DistributedLinearLayout)):
            raise ValueError(
                f"wgmma accumulator {tile.type}: a piece has 64 rows in NVMMADistributedLayout([3, 0], [4, 1], [16, "
                "columns, K]), "
                "or is the packed form of one"
            )
        if isinstance(layout, gl.NVMMADistributedLayout) and unwrap(layout.instr_shape)[1] > columns:
            raise ValueError(
                f"wgmma accumulator {tile.type}: instr_shape names {unwrap(layout.instr_shape)[1]} columns, the piece "
                f"has {columns}"
            )
    return n, d


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


def _fragment(tile: Traced, kind: str, semantic: Semantic) -> tuple[int, int]:
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
            f"k_width={wanted}), "
            "or pack of such a tile"
        )
    return per_word, registers(tile.type, semantic) // (4 * per_word)


def _operand_types(a: Traced, a_type: Traced, b_type: Traced) -> tuple[str, str]:
    """PTX operand types from what the caller names, else from the element type of a register tile A, else B as A."""
    if a_type is None and is_tile(a):
        a_type = a.dtype
    names: dict[str, Traced] = {
        "a_type": PTX_TYPES.get(str(a_type), a_type),
        "b_type": PTX_TYPES.get(str(b_type), b_type),
    }
    names["b_type"] = names["b_type"] or names["a_type"]
    for name, kind in names.items():
        if kind not in OPERANDS:
            raise ValueError(
                f"wgmma {name}={kind}: name one of {', '.join(OPERANDS)} or a Triton type; a descriptor or a packed "
                "tile does not tell"
            )
    return names["a_type"], names["b_type"]


@builtin
def _mma_async(
    accumulator: Traced,
    a: Traced,
    b: Traced,
    a_type: Traced,
    b_type: Traced,
    scale_d: Traced,
    scale_a: Traced,
    scale_b: Traced,
    trans_a: Traced,
    trans_b: Traced,
    saturate: Traced,
    step: Traced,
    _semantic: Semantic = None,
) -> Traced:
    require("wgmma.mma_async", only=(90,), _semantic=_semantic)
    explicit_only(_semantic, "wgmma.mma_async")
    tiles, single = tiles_of(accumulator)
    (a,), _ = tiles_of(a)
    kind_a, kind_b = _operand_types(a, unwrap(a_type), unwrap(b_type))
    n, d = _accumulator(tiles, kind_a in ("s8", "u8"))
    in_registers = is_tile(a)
    multiply = check(
        Multiply(
            n,
            d,
            kind_a,
            kind_b,
            in_registers,
            bool(unwrap(trans_a)),
            bool(unwrap(trans_b)),
            unwrap(scale_a),
            unwrap(scale_b),
            bool(unwrap(saturate)),
        )
    )
    outputs, ties = tied(tiles, _semantic)
    names = [f"${i}" for i in range(len(outputs))]
    first, step = 2 * len(outputs), unwrap(step)
    lines: list[str] = []
    operand_a: str | list[str]
    if in_registers:
        per_word, steps = _fragment(a, kind_a, _semantic)
        if not 0 <= step < steps:
            raise ValueError(f"wgmma.mma_async step={step}: the A fragment has {steps} K steps of {multiply.k} columns")
        lines, operand_a = fragment_asm(first, per_word, step, "a")
        count = per_word * 4 * steps
        letters = [letter(a.dtype)] * count
    else:
        operand_a, count, letters, a = f"${first}", 1, ["l"], _semantic.cast(_semantic.to_tensor(a), tl.uint64)
    if lines:  # registers that were written after the caller's fence need one of their own
        lines = [".reg .b32 t0, t1, a0, a1, a2, a3;", *lines, "wgmma.fence.sync.aligned;"]
    b = _semantic.cast(_semantic.to_tensor(b), tl.uint64)
    scale = _semantic.cast(_semantic.to_tensor(unwrap(scale_d)), tl.int32)
    instruction = mma_async_asm(multiply, names, operand_a, f"${first + count}", "p")
    template = "\n".join(["{ .reg .pred p;", *lines, f"setp.ne.b32 p, ${first + count + 1}, 0;", instruction, "}"])
    out = _semantic.inline_asm(
        template,
        ",".join(outputs + ties + letters + ["l", "r"]),
        (*tiles, a, b, scale),
        tuple(tile.type for tile in tiles),
        False,
    )
    return out[0] if single else tl.tuple(out)


@triton.jit
def mma_async(
    accumulator,
    a,
    b,
    a_type: tl.constexpr = None,
    b_type: tl.constexpr = None,
    scale_d=1,
    scale_a: tl.constexpr = 1,
    scale_b: tl.constexpr = 1,
    trans_a: tl.constexpr = False,
    trans_b: tl.constexpr = False,
    saturate: tl.constexpr = False,
    step: tl.constexpr = 0,
):
    """One wgmma: accumulator = scale_a * scale_b * A B + (accumulator if scale_d else 0). Explicit kernels, sm_90a.

    Returns the accumulator, which is not ready before the wait.

    accumulator  a register tile or a tuple of them (see the module), N columns together. It fixes D: float32, int32, or
                 packed float16.
    a            uint64 matrix descriptor of 64 x K, or a register fragment tile; b: uint64 matrix descriptor. K is 32
                 bytes: 16 for 16-bit types, 8 for tf32, 32 for 8-bit types. A fragment wider than K supplies its
                 columns of K step `step`.
    a_type       "f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8" or the Triton type; needed unless A is a register
                 tile of that type. b_type: likewise, default a_type.
    scale_d      int32 or constant; scale_a, scale_b: 1 or -1 (not for integers).
    trans_a/b    True for an MN-major shared operand (16-bit types). saturate: int32 accumulators clamp instead of
                 wrapping.
    A 16- or 8-bit fragment is packed inside, with moves and a second fence in each call. In a loop, call `pack` once.
    PTX ISA 9.7.15.5.2 `wgmma.mma_async`.
    """
    return _mma_async(accumulator, a, b, a_type, b_type, scale_d, scale_a, scale_b, trans_a, trans_b, saturate, step)


@builtin
def _mma_sync(
    accumulator: Traced,
    a: Traced,
    b: Traced,
    a_k_axis: Traced,
    b_k_axis: Traced,
    scale_d: Traced,
    scale_a: Traced,
    scale_b: Traced,
    saturate: Traced,
    _semantic: Semantic = None,
) -> Traced:
    require("wgmma.mma_async", only=(90,), _semantic=_semantic)
    explicit_only(_semantic, "wgmma.mma_sync")
    tiles, single = tiles_of(accumulator)
    (a,), _ = tiles_of(a)
    (b,), _ = tiles_of(b)
    operand_b = shared_operand(b, unwrap(b_k_axis))
    in_registers = is_tile(a)
    operand_a = None if in_registers else shared_operand(a, unwrap(a_k_axis))
    kind_a = operand_a.type if operand_a else PTX_TYPES.get(str(a.dtype))
    if kind_a is None:
        raise TypeError(f"wgmma.mma_sync of a register tile of {a.dtype}: the types are {', '.join(PTX_TYPES)}")
    halves = {str(tile.dtype) for tile in tiles} == {"fp16"}
    n, d = (
        (sum(unwrap(tile.type.shape[1]) for tile in tiles), "f16")
        if halves
        else _accumulator(tiles, kind_a in ("s8", "u8"))
    )
    multiply = check(
        Multiply(
            n,
            d,
            kind_a,
            operand_b.type,
            in_registers,
            bool(operand_a and not operand_a.k_major),
            not operand_b.k_major,
            unwrap(scale_a),
            unwrap(scale_b),
            bool(unwrap(saturate)),
        )
    )
    if operand_b.extent < n or (operand_a and operand_a.extent != 64):
        raise ValueError(
            f"wgmma.mma_sync with an accumulator of {n} columns, A {a.type}, B {b.type}: A has 64 rows and B at least "
            "N columns"
        )
    per_word, steps = (0, operand_a.k // multiply.k) if operand_a else _fragment(a, kind_a, _semantic)
    if steps * multiply.k != operand_b.k:
        raise ValueError(f"wgmma.mma_sync: A has K={steps * multiply.k}, B has K={operand_b.k}")

    outputs, ties = tied(tiles, _semantic)
    first, count = 2 * len(outputs), 4 * per_word * steps if in_registers else 1
    names = [f"${i}" for i in range(len(outputs))]
    lines = [
        "{ .reg .pred p, always; .reg .b32 t, t0, t1; .reg .b64 da, db;",
        f"setp.ne.b32 p, ${first + count + 1}, 0;",
        "setp.eq.b32 always, 0, 0;",
    ]
    unpack = []
    if halves:
        words = [f"w{i}" for i in range(multiply.accumulators)]
        pairs = [(word, names[2 * i], names[2 * i + 1]) for i, word in enumerate(words)]
        lines.append(f".reg .b32 {', '.join(words)};")
        lines += [f"mov.b32 {word}, {{{low}, {high}}};" for word, low, high in pairs]
        unpack = [f"mov.b32 {{{low}, {high}}}, {word};" for word, low, high in pairs]
        names = words
    lines.append(descriptor_asm("db", f"${first + count}", operand_b.constant, "t"))
    fragments = []
    if operand_a is None:
        for step in range(steps):
            moves, words = fragment_asm(first, per_word, step, f"a{step}_")
            lines += ([f".reg .b32 {', '.join(words)};"] if moves else []) + moves
            fragments.append(words)
    else:
        lines.append(descriptor_asm("da", f"${first}", operand_a.constant, "t"))
    lines.append("wgmma.fence.sync.aligned;")
    for step in range(steps):
        source_a: str | list[str] = fragments[step] if in_registers else f"da{step}"
        lines.append(f".reg .b64 da{step}, db{step}; add.s64 db{step}, db, {operand_b.offset(step) >> 4};")
        if operand_a:
            lines.append(f"add.s64 da{step}, da, {operand_a.offset(step) >> 4};")
        lines.append(mma_async_asm(multiply, names, source_a, f"db{step}", "always" if step else "p"))
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", *unpack, "}"]
    letters = [letter(a.dtype)] * count if in_registers else ["r"]
    scale = _semantic.cast(_semantic.to_tensor(unwrap(scale_d)), tl.int32)
    out = _semantic.inline_asm(
        "\n".join(lines),
        ",".join(outputs + ties + letters + ["r", "r"]),
        (*tiles, a, b, scale),
        tuple(tile.type for tile in tiles),
        False,
    )
    return out[0] if single else tl.tuple(out)


@triton.jit
def mma_sync(
    accumulator,
    a,
    b,
    a_k_axis: tl.constexpr = 1,
    b_k_axis: tl.constexpr = 0,
    scale_d=1,
    scale_a: tl.constexpr = 1,
    scale_b: tl.constexpr = 1,
    saturate: tl.constexpr = False,
):
    """accumulator = A B + (accumulator if scale_d else 0) over whole tiles, finished on return: fence, all K steps,
    commit and wait in one block.

    accumulator  a register tile or a tuple of them (see the module): float32, int32, or here also plain float16 tiles.
    a            shared tile with 64 rows, or a register fragment 64 x K; b: shared tile with at least N columns, of
                 which the first N are used.
    a_k_axis     the axis of K in a shared A: 1 for [M, K]. b_k_axis: 0 for B of [K, N], 1 for [N, K].
    Shared tiles are in a swizzled NVMMASharedLayout or in core_matrix_layout; which operands are MN-major follows from
    it. Writes to them by ordinary stores must be made visible first (barrier, fence.proxy.async). Explicit kernels,
    sm_90a. PTX ISA 9.7.15.5.2."""
    return _mma_sync(accumulator, a, b, a_k_axis, b_k_axis, scale_d, scale_a, scale_b, saturate)


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


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixDescriptor:
    """Where an operand lies in shared memory: byte address in the CTA's window, byte offsets, swizzle width in bytes,
    base offset in rows of 128 bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int
    base_offset: int

    def addresses(self, rows: int, k: int, element_bytes: int, k_major: bool) -> np.ndarray:
        """int64 [rows, k]: the byte address in the CTA's shared window of each element (`rows`: the axis that is not
        K).

        The canonical layouts of PTX ISA 9.7.15.5.1: groups of 8 rows of 16, 32, 64 or 128 contiguous bytes. K-major:
        `stride` leads to the next 8 rows, and without swizzling `leading` to the next 16 bytes of K. MN-major with
        swizzling: a row is `swizzle` bytes along MN, `leading` apart from the next such, and K runs over the rows, 8 of
        them `stride` apart; without swizzling the two change their parts. The swizzle exchanges 16-byte units by the
        address bits 7 to 9.
        """
        row: np.ndarray = np.arange(rows, dtype=np.int64)[:, None]
        column: np.ndarray = np.arange(k, dtype=np.int64)[None, :]
        along: np.ndarray
        width = self.swizzle or 16
        if k_major:
            along = column * element_bytes
            offsets = (
                row % 8 * width
                + row // 8 * self.stride
                + (along if self.swizzle else along // 16 * self.leading + along % 16)
            )
        else:
            along = row * element_bytes
            panel, group = (self.leading, self.stride) if self.swizzle else (self.stride, self.leading)
            offsets = along % width + along // width * panel + column % 8 * width + column // 8 * group
        places = self.start + offsets
        units = {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]
        return places ^ ((places - 128 * self.base_offset) >> 7 & units) << 4


def decode_descriptor(descriptor: int) -> MatrixDescriptor:
    """wgmma's 64-bit matrix descriptor (PTX ISA 9.7.15.5.1)."""
    swizzle = {code: size for size, code in SWIZZLES.items()}[descriptor >> 62 & 3]
    return MatrixDescriptor(
        (descriptor & 0x3FFF) << 4,
        (descriptor >> 16 & 0x3FFF) << 4,
        (descriptor >> 32 & 0x3FFF) << 4,
        swizzle,
        descriptor >> 49 & 7,
    )


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


_INTEGER = {"s8": np.int8, "u8": np.uint8}


def operand_values(name: str, bits: np.ndarray) -> np.ndarray:
    """float64 (int64 for s8, u8) of an operand's words."""
    return unsigned(bits, 8).view(_INTEGER[name]).astype(np.int64) if name in _INTEGER else decode(name, bits)


def multiply_add(
    a: np.ndarray, b: np.ndarray, c: "np.ndarray | None", d_type: str, saturate: bool = False
) -> np.ndarray:
    """Bits of a [m, k] b [n, k]ᵀ + c in the accumulator's type `d_type`; c: values, or None for 0.

    Floats: the sum of the exact products and c, in float64, rounded once to nearest. The tensor core aligns and
    truncates its partial sums, by an amount that the PTX ISA does not state; the difference is of the order of one unit
    in the last place of the largest term. Integers: exact, wrapped or clamped.
    """
    total = a @ b.T
    if d_type == "s32":
        total = total + (c if c is not None else 0)
        return unsigned(np.clip(total, -(2**31), 2**31 - 1) if saturate else total, 32)
    with np.errstate(all="ignore"):
        return encode(d_type, total + (c if c is not None else 0.0))


def accumulator_values(bits: np.ndarray, d_type: str) -> np.ndarray:
    return unsigned(bits, 32).view(np.int32).astype(np.int64) if d_type == "s32" else decode(d_type, bits)


@dataclass(frozen=True)
class Product:
    """One wgmma.mma_async of one warpgroup.

    warpgroup   its index in the role: threads 128 warpgroup … + 127
    multiply    types and sizes; D is 64 x n, A 64 x k, B n x k
    a           int64 [64, k] byte addresses in the CTA's shared window, or None: A is in registers
    a_bits      [64, k] words, or None
    b           int64 [n, k] byte addresses
    accumulator [64, n] words of D's type (uint16 for f16, else uint32), or None: D = A B
    """

    warpgroup: int
    multiply: Multiply
    a: "np.ndarray | None"
    a_bits: "np.ndarray | None"
    b: np.ndarray
    accumulator: "np.ndarray | None"

    @property
    def element_bytes(self) -> int:
        return OPERANDS[self.multiply.a][0] // 8

    def compute(self, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """[64, n] words of D. `read(addresses)` gives uint8 [*addresses.shape, element_bytes] of the CTA's shared
        memory."""
        m = self.multiply

        def operand(addresses: np.ndarray) -> np.ndarray:
            return from_bytes(np.asarray(read(addresses)), 8 * self.element_bytes)

        left = operand(self.a) if self.a is not None else self.a_bits
        assert left is not None
        a = operand_values(m.a, left)
        b = operand_values(m.b, operand(self.b))
        c = accumulator_values(self.accumulator, m.d) if self.accumulator is not None else None
        return multiply_add(a * m.scale_a, b * m.scale_b, c, m.d, m.saturate)


_TYPES = "|".join(OPERANDS)


def _warpgroups(i: Instruction) -> Iterator[tuple[int, slice]]:
    """(index, slice of the threads) of each warpgroup that executes. Errors: PtxFault where it is not whole."""
    if len(i.active) % 128:
        raise PtxFault(f"{len(i.active)} threads are no whole warpgroups")
    for group in range(len(i.active) // 128):
        threads = slice(128 * group, 128 * group + 128)
        if i.active[threads].all():
            yield group, threads
        elif i.active[threads].any():
            raise PtxFault("some threads of a warpgroup do not execute it")


def _stack(registers: Iterable[Register], i: Instruction, threads: slice) -> np.ndarray:
    """uint32 [128, registers] of one warpgroup."""
    return np.stack([np.broadcast_to(unsigned(x, 32), i.active.shape)[threads] for x in registers], axis=1)


@meaning(
    f"wgmma.mma_async.sync.aligned.{{shape}}.{{saturate:satfinite}}?.{{d:f16|f32|s32}}.{{a:{_TYPES}}}.{{b:{_TYPES}}}",
    updates=True,
)
def _mma_async_meaning(
    t: Machine, i: Instruction, accumulators: Register, a: Register, b: Register, scale_d: Register, *rest: Register
) -> Register:
    f = {name: value or "" for name, value in i.fields.items()}
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", f["shape"])
    if shape is None:
        raise NoMeaning(f"the shape {f['shape']}")
    in_registers = isinstance(a, tuple)
    flags = list(rest)
    scale_a, scale_b = (flags.pop(0), flags.pop(0)) if f["d"] != "s32" else (1, 1)
    transposed = (flags if not in_registers else [0, *flags]) if OPERANDS[f["a"]][0] == 16 else [0, 0]
    transposed_a, transposed_b = (bool(flag) for flag in transposed)
    m = check(
        Multiply(
            int(shape[1]),
            f["d"],
            f["a"],
            f["b"],
            in_registers,
            transposed_a,
            transposed_b,
            scale_a,
            scale_b,
            bool(f["saturate"]),
        )
    )
    if m.k != int(shape[2]) or len(accumulators) != m.accumulators:
        raise PtxFault(
            f"{f['shape']} with {len(accumulators)} accumulator registers: K is {m.k}, and there are {m.accumulators}"
        )
    out: np.ndarray = np.zeros((len(accumulators), len(i.active)), np.uint32)
    size = OPERANDS[m.a][0] // 8
    places = accumulator_places(m.n)
    for group, threads in _warpgroups(i):
        here = np.zeros(i.active.shape, bool)
        here[threads] = True
        matrix = None
        if uniform(scale_d, here, "scale-d of wgmma.mma_async"):
            words = _stack(accumulators, i, threads)
            if m.d == "f16":
                words = np.stack(split(words, 32, 2), axis=2).reshape(128, -1)
            matrix = np.zeros((64, m.n), words.dtype)
            matrix[places] = words
        fragment = left = None
        if in_registers:
            per_word = 4 // size
            words = _stack(a, i, threads)
            parts = np.stack(split(words, 32, per_word), axis=2)
            fragment = np.zeros((64, m.k), parts.dtype)
            fragment[fragment_places(per_word)] = parts
        else:
            left = decode_descriptor(uniform(a, here, "A's matrix descriptor")).addresses(64, m.k, size, not m.trans_a)
        right = decode_descriptor(uniform(b, here, "B's matrix descriptor")).addresses(m.n, m.k, size, not m.trans_b)
        result = np.asarray(t.wgmma(Product(group, m, left, fragment, right, matrix)))[places]
        out[:, threads] = (join([result[:, 0::2], result[:, 1::2]], 32) if m.d == "f16" else result).T
    return tuple(out)


@meaning("wgmma.fence.sync.aligned", destinations=0)
def _fence_meaning(t: Machine, i: Instruction) -> None:
    t.wgmma_fence()


@meaning("wgmma.commit_group.sync.aligned", destinations=0)
def _commit_meaning(t: Machine, i: Instruction) -> None:
    t.wgmma_commit()


@meaning("wgmma.wait_group.sync.aligned", destinations=0)
def _wait_meaning(t: Machine, i: Instruction, pending: Register) -> Waits:
    wait = t.wgmma_wait(uniform(pending, i.active, "the number of groups of wgmma.wait_group"))
    if wait is not None:
        yield wait
