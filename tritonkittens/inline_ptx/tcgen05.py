"""Fifth-generation tensor cores of datacentre Blackwell (PTX ISA 9.7.16): tensor memory, its loads and stores, mma;
sm_100a and sm_103a, one CTA.

Tensor memory has 128 lanes of 512 32-bit columns a CTA; an address is lane << 16 | column, as int32 or a
tensor-memory descriptor. Three kinds of instructions, by their executing threads:
 - alloc, dealloc and relinquish_alloc_permit belong to one whole warp. issuer: "warp" (every warp that executes it),
   "warpgroup" (the first warp of each four), "cta" (the first warp of the CTA);
 - mma, cp, shift and commit belong to one thread. issuer as in the whole package: "thread", "warp", "warpgroup",
   "cta";
 - ld, st, the waits and the fences are executed by every warp; ld and st need a warpgroup, whose warp w accesses
   lanes 32 w to 32 w + 31 only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from ._asm import arch, asm, builtin, issued, require, unwrap
from ._meaning import (
    Instruction,
    Machine,
    NoMeaning,
    PtxFault,
    Register,
    Waits,
    data_bytes,
    from_bytes,
    lanes,
    meaning,
    uniform,
    unsigned,
    warps,
)
from ._tile_operands import explicit_only, is_tile, letter, pass_through, registers, tiles_of
from ._traced import Semantic, Traced
from .wgmma import MatrixDescriptor, accumulator_values, descriptor_asm, multiply_add, operand_values

TARGETS = (100, 103)
# ld/st shape -> 32-bit registers of a thread for .x1
SHAPES = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}  # bytes -> the shared-memory descriptor's bits 61-63
# mma kind -> (operand type -> its code in the instruction descriptor, accumulator type -> code, bytes of K fixed at 32)
KINDS = {
    "f16": ({"f16": 0, "bf16": 1}, {"f16": 0, "f32": 1}),
    "tf32": ({"tf32": 2}, {"f32": 1}),
    "f8f6f4": ({"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}, {"f16": 0, "f32": 1}),
    "i8": ({"u8": 0, "s8": 1}, {"s32": 2}),
}
COPIES = {
    "128x256b": ("",),
    "4x256b": ("",),
    "128x128b": ("",),
    "64x128b": ("warpx2::02_13", "warpx2::01_23"),
    "32x128b": ("warpx4",),
}
EXPANSIONS = ("", "b8x16.b6x16_p32", "b8x16.b4x16_p64")


@constexpr_function
def instruction_descriptor(
    kind: str,
    m: int,
    n: int,
    a: str,
    b: str | None = None,
    d: str = "f32",
    trans_a: bool = False,
    trans_b: bool = False,
    negate_a: bool = False,
    negate_b: bool = False,
    saturate: bool = False,
) -> int:
    """int: the 32-bit instruction descriptor of a dense `mma` (PTX ISA 9.7.16.4.2). Works on the host and in kernels.

    kind "f16", "tf32", "f8f6f4" or "i8"; m 64 or 128; n a multiple of 8 (m=64) or 16 (m=128) up to 256; a, b PTX
    operand types ("bf16", "e4m3", …; b default a), d the accumulator type; trans: the operand is MN-major. Errors:
    ValueError that states the rule.
    """
    b = a if b is None else b
    given = f"tcgen05.mma kind {kind}, m={m}, n={n}, {d} += {a} x {b}"
    if kind not in KINDS:
        raise ValueError(f"{given}: the kind is one of {', '.join(KINDS)}")
    operands, accumulators = KINDS[kind]
    if (
        a not in operands
        or b not in operands
        or d not in accumulators
        or (kind == "f16" and (a != b or (a == "bf16" and d == "f16")))
    ):
        raise ValueError(
            f"{given}: operands are {', '.join(operands)}{' (both the same)' if kind == 'f16' else ''} and "
            "accumulators "
            f"{', '.join(accumulators)}{' (bf16: f32 only)' if kind == 'f16' else ''}"
        )
    integer = kind == "i8"
    allowed = [size for size in range(8, 257, 8) if size % (16 if m == 128 or (integer and size > 32) else 8) == 0]
    if m not in (64, 128) or n not in allowed:
        raise ValueError(
            f"{given}: m is 64 or 128, n a multiple of {16 if m == 128 else 8} up to "
            f"256{' (above 32: of 16)' if integer else ''}"
        )
    if (integer and (negate_a or negate_b)) or (saturate and not integer):
        raise ValueError(f"{given}: only floating-point operands are negated and only integers saturate")
    if kind == "tf32" and (trans_a or trans_b):
        raise ValueError(f"{given} with trans_a={trans_a}, trans_b={trans_b}: 32-bit operands are contiguous in K here")
    return (
        int(saturate) << 3
        | accumulators[d] << 4
        | operands[a] << 7
        | operands[b] << 10
        | int(negate_a) << 13
        | int(negate_b) << 14
        | int(trans_a) << 15
        | int(trans_b) << 16
        | n >> 3 << 17
        | m >> 4 << 24
    )


def descriptor_constant(leading: int, stride: int, swizzle: int) -> int:
    """The shared-memory descriptor without its address (PTX ISA 9.7.16.4.1); strides in bytes, as
    `wgmma.operand_strides` computes them."""
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle={swizzle}: it is 0, 32, 64 or 128 bytes")
    for name, value in (("leading_bytes", leading), ("stride_bytes", stride)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise ValueError(f"{name}={value}: it is a multiple of 16 below {1 << 18}")
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[swizzle] << 61


@builtin
def _descriptor(
    address: Traced, leading: Traced, stride: Traced, swizzle: Traced, _semantic: Semantic = None
) -> Traced:
    require("tcgen05 shared-memory descriptor", only=TARGETS, _semantic=_semantic)
    constant = descriptor_constant(unwrap(leading), unwrap(stride), unwrap(swizzle))
    template = "{ .reg .b32 t; " + descriptor_asm("$0", "$1", constant, "t") + " }"
    return asm(template, "=l,r", (address,), tl.uint64, _semantic=_semantic)


@triton.jit
def shared_descriptor(address, leading_bytes: tl.constexpr, stride_bytes: tl.constexpr, swizzle: tl.constexpr):
    """uint64 descriptor of a shared operand for mma and cp: address an int32 shared address or a descriptor, swizzle 0,
    32, 64 or 128 bytes.

    `wgmma.operand_strides` gives the strides of tiles in Gluon's layouts. PTX ISA 9.7.16.4.1 "Shared memory
    descriptor".
    """
    return _descriptor(address, leading_bytes, stride_bytes, swizzle)


def warp_issued(instruction: str, issuer: str) -> str:
    """`instruction` executed by whole warps: all that reach it, the first of each warpgroup, or the first of the
    CTA."""
    if issuer not in ("warp", "warpgroup", "cta"):
        raise ValueError(
            f"issuer={issuer!r}: an allocation belongs to a whole warp: 'warp' (each), 'warpgroup' (first of four) or "
            "'cta' (first)"
        )
    if issuer == "warp":
        return instruction
    threads = "and.b32 w, w, 127; " if issuer == "warpgroup" else ""
    return f"{{ .reg .pred issue; .reg .b32 w; mov.u32 w, %tid.x; {threads}setp.lt.u32 issue, w, 32; @issue {instruction} }}"  # noqa: E501


def _columns(columns: int) -> int:
    if columns not in (32, 64, 128, 256, 512):
        raise ValueError(f"tensor memory of {columns} columns: allocations are a power of two from 32 to 512")
    return columns


@builtin
def _allocation(template: Traced, args: Traced, columns: Traced, issuer: Traced, _semantic: Semantic = None) -> None:
    template = unwrap(template)
    require(template.split(" ")[0].rstrip(";"), only=TARGETS, _semantic=_semantic)
    if unwrap(columns) is not None:
        template = template.replace("COLUMNS", str(_columns(unwrap(columns))))
    asm(warp_issued(template, unwrap(issuer)), ("r",) * len(args), args, _semantic=_semantic)


@triton.jit
def alloc(destination, columns: tl.constexpr, issuer: tl.constexpr = "cta"):
    """Allocates `columns` (32, 64, … 512) of tensor memory, waiting for them; writes the address (int32) to shared
    `destination`.

    PTX ISA 9.7.16.7.1 `tcgen05.alloc`.
    """
    _allocation(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], COLUMNS;", (destination,), columns, issuer
    )


@triton.jit
def dealloc(address, columns: tl.constexpr, issuer: tl.constexpr = "cta"):
    """Frees the `columns` of an alloc at `address`; needed before the kernel ends. PTX ISA 9.7.16.7.1
    `tcgen05.dealloc`.
    """
    _allocation("tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, COLUMNS;", (address,), columns, issuer)


@triton.jit
def relinquish_alloc_permit(issuer: tl.constexpr = "cta"):
    """This CTA allocates no more, so that the next one on the multiprocessor may. PTX ISA 9.7.16.7.1
    `tcgen05.relinquish_alloc_permit`."""
    _allocation("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", (), None, issuer)


# The warp's quarter of the lanes, added to an address: (%tid.x / 32 % 4) * 32 lanes << 16.
_QUARTER = "mov.u32 t, %tid.x; shr.u32 t, t, 5; and.b32 t, t, 3; shl.b32 t, t, 21; add.u32 t, t, "


def transfer_asm(operation: str, shape: str, words: list[str], address: str, half: bool, split: int) -> str:
    """`tcgen05.ld` or `.st` of the 32-bit `words` of each thread; `half` packs two 16-bit columns a word; split:
    16x32bx2's second half.

    Errors: ValueError for a shape or number of words that no instruction has.
    """
    count, unit = len(words), SHAPES.get(shape)
    if unit is None or count % unit or count // unit not in (1, 2, 4, 8, 16, 32, 64, 128) or count > 128:
        raise ValueError(
            f"tcgen05.{operation} {shape} of {count} words a thread: shapes are {', '.join(SHAPES)}, words x1, x2, … "
            "up to 128 in all"
        )
    pack = {"ld": ".pack::16b", "st": ".unpack::16b"}[operation] if half else ""
    mnemonic = f"tcgen05.{operation}.sync.aligned.{shape}.x{count // unit}{pack}.b32"
    vector, place = "{" + ", ".join(words) + "}", "[t]" + (f", {split}" if shape == "16x32bx2" else "")
    operands = f"{vector}, {place}" if operation == "ld" else f"{place}, {vector}"
    return f"{{ .reg .b32 t; {_QUARTER}{address}; {mnemonic} {operands}; }}"


@builtin
def _ld(
    address: Traced,
    tile_shape: Traced,
    layout: Traced,
    dtype: Traced,
    shape: Traced,
    half: Traced,
    split: Traced,
    _semantic: Semantic = None,
) -> Traced:
    require("tcgen05.ld", only=TARGETS, _semantic=_semantic)
    explicit_only(_semantic, "tcgen05.ld")
    (address,), _ = tiles_of(address)
    tile_shape, layout, dtype, shape = list(unwrap(tile_shape)), unwrap(layout), unwrap(dtype), unwrap(shape)
    if layout is None:
        if shape != "32x32b" or tile_shape[0] != 128:
            raise ValueError(
                f"tcgen05.ld {shape} of {tile_shape}: only a 32x32b load of 128 rows has a default layout; name the "
                "layout"
            )
        layout = gl.BlockedLayout([1, tile_shape[1]], [32, 1], [4, 1], [1, 0])
    if dtype.primitive_bitwidth != 32:
        raise TypeError(f"tcgen05.ld of {dtype}: a register holds 32 bits; load int32 words and unpack them")
    type_ = gl.distributed_type(dtype, tile_shape, layout)
    count = registers(type_, _semantic)
    template = transfer_asm(
        "ld", shape, [f"${i}" for i in range(count)], f"${count}", bool(unwrap(half)), unwrap(split)
    )
    return _semantic.inline_asm(template, ",".join([f"={letter(dtype)}"] * count + ["r"]), (address,), type_, False)


@builtin
def _st(address: Traced, tile: Traced, shape: Traced, half: Traced, split: Traced, _semantic: Semantic = None) -> None:
    require("tcgen05.st", only=TARGETS, _semantic=_semantic)
    explicit_only(_semantic, "tcgen05.st")
    (address,), _ = tiles_of(address)
    (tile,), _ = tiles_of(tile)
    if not is_tile(tile) or tile.dtype.primitive_bitwidth != 32:
        raise TypeError(f"tcgen05.st of {tile.type}: it stores a register tile of 32-bit elements")
    count = registers(tile.type, _semantic)
    template = transfer_asm(
        "st", unwrap(shape), [f"${1 + i}" for i in range(count)], "$0", bool(unwrap(half)), unwrap(split)
    )
    _semantic.inline_asm(template, ",".join(["r"] + [letter(tile.dtype)] * count), (address, tile), (), False)


@triton.jit
def ld(
    address,
    tile_shape: tl.constexpr,
    layout: tl.constexpr = None,
    dtype: tl.constexpr = tl.float32,
    shape: tl.constexpr = "32x32b",
    half: tl.constexpr = False,
    split: tl.constexpr = 0,
):
    """A register tile of 32-bit elements from tensor memory; it may be used after `wait_ld` only. Explicit kernels, a
    whole warpgroup.

    address     lane 0 of the tile; each warp adds its own quarter of the lanes.
    tile_shape  (rows, columns) and layout: the instruction fills thread t's registers in the layout's order. Default:
                128 rows, row t in thread t ("32x32b").
    shape       "32x32b", "16x64b", "16x128b", "16x256b" or "16x32bx2" (with `split`, the column distance of its
                halves); the repeat count follows.
    half        two 16-bit columns are packed into each register. PTX ISA 9.7.16.8.3 `tcgen05.ld`.
    """
    return _ld(address, tile_shape, layout, dtype, shape, half, split)


@triton.jit
def st(address, tile, shape: tl.constexpr = "32x32b", half: tl.constexpr = False, split: tl.constexpr = 0):
    """Stores a register tile of 32-bit elements to tensor memory; others see it after `wait_st`. Operands as in `ld`.
    PTX ISA 9.7.16.8.4 `tcgen05.st`.
    """
    _st(address, tile, shape, half, split)


@triton.jit
def wait_ld(tiles=()):
    """Waits for this thread's loads from tensor memory. Returns `tiles`, which may be used from here on. PTX ISA
    9.7.16.8.5 `tcgen05.wait::ld`.
    """
    return pass_through("tcgen05.wait::ld.sync.aligned;", tiles, (100, 103))


@triton.jit
def wait_st():
    """Waits for this thread's stores to tensor memory. PTX ISA 9.7.16.8.5 `tcgen05.wait::st`."""
    pass_through("tcgen05.wait::st.sync.aligned;", (), (100, 103))


@triton.jit
def fence_before_thread_sync():
    """Orders this thread's tcgen05 operations before a following barrier or flag. PTX ISA 9.7.16.11
    `tcgen05.fence::before_thread_sync`."""
    pass_through("tcgen05.fence::before_thread_sync;", (), (100, 103))


@triton.jit
def fence_after_thread_sync():
    """Orders this thread's tcgen05 operations after a preceding barrier or flag. PTX ISA 9.7.16.11
    `tcgen05.fence::after_thread_sync`."""
    pass_through("tcgen05.fence::after_thread_sync;", (), (100, 103))


@builtin
def _issue(
    template: Traced,
    args: Traced,
    constraints: Traced,
    issuer: Traced,
    declarations: Traced,
    only: Traced,
    _semantic: Semantic = None,
) -> None:
    template, only = unwrap(template), unwrap(only)
    require(template.split(" ")[0], only=only, _semantic=_semantic)
    block = issued(template, unwrap(issuer), unwrap(arch(_semantic=_semantic)), unwrap(declarations))
    asm(block, unwrap(constraints), args, _semantic=_semantic)


@builtin
def _copy_template(shape: Traced, multicast: Traced, expand: Traced, _semantic: Semantic = None) -> Traced:
    shape, multicast, expand = unwrap(shape), unwrap(multicast), unwrap(expand)
    if shape not in COPIES or multicast not in COPIES[shape] or expand not in EXPANSIONS:
        rows = "; ".join(f"{name} {' or '.join(map(repr, modes))}" for name, modes in COPIES.items())
        raise ValueError(
            f"tcgen05.cp shape={shape!r}, multicast={multicast!r}, expand={expand!r}: shapes with their multicast are "
            f"{rows}; "
            f"expand is one of {EXPANSIONS}"
        )
    return tl.constexpr(
        ".".join(part for part in ("tcgen05.cp.cta_group::1", shape, multicast, expand) if part) + " [$0], $1;"
    )


@triton.jit
def cp(
    address,
    descriptor,
    shape: tl.constexpr = "128x256b",
    multicast: tl.constexpr = "",
    expand: tl.constexpr = "",
    issuer: tl.constexpr = "warp",
):
    """Copies shared memory (uint64 descriptor) to tensor memory, asynchronously, in order with later mma of the same
    thread.

    shape "128x256b", "4x256b", "128x128b", "64x128b" (multicast "warpx2::02_13" or "warpx2::01_23") or "32x128b"
    (multicast "warpx4"); expand "b8x16.b6x16_p32" or "b8x16.b4x16_p64" spreads 6- or 4-bit elements to bytes. PTX ISA
    9.7.16.9.1 `tcgen05.cp`.
    """
    _issue(_copy_template(shape, multicast, expand), (address, descriptor), ("r", "l"), issuer, "", (100, 103))


@triton.jit
def shift(address, issuer: tl.constexpr = "warp"):
    """Moves the rows from `address` (lane a multiple of 32) down by one, asynchronously. PTX ISA 9.7.16.9.2
    `tcgen05.shift.down`."""
    _issue("tcgen05.shift.cta_group::1.down [$0];", (address,), ("r",), issuer, "", (100, 103))


@builtin
def _mma_template(kind: Traced, a_in_tmem: Traced, _semantic: Semantic = None) -> Traced:
    kind = unwrap(kind)
    if kind not in KINDS:
        raise ValueError(f"tcgen05.mma kind={kind!r}: the kind is one of {', '.join(KINDS)}")
    return tl.constexpr(
        f"tcgen05.mma.cta_group::1.kind::{kind} [$0], {'[$1]' if unwrap(a_in_tmem) else '$1'}, $2, $3, accumulate;"
    )


@triton.jit
def mma(
    d,
    a,
    b,
    instruction,
    kind: tl.constexpr,
    accumulate=1,
    a_in_tmem: tl.constexpr = False,
    issuer: tl.constexpr = "warp",
):
    """One MMA, asynchronously: d = a b + (d if accumulate else 0), for K = 32 bytes of each operand.

    d            tensor-memory address (int32 or descriptor) of the accumulator, m x n.
    a            uint64 shared descriptor, or with a_in_tmem a tensor-memory address; b: uint64 shared descriptor.
    instruction  int32 from `instruction_descriptor`; kind "f16", "tf32", "f8f6f4" or "i8" (sm_100a only) must agree
                 with it.
    PTX ISA 9.7.16.10.9.1 `tcgen05.mma`.
    """
    constraints: tl.constexpr = ("r", "r" if a_in_tmem else "l", "l", "r", "r")
    only: tl.constexpr = (100,) if kind == "i8" else (100, 103)
    declarations: tl.constexpr = ".reg .pred accumulate; setp.ne.b32 accumulate, $4, 0;"
    _issue(_mma_template(kind, a_in_tmem), (d, a, b, instruction, accumulate), constraints, issuer, declarations, only)


@triton.jit
def commit(barrier, multicast=None, issuer: tl.constexpr = "warp"):
    """Arrives once at the mbarrier (shared address or descriptor) when this thread's earlier mma, cp and shift are
    done. Their thread must be the issuer.

    multicast: 16-bit mask of CTAs of the cluster; the barriers at the same offset receive one arrival each. PTX ISA
    9.7.16.12.1 `tcgen05.commit.mbarrier::arrive::one`.
    """
    if multicast is None:
        _issue(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];",
            (barrier,),
            ("r",),
            issuer,
            "",
            (100, 103),
        )
    else:
        _issue(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [$0], mask;",
            (barrier, multicast),
            ("r", "r"),
            issuer,
            ".reg .b16 mask; cvt.u16.u32 mask, $1;",
            (100, 103),
        )


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


LANES = 128
_ARCHITECTURE_BITS = 0b001  # bits 46-48 of every shared-memory descriptor


def decode_descriptor(descriptor: int) -> MatrixDescriptor:
    """The 64-bit shared-memory descriptor (PTX ISA 9.7.16.4.1). Errors: PtxFault for an invalid one.

    The 128-byte swizzle of 32-byte units and absolute leading addresses are not supported.
    """
    modes = {code: size for size, code in SWIZZLES.items()}
    if descriptor >> 46 & 7 != _ARCHITECTURE_BITS or descriptor >> 61 not in modes or descriptor >> 52 & 1:
        raise PtxFault(
            f"shared-memory descriptor {descriptor:#x}: bits 46-48 are 1, the swizzle mode (bits 61-63) one of "
            f"{sorted(modes)}, bit 52 is 0"
        )
    fields = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    return MatrixDescriptor(*fields, modes[descriptor >> 61], descriptor >> 49 & 7)


def cells(address: int, rows: int, columns: int) -> np.ndarray:
    """uint32 [rows, columns]: tensor-memory addresses (lane << 16 | column) of a matrix with one element a cell. 128
    rows lie in 128 lanes; 64 rows in the first 16 lanes of each warp's 32 (PTX ISA 9.7.16.10.5, "Layout F").
    """
    row = np.arange(rows)
    lane: np.ndarray = (address >> 16) + (row if rows == LANES else row % 16 + row // 16 * 32)
    return (lane[:, None] << 16 | (address & 0xFFFF) + np.arange(columns)[None, :]).astype(np.uint32)


# Bits of an operand in memory. fp4 and fp6 are missing: they lie in padded units of 16 elements, which nothing here
# decodes.
OPERAND_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}

Read: TypeAlias = Callable[[str, np.ndarray, int], np.ndarray]
Write: TypeAlias = Callable[[str, np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Product:
    """One tcgen05.mma of one thread: D (tensor memory, `d` uint32 [m, n] addresses) = A B (+ D).

    a  int64 [m, k] byte addresses in the CTA's shared window, or with `a_in_tmem` uint32 [m, 8] addresses of the 32-bit
       columns that hold a row of 32 bytes
    b  int64 [n, k] byte addresses
    """

    d: np.ndarray
    a: np.ndarray
    b: np.ndarray
    a_in_tmem: bool
    types: tuple[str, str, str]  # of a, b and d
    signs: tuple[int, int]
    accumulate: bool
    saturate: bool

    def run(self, read: Read, write: Write) -> None:
        """`read(space, addresses, nbytes)` gives uint8 [*addresses.shape, nbytes], `write(space, addresses, data)`
        takes such."""
        a_type, b_type, d_type = self.types
        bits = OPERAND_BITS[a_type]
        if self.a_in_tmem:
            a = from_bytes(np.asarray(read("tensor", self.a, 4)).reshape(len(self.a), -1, bits // 8), bits)
        else:
            a = from_bytes(np.asarray(read("shared", self.a, bits // 8)), bits)
        b = from_bytes(np.asarray(read("shared", self.b, bits // 8)), bits)
        old = None
        if self.accumulate:
            words = from_bytes(np.asarray(read("tensor", self.d, 4)), 32)
            old = accumulator_values(unsigned(words, 16 if d_type == "f16" else 32), d_type)
        new = multiply_add(
            operand_values(a_type, a) * self.signs[0],
            operand_values(b_type, b) * self.signs[1],
            old,
            d_type,
            self.saturate,
        )
        write("tensor", self.d, np.ascontiguousarray(unsigned(new, 32)).view(np.uint8).reshape(*self.d.shape, 4))


@dataclass(frozen=True)
class Copy:
    """One tcgen05.cp of one thread: 32-bit words from byte addresses `source` int64 [words] of the CTA's shared window
    to `targets` uint32 [copies, words]."""

    source: np.ndarray
    targets: np.ndarray

    def run(self, read: Read, write: Write) -> None:
        """`read` and `write` as in `Product.run`."""
        data = np.asarray(read("shared", self.source, 4))
        for target in self.targets:
            write("tensor", target, data)


def decode_instruction(descriptor: int, kind: str) -> dict[str, Any]:
    """The fields of `instruction_descriptor`'s 32 bits, by its parameters' names. Errors: PtxFault for an invalid
    one.
    """
    operands, accumulators = ({code: name for name, code in table.items()} for table in KINDS[kind])
    a, b, d = descriptor >> 7 & 7, descriptor >> 10 & 7, descriptor >> 4 & 3
    if descriptor & 7 or a not in operands or b not in operands or d not in accumulators:
        raise PtxFault(
            f"instruction descriptor {descriptor:#x} of kind {kind}: sparsity {descriptor & 7}, types {a} and {b}, "
            f"accumulator {d}"
        )
    fields = dict(
        kind=kind,
        m=(descriptor >> 24 & 31) << 4,
        n=(descriptor >> 17 & 63) << 3,
        a=operands[a],
        b=operands[b],
        d=accumulators[d],
        trans_a=bool(descriptor >> 15 & 1),
        trans_b=bool(descriptor >> 16 & 1),
        negate_a=bool(descriptor >> 13 & 1),
        negate_b=bool(descriptor >> 14 & 1),
        saturate=bool(descriptor >> 3 & 1),
    )
    try:
        again = instruction_descriptor(**fields)
    except ValueError as error:
        raise PtxFault(str(error)) from None
    if again != descriptor:
        raise PtxFault(
            f"instruction descriptor {descriptor:#x}: bits {descriptor ^ again:#x} belong to no field of a dense "
            "product"
        )
    return fields


@meaning("tcgen05.mma.cta_group::1.{kind:kind::f16|kind::tf32|kind::f8f6f4|kind::i8}", destinations=0)
def _mma_meaning(
    t: Machine,
    i: Instruction,
    d: Register,
    a: Register,
    b: Register,
    instruction: Register,
    accumulate: Register,
    *rest: Register,
) -> None:
    if rest:
        raise NoMeaning("tcgen05.mma with disabled lanes or a scale of its input")
    kind = (i.fields["kind"] or "").removeprefix("kind::")
    in_tmem = np.asarray(a).dtype == np.uint32  # [an address] has 32 bits, a descriptor 64
    flags = np.broadcast_to(np.asarray(accumulate, bool), i.active.shape)
    for thread, to, left, right, code in zip(i.threads, *(lanes(x, i.active) for x in (d, a, b, instruction))):
        f = decode_instruction(code, kind)
        if f["a"] not in OPERAND_BITS or f["b"] not in OPERAND_BITS:
            raise NoMeaning(f"tcgen05.mma of {f['a']} x {f['b']}: fp4 and fp6 operands")
        size = OPERAND_BITS[f["a"]] // 8
        k = 32 // size
        rows = (
            cells(left, f["m"], 8) if in_tmem else decode_descriptor(left).addresses(f["m"], k, size, not f["trans_a"])
        )
        columns = decode_descriptor(right).addresses(f["n"], k, size, not f["trans_b"])
        signs = (-1 if f["negate_a"] else 1, -1 if f["negate_b"] else 1)
        types = (f["a"], f["b"], f["d"])
        t.tcgen05_issue(
            Product(
                cells(to, f["m"], f["n"]),
                rows,
                columns,
                bool(in_tmem),
                types,
                signs,
                bool(flags[thread]),
                f["saturate"],
            ),
            thread,
        )


# cp shape -> (rows, bytes of a row, for each copy the lane of each row)
_ROWS32, _ROWS64 = np.arange(32), np.arange(64)
_COPY_LANES: dict[str, tuple[int, int, list[np.ndarray]]] = {
    "128x256b": (128, 32, [np.arange(128)]),
    "128x128b": (128, 16, [np.arange(128)]),
    "4x256b": (4, 32, [np.arange(4) * 32]),
    "64x128b.warpx2::02_13": (64, 16, [_ROWS64, _ROWS64 + 64]),
    "64x128b.warpx2::01_23": (64, 16, [_ROWS64 % 32 + _ROWS64 // 32 * 64 + second for second in (0, 32)]),
    "32x128b.warpx4": (32, 16, [_ROWS32 + 32 * warp for warp in range(4)]),
}


@meaning(
    "tcgen05.cp.cta_group::1.{shape:128x256b|4x256b|128x128b|64x128b|32x128b}.{multicast:warpx2::02_13|warpx2::01_23|warpx4}?.{expand}*",
    destinations=0,
)
def _cp_meaning(t: Machine, i: Instruction, address: Register, descriptor: Register) -> None:
    if i.fields["expand"]:
        raise NoMeaning(f"{i.fields['expand']}: where the bits of expanded elements go")
    shape = ".".join(x for x in (i.fields["shape"], i.fields["multicast"]) if x)
    if shape not in _COPY_LANES:
        raise NoMeaning(f"tcgen05.cp.{shape}")
    rows, nbytes, copies = _COPY_LANES[shape]
    for thread, to, matrix in zip(i.threads, lanes(address, i.active), lanes(descriptor, i.active)):
        source = decode_descriptor(matrix).addresses(rows, nbytes, 1, True)[:, ::4]
        targets = [
            (to >> 16) + lane[:, None] << 16 | (to & 0xFFFF) + np.arange(nbytes // 4)[None, :] for lane in copies
        ]
        t.tcgen05_issue(Copy(source.reshape(-1), np.stack(targets).astype(np.uint32).reshape(len(copies), -1)), thread)


@meaning("tcgen05.shift.cta_group::1.down", destinations=0)
def _shift_meaning(t: Machine, i: Instruction, address: Register) -> None:
    raise NoMeaning("which lanes tcgen05.shift moves where is not known here")


@meaning(
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.{space:shared::cluster}?.{multicast:multicast::cluster}?.b64",
    destinations=0,
)
def _commit_meaning(t: Machine, i: Instruction, barriers: Register, masks: Register = None) -> None:
    for thread, bar, mask in zip(
        i.threads, lanes(barriers, i.active), lanes(masks, i.active) if masks is not None else [None] * len(i.active)
    ):
        t.tcgen05_commit(
            [bar] if mask is None else [bar & 0xFFFFFF | rank << 24 for rank in range(16) if mask >> rank & 1], thread
        )


@meaning("tcgen05.alloc.cta_group::1.sync.aligned.{space:shared::cta}?.b32", destinations=0)
def _alloc_meaning(t: Machine, i: Instruction, destination: Register, columns: Register) -> Waits:
    for warp in warps(t, i.active):
        address = yield from t.tcgen05_alloc(uniform(columns, warp, "the columns of tcgen05.alloc"))
        first: np.ndarray = np.zeros(len(warp), bool)
        first[int(np.argmax(warp))] = True
        t.store("shared", destination, data_bytes(address, 32, first), first)


@meaning("tcgen05.dealloc.cta_group::1.sync.aligned.b32", destinations=0)
def _dealloc_meaning(t: Machine, i: Instruction, address: Register, columns: Register) -> None:
    for warp in warps(t, i.active):
        t.tcgen05_dealloc(
            uniform(address, warp, "the address of tcgen05.dealloc"),
            uniform(columns, warp, "the columns of tcgen05.dealloc"),
        )


@meaning("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned", destinations=0)
def _relinquish_meaning(t: Machine, i: Instruction) -> None:
    for _ in warps(t, i.active):
        t.tcgen05_relinquish()


def transfer_cells(shape: str, words: int, lane: np.ndarray, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) [threads, words]: the 32-bit cell, from the instruction's address, of each register of a thread of
    lane `lane` (PTX ISA 9.7.16.8.2, "Matrix fragments"). `split`: the distance in columns of the second half of
    16x32bx2.
    """
    lane, word = np.asarray(lane).astype(np.int64)[:, None], np.arange(words)[None, :]
    zero = 0 * lane + 0 * word
    if shape == "32x32b":
        return lane + zero, word + zero
    if shape == "16x32bx2":
        return lane % 16 + zero, word + lane // 16 * split
    if shape == "16x64b":
        return lane % 2 * 8 + lane // 4 + zero, 2 * word + lane // 2 % 2
    if shape == "16x128b":
        return lane // 4 + 8 * (word % 2), 4 * (word // 2) + lane % 4
    return lane // 4 + 8 * (word // 2 % 2), 8 * (word // 4) + 2 * (lane % 4) + word % 2


def _transfer(t: Machine, i: Instruction, address: Register, words: int, split: int, half: bool) -> np.ndarray:
    """uint32 [T, cells]: the tensor-memory addresses of a load or store; with `half` two cells, of 16 bits each, for
    every register."""
    base = np.broadcast_to(unsigned(address, 32), i.active.shape).astype(np.int64)
    warp: np.ndarray = t.warp.astype(np.int64)
    outside = i.active & ((base >> 16) // 32 != warp % 4)
    if outside.any():
        thread = int(np.argmax(outside))
        first = 32 * (int(warp[thread]) % 4)
        raise PtxFault(f"warp {int(warp[thread])} reaches lanes {first} to {first + 31}, not {int(base[thread]) >> 16}")
    row, column = transfer_cells(i.fields["shape"] or "", words, t.lane, split)
    if half:
        row, column = np.repeat(row, 2, axis=1), np.stack([2 * column, 2 * column + 1], axis=2).reshape(len(column), -1)
    return ((base[:, None] >> 16) + row << 16 | (base[:, None] & 0xFFFF) + column).astype(np.uint32)


_SHAPE = "{shape:" + "|".join(SHAPES) + "}.{count:x1|x2|x4|x8|x16|x32|x64|x128}"


@meaning(f"tcgen05.ld.sync.aligned.{_SHAPE}.{{half:pack::16b}}?.b32")
def _ld_meaning(t: Machine, i: Instruction, address: Register, split: Register = 0) -> Register:
    """Load at once. The machine checks that values are used only after tcgen05.wait::ld."""
    single = not isinstance(i.destination_bits[0], tuple)
    words, half = 1 if single else len(i.destination_bits[0]), i.fields["half"] is not None
    bits = from_bytes(np.asarray(t.load("tensor", _transfer(t, i, address, words, split, half), 4, i.active)), 32)
    if half:
        bits = bits[:, 0::2] & np.uint32(0xFFFF) | bits[:, 1::2] << np.uint32(16)
    return bits[:, 0] if single else tuple(bits.T)


@meaning(f"tcgen05.st.sync.aligned.{_SHAPE}.{{half:unpack::16b}}?.b32", destinations=0)
def _st_meaning(t: Machine, i: Instruction, address: Register, *rest: Register) -> None:
    *split, values = rest
    values, half = values if isinstance(values, tuple) else (values,), i.fields["half"] is not None
    bits = np.stack([np.broadcast_to(unsigned(x, 32), i.active.shape) for x in values], axis=1)
    if half:
        bits = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=2).reshape(len(bits), -1)
    places = _transfer(t, i, address, len(values), split[0] if split else 0, half)
    t.store("tensor", places, np.ascontiguousarray(bits).view(np.uint8).reshape(*places.shape, 4), i.active)


@meaning("tcgen05.{what:wait::ld|wait::st}.sync.aligned", destinations=0)
def _wait_meaning(t: Machine, i: Instruction) -> Waits:
    wait = t.tcgen05_wait((i.fields["what"] or "").removeprefix("wait::"))
    if wait is not None:
        yield wait


@meaning("tcgen05.{what:fence::before_thread_sync|fence::after_thread_sync}", destinations=0)
def _fence_meaning(t: Machine, i: Instruction) -> None:
    t.fence("tcgen05." + (i.fields["what"] or "").removeprefix("fence::"), i.active)
