"""Floating-point formats of PTX (PTX ISA 5.2 "Types", 9.7.9 `cvt`): bits from values and values from bits, in every
rounding that PTX names.

Values are float64, which holds every finite number of these formats, and every sum or product of two float32, closely
enough for one further rounding (`fma_to_odd` takes care of the last bit).
"""

from dataclasses import dataclass

import numpy as np

ROUNDINGS = ("rn", "rz", "rna", "rp", "rm", "rs")


@dataclass(frozen=True)
class Format:
    """Sign, `exponent` bits with `bias`, `mantissa` bits. `special`: "ieee" has infinities and NaN, "nan" only one NaN
    (all ones), "none" neither."""

    exponent: int
    mantissa: int
    bias: int
    special: str = "ieee"

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def largest(self) -> int:
        """Bits of the largest finite number."""
        ones = (1 << (self.exponent + self.mantissa)) - 1
        return {"ieee": ones - (1 << self.mantissa), "nan": ones - 1, "none": ones}[self.special]


FORMATS = {
    "f64": Format(11, 52, 1023),
    "f32": Format(8, 23, 127),
    "tf32": Format(8, 10, 127),
    "f16": Format(5, 10, 15),
    "bf16": Format(8, 7, 127),
    "e4m3": Format(4, 3, 7, "nan"),
    "e5m2": Format(5, 2, 15),
    "e2m3": Format(2, 3, 1, "none"),
    "e3m2": Format(3, 2, 3, "none"),
    "e2m1": Format(2, 1, 1, "none"),
}


def word(bits: int) -> type:
    """The unsigned numpy type of a register of `bits` bits."""
    return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]


def storage(name: str) -> int:
    """Bits of the smallest register that holds one number of a format (tf32 keeps float32's places: 32)."""
    return 32 if name == "tf32" else max(8, FORMATS[name].bits) if name != "ue8m0" else 8


def encode(
    name: str,
    values: np.ndarray | np.float64,
    rounding: str = "rn",
    satfinite: bool = False,
    random: np.ndarray | int = 0,
    random_bits: int = 16,
) -> np.ndarray:
    """Bits of `values` (any float array), as unsigned words of `storage(name)` bits (fp4 and fp6 in the low bits of a
    byte).

    Numbers beyond the largest become it where `satfinite` (or where the rounding is toward zero), else infinity, or NaN
    in formats without one. NaN is the canonical NaN, and the largest number in formats without. "rs" adds the
    `random_bits`-bit integers `random` below the last kept bit and truncates.
    """
    values = np.asarray(values)
    if name == "f32" and rounding == "rn" and not satfinite:
        with np.errstate(all="ignore"):
            return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.astype(np.float32).view(np.uint32))
    if name == "f16" and rounding == "rn" and not satfinite:
        with np.errstate(all="ignore"):
            return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))
    if name == "f64":
        if rounding != "rn":
            raise ValueError(f"rounding {rounding} to f64 has no meaning here")
        return np.ascontiguousarray(values, np.float64).view(np.uint64)
    if name == "ue8m0":
        return _scale_exponent(values, rounding)
    f = FORMATS[name]
    x: np.ndarray = values.astype(np.float64)
    size = np.where(np.isfinite(x), np.abs(x), 1.0)
    exponent = np.where(size == 0, 1 - f.bias, np.maximum(np.frexp(size)[1] - 1, 1 - f.bias))
    scaled = np.ldexp(size, f.mantissa - exponent)
    whole = np.floor(scaled)
    rest = scaled - whole
    if rounding == "rn":
        kept = np.rint(scaled)
    elif rounding == "rna":
        kept = whole + (rest >= 0.5)
    elif rounding == "rs":
        kept = whole + (np.floor(np.ldexp(rest, random_bits)) + np.asarray(random, np.float64) >= 2.0**random_bits)
    elif rounding in ("rp", "rm"):
        kept = whole + ((rest > 0) & (np.signbit(x) == (rounding == "rm")))
    elif rounding == "rz":
        kept = whole
    else:
        raise ValueError(f"rounding {rounding!r}: one of {', '.join(ROUNDINGS)}")
    # a kept mantissa of 2**(mantissa + 1) carries into the exponent, one below 2**mantissa is a subnormal number: the
    # sum says both
    bits = ((exponent.astype(np.int64) + f.bias) << f.mantissa) + kept.astype(np.int64) - (1 << f.mantissa)
    ones = (1 << (f.exponent + f.mantissa)) - 1
    infinity = {"ieee": ones - ((1 << f.mantissa) - 1), "nan": ones, "none": f.largest}[f.special]
    toward_zero = (rounding == "rz") | (
        np.signbit(x) if rounding == "rp" else ~np.signbit(x) if rounding == "rm" else np.zeros(x.shape, bool)
    )
    bits = np.where(bits > f.largest, np.where(satfinite | toward_zero, f.largest, infinity), bits)
    bits = np.where(np.isinf(x), f.largest if satfinite else infinity, bits)
    bits = bits | (np.signbit(x).astype(np.int64) << (f.exponent + f.mantissa))
    bits = np.where(np.isnan(x), f.largest if f.special == "none" else ones, bits)
    return (bits << 13 if name == "tf32" else bits).astype(word(storage(name)))


def _scale_exponent(values: np.ndarray | np.float64, rounding: str) -> np.ndarray:
    """ue8m0: exponent plus 127 of |x|, rounded down ("rz") or up ("rp") to a power of two, in 0 … 254; NaN is 255."""
    if rounding not in ("rz", "rp"):
        raise ValueError(f"rounding {rounding!r} to ue8m0: 'rz' or 'rp'")
    size = np.abs(values.astype(np.float64))
    fraction, exponent = np.frexp(np.where(np.isfinite(size) & (size > 0), size, 1.0))
    bits = exponent - 1 + 127 + ((fraction > 0.5) & (rounding == "rp"))
    bits = np.where(size == 0, 0, np.where(np.isinf(size), 254, np.clip(bits, 0, 254)))
    return np.where(np.isnan(size), 255, bits).astype(np.uint8)


def decode(name: str, bits: np.ndarray) -> np.ndarray:
    """Values (float64) of unsigned words: the inverse of `encode`. tf32 ignores the low 13 bits of a float32."""
    bits = np.asarray(bits)
    if name == "f64":
        return np.ascontiguousarray(bits, np.uint64).view(np.float64)
    with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
        return _decode(name, bits)


def _decode(name: str, bits: np.ndarray) -> np.ndarray:
    if name in ("f32", "tf32"):
        words: np.ndarray = bits.astype(np.uint32)
        return (words & np.uint32(0xFFFFE000) if name == "tf32" else words).view(np.float32).astype(np.float64)
    if name == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    whole: np.ndarray = bits.astype(np.int64)
    if name == "ue8m0":
        return np.where(whole == 255, np.nan, np.ldexp(1.0, np.minimum(whole, 254) - 127))
    f = FORMATS[name]
    field, mantissa = whole >> f.mantissa & ((1 << f.exponent) - 1), whole & ((1 << f.mantissa) - 1)
    values = np.ldexp(
        (mantissa + np.where(field > 0, 1 << f.mantissa, 0)).astype(np.float64),
        np.maximum(field, 1) - f.bias - f.mantissa,
    )
    size = whole & ((1 << (f.exponent + f.mantissa)) - 1)
    values = np.where(size > f.largest, np.nan, values)
    if f.special == "ieee":
        values = np.where(size == f.largest + 1, np.inf, values)
    return np.where(whole >> (f.exponent + f.mantissa) & 1 > 0, -values, values)


def fma_to_odd(a: np.ndarray, b: np.ndarray | np.float64, c: np.ndarray) -> np.ndarray:
    """a b + c of float32 (or narrower) numbers, in float64 rounded to odd: rounding the result once more, to float32 or
    narrower, is exact.

    The product of two float32 is exact in float64. Where the sum is not (Knuth's two-sum finds the error), the last bit
    is made odd, which keeps "above" and "below" apart for the second rounding (Boldo and Melquiond, "Emulation of FMA
    and correctly rounded sums").
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        c = np.asarray(c, np.float64)
        total = np.asarray(product + c)
        part = total - product
        error = (product - (total - part)) + (c - part)
    words = np.ascontiguousarray(total).view(np.int64).reshape(total.shape)
    inexact = np.isfinite(total) & (error != 0) & np.isfinite(error) & (words & 1 == 0)
    # sign-magnitude: one more is away from zero
    away = (error > 0) == (total > 0)
    return np.where(inexact, np.where(away, words + 1, words - 1), words).view(np.float64)
