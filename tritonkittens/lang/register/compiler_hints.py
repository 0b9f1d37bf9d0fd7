"""Numbers that the compiler cannot predict, to keep arithmetic where it is written."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, op


@triton.jit
def _coordinate(AXIS: tl.constexpr):
    return asm("mov.u32 $0, %ctaid." + AXIS + ";", "=r", [], tl.int32)  # volatile: the compiler reads it at each use


@op
def opaque_zero(t: Trace, axis: Traced = "y") -> Traced:
    """Return an int32 zero that the compiler cannot predict.

    An address plus this zero is computed where it is used. Otherwise the compiler computes the address before a loop,
    and keeps it in registers that accumulators need.

    The zero is the CTA's coordinate along `axis` ("y" or "z"). A template's grid has neither axis; another kernel
    must not have it either. The coordinate is in a uniform register.
    A zero computed from an iteration's number may be in a vector register. Then descriptors are too, and every wgmma
    needs a move to a uniform register (measured: docs/notes/attention_backward.md).
    """
    return t.call(_coordinate, axis)
