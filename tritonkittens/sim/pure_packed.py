"""Two numbers an instruction: `add2`, `fma2`, … of Gluon for Blackwell (PTX ISA "add", "fma", "min" with .f32x2,
.f16x2, .bf16x2).

Each lane is the plain operation, rounded once to nearest even. min and max return the number where the other operand
is NaN.
"""

from __future__ import annotations

from typing import Any

from .pure_arith import max_number, min_number
from .pure_math import fused
from .pure_registry import array, element, pure, settle
from .ttgir import Op

_KINDS: dict[int, Any] = {
    0: lambda a, b: a + b,
    1: lambda a, b: a - b,
    2: lambda a, b: a * b,
    3: fused,
    4: min_number,
    5: max_number,
}


@pure("ttng.packed_arith")
def packed_arithmetic(op: Op, *values: Any) -> Any:
    """op_kind: add, sub, mul, fma, min, max. Operands and results of 8 or 4 bits are for architectures after
    Blackwell."""
    names = [element(t).name for t in (*op.operand_types, *op.result_types)]
    strange = [n for n in names if n not in ("f32", "f16", "bf16")]
    if strange or op.attributes["op_kind"] not in _KINDS:
        raise NotImplementedError(
            f"the simulator knows no {op.name} of kind {op.attributes['op_kind']} on {', '.join(names)}"
        )
    return settle(
        _KINDS[op.attributes["op_kind"]](*[array(v, t) for v, t in zip(values, op.operand_types)]), op.result_types[0]
    )
