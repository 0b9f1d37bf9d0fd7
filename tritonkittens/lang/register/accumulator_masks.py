"""Masks of accumulators of a warpgroup: one comparison with a constant for each element.

A thread knows the columns of its elements except for 2 · (lane % 4). The mask subtracts that term from the bound, so
no register holds a column.
Triton's own index tiles take one register for every column of a thread, and the compiler keeps them across a loop.
Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk*".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, gl
from tritonkittens.lang.core.constants import unwrap

ROWS = 64
HALVES = 2  # rows of a thread in an accumulator of 64 rows


def is_fragment(piece: Traced) -> bool:
    """Whether `piece` is an fp32 accumulator of 64 rows of one warpgroup. mma.sync and tcgen05 give each thread the
    elements of wgmma."""
    layout = getattr(piece.type, "layout", None)
    return (
        isinstance(layout, gl.NVMMADistributedLayout)
        and list(unwrap(layout.version)) in ([2, 0], [3, 0])
        and list(unwrap(layout.warps_per_cta)) == [4, 1]
        and int(unwrap(piece.shape[0])) == ROWS
        and piece.dtype == tl.float32
    )


def keep_between(t: Trace, piece: Traced, lower: Traced, upper: Traced, fill: float) -> Traced:
    """Keep the elements whose column is at least `lower` and below `upper`; the others become `fill`.

    The bounds are int32, one for each row. None is no bound.
    """
    bounds = [bound for bound in (lower, upper) if bound is not None]
    return in_place(
        t, piece, lambda elements: mask_asm(elements, lower is not None, upper is not None, fill), "r", bounds
    )


def in_place(t: Trace, piece: Traced, text: Callable[[int], str], constraint: str, of_rows: list[Traced]) -> Traced:
    """Return an accumulator after inline assembly that works in place on a thread's elements.

    The operands are the elements $0 …, then the same elements as inputs, then two registers (two rows of a thread) of
    each vector in `of_rows`. `text` makes the assembly for a given number of elements.
    """
    elements = int(unwrap(piece.shape[1])) // 2
    constraints = ["=f"] * elements + [str(i) for i in range(elements)] + [constraint] * (HALVES * len(of_rows))
    return t.call(asm, text(elements), ",".join(constraints), [piece, *of_rows], piece.type, is_pure=True)


def mask_asm(elements: int, lower: bool, upper: bool, fill: float) -> str:
    """Return assembly that masks $0 … in place.

    The elements appear again as inputs. The bounds follow, two registers each: the lower ones, then the upper ones.
    """
    names = [f"{which}{half}" for which, given in (("l", lower), ("u", upper)) if given for half in range(HALVES)]
    lines = [f".reg .pred p; .reg .b32 c, {', '.join(names)};", "mov.u32 c, %laneid; and.b32 c, c, 3; shl.b32 c, c, 1;"]
    lines += [f"sub.s32 {name}, ${2 * elements + i}, c;" for i, name in enumerate(names)]
    other = f"0f{_bits(fill):08X}"
    for i in range(elements):
        column, half = 8 * (i // 4) + i % 2, i % 4 // 2
        if lower:
            lines.append(f"setp.le.s32 p, l{half}, {column};")
        if upper:
            lines.append(f"setp.gt{'.and' if lower else ''}.s32 p, u{half}, {column}{', p' if lower else ''};")
        lines.append(f"selp.f32 ${i}, ${i}, {other}, p;")
    return "{ " + " ".join(lines) + " }"


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
