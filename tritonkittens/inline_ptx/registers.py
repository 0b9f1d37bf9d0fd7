"""setmaxnreg: moves registers between warpgroups (PTX ISA, "setmaxnreg"). sm_90a, sm_100a, sm_103a.

The kernel must be compiled with a register limit (Triton: `maxnreg`, or explicit partitions); otherwise ptxas ignores
the instruction. ptxas accepts it for sm_120a, but it is refused there, as are the other instructions of
warp-specialised kernels.
"""

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, asm, require
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Register, Waits, meaning, uniform

TARGETS = tl.constexpr((90, 100, 103))


@constexpr_function
def setmaxnreg_text(direction: str, count: int) -> str:
    if not (24 <= count <= 256 and count % 8 == 0):
        raise OperandError(f"setmaxnreg.{direction}({count}): a multiple of 8 from 24 to 256 registers a thread")
    return f"setmaxnreg.{direction}.sync.aligned.u32 {count};"


@triton.jit
def inc(count: tl.constexpr):
    """`setmaxnreg.inc`: raises this warpgroup's limit to `count` registers a thread; waits until the CTA's pool has
    them.

    All four warps of the warpgroup execute it. `count` is a multiple of 8 from 24 to 256. PTX ISA "setmaxnreg".
    """
    require("setmaxnreg", only=TARGETS)
    asm(setmaxnreg_text("inc", count), "", [])


@triton.jit
def dec(count: tl.constexpr):
    """`setmaxnreg.dec`: lowers this warpgroup's limit to `count` registers a thread and releases the rest to the
    CTA's pool.

    All four warps of the warpgroup execute it. `count` is a multiple of 8 from 24 to 256. PTX ISA "setmaxnreg".
    """
    require("setmaxnreg", only=TARGETS)
    asm(setmaxnreg_text("dec", count), "", [])


# --- meanings: what each instruction does, on the CPU
# -----------------------------------------------------------------------------------


@meaning("setmaxnreg.{direction:inc|dec}.sync.aligned.u32", destinations=0)
def _setmaxnreg(t: Machine, i: Instruction, count: Register) -> Waits:
    wait = t.set_max_registers(i.fields["direction"] or "", uniform(count, i.active, "the count of setmaxnreg"))
    if wait is not None:
        yield wait
