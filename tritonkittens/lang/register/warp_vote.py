"""What a warp seldom has to do, in branches of its own: multiplications by factors that are nearly always one, and what follows where a limit is exceeded."""
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
    """`mul_row(x, factor)`, `factor` a column vector. Of an accumulator of wgmma of 64 rows, a warp all of whose rows have the factor 1 multiplies nothing: it
    asks its threads and branches. For the results of an online softmax, whose largest scores seldom grow (Source: FlashAttention-4, its conditional rescaling).
    """
    pieces, factors = pieces_of(x), pieces_of(factor)
    if len(factors) != 1 or not all(is_fragment(piece) for piece in pieces):
        return t.call(mul_row, x, factor)
    return assemble(axes_of(x), [in_place(t, piece, rescale_asm, "f", [t.vector(factors[0], 0, piece)]) for piece in pieces])


def rescale_asm(elements: int) -> str:
    """In place on $0 … of a thread, behind which stand the operands again and the factors of its two rows."""
    factors = [f"${2 * elements + half}" for half in range(HALVES)]
    lines = [".reg .pred p, q;", *(f"setp.neu.f32 {name}, {factor}, 0f3F800000;" for name, factor in zip("pq", factors, strict=True)),
             "or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra SAME;"]
    lines += [f"mul.f32 ${i}, ${i}, {factors[i % 4 // 2]};" for i in range(elements)]
    return "{ " + " ".join(lines) + " SAME: }"


@op
def warp_exceeds(t: Trace, x: Traced, limit: Traced, *more: Traced) -> Traced:
    """1 (int32) in a warp where an element of `x` that it holds is above `limit`, a number or scalar, or NaN, else 0; `more` tiles, each with its limit, count
    as well. In a branch on it stand only operations within a warp: those of elements, reductions of rows. PTX ISA, vote.sync."""
    t.require_explicit("warp_exceeds")
    tiles, limits = (x, *more[::2]), [unwrap(of) for of in (limit, *more[1::2])]
    scalars = [of for of in limits if not isinstance(of, (int, float))]
    names = iter(f"${1 + i}" for i in range(len(scalars)))
    lines, operands = [".reg .pred p, q; setp.ne.s32 p, 0, 0;"], list(scalars)
    elements = 1 + len(scalars)
    for tile, of in zip(tiles, limits, strict=True):
        above = f"0f{struct.unpack('<I', struct.pack('<f', float(of)))[0]:08X}" if isinstance(of, (int, float)) else next(names)
        for piece in pieces_of(tile):
            operands.append(piece)
            behind = elements + t.builder.get_total_elems_per_thread(piece.type.to_ir(t.builder))
            lines += [f"setp.gtu.f32 q, ${i}, {above}; or.pred p, p, q;" for i in range(elements, behind)]
            elements = behind
    text = "{ " + " ".join(lines) + " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
    return t.call(asm, text, ",".join(["=r"] + ["f"] * (elements - 1)), operands, tl.int32)
