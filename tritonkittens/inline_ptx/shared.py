"""Shared memory by address: static allocation, and plain loads and stores (PTX ISA, "State Spaces", "ld", "st"). Any
architecture.

In explicit kernels, the compiler owns shared memory and provides descriptors. A plain Triton kernel has no name for
it, so a shim with a barrier or a buffer declares its own `.shared` variable. That variable precedes the compiler's
dynamic shared memory and adds to it.
"""

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, arch, asm, issued

_REGISTER_CLASSES = {
    "int32": ("b32", "r"),
    "uint32": ("b32", "r"),
    "int64": ("b64", "l"),
    "uint64": ("b64", "l"),
    "fp32": ("f32", "f"),
    "fp64": ("f64", "d"),
}
STATIC_LIMIT = 48 * 1024  # bytes of .shared variables that one kernel may declare: larger amounts are dynamic only
# The compiler's dynamic shared memory begins where the static ends, and declares an alignment of only 16 bytes,
# although its swizzled tiles rely on 1024. So static buffers are multiples of 1024 bytes; any other size would
# silently misalign the tiles of `tl.dot` and of TMA.
GRANULE = 1024


@constexpr_function
def register_class(dtype: tl.dtype) -> tuple[str, str]:
    """(PTX type, constraint letter) of a 32- or 64-bit scalar dtype."""
    name = str(dtype)
    if name not in _REGISTER_CLASSES:
        raise OperandError(
            f"dtype={name}: a single register of 32 or 64 bits is needed, one of {', '.join(_REGISTER_CLASSES)}"
        )
    return _REGISTER_CLASSES[name]


@constexpr_function
def allocate_text(nbytes: int, align: int) -> str:
    if not 0 < nbytes <= STATIC_LIMIT:
        raise OperandError(
            f"shared.allocate(nbytes={nbytes}): 1 to {STATIC_LIMIT} bytes; a kernel's static shared memory ends there"
        )
    if align <= 0 or align & (align - 1) or align > 1024:
        raise OperandError(f"shared.allocate(align={align}): a power of two up to 1024")
    whole = -(-nbytes // GRANULE) * GRANULE
    return f"{{ .shared .align {GRANULE} .b8 buffer[{whole}]; mov.u32 $0, buffer; }}"


@constexpr_function
def load_text(space: str, dtype: tl.dtype) -> str:
    return f"ld.{space}.{register_class(dtype)[0]} $0, [$1];"


@constexpr_function
def store_text(space: str, dtype: tl.dtype, issuer: str, sm: int) -> str:
    return issued(f"st.{space}.{register_class(dtype)[0]} [$0], $1;", issuer, sm)


@constexpr_function
def load_constraints(dtype: tl.dtype) -> str:
    return f"={register_class(dtype)[1]},r"


@constexpr_function
def store_constraints(dtype: tl.dtype) -> str:
    return f"r,{register_class(dtype)[1]}"


@triton.jit
def allocate(nbytes: tl.constexpr, align: tl.constexpr = 16):
    """Return the i32 shared address of `nbytes` bytes of static shared memory, uninitialised and aligned to `align`
    bytes.

    One call in the source is one buffer, also when it runs again. Call it at the top of the kernel, because the
    compiler may unroll a loop and make several buffers. Each takes a multiple of 1024 bytes, so allocate once and
    divide by addresses.
    `align` is a power of two up to 1024; at most 48 KiB a kernel. PTX ISA "Shared State Space"; any architecture.
    """
    return asm(allocate_text(nbytes, align), "=r", [], tl.int32)


@triton.jit
def address(memory):
    """The i32 address of a shared descriptor (or of an i32 that already is one): `mov.u32`. Any architecture."""
    return asm("mov.u32 $0, $1;", "=r,r", [memory], tl.int32)


@triton.jit
def load(memory, dtype: tl.constexpr):
    """`ld.shared`: the value at a shared address (bytes, i32), as the scalar `dtype` of 32 or 64 bits; every thread
    reads it.

    `memory` is naturally aligned. PTX ISA "ld"; any architecture.
    """
    return asm(load_text("shared", dtype), load_constraints(dtype), [memory], dtype)


@triton.jit
def store(memory, value, dtype: tl.constexpr, issuer: tl.constexpr = "warp"):
    """`st.shared`: writes a scalar `dtype` of 32 or 64 bits to a shared address (bytes, i32), from the threads that
    `issuer` names.

    Visible to other threads after a barrier. PTX ISA "st"; any architecture.
    """
    asm(store_text("shared", dtype, issuer, arch()), store_constraints(dtype), [memory, value])
