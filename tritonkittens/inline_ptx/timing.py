"""Clocks, places and pauses (PTX ISA 10 "Special registers" and 9.7.20 `nanosleep`); every target, plain Triton and
explicit kernels.

The registers differ between threads. Without an argument a function reads its own thread's register into a scalar,
which the compiler counts as uniform (a scalar store writes what one thread saw). With a tile `like`, it returns a tile
of that shape: for each element, the register of the thread that holds the element.
"""

import triton
import triton.language as tl

from ._asm import asm, builtin, require, unwrap
from ._meaning import Instruction, Machine, Register, Waits, lanes, meaning
from ._traced import Semantic, Traced


@builtin
def _read(register: Traced, dtype: Traced, like: Traced, _semantic: Semantic = None) -> Traced:
    register, dtype, like = unwrap(register), unwrap(dtype), unwrap(like)
    require(register, 80, _semantic=_semantic)
    bits = dtype.primitive_bitwidth
    args, constraints = [], "=l" if bits == 64 else "=r"
    if like is not None:  # the element's own value only ties the block to the thread that holds it
        args, constraints = (
            [tl.cast(like.to(tl.int1, _semantic=_semantic), tl.int32, _semantic=_semantic)],
            constraints + ",r",
        )
    return tl.inline_asm_elementwise(
        f"mov.u{bits} $0, {register};", constraints, args, dtype, False, 1, _semantic=_semantic
    )


@triton.jit
def clock(like=None):
    """int32: the multiprocessor's cycle counter, low 32 bits. PTX ISA 10 `%clock`."""
    return _read("%clock", tl.int32, like)


@triton.jit
def clock64(like=None):
    """int64: the multiprocessor's cycle counter. Counters of different multiprocessors are not synchronised. PTX ISA 10
    `%clock64`."""
    return _read("%clock64", tl.int64, like)


@triton.jit
def globaltimer(like=None):
    """int64: nanoseconds, one clock for the whole GPU; its resolution is about a microsecond. PTX ISA 10
    `%globaltimer`."""
    return _read("%globaltimer", tl.int64, like)


@triton.jit
def smid(like=None):
    """int32: the multiprocessor that runs this thread. PTX ISA 10 `%smid`."""
    return _read("%smid", tl.int32, like)


@triton.jit
def warpid(like=None):
    """int32: the hardware's slot of this warp in its multiprocessor; it is not %tid.x // 32. PTX ISA 10 `%warpid`."""
    return _read("%warpid", tl.int32, like)


@triton.jit
def laneid(like=None):
    """int32: this thread's lane in its warp, 0 to 31. PTX ISA 10 `%laneid`."""
    return _read("%laneid", tl.int32, like)


@triton.jit
def nanosleep(nanoseconds):
    """Suspends every thread that gets here for 0 to 2 * `nanoseconds` (uint32, at most 1_000_000). PTX ISA 9.7.20
    `nanosleep.u32`."""
    asm("nanosleep.u32 $0;", "r", (nanoseconds,))


# --- meanings: what each instruction does, on the CPU
# -----------------------------------------------------------------------------------


@meaning("nanosleep.u32", destinations=0)
def _nanosleep(t: Machine, i: Instruction, nanoseconds: Register) -> Waits:
    yield t.sleep(max(lanes(nanoseconds, i.active)))
