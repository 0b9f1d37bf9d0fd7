"""2^x with a share of the elements on the FMA units. The special-function unit, which computes 16 a clock and SM,
limits a softmax.

2^x = 2^n · 2^f, where n is the integer nearest to x. The sum of x and 1.5 · 2²³ has n in its low bits. They are added
to the exponent of a cubic polynomial of f. Source: FlashAttention-4, "software emulation of the exponential".
"""

from __future__ import annotations

import struct

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError

GROUP = 8  # elements of a thread among which the share is counted
# 2^f = 1 + f · (c1 + f · (c2 + f · c3)) for |f| ≤ 1/2, with the least largest relative error, 1.01e-4
CONSTANTS = dict(magic=1.5 * 2**23, back=-1.5 * 2**23, minus=-1.0, one=1.0, c1=0.69328293, c2=0.242211, c3=0.05500893)
LOWEST = -127.0  # 2^LOWEST, and what is below, becomes exactly zero


def check_share(name: str, share: Traced) -> int:
    """Return how many of `GROUP` elements the FMA units compute. Raises `TileError` for a share that is no multiple of
    1/4 from 0 to 1."""
    share = unwrap(share)
    if not isinstance(share, (int, float)) or share * 4 not in range(5):
        raise TileError(f"{name}(fma_share={share!r}): must be 0, 0.25, 0.5, 0.75 or 1")
    return int(share * GROUP)


def exp2_piece(t: Trace, x: Traced, number: int) -> Traced:
    """Return 2^x of an fp32 piece or scalar, with `number` of `GROUP` elements on the FMA units, where they compute two
    elements an instruction."""
    if number == 0 or t.interpreted or not t.chip.f32x2:
        return t.call("exp2", x)
    constraints = ",".join(["=f"] * GROUP + ["f"] * GROUP)
    return t.call(
        "inline_asm_elementwise", exp2_asm(number), constraints, [x], dtype=tl.float32, is_pure=True, pack=GROUP
    )


def _literal(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def exp2_asm(number: int) -> str:
    """Return assembly for 2^x of `GROUP` elements, $8 … to $0 …: the first `number`, which is even, on the FMA
    units."""
    lines = [f".reg .f32 x0, x1; .reg .b32 n0, n1, p0, p1; .reg .b64 x, n, f, p, {', '.join(CONSTANTS)};"]
    lines += [f"mov.b64 {name}, {{{_literal(value)}, {_literal(value)}}};" for name, value in CONSTANTS.items()]
    for i in range(0, number, 2):
        lines += [f"max.NaN.f32 x{k}, ${GROUP + i + k}, {_literal(LOWEST)};" for k in (0, 1)]
        lines += [
            "mov.b64 x, {x0, x1}; add.rn.f32x2 n, x, magic; add.rn.f32x2 f, n, back; fma.rn.f32x2 f, f, minus, x;",
            "fma.rn.f32x2 p, f, c3, c2; fma.rn.f32x2 p, p, f, c1; fma.rn.f32x2 p, p, f, one;",
            "mov.b64 {n0, n1}, n; mov.b64 {p0, p1}, p;",
        ]
        lines += [f"shl.b32 n{k}, n{k}, 23; add.s32 n{k}, n{k}, p{k}; mov.b32 ${i + k}, n{k};" for k in (0, 1)]
    lines += [f"ex2.approx.ftz.f32 ${i}, ${GROUP + i};" for i in range(number, GROUP)]
    return "{ " + " ".join(lines) + " }"
