"""Integer instructions on 32-bit words (PTX ISA 9.7.8), element by element on tiles of any shape, in plain Triton and
in explicit kernels.
"""

import numpy as np
import triton
import triton.language as tl

from ._asm import builtin, require, unwrap
from ._meaning import Instruction, Machine, Register, meaning, unsigned
from ._traced import Semantic, Traced


@builtin
def _funnel(high: Traced, low: Traced, count: Traced, _semantic: Semantic = None) -> Traced:
    require("shf.l.wrap.b32", 80, _semantic=_semantic)
    args = [_semantic.to_tensor(unwrap(arg)) for arg in (high, low)]
    types = [str(arg.dtype) for arg in args]
    if types != ["uint32", "uint32"]:
        raise TypeError(f"funnel_shift_left({', '.join(types)}): the operands must be uint32")
    text = f"shf.l.wrap.b32 $0, $2, $1, {unwrap(count)};"
    return tl.inline_asm_elementwise(text, "=r,r,r", args, tl.uint32, True, 1, _semantic=_semantic)


@triton.jit
def funnel_shift_left(high, low, count: tl.constexpr):
    """The upper 32 bits of {high, low} << count, for uint32 and a count from 0 to 31. PTX ISA 9.7.8 `shf.l.wrap`."""
    return _funnel(high, low, count)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@meaning("shf.l.wrap.b32")
def _shf(t: Machine, i: Instruction, low: Register, high: Register, by: Register) -> Register:
    both = unsigned(low, 32).astype(np.uint64) | unsigned(high, 32).astype(np.uint64) << np.uint64(32)
    return (both << (unsigned(by, 32) & np.uint32(31)).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
