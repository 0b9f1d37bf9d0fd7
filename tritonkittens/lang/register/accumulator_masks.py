"""Masks of accumulators, of a warpgroup and as tensor memory returns them: one comparison with a constant for each
element.

A thread knows the columns of its elements. In a warpgroup's accumulator this is so except for 2 · (lane % 4); the mask
subtracts that term from the bound, so no register holds a column.
In the layout "row" a thread holds one row. A warp whose rows keep all elements skips the mask.
Triton's own index tiles take one register for every column of a thread, and the compiler keeps them across a loop.
Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk*".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton.language as tl

from tritonkittens.arch import WARP
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


def has_row_a_thread(t: Trace, piece: Traced) -> bool:
    """Whether `piece` is an fp32 tile of which each thread holds one row, as tensor memory returns it."""
    layout, (rows, cols) = getattr(piece.type, "layout", None), (int(unwrap(n)) for n in piece.shape)
    return (
        isinstance(layout, gl.BlockedLayout)
        and (list(layout.size_per_thread), list(layout.threads_per_warp)) == ([1, cols], [WARP, 1])
        and rows == WARP * t.num_warps
        and piece.dtype == tl.float32
    )


def keep_between(t: Trace, piece: Traced, lower: Traced, upper: Traced, fill: float) -> Traced:
    """Keep the elements whose column is at least `lower` and below `upper`; the others become `fill`.

    The bounds are int32, one for each row. None is no bound.
    """
    bounds = [bound for bound in (lower, upper) if bound is not None]
    text = mask_asm if is_fragment(piece) else row_mask_asm
    return in_place(t, piece, lambda elements: text(elements, lower is not None, upper is not None, fill), "r", bounds)


def in_place(t: Trace, piece: Traced, text: Callable[[int], str], constraint: str, of_rows: list[Traced]) -> Traced:
    """Return an accumulator after inline assembly that works in place on a thread's elements.

    The operands are the elements $0 …, then the same elements as inputs, then for each vector in `of_rows` one register
    for each row of a thread. `text` makes the assembly for a given number of elements.
    """
    rows, elements = (
        (HALVES, int(unwrap(piece.shape[1])) // 2) if is_fragment(piece) else (1, int(unwrap(piece.shape[1])))
    )
    constraints = ["=f"] * elements + [str(i) for i in range(elements)] + [constraint] * (rows * len(of_rows))
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


def row_mask_asm(elements: int, lower: bool, upper: bool, fill: float) -> str:
    """Return assembly that masks the row $0 … of a thread in place, where a thread of the warp has to.

    The elements appear again as inputs. The bounds follow, the lower one and then the upper one.
    """
    bounds = iter(f"${2 * elements + i}" for i in range(lower + upper))
    below, above = next(bounds) if lower else "", next(bounds) if upper else ""
    lines = [".reg .pred p, q; setp.ne.s32 p, 0, 0;"]
    if lower:
        lines.append(f"setp.gt.s32 q, {below}, 0; or.pred p, p, q;")
    if upper:
        lines.append(f"setp.lt.s32 q, {above}, {elements}; or.pred p, p, q;")
    lines.append("vote.sync.any.pred p, p, 0xffffffff; @!p bra KEPT;")
    for i in range(elements):
        if lower:
            lines.append(f"setp.le.s32 p, {below}, {i};")
        if upper:
            lines.append(f"setp.gt{'.and' if lower else ''}.s32 p, {above}, {i}{', p' if lower else ''};")
        lines.append(f"selp.f32 ${i}, ${i}, 0f{_bits(fill):08X}, p;")
    return "{ " + " ".join(lines) + " KEPT: }"


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
