"""Operations without side effects, by name: `f(op, *operand values) -> result`, a tuple for several results. And the
forms of their values.

Scalar integers are Python ints (signed; i1 is 0 or 1), scalar floats numpy scalars; tiles are numpy arrays of the
logical shape.
Inside a region (the combiner of a reduction), a value of scalar type is an array with one number for every active
element. So operations take shapes from values, and only number formats from types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .numbers import round_to
from .ttgir import Pointer, Scalar, Tensor, Type

PURE: dict[str, Callable[..., Any]] = {}
SIGNED: dict[int, Any] = {1: np.bool_, 8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}


def pure(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the meaning of operations."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in PURE, name
            PURE[name] = fn
        return fn

    return register


def element(kind: Type) -> Scalar | Pointer:
    """Return the number type of a tile or a scalar."""
    return kind.element if isinstance(kind, Tensor) else kind  # type: ignore[return-value]


def width(number: Scalar | Pointer) -> int:
    """Return the bits of an integer or pointer."""
    if number.name not in BITS:
        raise NotImplementedError(f"the simulator knows no integers of type {number.name}")
    return BITS[number.name]


def dtype_of(kind: Type) -> Any:
    """Return the numpy type for numbers of a type: float32 for every float format but f64, int64 for pointers."""
    number = element(kind)
    if number.is_float:
        return np.float64 if number.name == "f64" else np.float32
    return SIGNED[width(number)]


def wrap(value: int, bits: int) -> int:
    """Return a Python int as a signed integer of that width; i1 is 0 or 1."""
    if bits == 1:
        return value & 1
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def array(value: Any, kind: Type) -> np.ndarray:
    """Return a value as an array (of rank 0 for a scalar) of its numpy type. Raises TypeError for values that are no
    numbers (poison).
    """
    return np.asarray(value, dtype_of(kind))


def settle(value: Any, kind: Type) -> Any:
    """Return a computed number in the form of its type: floats rounded once, integers wrapped, rank 0 as a scalar."""
    number = element(kind)
    if number.is_float:
        name = number.name
        out = value if name == "f32" and value.dtype == np.float32 else round_to(name, value)
        return out if out.ndim else out[()]
    if isinstance(value, int):
        return wrap(value, width(number))
    out = np.asarray(value)
    if not out.ndim:
        return wrap(int(out), width(number))
    return (
        (out & 1).astype(np.bool_)
        if number.name == "i1" and out.dtype != np.bool_
        else out.astype(dtype_of(kind), copy=False)
    )
