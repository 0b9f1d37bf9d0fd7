"""LLVM IR functions with PTX inside (`extern.ll` in this folder), linked into the kernels that call them, as
libdevice is.

A kernel that uses one needs the launch or compile options of `link_options`, in plain Triton and in explicit kernels:

    kernel[grid](…, **link_options())            triton.compile(source, target=…, options=link_options())

Without them, the PTX assembler reports an unresolved `tritonkittens_…` symbol.
"""

from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from ._asm import asm, builtin, is_explicit, require
from ._traced import Semantic, Traced

NAME = "tritonkittens"
LIBRARY = str(Path(__file__).with_name("extern.ll"))


def link_options(options: dict[str, Any] | None = None) -> dict[str, Any]:
    """`options` (launch or compile options, None for none) with this library added to their `extern_libs`; the argument
    is not changed."""
    merged = dict(options or {})
    merged["extern_libs"] = {**dict(merged.get("extern_libs") or {}), NAME: LIBRARY}
    return merged


@builtin
def _spin_try_wait(address: Traced, parity: Traced, limit: Traced, _semantic: Semantic = None) -> Traced:
    require("mbarrier.try_wait", 90, _semantic=_semantic)
    signature = {(tl.int32, tl.int32, tl.int32): ("tritonkittens_spin_try_wait", tl.int32)}
    args = [_semantic.cast(_semantic.to_tensor(arg), tl.int32) for arg in (address, parity, limit)]
    return tl.core.extern_elementwise(NAME, LIBRARY, args, signature, is_pure=False, _semantic=_semantic)


@builtin
def _time_and_place(_semantic: Semantic = None) -> Traced:
    require("globaltimer", 80, _semantic=_semantic)
    signature = {(): ("tritonkittens_time_and_place", tl.int64)}
    return tl.core.extern_elementwise(NAME, LIBRARY, [], signature, is_pure=False, _semantic=_semantic)


@triton.jit
def spin_try_wait(barrier, phase, limit):
    """int32: how many `mbarrier.try_wait` it took until the phase with parity `phase` (0 or 1) was complete, or -1
    after `limit` of them.

    barrier is a shared address (int32) or, in explicit kernels, a shared descriptor. One try suspends the thread for a
    time limit of the hardware's choice. sm_90+. PTX ISA 9.7.13.15 `mbarrier.try_wait.parity`.
    """
    if is_explicit():
        address = asm("mov.b32 $0, $1;", "=r,r", (barrier,), tl.int32)
    else:
        address = barrier
    return _spin_try_wait(address, phase, limit)


@triton.jit
def time_and_place():
    """int64: %globaltimer (nanoseconds) modulo 2**48 in bits 16 to 63, and %smid in bits 0 to 15: one word for a
    timeline. PTX ISA 10."""
    return _time_and_place()


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------

# What the functions of extern.ll do, as blocks with the same instructions: symbol -> (PTX, constraints: the result,
# then the arguments).
PTX = {
    "tritonkittens_spin_try_wait": (
        "{ .reg .pred p; .reg .b32 n; mov.b32 n, 1; mov.b32 $0, -1; TRY: setp.gt.s32 p, n, $3; @p bra END; "
        "mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @p mov.b32 $0, n; @p bra END; add.s32 n, n, 1; bra "
        "TRY; END: }",
        "=r,r,r,r",
    ),
    "tritonkittens_time_and_place": (
        "{ .reg .b64 time, place; .reg .b32 sm; mov.u64 time, %globaltimer; mov.u32 sm, %smid; "
        "shl.b64 time, time, 16; cvt.u64.u32 place, sm; or.b64 $0, time, place; }",
        "=l",
    ),
}
