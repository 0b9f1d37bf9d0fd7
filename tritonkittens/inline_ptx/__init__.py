"""PTX, one function an instruction, one module a family. Usable in plain `@triton.jit` kernels and in explicit kernels; nothing is added.

    from tritonkittens.inline_ptx import mbarrier, tma

The compiler models none of it: barriers, fences and waits are the caller's. A target that lacks an instruction is refused while the kernel
compiles (`ArchitectureError`), a wrong operand likewise (`OperandError`).
"""

from tritonkittens.arch import ArchitectureError
from tritonkittens.inline_ptx import (
    barrier,
    clc,
    cluster,
    convert,
    elect,
    extern,
    math,
    mbarrier,
    memory,
    pdl,
    registers,
    shared,
    tcgen05,
    tensormap,
    timing,
    tma,
    wgmma,
)
from tritonkittens.inline_ptx._asm import OperandError

__all__ = [
    "ArchitectureError",
    "OperandError",
    "barrier",
    "clc",
    "cluster",
    "convert",
    "elect",
    "extern",
    "math",
    "mbarrier",
    "memory",
    "pdl",
    "registers",
    "shared",
    "tcgen05",
    "tensormap",
    "timing",
    "tma",
    "wgmma",
]
