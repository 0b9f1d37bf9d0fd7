"""Branches that a warp seldom takes: multiplications by factors that are nearly always one, and work after a limit is
exceeded.
"""

from __future__ import annotations

import struct

import triton.language as tl

from tritonkittens.inline_ptx._asm import asm
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.records import assemble, axes_of, pieces_of
from tritonkittens.lang.register.accumulator_masks import HALVES, in_place, is_fragment
from tritonkittens.lang.register.broadcast import mul_row


@op
def rescale_row(t: Trace, x: Traced, factor: Traced) -> Traced:
    """Compute `mul_row(x, factor)`, and skip the multiplication in a warp whose rows all have the factor 1.

    Args:
        x: a register tile (rows × cols). Only fp32 wgmma accumulators of 64 rows skip; other tiles always multiply.
            Or a tile of tensor memory, fp32 of 128 rows, in a role of four warps. It is multiplied in place, and a warp
            that skips does not access it. Fences order it before other accesses (`inline_ptx.tcgen05`).
        factor: a column vector (rows).

    Returns:
        A tile of the shape of `x`; `x` itself in tensor memory.

    Raises:
        TileError: for another tile of tensor memory or another number of warps.

    An online softmax rescales its output this way: its row maxima seldom grow.
    Source: FlashAttention-4, conditional rescaling; PTX ISA, vote.sync.
    """
    if hasattr(x, "rescale_rows"):
        return x.rescale_rows(t, factor)
    pieces, factors = pieces_of(x), pieces_of(factor)
    if len(factors) != 1 or not all(is_fragment(piece) for piece in pieces):
        return t.call(mul_row, x, factor)
    return assemble(
        axes_of(x), [in_place(t, piece, rescale_asm, "f", [t.vector(factors[0], 0, piece)]) for piece in pieces]
    )


def rescale_asm(elements: int) -> str:
    """Return assembly that multiplies $0 … in place. The elements appear again as inputs; the factors of a thread's
    two rows follow.
    """
    factors = [f"${2 * elements + half}" for half in range(HALVES)]
    lines = [
        ".reg .pred p, q;",
        *(f"setp.neu.f32 {name}, {factor}, 0f3F800000;" for name, factor in zip("pq", factors, strict=True)),
        "or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra SAME;",
    ]
    lines += [f"mul.f32 ${i}, ${i}, {factors[i % 4 // 2]};" for i in range(elements)]
    return "{ " + " ".join(lines) + " SAME: }"


@op
def warp_exceeds(t: Trace, x: Traced, limit: Traced, *more: Traced) -> Traced:
    """Return 1 (int32) in a warp that holds an element of `x` above `limit` or NaN, else 0.

    Args:
        x: an fp32 register tile.
        limit: a number or scalar.
        more: further tiles, each followed by its limit.

    A branch on the result may contain only operations within a warp: element-wise ones and row reductions. Raises
    `TileError` outside explicit kernels. Source: PTX ISA, vote.sync.
    """
    t.require_explicit("warp_exceeds")
    tiles, limits = (x, *more[::2]), [unwrap(of) for of in (limit, *more[1::2])]
    scalars = [of for of in limits if not isinstance(of, (int, float))]
    names = iter(f"${1 + i}" for i in range(len(scalars)))
    lines, operands = [".reg .pred p, q; setp.ne.s32 p, 0, 0;"], list(scalars)
    elements = 1 + len(scalars)
    for tile, of in zip(tiles, limits, strict=True):
        above = (
            f"0f{struct.unpack('<I', struct.pack('<f', float(of)))[0]:08X}"
            if isinstance(of, (int, float))
            else next(names)
        )
        for piece in pieces_of(tile):
            operands.append(piece)
            behind = elements + t.builder.get_total_elems_per_thread(piece.type.to_ir(t.builder))
            lines += [f"setp.gtu.f32 q, ${i}, {above}; or.pred p, p, q;" for i in range(elements, behind)]
            elements = behind
    text = "{ " + " ".join(lines) + " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
    return t.call(asm, text, ",".join(["=r"] + ["f"] * (elements - 1)), operands, tl.int32)
