"""Numbers that compilers know nothing of, to keep arithmetic where it is written."""
from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, op


@triton.jit
def _coordinate(AXIS: tl.constexpr):
    return asm("mov.u32 $0, %ctaid." + AXIS + ";", "=r", [], tl.int32)  # volatile: read anew where it is used


@op
def opaque_zero(t: Trace, axis: Traced = "y") -> Traced:
    """Zero, which the compiler cannot tell: the block's coordinate along an `axis` that the grid of a template does not have (nor may that of another kernel
    which calls this), "y" or "z", two zeros that it cannot tell from each other either. What an index or address it is added to leads to is computed where it
    is used, and not once for a whole loop, to be held in registers that accumulators need.

    It is in a uniform register. With a zero made of the number of an iteration, which ptxas may count in a vector register, descriptors are in vector registers
    too, and in front of every wgmma is a move to a uniform one: the backward of attention of dimension 64 was 4 to 10 % slower so on the H200 under a causal
    mask (`bench/results/attention_variants.json`).
    """
    return t.call(_coordinate, axis)
