"""Allocation of tensor memory, by whole warps (PTX ISA 9.7.16.7)."""

import numpy as np
import triton
import triton.language as tl

from .._asm import asm, builtin, require, unwrap
from .._meaning import Instruction, Machine, Register, Waits, data_bytes, meaning, uniform, warps
from .._traced import Semantic, Traced
from .issue import TARGETS


def warp_issued(instruction: str, issuer: str) -> str:
    """`instruction` executed by whole warps: all that reach it, the first of each warpgroup, or the first of the
    CTA."""
    if issuer not in ("warp", "warpgroup", "cta"):
        raise ValueError(
            f"issuer={issuer!r}: an allocation belongs to a whole warp: 'warp' (each), 'warpgroup' (first of four) or "
            "'cta' (first)"
        )
    if issuer == "warp":
        return instruction
    threads = "and.b32 w, w, 127; " if issuer == "warpgroup" else ""
    return f"{{ .reg .pred issue; .reg .b32 w; mov.u32 w, %tid.x; {threads}setp.lt.u32 issue, w, 32; @issue {instruction} }}"  # noqa: E501


def _columns(columns: int) -> int:
    if columns not in (32, 64, 128, 256, 512):
        raise ValueError(f"tensor memory of {columns} columns: allocations are a power of two from 32 to 512")
    return columns


@builtin
def _allocation(template: Traced, args: Traced, columns: Traced, issuer: Traced, _semantic: Semantic = None) -> None:
    template = unwrap(template)
    require(template.split(" ")[0].rstrip(";"), only=TARGETS, _semantic=_semantic)
    if unwrap(columns) is not None:
        template = template.replace("COLUMNS", str(_columns(unwrap(columns))))
    asm(warp_issued(template, unwrap(issuer)), ("r",) * len(args), args, _semantic=_semantic)


@triton.jit
def alloc(destination, columns: tl.constexpr, issuer: tl.constexpr = "cta"):
    """Allocates `columns` (32, 64, … 512) of tensor memory, waiting for them; writes the address (int32) to shared
    `destination`.

    PTX ISA 9.7.16.7.1 `tcgen05.alloc`.
    """
    _allocation(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], COLUMNS;", (destination,), columns, issuer
    )


@triton.jit
def dealloc(address, columns: tl.constexpr, issuer: tl.constexpr = "cta"):
    """Frees the `columns` of an alloc at `address`; needed before the kernel ends. PTX ISA 9.7.16.7.1
    `tcgen05.dealloc`.
    """
    _allocation("tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, COLUMNS;", (address,), columns, issuer)


@triton.jit
def relinquish_alloc_permit(issuer: tl.constexpr = "cta"):
    """This CTA allocates no more, so that the next one on the multiprocessor may. PTX ISA 9.7.16.7.1
    `tcgen05.relinquish_alloc_permit`."""
    _allocation("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", (), None, issuer)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@meaning("tcgen05.alloc.cta_group::1.sync.aligned.{space:shared::cta}?.b32", destinations=0)
def _alloc_meaning(t: Machine, i: Instruction, destination: Register, columns: Register) -> Waits:
    for warp in warps(t, i.active):
        address = yield from t.tcgen05_alloc(uniform(columns, warp, "the columns of tcgen05.alloc"))
        first: np.ndarray = np.zeros(len(warp), bool)
        first[int(np.argmax(warp))] = True
        t.store("shared", destination, data_bytes(address, 32, first), first)


@meaning("tcgen05.dealloc.cta_group::1.sync.aligned.b32", destinations=0)
def _dealloc_meaning(t: Machine, i: Instruction, address: Register, columns: Register) -> None:
    for warp in warps(t, i.active):
        t.tcgen05_dealloc(
            uniform(address, warp, "the address of tcgen05.dealloc"),
            uniform(columns, warp, "the columns of tcgen05.dealloc"),
        )


@meaning("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned", destinations=0)
def _relinquish_meaning(t: Machine, i: Instruction) -> None:
    for _ in warps(t, i.active):
        t.tcgen05_relinquish()
