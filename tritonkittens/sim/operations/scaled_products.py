"""tcgen05.mma with block scales: the instruction's reading of its operands' bits, independent of the tiles' types.

Kind and scale format follow from the operation as in Triton's lowering. PTX ISA "tcgen05.mma", "Block scaling",
"Instruction descriptor".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..agents import Async, Role
from ..clocks import ASYNC
from ..costs import tcgen05_cycles
from ..layouts import is_fp4_padded, shared_bases
from ..numbers import decode
from ..pure_tensor import SCALED_TYPES, unpack_fp4
from ..ttgir import MemDesc, Op
from ..values import View
from .registry import effect
from .tensor_memory import in_shared, product


def kind_and_scales(
    a_type: str, b_type: str, scales: tuple[MemDesc, MemDesc], block: int, k_major: bool
) -> tuple[str, str]:
    """Return the instruction's kind and the format of its scales. `block` is the number of elements of A per scale."""
    if (a_type, b_type) != ("e2m1", "e2m1"):
        return "mxf8f6f4", "ue8m0"
    elements = tuple(s.element.name for s in scales)
    form = "ue4m3" if elements[0] == "f8E4M3FN" else "ue5m3" if block == 16 else "ue8m0"
    if elements == ("f8E4M3FN", "f8E4M3FN") or (elements == ("i8", "i8") and block == 16):
        return "mxf4nvf4", form
    return ("mxf4", form) if k_major else ("mxf8f6f4", "ue8m0")


def contiguous_along_k(kind: MemDesc, is_b: bool) -> bool:
    """Whether neighbours along K are contiguous. They are in tensor memory."""
    return kind.space == "tensor" or bool(shared_bases(kind)["offset"][0][0 if is_b else -1])


def check_operand(role: Role, op: Op, name: str, form: str, tile: MemDesc, kind: str) -> None:
    """Report a tile whose numbers are not where the instruction reads them."""
    machine, padded = role.machine, is_fp4_padded(tile)
    if form not in ("f8E4M3FN", "f8E5M2", "e2m1") or tile.element.nbytes != 1:
        machine.stop(
            "unknown", f"operand {name} of a scaled product is {form} in elements of {tile.element.name}", role, op
        )
    if padded and (form != "e2m1" or kind != "mxf8f6f4"):
        machine.stop(
            "illegal",
            f"operand {name}: kind::{kind} reads {form} without padding, and the tile's layout is fp4_padded",
            role,
            op,
        )
    if form == "e2m1" and kind == "mxf8f6f4" and not padded:
        machine.stop(
            "illegal",
            f"operand {name}: kind::{kind} reads e2m1 from a tile that is fp4_padded; this one's layout is not",
            role,
            op,
        )
    if form == "e2m1" and not contiguous_along_k(tile, name == "B"):
        machine.stop(
            "illegal",
            f"operand {name}: numbers of 4 bits are packed along K, which has to be the contiguous dimension of the "
            "tile",
            role,
            op,
        )


def check_scales(role: Role, op: Op, name: str, kind: str, form: str, block: int) -> None:
    """Report a format or block of scales that the kind does not have."""
    if form == "ue5m3":
        message = (
            f"scales {name} of integers, one for {block} numbers, are ue5m3 for the compiler: the simulator "
            "has no meaning for them"
        )
        role.machine.stop("unknown", message, role, op)
    allowed = {("mxf8f6f4", "ue8m0"): (32,), ("mxf4", "ue8m0"): (32,), ("mxf4nvf4", "ue4m3"): (16,)}.get(
        (kind, form), ()
    )
    if block not in allowed:
        message = f"scales {name}: kind::{kind} has no scales of {form} for {block} numbers each"
        role.machine.stop("illegal", message, role, op)


@effect("ttng.tc_gen5_mma_scaled")
def tc_gen5_mma_scaled(role: Role, op: Op, *operands: Any) -> Any:
    (a,), (b,), (d,), _, (a_scale,), (b_scale,), (use,), (predicate,), bars, bar_predicates = op.split(operands)
    if not predicate:
        return None
    machine = role.machine
    chosen = [bar for i, bar in enumerate(bars) if i >= len(bar_predicates) or bar_predicates[i]]
    a_type, b_type = SCALED_TYPES[op.attributes["a_type"]], SCALED_TYPES[op.attributes["b_type"]]
    (a_tile,), (b_tile,), _, _, (a_scales,), (b_scales,), *_ = op.split(op.operand_types)
    m, n = d.map.shape[-2:]
    k = a_tile.shape[-1] * (2 if a_type == "e2m1" else 1)
    blocks = [k // tile.shape[-1] for tile in (a_scales, b_scales)]
    k_major = contiguous_along_k(a_tile, False) and contiguous_along_k(b_tile, True)
    kind, form = kind_and_scales(a_type, b_type, (a_scales, b_scales), blocks[0], k_major)
    for name, number, tile, block in (("A", a_type, a_tile, blocks[0]), ("B", b_type, b_tile, blocks[1])):
        check_operand(role, op, name, number, tile, kind)
        check_scales(role, op, name, kind, form, block)

    def bits(operation: Async, view: View) -> np.ndarray:
        machine.touch(operation, view, False, ASYNC, op)
        machine.check_written(operation, view, op)
        return machine.read(view)

    def factors(operation: Async, view: View) -> np.ndarray:
        values = decode("f8E4M3FN" if form == "ue4m3" else form, bits(operation, view))
        return np.repeat(values, k // values.shape[-1], axis=-1)

    def numbers(operation: Async, view: View, form: str, axis: int) -> np.ndarray:
        raw = bits(operation, view)
        return unpack_fp4(raw, axis) if form == "e2m1" else decode(form, raw)

    def read(operation: Async) -> tuple[np.ndarray, np.ndarray]:
        x, y = numbers(operation, a, a_type, -1), numbers(operation, b, b_type, 0)
        return x * factors(operation, a_scale)[: x.shape[0]], y * factors(operation, b_scale)[: y.shape[1]].T

    cost = tcgen05_cycles(m, n, k, 8 if kind == "mxf8f6f4" else 4)
    product(role, op, d, bool(use), chosen, in_shared(a, b, a_scale, b_scale), read, cost)
    yield None
    return None
