"""elect.sync: the hardware picks one lane of a warp (PTX ISA, "elect.sync"). sm_90."""

import numpy as np
import triton
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm, require
from tritonkittens.inline_ptx._glue import elected
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Register, meaning


@triton.jit
def elect_one():
    """`elect.sync` over the full warp -> i32: 1 in one lane of each warp (the same one each time), 0 in the others.
    sm_90.

    The compiler takes a scalar for uniform and does not know that lanes disagree: use the result as an operand of
    further assembly (a predicate), not in an `if` around operations of the compiler. Shims take `issuer="warp"`
    instead. PTX ISA "elect.sync".
    """
    require("elect.sync", 90)
    return asm("{ .reg .pred chosen; elect.sync _|chosen, 0xffffffff; selp.b32 $0, 1, 0, chosen; }", "=r", [], tl.int32)


# --- meanings: what each instruction does, on the CPU
# -----------------------------------------------------------------------------------


@meaning("elect.sync")
def _elect(t: Machine, i: Instruction, mask: Register) -> Register:
    """The lowest executing lane of each warp; the other result is its number, in all of the warp's threads."""
    chosen = elected(t, i, mask)
    leader: np.ndarray = np.zeros(len(chosen), np.uint32)
    for n in np.flatnonzero(chosen):
        leader[t.warp == t.warp[n]] = t.lane[n]
    return leader, chosen
