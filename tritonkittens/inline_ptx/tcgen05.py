"""Fifth-generation tensor cores of datacentre Blackwell (PTX ISA 9.7.16): tensor memory, its loads and stores, mma; sm_100a and sm_103a,
one CTA.

Tensor memory has 128 lanes of 512 32-bit columns a CTA; an address is lane << 16 | column, as int32 or a tensor-memory descriptor.
Three kinds of instructions, by who executes them:
 - alloc, dealloc and relinquish_alloc_permit belong to one whole warp. issuer: "warp" (every warp that gets here), "warpgroup" (the first
   warp of
   each four), "cta" (the first warp of the CTA);
 - mma, cp, shift and commit belong to one thread. issuer as in the whole package: "thread", "warp", "warpgroup", "cta";
 - ld, st, the waits and the fences are executed by every warp; ld and st need a warpgroup, whose warp w reaches lanes 32 w to 32 w + 31
   only.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from ._asm import arch, asm, builtin, issued, require, unwrap
from ._tile_operands import explicit_only, is_tile, letter, pass_through, registers, tiles_of
from .wgmma import descriptor_asm

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
COPIES = {"128x256b": ("",), "4x256b": ("",), "128x128b": ("",), "64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}
EXPANSIONS = ("", "b8x16.b6x16_p32", "b8x16.b4x16_p64")


@constexpr_function
def instruction_descriptor(kind, m, n, a, b=None, d="f32", trans_a=False, trans_b=False, negate_a=False, negate_b=False, saturate=False):
    """int: the 32-bit instruction descriptor of a dense `mma` (PTX ISA 9.7.16.4.2). Works on the host and in kernels.

    kind "f16", "tf32", "f8f6f4" or "i8"; m 64 or 128; n a multiple of 8 (m=64) or 16 (m=128) up to 256; a, b PTX operand types ("bf16",
    "e4m3", …; b
    default a), d the accumulator type; trans: the operand is MN-major. Errors: ValueError that states the rule.
    """
    b = a if b is None else b
    given = f"tcgen05.mma kind {kind}, m={m}, n={n}, {d} += {a} x {b}"
    if kind not in KINDS:
        raise ValueError(f"{given}: the kind is one of {', '.join(KINDS)}")
    operands, accumulators = KINDS[kind]
    if a not in operands or b not in operands or d not in accumulators or (kind == "f16" and (a != b or (a == "bf16" and d == "f16"))):
        raise ValueError(
            f"{given}: operands are {', '.join(operands)}{' (both the same)' if kind == 'f16' else ''} and accumulators "
            f"{', '.join(accumulators)}{' (bf16: f32 only)' if kind == 'f16' else ''}"
        )
    integer = kind == "i8"
    allowed = [size for size in range(8, 257, 8) if size % (16 if m == 128 or (integer and size > 32) else 8) == 0]
    if m not in (64, 128) or n not in allowed:
        raise ValueError(
            f"{given}: m is 64 or 128, n a multiple of {16 if m == 128 else 8} up to 256{' (above 32: of 16)' if integer else ''}"
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
    """The shared-memory descriptor without its address (PTX ISA 9.7.16.4.1); strides in bytes, as `wgmma.operand_strides` computes them."""
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle={swizzle}: it is 0, 32, 64 or 128 bytes")
    for name, value in (("leading_bytes", leading), ("stride_bytes", stride)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise ValueError(f"{name}={value}: it is a multiple of 16 below {1 << 18}")
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[swizzle] << 61


@builtin
def _descriptor(address, leading, stride, swizzle, _semantic=None):
    require("tcgen05 shared-memory descriptor", only=TARGETS, _semantic=_semantic)
    constant = descriptor_constant(unwrap(leading), unwrap(stride), unwrap(swizzle))
    template = "{ .reg .b32 t; " + descriptor_asm("$0", "$1", constant, "t") + " }"
    return asm(template, "=l,r", (address,), tl.uint64, _semantic=_semantic)


@triton.jit
def shared_descriptor(address, leading_bytes: tl.constexpr, stride_bytes: tl.constexpr, swizzle: tl.constexpr):
    """uint64 descriptor of a shared operand for mma and cp: address an int32 shared address or a descriptor, swizzle 0, 32, 64 or 128
    bytes.

    `wgmma.operand_strides` gives the strides of tiles in Gluon's layouts. PTX ISA 9.7.16.4.1 "Shared memory descriptor".
    """
    return _descriptor(address, leading_bytes, stride_bytes, swizzle)


def warp_issued(instruction: str, issuer: str) -> str:
    """`instruction` executed by whole warps: all that get here, the first of each warpgroup, or the first of the CTA."""
    if issuer not in ("warp", "warpgroup", "cta"):
        raise ValueError(
            f"issuer={issuer!r}: an allocation belongs to a whole warp: 'warp' (each), 'warpgroup' (first of four) or 'cta' (first)"
        )
    if issuer == "warp":
        return instruction
    threads = "and.b32 w, w, 127; " if issuer == "warpgroup" else ""
    return f"{{ .reg .pred issue; .reg .b32 w; mov.u32 w, %tid.x; {threads}setp.lt.u32 issue, w, 32; @issue {instruction} }}"


def _columns(columns):
    if columns not in (32, 64, 128, 256, 512):
        raise ValueError(f"tensor memory of {columns} columns: allocations are a power of two from 32 to 512")
    return columns


@builtin
def _allocation(template, args, columns, issuer, _semantic=None):
    template = unwrap(template)
    require(template.split(" ")[0].rstrip(";"), only=TARGETS, _semantic=_semantic)
    if unwrap(columns) is not None:
        template = template.replace("COLUMNS", str(_columns(unwrap(columns))))
    asm(warp_issued(template, unwrap(issuer)), ("r",) * len(args), args, _semantic=_semantic)


@triton.jit
def alloc(destination, columns: tl.constexpr, issuer: tl.constexpr = "cta"):
    """Allocates `columns` (32, 64, … 512) of tensor memory, waiting for them; writes the address (int32) to shared `destination`.

    PTX ISA 9.7.16.7.1 `tcgen05.alloc`.
    """
    _allocation("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], COLUMNS;", (destination,), columns, issuer)


@triton.jit
def dealloc(address, columns: tl.constexpr, issuer: tl.constexpr = "cta"):
    """Frees the `columns` that alloc gave at `address`; needed before the kernel ends. PTX ISA 9.7.16.7.1 `tcgen05.dealloc`."""
    _allocation("tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, COLUMNS;", (address,), columns, issuer)


@triton.jit
def relinquish_alloc_permit(issuer: tl.constexpr = "cta"):
    """This CTA allocates no more, so that the next one on the multiprocessor may. PTX ISA 9.7.16.7.1 `tcgen05.relinquish_alloc_permit`."""
    _allocation("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", (), None, issuer)


# The warp's quarter of the lanes, added to an address: (%tid.x / 32 % 4) * 32 lanes << 16.
_QUARTER = "mov.u32 t, %tid.x; shr.u32 t, t, 5; and.b32 t, t, 3; shl.b32 t, t, 21; add.u32 t, t, "


def transfer_asm(operation: str, shape: str, words: list[str], address: str, half: bool, split: int) -> str:
    """`tcgen05.ld` or `.st` of the 32-bit `words` of each thread; `half` packs two 16-bit columns a word; split: 16x32bx2's second half.

    Errors: ValueError for a shape or number of words that no instruction has.
    """
    count, unit = len(words), SHAPES.get(shape)
    if unit is None or count % unit or count // unit not in (1, 2, 4, 8, 16, 32, 64, 128) or count > 128:
        raise ValueError(
            f"tcgen05.{operation} {shape} of {count} words a thread: shapes are {', '.join(SHAPES)}, words x1, x2, … up to 128 in all"
        )
    pack = {"ld": ".pack::16b", "st": ".unpack::16b"}[operation] if half else ""
    mnemonic = f"tcgen05.{operation}.sync.aligned.{shape}.x{count // unit}{pack}.b32"
    vector, place = "{" + ", ".join(words) + "}", "[t]" + (f", {split}" if shape == "16x32bx2" else "")
    operands = f"{vector}, {place}" if operation == "ld" else f"{place}, {vector}"
    return f"{{ .reg .b32 t; {_QUARTER}{address}; {mnemonic} {operands}; }}"


@builtin
def _ld(address, tile_shape, layout, dtype, shape, half, split, _semantic=None):
    require("tcgen05.ld", only=TARGETS, _semantic=_semantic)
    explicit_only(_semantic, "tcgen05.ld")
    (address,), _ = tiles_of(address)
    tile_shape, layout, dtype, shape = list(unwrap(tile_shape)), unwrap(layout), unwrap(dtype), unwrap(shape)
    if layout is None:
        if shape != "32x32b" or tile_shape[0] != 128:
            raise ValueError(f"tcgen05.ld {shape} of {tile_shape}: only a 32x32b load of 128 rows has a default layout; name the layout")
        layout = gl.BlockedLayout([1, tile_shape[1]], [32, 1], [4, 1], [1, 0])
    if dtype.primitive_bitwidth != 32:
        raise TypeError(f"tcgen05.ld of {dtype}: a register holds 32 bits; load int32 words and unpack them")
    type_ = gl.distributed_type(dtype, tile_shape, layout)
    count = registers(type_, _semantic)
    template = transfer_asm("ld", shape, [f"${i}" for i in range(count)], f"${count}", bool(unwrap(half)), unwrap(split))
    return _semantic.inline_asm(template, ",".join([f"={letter(dtype)}"] * count + ["r"]), (address,), type_, False)


@builtin
def _st(address, tile, shape, half, split, _semantic=None):
    require("tcgen05.st", only=TARGETS, _semantic=_semantic)
    explicit_only(_semantic, "tcgen05.st")
    (address,), _ = tiles_of(address)
    (tile,), _ = tiles_of(tile)
    if not is_tile(tile) or tile.dtype.primitive_bitwidth != 32:
        raise TypeError(f"tcgen05.st of {tile.type}: it stores a register tile of 32-bit elements")
    count = registers(tile.type, _semantic)
    template = transfer_asm("st", unwrap(shape), [f"${1 + i}" for i in range(count)], "$0", bool(unwrap(half)), unwrap(split))
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
    """A register tile of 32-bit elements from tensor memory; it may be used after `wait_ld` only. Explicit kernels, a whole warpgroup.

    address     lane 0 of the tile; each warp adds its own quarter of the lanes.
    tile_shape  (rows, columns) and layout: thread t's registers, in the layout's order, are what the instruction gives it. Default: 128
                rows, row t in
                thread t ("32x32b").
    shape       "32x32b", "16x64b", "16x128b", "16x256b" or "16x32bx2" (with `split`, the column distance of its halves); the repeat count
                follows.
    half        two 16-bit columns are packed into each register. PTX ISA 9.7.16.8.3 `tcgen05.ld`.
    """
    return _ld(address, tile_shape, layout, dtype, shape, half, split)


@triton.jit
def st(address, tile, shape: tl.constexpr = "32x32b", half: tl.constexpr = False, split: tl.constexpr = 0):
    """Stores a register tile of 32-bit elements to tensor memory; others see it after `wait_st`. Operands as in `ld`. PTX ISA 9.7.16.8.4
    `tcgen05.st`.
    """
    _st(address, tile, shape, half, split)


@triton.jit
def wait_ld(tiles=()):
    """Waits for this thread's loads from tensor memory. Returns `tiles`, which may be used from here on. PTX ISA 9.7.16.8.5
    `tcgen05.wait::ld`.
    """
    return pass_through("tcgen05.wait::ld.sync.aligned;", tiles, (100, 103))


@triton.jit
def wait_st():
    """Waits for this thread's stores to tensor memory. PTX ISA 9.7.16.8.5 `tcgen05.wait::st`."""
    pass_through("tcgen05.wait::st.sync.aligned;", (), (100, 103))


@triton.jit
def fence_before_thread_sync():
    """Orders this thread's tcgen05 operations before a following barrier or flag. PTX ISA 9.7.16.11 `tcgen05.fence::before_thread_sync`."""
    pass_through("tcgen05.fence::before_thread_sync;", (), (100, 103))


@triton.jit
def fence_after_thread_sync():
    """Orders this thread's tcgen05 operations after a preceding barrier or flag. PTX ISA 9.7.16.11 `tcgen05.fence::after_thread_sync`."""
    pass_through("tcgen05.fence::after_thread_sync;", (), (100, 103))


@builtin
def _issue(template, args, constraints, issuer, declarations, only, _semantic=None):
    template, only = unwrap(template), unwrap(only)
    require(template.split(" ")[0], only=only, _semantic=_semantic)
    block = issued(template, unwrap(issuer), unwrap(arch(_semantic=_semantic)), unwrap(declarations))
    asm(block, unwrap(constraints), args, _semantic=_semantic)


@builtin
def _copy_template(shape, multicast, expand, _semantic=None):
    shape, multicast, expand = unwrap(shape), unwrap(multicast), unwrap(expand)
    if shape not in COPIES or multicast not in COPIES[shape] or expand not in EXPANSIONS:
        rows = "; ".join(f"{name} {' or '.join(map(repr, modes))}" for name, modes in COPIES.items())
        raise ValueError(
            f"tcgen05.cp shape={shape!r}, multicast={multicast!r}, expand={expand!r}: shapes with their multicast are {rows}; "
            f"expand is one of {EXPANSIONS}"
        )
    return tl.constexpr(".".join(part for part in ("tcgen05.cp.cta_group::1", shape, multicast, expand) if part) + " [$0], $1;")


@triton.jit
def cp(
    address,
    descriptor,
    shape: tl.constexpr = "128x256b",
    multicast: tl.constexpr = "",
    expand: tl.constexpr = "",
    issuer: tl.constexpr = "warp",
):
    """Copies shared memory (uint64 descriptor) to tensor memory, asynchronously, in order with later mma of the same thread.

    shape "128x256b", "4x256b", "128x128b", "64x128b" (multicast "warpx2::02_13" or "warpx2::01_23") or "32x128b" (multicast "warpx4");
    expand
    "b8x16.b6x16_p32" or "b8x16.b4x16_p64" spreads 6- or 4-bit elements to bytes. PTX ISA 9.7.16.9.1 `tcgen05.cp`.
    """
    _issue(_copy_template(shape, multicast, expand), (address, descriptor), ("r", "l"), issuer, "", (100, 103))


@triton.jit
def shift(address, issuer: tl.constexpr = "warp"):
    """Moves the rows from `address` (lane a multiple of 32) down by one, asynchronously. PTX ISA 9.7.16.9.2 `tcgen05.shift.down`."""
    _issue("tcgen05.shift.cta_group::1.down [$0];", (address,), ("r",), issuer, "", (100, 103))


@builtin
def _mma_template(kind, a_in_tmem, _semantic=None):
    kind = unwrap(kind)
    if kind not in KINDS:
        raise ValueError(f"tcgen05.mma kind={kind!r}: the kind is one of {', '.join(KINDS)}")
    return tl.constexpr(f"tcgen05.mma.cta_group::1.kind::{kind} [$0], {'[$1]' if unwrap(a_in_tmem) else '$1'}, $2, $3, accumulate;")


@triton.jit
def mma(d, a, b, instruction, kind: tl.constexpr, accumulate=1, a_in_tmem: tl.constexpr = False, issuer: tl.constexpr = "warp"):
    """One MMA, asynchronously: d = a b + (d if accumulate else 0), for K = 32 bytes of each operand.

    d            tensor-memory address (int32 or descriptor) of the accumulator, m x n.
    a            uint64 shared descriptor, or with a_in_tmem a tensor-memory address; b: uint64 shared descriptor.
    instruction  int32 from `instruction_descriptor`; kind "f16", "tf32", "f8f6f4" or "i8" (sm_100a only) must agree with it.
    PTX ISA 9.7.16.10.9.1 `tcgen05.mma`.
    """
    constraints: tl.constexpr = ("r", "r" if a_in_tmem else "l", "l", "r", "r")
    only: tl.constexpr = (100,) if kind == "i8" else (100, 103)
    declarations: tl.constexpr = ".reg .pred accumulate; setp.ne.b32 accumulate, $4, 0;"
    _issue(_mma_template(kind, a_in_tmem), (d, a, b, instruction, accumulate), constraints, issuer, declarations, only)


@triton.jit
def commit(barrier, multicast=None, issuer: tl.constexpr = "warp"):
    """The mbarrier (shared address or descriptor) gets one arrival when this thread's earlier mma, cp and shift are done; the issuer must
    be their thread.

    multicast: 16-bit mask of CTAs of the cluster, whose barriers at the same offset get one arrival each.
    PTX ISA 9.7.16.12.1 `tcgen05.commit.mbarrier::arrive::one`.
    """
    if multicast is None:
        _issue("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];", (barrier,), ("r",), issuer, "", (100, 103))
    else:
        _issue(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [$0], mask;",
            (barrier, multicast),
            ("r", "r"),
            issuer,
            ".reg .b16 mask; cvt.u16.u32 mask, $1;",
            (100, 103),
        )
