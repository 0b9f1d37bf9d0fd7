"""PTX: one function an instruction, one module a family. Usable in plain `@triton.jit` kernels and in explicit
kernels.

    from tritonkittens.inline_ptx import mbarrier, tma

The compiler models none of it, so the caller adds all barriers, fences and waits. A missing instruction on the target
raises `ArchitectureError` while the kernel compiles, a wrong operand `OperandError`.
"""

from tritonkittens.arch import ArchitectureError
from tritonkittens.inline_ptx import (
    barrier,
    bits,
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
    "bits",
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
