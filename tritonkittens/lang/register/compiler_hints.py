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
    """Zero, which the compiler does not know to be zero: the block's coordinate along an `axis` ("y" or "z") that the grid of a template does not have. Another
    kernel that calls this must not have it either. An address to which it is added is computed where it is used, and not once before a loop, to be held in
    registers that accumulators need.

    The zero is in a uniform register. A zero computed from an iteration's number may be in a vector register; then descriptors are too, and every wgmma needs a
    move to a uniform register (measured: docs/notes/attention_backward.md).
    """
    return t.call(_coordinate, axis)
