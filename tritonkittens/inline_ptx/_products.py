"""The arithmetic of matrix products on the CPU, for the meanings of wgmma and tcgen05.mma."""

import numpy as np

from ._formats import decode, encode
from ._meaning import unsigned

_INTEGER = {"s8": np.int8, "u8": np.uint8}


def operand_values(name: str, bits: np.ndarray) -> np.ndarray:
    """float64 (int64 for s8, u8) of an operand's words."""
    return unsigned(bits, 8).view(_INTEGER[name]).astype(np.int64) if name in _INTEGER else decode(name, bits)


def accumulator_values(bits: np.ndarray, d_type: str) -> np.ndarray:
    """float64 (int64 for s32) of an accumulator's words."""
    return unsigned(bits, 32).view(np.int32).astype(np.int64) if d_type == "s32" else decode(d_type, bits)


def multiply_add(
    a: np.ndarray, b: np.ndarray, c: "np.ndarray | None", d_type: str, saturate: bool = False
) -> np.ndarray:
    """Bits of a [m, k] b [n, k]ᵀ + c in the accumulator's type `d_type`; c: values, or None for 0.

    Floats: the sum of the exact products and c, in float64, rounded once to nearest. The tensor core aligns and
    truncates its partial sums, by an amount that the PTX ISA does not state; the difference is of the order of one unit
    in the last place of the largest term. Integers: exact, wrapped or clamped.
    """
    total = a @ b.T
    if d_type == "s32":
        total = total + (c if c is not None else 0)
        return unsigned(np.clip(total, -(2**31), 2**31 - 1) if saturate else total, 32)
    with np.errstate(all="ignore"):
        return encode(d_type, total + (c if c is not None else 0.0))
