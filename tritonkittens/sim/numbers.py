"""Number formats with numpy alone: bits ↔ values, and rounding to a format.

Values of every float format but f64 are float32 arrays that hold numbers of the format exactly. Conversions saturate
only on request, as PTX `cvt.satfinite`.
Sources: 8-bit formats, "OFP8 Formats for Deep Learning"; 4-bit and scale formats, "OCP Microscaling Formats (MX)".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ALIASES = {
    "f4E2M1FN": "e2m1",
    "f6E2M3FN": "e2m3",
    "f6E3M2FN": "e3m2",
    "f8E8M0FNU": "ue8m0",
    "e4m3": "f8E4M3FN",
    "e5m2": "f8E5M2",
}
_INTEGERS = {
    "i1": np.int8,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "index": np.int64,
    # for elements of tensor maps; MLIR's types have no signs
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
}


@dataclass(frozen=True)
class Small:
    """A float format of at most 8 bits."""

    exponent: int
    mantissa: int
    bias: int
    infinities: bool  # otherwise the largest exponent holds numbers
    nan: bool
    signed: bool = True


SMALL = {
    "f8E4M3FN": Small(4, 3, 7, False, True),
    "f8E5M2": Small(5, 2, 15, True, True),
    "e2m1": Small(2, 1, 1, False, False),
    "e2m3": Small(2, 3, 1, False, False),
    "e3m2": Small(3, 2, 3, False, False),
}


@functools.cache
def table(name: str) -> np.ndarray:
    """Return the value of every encoding of a small format. ue8m0 is 2 to the (encoding − 127); 255 is NaN."""
    if name == "ue8m0":
        values: np.ndarray = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(
            np.float32
        )
        return values
    form = SMALL[name]
    bits = 1 + form.exponent + form.mantissa
    codes = np.arange(1 << bits)
    exponent = (codes >> form.mantissa) & ((1 << form.exponent) - 1)
    fraction = codes & ((1 << form.mantissa) - 1)
    normal = np.ldexp(1 + fraction / (1 << form.mantissa), exponent - form.bias)
    values = np.where(exponent == 0, np.ldexp(fraction / (1 << form.mantissa), 1 - form.bias), normal)
    top = (1 << form.exponent) - 1
    if form.infinities:
        values = np.where(exponent == top, np.where(fraction == 0, np.inf, np.nan), values)
    elif form.nan:
        values = np.where((exponent == top) & (fraction == (1 << form.mantissa) - 1), np.nan, values)
    return np.where(codes >> (bits - 1) & 1, -values, values).astype(np.float32)


@np.errstate(all="ignore")
def narrow(values: np.ndarray) -> np.ndarray:
    """Round float64 to float32, to odd. A second rounding, to a format at least two bits shorter, then equals a
    single rounding.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
    odd".
    """
    x = np.asarray(values)
    if x.dtype != np.float64:
        return np.ascontiguousarray(x, np.float32)
    near = np.atleast_1d(x.astype(np.float32))
    bits = near.view(np.int32)
    wide = near.astype(np.float64)
    # an inexact result with an even significand is replaced by its odd neighbour on the other side of the exact value;
    # NaN compares false
    step = np.where(np.abs(wide) > np.abs(x), -1, np.where(np.abs(wide) < np.abs(x), 1, 0)).astype(np.int32)
    return (bits + step * ((bits & 1) == 0)).view(np.float32).reshape(x.shape)


@np.errstate(all="ignore")
def encode_small(name: str, values: np.ndarray, saturate: bool = False, toward_zero: bool = False) -> np.ndarray:
    """Round to the nearest number of a small format in one step, ties to even (or toward zero). Return the encodings
    as bytes.

    Values that are too large, infinity included, become infinity (e5m2) or NaN (e4m3), unless the conversion
    saturates. Toward zero, only infinity itself does. Formats with neither always saturate, and NaN becomes their
    largest number (PTX ISA "cvt").
    """
    if name == "ue8m0":
        return _encode_scale(values)
    form = SMALL[name]
    x = narrow(values)
    bits: np.ndarray = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    shift, sign_at = 23 - form.mantissa, form.exponent + form.mantissa
    # normal numbers: the exponent rebiased, then the significand rounded by an addition that carries into the exponent
    rebias = np.uint32(((form.bias - 127) << 23) & 0xFFFFFFFF)
    half = (
        np.uint32(0)
        if toward_zero
        else np.uint32((1 << (shift - 1)) - 1) + ((magnitude >> np.uint32(shift)) & np.uint32(1))
    )
    code = (magnitude + rebias + half) >> np.uint32(shift)
    # subnormal ones are multiples of 2^(1 - bias - mantissa): an addition in float32 rounds to them
    small = magnitude < np.uint32((128 - form.bias) << 23)
    if small.any():
        quantum = np.float32(2.0 ** (1 - form.bias - form.mantissa))
        absolute = magnitude.view(np.float32)
        low = (
            np.trunc(absolute / quantum)
            if toward_zero
            else (absolute + quantum * np.float32(1 << 23)) - quantum * np.float32(1 << 23)
        )
        code = np.where(small, (low if toward_zero else low / quantum).astype(np.uint32), code)
    infinite, missing = magnitude == np.uint32(0x7F800000), magnitude > np.uint32(0x7F800000)
    encodings = 1 << sign_at
    # infinity, or the only NaN
    overflow = {True: encodings - (1 << form.mantissa), False: encodings - 1}[form.infinities]
    largest = overflow - 1 if form.infinities or form.nan else encodings - 1
    over = infinite | missing | (code > np.uint32(largest)) | (magnitude >= np.uint32((255 - form.bias) << 23))
    if over.any():
        beyond = largest if saturate or not (form.infinities or form.nan) else overflow
        code = np.where(over, np.uint32(largest if toward_zero else beyond), code)
        code = np.where(infinite, np.uint32(beyond), code)
        code = np.where(missing, np.uint32(encodings - 1 if form.infinities or form.nan else largest), code)
    sign = (bits >> np.uint32(31)) << np.uint32(sign_at)
    if missing.any() and not form.nan:
        sign = np.where(missing, np.uint32(0), sign)
    return (code | sign).astype(np.uint8).reshape(np.shape(values))


def _encode_scale(values: np.ndarray) -> np.ndarray:
    """Encode ue8m0, rounding down to a power of two as cvt.rz does."""
    x = np.asarray(values, np.float32)
    bits = x.view(np.uint32)
    code = (bits >> np.uint32(23)) & np.uint32(255)
    return np.where(np.isnan(x), 255, np.where(np.isinf(x), 254, code)).astype(np.uint8)


def _bf16_bits(values: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    x = narrow(values)
    bits: np.ndarray = x.view(np.uint32)
    if toward_zero:
        out = (bits >> np.uint32(16)).astype(np.uint16)
    else:
        out = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    missing = np.isnan(x)
    return np.where(missing, (bits >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40), out) if missing.any() else out


def _f16_toward_zero(values: np.ndarray) -> np.ndarray:
    near = np.asarray(values).astype(np.float16)
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    return np.where(away, np.nextafter(near, np.float16(0)), near)


@np.errstate(all="ignore")
def encode(name: str, values: np.ndarray, saturate: bool = False, toward_zero: bool = False) -> np.ndarray:
    """Return the bits of values of an MLIR scalar type, as unsigned words of its size (an i1 is a byte). Floats are
    rounded to the format once.
    """
    values = np.asarray(values)
    name = _ALIASES.get(name, name)
    if name in ("f32", "tf32"):
        rounded = round_to(name, values, toward_zero)
        return np.ascontiguousarray(rounded).view(np.uint32).reshape(values.shape)
    if name == "bf16":
        return _bf16_bits(values, toward_zero).reshape(values.shape)
    if name == "f16":
        half = _f16_toward_zero(values) if toward_zero else values.astype(np.float16)
        return np.ascontiguousarray(half, np.float16).view(np.uint16).reshape(values.shape)
    if name == "f64":
        return np.ascontiguousarray(values, np.float64).view(np.uint64).reshape(values.shape)
    if name in SMALL or name == "ue8m0":
        return encode_small(name, values, saturate, toward_zero)
    if name in _INTEGERS:
        kind = _INTEGERS[name]
        return np.ascontiguousarray(values.astype(kind)).view(_UNSIGNED[np.dtype(kind).itemsize]).reshape(values.shape)
    raise NotImplementedError(f"the simulator knows no number format {name}")


@np.errstate(all="ignore")
def decode(name: str, bits: np.ndarray) -> np.ndarray:
    """Return the values of bits: integers signed, i1 bool, f64 float64, every other float float32."""
    bits = np.asarray(bits)
    name = _ALIASES.get(name, name)
    if name in ("f32", "tf32"):
        return np.ascontiguousarray(bits, np.uint32).view(np.float32).reshape(bits.shape)
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f16":
        return np.ascontiguousarray(bits, np.uint16).view(np.float16).reshape(bits.shape).astype(np.float32)
    if name == "f64":
        return np.ascontiguousarray(bits, np.uint64).view(np.float64).reshape(bits.shape)
    if name in SMALL or name == "ue8m0":
        values = table(name)
        return values.take(
            bits if len(values) == 256 and bits.dtype == np.uint8 else bits.astype(np.int64) & (len(values) - 1)
        )
    if name == "i1":
        return bits.astype(bool)
    if name in _INTEGERS:
        kind = _INTEGERS[name]
        return np.ascontiguousarray(bits).view(kind).reshape(bits.shape)
    raise NotImplementedError(f"the simulator knows no number format {name}")


@np.errstate(all="ignore")
def round_to(name: str, values: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    """Round float32 or float64 values to a float format once. The result is float64 for f64, else float32."""
    if name == "f32":
        x = np.asarray(values)
        if not toward_zero or x.dtype != np.float64:
            return np.asarray(x, np.float32)
        near = x.astype(np.float32)
        return np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    if name == "f64":
        return np.asarray(values, np.float64)
    if name == "tf32":
        x = narrow(values)
        bits: np.ndarray = x.view(np.uint32)
        half = np.uint32(0) if toward_zero else np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        out = ((bits + half) & np.uint32(0xFFFFE000)).view(np.float32).reshape(np.shape(values))
        return out if np.isfinite(x).all() else np.where(np.isfinite(x).reshape(out.shape), out, x.reshape(out.shape))
    return decode(name, encode(name, values, toward_zero=toward_zero))


def to_bytes(name: str, values: np.ndarray) -> np.ndarray:
    """Return the little-endian bytes of values in memory: shape S → uint8 of shape S + (bytes of an element,)."""
    words = np.ascontiguousarray(encode(name, values))
    return (
        words.reshape(-1)
        .astype(words.dtype.newbyteorder("<"), copy=False)
        .view(np.uint8)
        .reshape(*np.shape(values), words.dtype.itemsize)
    )


def from_bytes(name: str, data: np.ndarray) -> np.ndarray:
    """Return the values of little-endian bytes: uint8 of shape S + (bytes of an element,) → shape S."""
    data = np.ascontiguousarray(data, np.uint8)
    words = data.reshape(-1).view(f"<u{data.shape[-1]}").reshape(data.shape[:-1])
    return decode(name, words)
