"""The descriptors of an MMA, encoded and decoded: the instruction's (PTX ISA 9.7.16.4.2) and those of operands in
shared memory (9.7.16.4.1)."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from .._asm import asm, builtin, require, unwrap
from .._matrix_descriptors import MatrixDescriptor, descriptor_asm, stride_bits
from .._meaning import PtxFault
from .._traced import Semantic, Traced
from .issue import TARGETS

SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}  # bytes -> the shared-memory descriptor's bits 61-63
_ARCHITECTURE_BITS = 0b001  # bits 46-48 of every shared-memory descriptor

# mma kind -> (operand type -> its code in the instruction descriptor, accumulator type -> code, bytes of K fixed at 32)
KINDS = {
    "f16": ({"f16": 0, "bf16": 1}, {"f16": 0, "f32": 1}),
    "tf32": ({"tf32": 2}, {"f32": 1}),
    "f8f6f4": ({"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}, {"f16": 0, "f32": 1}),
    "i8": ({"u8": 0, "s8": 1}, {"s32": 2}),
}


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
    ctas: int = 1,
) -> int:
    """int: the 32-bit instruction descriptor of a dense `mma` (PTX ISA 9.7.16.4.2). Works on the host and in kernels.

    kind "f16", "tf32", "f8f6f4" or "i8"; m 64 or 128; n a multiple of 8 (m=64) or 16 (m=128) up to 256. For a pair of
    CTAs (ctas=2), m is 128 or 256, and n a multiple of 32. a, b PTX operand types ("bf16", "e4m3", …; b default a), d
    the accumulator type; trans: the operand is MN-major. Errors:
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
            f"accumulators {', '.join(accumulators)}{' (bf16: f32 only)' if kind == 'f16' else ''}"
        )
    integer = kind == "i8"
    step = 32 if ctas == 2 else 16 if m == 128 else 8
    allowed = [size for size in range(step, 257, step) if size % (16 if integer and size > 32 else 8) == 0]
    if m not in (64 * ctas, 128 * ctas) or n not in allowed:
        raise ValueError(
            f"{given}: m is {64 * ctas} or {128 * ctas}, n a multiple of {step} up to "
            f"256{' (above 32: of 16)' if integer and step == 8 else ''}"
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
    return stride_bits(leading, stride, swizzle) | _ARCHITECTURE_BITS << 46 | SWIZZLES[swizzle] << 61


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
    return MatrixDescriptor.decode(descriptor, modes[descriptor >> 61])


def decode_instruction(descriptor: int, kind: str, ctas: int = 1) -> dict[str, Any]:
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
    return checked_fields(descriptor, fields, instruction_descriptor, ctas, " of a dense product")


def checked_fields(
    descriptor: int, fields: dict[str, Any], encode: Callable[..., int], ctas: int, of: str = ""
) -> dict[str, Any]:
    """The fields of an instruction descriptor. Errors: PtxFault where `encode` makes other bits of them."""
    try:
        again = encode(**fields, ctas=ctas)
    except ValueError as error:
        raise PtxFault(str(error)) from None
    if again != descriptor:
        raise PtxFault(f"instruction descriptor {descriptor:#x}: bits {descriptor ^ again:#x} belong to no field{of}")
    return fields
