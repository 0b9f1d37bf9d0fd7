"""Integer and float arithmetic, comparisons and conversions: the MLIR dialect arith, and Triton's additions."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .numbers import decode, encode, round_to
from .pure_registry import BITS, PURE, SIGNED, UNSIGNED, array, dtype_of, element, pure, settle, width, wrap
from .ttgir import Dense, Op, Pointer, Tensor, Type

# ---------------------------------------------------------------- constants

_CONSTANTS: weakref.WeakKeyDictionary[Op, Any] = weakref.WeakKeyDictionary()


@pure("arith.constant")
def constant(op: Op) -> Any:
    found = _CONSTANTS.get(op)
    if found is None:
        value, kind = op.attributes["value"], op.result_types[0]
        if isinstance(value, Dense):
            assert isinstance(kind, Tensor)
            values = np.asarray(value.values)
            number = kind.element
            values = round_to(number.name, values) if number.is_float else wrapped(values, kind)
            found = np.ascontiguousarray(np.broadcast_to(values, kind.shape))
            found.flags.writeable = False  # made once and shared
        elif isinstance(value, (int, float)):
            found = settle(np.float64(value) if element(kind).is_float else int(value), kind)
        else:
            raise NotImplementedError(f"the simulator knows no constant {value} of type {kind}")
        _CONSTANTS[op] = found
    return found


def wrapped(values: np.ndarray, kind: Type) -> np.ndarray:
    """Return integers of a literal, which may be written without a sign, in their type."""
    return (
        values.astype(np.bool_)
        if width(element(kind)) == 1
        else values.astype(np.uint64 if values.dtype == np.uint64 else np.int64).astype(dtype_of(kind))
    )


# ---------------------------------------------------------------- integers


def read_signed(value: Any, kind: Type) -> Any:
    """Return the signed numbers of the bits: an i1 that is set is -1."""
    if width(element(kind)) != 1:
        return value if isinstance(value, int) else array(value, kind)
    return -value if isinstance(value, int) else -array(value, kind).astype(np.int8)


def read_unsigned(value: Any, kind: Type) -> Any:
    """Return the unsigned numbers of the bits."""
    bits = width(element(kind))
    if isinstance(value, int):
        return value & ((1 << bits) - 1)
    out = array(value, kind)
    return out.astype(np.uint8) if bits == 1 else out.astype(UNSIGNED[bits])


def back(value: Any, kind: Type) -> Any:
    """Return computed integers, signed or unsigned, as values of their type."""
    bits = width(element(kind))
    if isinstance(value, int):
        return wrap(value, bits)
    return (value & 1).astype(np.bool_) if bits == 1 else value.astype(SIGNED[bits], copy=False)


def _integer(
    name: str,
    read: Callable[[Any, Type], Any],
    scalar: Callable[[int, int], int],
    tile: Callable[[Any, Any], Any] | None = None,
) -> None:
    tile = tile or scalar

    def run(op: Op, a: Any, b: Any) -> Any:
        kind = op.result_types[0]
        if type(a) is int and type(b) is int:  # the most frequent case, kept short
            bits = BITS[kind.name]  # type: ignore[union-attr]
            try:
                out = scalar(a, b) if read is read_signed and bits > 1 else scalar(read(a, kind), read(b, kind))
            except ZeroDivisionError:  # as for tiles; code may compute unused quotients, for a tile after the last
                out = a if "rem" in name else -1
            return out if -128 <= out < 128 and bits > 1 else wrap(out, bits)
        x, y = read(a, kind), read(b, kind)
        if isinstance(x, int) or isinstance(y, int):  # a constant inside a region
            x, y = (np.asarray(x, y.dtype), y) if isinstance(x, int) else (x, np.asarray(y, x.dtype))
        return back(tile(x, y), kind)

    run.__name__ = name
    PURE[name] = run


def _quotient(a: int, b: int) -> int:
    out = abs(a) // abs(b)
    return out if (a < 0) == (b < 0) else -out


def _tile_quotient(a: Any, b: Any) -> Any:
    """Divide toward zero. A division by zero gives all ones and leaves the dividend, as 32-bit ones on the H200 do.

    PTX leaves it undefined; positive int64 numbers give 2**32 - 1 there.
    """
    rest = np.fmod(a, b)
    return np.where(b == 0, -1, (a - rest) // np.where(b == 0, 1, b)).astype(np.result_type(a, b))


def _tile_remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, a, np.fmod(a, b)).astype(np.result_type(a, b))


def _or_ones(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: np.where(b == 0, ~(b & 0), fn(a, np.where(b == 0, np.ones_like(b), b)))


_integer("arith.addi", read_signed, operator.add)
_integer("arith.subi", read_signed, operator.sub)
_integer("arith.muli", read_signed, operator.mul)
_integer("arith.andi", read_signed, operator.and_)
_integer("arith.ori", read_signed, operator.or_)
_integer("arith.xori", read_signed, operator.xor)
_integer("arith.divsi", read_signed, _quotient, _tile_quotient)
_integer("arith.remsi", read_signed, lambda a, b: a - _quotient(a, b) * b, _tile_remainder)
_integer("arith.floordivsi", read_signed, operator.floordiv, _or_ones(operator.floordiv))
_integer("arith.ceildivsi", read_signed, lambda a, b: -(-a // b), _or_ones(lambda a, b: a // b + (a % b != 0)))
_integer("arith.divui", read_unsigned, operator.floordiv, _or_ones(operator.floordiv))
_integer(
    "arith.remui",
    read_unsigned,
    operator.mod,
    lambda a, b: np.where(b == 0, a, a % np.where(b == 0, np.ones_like(b), b)),
)
_integer("arith.ceildivui", read_unsigned, lambda a, b: -(-a // b), _or_ones(lambda a, b: a // b + (a % b != 0)))
_integer("arith.maxsi", read_signed, max, np.maximum)
_integer("arith.minsi", read_signed, min, np.minimum)
_integer("arith.maxui", read_unsigned, max, np.maximum)
_integer("arith.minui", read_unsigned, min, np.minimum)


@pure("arith.shli", "arith.shrsi", "arith.shrui")
def shift(op: Op, a: Any, b: Any) -> Any:
    """Shift. By the width or more it leaves zeros, or copies of the sign, as shl and shr do (PTX ISA "shr": amounts
    are clamped to the width).
    """
    kind = op.result_types[0]
    bits = width(element(kind))
    by = read_unsigned(b, kind)
    x = read_signed(a, kind) if op.name == "arith.shrsi" else read_unsigned(a, kind)
    if isinstance(x, int) and isinstance(by, int):
        by = min(by, bits)
        return wrap(x << by if op.name == "arith.shli" else x >> by, bits)
    x = np.asarray(x)
    within = np.minimum(by, bits - 1).astype(x.dtype)
    out = x << within if op.name == "arith.shli" else x >> within
    return back(out if op.name == "arith.shrsi" else np.where(by >= bits, np.zeros_like(out), out), kind)


def high_product(a: Any, b: Any, kind: Type, read: Callable[[Any, Type], Any]) -> Any:
    """Return the upper half of the product of twice the width."""
    bits = width(element(kind))
    x, y = read(a, kind), read(b, kind)
    if isinstance(x, int) and isinstance(y, int):
        return wrap(x * y >> bits, bits)
    if bits < 64:
        wide = np.int64 if read is read_signed else np.uint64
        return back((np.asarray(x).astype(wide) * np.asarray(y).astype(wide)) >> wide(bits), kind)
    u, v = read_unsigned(a, kind), read_unsigned(b, kind)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    u0, u1, v0, v1 = u & low, u >> half, v & low, v >> half
    middle = u1 * v0 + (u0 * v0 >> half)
    out = u1 * v1 + (middle >> half) + ((u0 * v1 + (middle & low)) >> half)
    if read is read_signed:  # corrects the 2^64 too much of a negative factor
        out = out - np.where(x < 0, v, np.uint64(0)) - np.where(y < 0, u, np.uint64(0))
    return back(out, kind)


@pure("arith.mulsi_extended", "arith.mului_extended")
def multiply_extended(op: Op, a: Any, b: Any) -> Any:
    """(low half, high half)."""
    return PURE["arith.muli"](op, a, b), high_product(
        a, b, op.result_types[0], read_signed if op.name == "arith.mulsi_extended" else read_unsigned
    )


@pure("tt.mulhiui")
def multiply_high(op: Op, a: Any, b: Any) -> Any:
    return high_product(a, b, op.result_types[0], read_unsigned)


@pure("arith.addui_extended", "arith.subui_extended")
def add_extended(op: Op, a: Any, b: Any) -> Any:
    """(sum or difference, carry or borrow)."""
    kind = op.result_types[0]
    add = op.name == "arith.addui_extended"
    out = PURE["arith.addi" if add else "arith.subi"](op, a, b)
    carry = (
        read_unsigned(out, kind) < read_unsigned(a, kind) if add else read_unsigned(a, kind) < read_unsigned(b, kind)
    )
    return out, carry if isinstance(carry, np.ndarray) and carry.ndim else int(carry)


_ORDER: list[Callable[[Any, Any], Any]] = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@pure("arith.cmpi")
def compare_integers(op: Op, a: Any, b: Any) -> Any:
    """Predicates: eq ne, slt sle sgt sge, ult ule ugt uge."""
    predicate, kind = op.attributes["predicate"], op.operand_types[0]
    read = read_unsigned if predicate >= 6 else read_signed
    a, b = read(a, kind), read(b, kind)  # values that are no numbers stop here; == would accept anything
    out = _ORDER[predicate - 4 if predicate >= 6 else predicate](a, b)
    return out if isinstance(out, np.ndarray) and out.ndim else int(out)


@pure("arith.cmpf")
def compare_floats(op: Op, a: Any, b: Any) -> Any:
    """Compare floats by a predicate: false, oeq ogt oge olt ole one, ord, ueq ugt uge ult ule une, uno, true.

    With a NaN, ordered predicates are false and unordered ones true.
    """
    predicate, kind = op.attributes["predicate"], op.operand_types[0]
    x, y = array(a, kind), array(b, kind)
    # of numpy's comparisons only != is true for NaN; an unordered predicate is the opposite of an ordered one
    if predicate in (0, 15):
        out = np.full(np.broadcast_shapes(x.shape, y.shape), predicate == 15)
    elif predicate in (7, 14):
        out = np.isnan(x) | np.isnan(y)
        out = ~out if predicate == 7 else out
    elif predicate in (6, 8):
        out = (x < y) | (x > y)
        out = ~out if predicate == 8 else out
    elif predicate < 7:
        out = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal}[predicate](x, y)
    else:
        out = ~{9: np.less_equal, 10: np.less, 11: np.greater_equal, 12: np.greater, 13: np.equal}[predicate](x, y)
    return out if out.ndim else int(out)


@pure("arith.select")
def select(op: Op, condition: Any, a: Any, b: Any) -> Any:
    """Select by a scalar: one of the two, unread (the other may be poison); by a tile: element by element."""
    if isinstance(condition, np.ndarray) and condition.ndim:
        return np.where(condition, array(a, op.operand_types[1]), array(b, op.operand_types[2]))
    return a if int(condition) else b


# ---------------------------------------------------------------- floats


def _float(name: str, fn: Callable[..., Any]) -> None:
    """Make an operation on floats: computed in float32 (f64 in float64), then rounded to the type.

    For + - * / and square roots of f16 and bf16 that equals a single rounding, because float32 has more than twice
    their digits.
    """

    def run(op: Op, *values: Any) -> Any:
        kind = op.result_types[0]
        return settle(fn(*[array(v, t) for v, t in zip(values, op.operand_types)]), kind)

    run.__name__ = name
    PURE[name] = run


def _extreme(fn: Callable[[Any, Any], Any], of_zeros: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """+0 is larger than -0 (PTX ISA "min", "max"), which numpy leaves open."""

    def run(a: Any, b: Any) -> Any:
        out = fn(a, b)
        zero = out == 0
        return np.where(zero & (a == b), of_zeros(a, b), out) if zero.any() else out

    return run


maximum = _extreme(np.maximum, lambda a, b: a + b)  # NaN wins
minimum = _extreme(np.minimum, lambda a, b: -(-a - b))
max_number = _extreme(np.fmax, lambda a, b: a + b)  # NaN gives way to the other operand
min_number = _extreme(np.fmin, lambda a, b: -(-a - b))

_float("arith.addf", np.add)
_float("arith.subf", np.subtract)
_float("arith.mulf", np.multiply)
_float("arith.divf", np.divide)
_float("arith.remf", np.fmod)
_float("arith.negf", np.negative)
_float("arith.maximumf", maximum)
_float("arith.minimumf", minimum)
_float("arith.maxnumf", max_number)
_float("arith.minnumf", min_number)
_float("tt.precise_divf", np.divide)
_float("tt.approx_divf", np.divide)  # div.approx.f32 is within 2 ulp of it (PTX ISA "div")
_float("tt.precise_sqrt", np.sqrt)
_float(
    "arith.flush_denormals", lambda x: np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)
)


@pure("tt.clampf")
def clamp(op: Op, x: Any, low: Any, high: Any) -> Any:
    """Clamp. propagateNan: 65535 (all) keeps NaN; 0 (none) replaces it by a bound."""
    kind = op.result_types[0]
    x, low, high = array(x, kind), array(low, kind), array(high, kind)
    return settle(
        minimum(maximum(x, low), high) if op.attributes["propagateNan"] else min_number(max_number(x, low), high), kind
    )


# ---------------------------------------------------------------- conversions


@pure("arith.extsi", "arith.index_cast", "arith.trunci")
def integer_cast(op: Op, a: Any) -> Any:
    return back(read_signed(a, op.operand_types[0]), op.result_types[0])


@pure("arith.extui", "arith.index_castui")
def integer_cast_unsigned(op: Op, a: Any) -> Any:
    return back(read_unsigned(a, op.operand_types[0]), op.result_types[0])


@pure("arith.sitofp", "arith.uitofp")
def integer_to_float(op: Op, a: Any) -> Any:
    read = read_signed if op.name == "arith.sitofp" else read_unsigned
    source, kind = op.operand_types[0], op.result_types[0]
    x = np.asarray(read(a, source))
    if element(kind).name in ("f32", "f64"):
        return settle(x.astype(dtype_of(kind)), kind)
    wide = x.astype(np.float64)
    if width(element(source)) == 64:  # 53 bits may be too few; an odd last bit keeps the cut-off part
        low = x & x.dtype.type(0xFFF)
        wide = np.where(np.abs(wide) >= 2.0**52, (x - low).astype(np.float64) + np.where(low != 0, 2048.0, 0.0), wide)
    return settle(wide, kind)


@pure("arith.fptosi", "arith.fptoui")
def float_to_integer(op: Op, a: Any) -> Any:
    """Convert toward zero, as cvt.rzi does (PTX ISA "cvt").

    Values out of range become the nearest end of the range, NaN becomes 0 (64-bit: the top bit alone). There is no
    8-bit cvt, so an i8 is the low byte of 16 bits.
    """
    kind = op.result_types[0]
    bits = width(element(kind))
    x = np.trunc(array(a, op.operand_types[0]).astype(np.float64))
    signed = op.name == "arith.fptosi"
    at_least = max(bits, 16)
    low, high = (-(2.0 ** (at_least - 1)), 2.0 ** (at_least - 1)) if signed else (0.0, 2.0**at_least)
    inside = (x >= low) & (x < high)
    whole = np.where(inside, x, 0).astype(np.int64 if signed else np.uint64)
    limits = np.iinfo((SIGNED if signed else UNSIGNED)[at_least])
    whole = np.where(x >= high, whole.dtype.type(limits.max), np.where(x < low, whole.dtype.type(limits.min), whole))
    if bits == 64:
        whole = np.where(np.isnan(x), whole.dtype.type(limits.min if signed else 1 << 63), whole)
    return back(whole, kind) if whole.ndim else wrap(int(whole), bits)


_ROUNDING = {None: False, 0: False, 3: True}  # arith::RoundingMode: to nearest even, …, toward zero


@pure("arith.extf", "arith.truncf", "arith.convertf")
def float_cast(op: Op, a: Any) -> Any:
    kind = op.result_types[0]
    mode = op.attributes.get("roundingmode")
    if mode not in _ROUNDING:
        raise NotImplementedError(f"the simulator knows no {op.name} with rounding mode {mode}")
    out = round_to(element(kind).name, array(a, op.operand_types[0]), toward_zero=_ROUNDING[mode])
    return out if out.ndim else out[()]


@pure("tt.fp_to_fp")
def custom_float_cast(op: Op, a: Any) -> Any:
    """Convert floats. rounding: 0 toward zero, 1 (or none) to nearest even. To 8 bits this is cvt.rn.satfinite, which
    also takes infinity to the largest number.
    """
    kind = op.result_types[0]
    name = element(kind).name
    toward_zero = op.attributes.get("rounding", 1) == 0
    x = array(a, op.operand_types[0])
    if name.startswith("f8"):
        out = decode(name, encode(name, x, saturate=not toward_zero, toward_zero=toward_zero))
    else:
        out = round_to(name, x, toward_zero=toward_zero)
    return out if out.ndim else out[()]


@pure("arith.bitcast", "tt.bitcast")
def bitcast(op: Op, a: Any) -> Any:
    source, target = element(op.operand_types[0]), element(op.result_types[0])
    if source.name == target.name:
        return a if isinstance(a, int) else array(a, op.operand_types[0])[()]
    if source.bits != target.bits:
        raise NotImplementedError(f"the simulator knows no {op.name} from {source.name} to {target.name}")
    out = decode(target.name, encode(source.name, array(a, op.operand_types[0])))
    return out if out.ndim else out[()] if target.is_float else int(out)


@pure("tt.int_to_ptr", "tt.ptr_to_int")
def pointer_cast(op: Op, a: Any) -> Any:
    return integer_cast(op, a)


@pure("tt.addptr")
def add_pointer(op: Op, pointer: Any, offset: Any) -> Any:
    """Add an offset to a pointer. Offsets count elements of the pointee and are signed."""
    kind = element(op.result_types[0])
    assert isinstance(kind, Pointer)
    size = kind.pointee.nbytes  # type: ignore[union-attr]
    if isinstance(pointer, int) and isinstance(offset, int):
        return wrap(pointer + offset * size, 64)
    return np.asarray(pointer, np.int64) + array(offset, op.operand_types[1]).astype(np.int64) * size
