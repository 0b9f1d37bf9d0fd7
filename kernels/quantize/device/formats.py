"""Numbers of the formats of block-scaled products, from fp32 tiles: e8m0, e4m3, e5m2 and e2m1.

CONVERT says how values are rounded (`conversions`). "arithmetic" needs no conversion instruction, so it runs on every
GPU and in Triton's interpreter. "fp8" has those of 8-bit numbers (sm_89), "fp4" those of e2m1, too (sm_100a). All give
the same bits: nearest even, beyond the largest value that value, also for infinities, and for NaN 0x7F in 8 bits and
6.0 in e2m1 (PTX ISA 9.7.9 `cvt`, `.satfinite`). Kernels that call these are compiled without fused multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonkittens.inline_ptx.convert import (
    bf16_to_f32,
    to_e2m1x8,
    to_e2m1x8_by_halves,
    to_e2m1x8_stochastic_by_halves,
    to_e4m3,
    to_e5m2,
)
from tritonkittens.inline_ptx.math import rcp
from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap

INFINITY = tl.constexpr(0x7F800000)  # bits of fp32
LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32


@op
def conversions(t: Trace, wanted: Traced) -> Traced:
    """constexpr: the CONVERT of this kernel's target, or "arithmetic" where that is `wanted`."""
    if t.interpreted or unwrap(wanted) == "arithmetic" or not t.chip.e4m3:
        return tl.constexpr("arithmetic")
    return tl.constexpr("fp4" if t.chip.e2m1 else "fp8")


@triton.jit
def to_fp32(x, CONVERT: tl.constexpr):
    """x in fp32."""
    if x.dtype == tl.bfloat16 and CONVERT == "arithmetic":  # the interpreter's own conversion loses denormal numbers
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.bfloat16:
        return bf16_to_f32(x)
    else:
        return x.to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x, CONVERT: tl.constexpr):
    """Bits of the largest magnitude along the last of three axes, as int32: of a positive NaN if there is one."""
    x = to_fp32(x, CONVERT) if CONVERT == "arithmetic" else x  # 16-bit instructions take two numbers
    if x.dtype == tl.float32:
        largest = tl.reduce(tl.abs(x), 2, _larger)
    else:  # there, abs is an instruction of its own
        largest = _larger(tl.reduce(x, 2, _larger), -tl.reduce(x, 2, _smaller))
    return largest.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e8m0_scale(bits, EMAX: tl.constexpr, UP: tl.constexpr):
    """(scales in e8m0 as uint8, 1 / scale in fp32) for the bits of blocks' largest magnitudes.

    The largest numbers of e4m3 and e5m2 are 1.75 · 2**EMAX. With UP, a scale is the least power of two for which none
    is exceeded; otherwise 2**(exponent of the largest magnitude - EMAX). An infinity gives 2**127, NaN gives NaN.
    """
    code = tl.maximum(((bits + (0x1FFFFF if UP else 0)) >> 23) - EMAX, 0)
    special = bits >= INFINITY
    is_nan = bits > INFINITY
    code = tl.where(special, tl.where(is_nan, 255, 254), code)
    # 2**-127 is denormal
    inverse = tl.where(special, tl.where(is_nan, 0x7FC00000, 0x00400000), (254 - code) << 23)
    return code.to(tl.uint8), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _round_to_fp8(y, MANTISSA: tl.constexpr):
    """e4m3 (MANTISSA 3) or e5m2 (2) by integer arithmetic, as uint8."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    CUT: tl.constexpr = 23 - MANTISSA  # bits of the mantissa
    LEAST: tl.constexpr = (128 - BIAS) << 23  # bits of the least normal number
    # a number that the least step of the format is the last bit of: adding it rounds denormal numbers
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << (CUT - 1)) - 1) + ((size >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    magic = tl.full(y.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    denormal = (size.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    code = tl.minimum(tl.where(size < LEAST, denormal, normal), 0x7E if MANTISSA == 3 else 0x7B)
    code = tl.where(size > INFINITY, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def to_fp8(y, MANTISSA: tl.constexpr, CONVERT: tl.constexpr):
    """e4m3 (MANTISSA 3) or e5m2 (2) of fp32, as uint8."""
    if CONVERT == "arithmetic":
        return _round_to_fp8(y, MANTISSA)
    elif MANTISSA == 3:
        return to_e4m3(y).to(tl.uint8, bitcast=True)
    else:
        return to_e5m2(y).to(tl.uint8, bitcast=True)


@triton.jit
def _reciprocal(x, CONVERT: tl.constexpr):
    """1 / x of normal fp32 numbers, rounded to nearest even."""
    if CONVERT == "arithmetic":
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    else:  # what a division does, without its checks
        guess = rcp(x)
        return tl.fma(guess, tl.fma(-x, guess, 1.0), guess)


@triton.jit
def e4m3_scale(bits, factor, reciprocal, CONVERT: tl.constexpr):
    """(scales in e4m3 as uint8, 1 / (scale · tensor scale) in fp32) for the bits of blocks' largest magnitudes.

    `factor` is 1 / (6 · tensor scale), `reciprocal` is 1 / tensor scale. A scale that is zero has 0 for a reciprocal.
    """
    code = to_fp8(bits.to(tl.float32, bitcast=True) * factor, 3, CONVERT)
    # its bits in an fp32 number are 2**-120 times its value
    scale = (code.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    inverse = tl.minimum(reciprocal * _reciprocal(scale, CONVERT), LARGEST)
    inverse = tl.where(code == 0x7F, float("nan"), tl.where(code == 0, 0.0, inverse))
    return code, inverse


@triton.jit
def _e2m1(y):
    """Numbers whose low three bits are those of e2m1 without the sign, nearest even."""
    size = tl.abs(y)
    # The bits of e2m1 count steps of 0.5 up to 2, from there on of 1 up to 4, then of 2: the least of three lines. A
    # number from 2**23 on has whole steps only, so each sum, which is rounded once, counts the nearest.
    halves = tl.fma(size, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    ones = (size + 8388610.0).to(tl.int32, bitcast=True)
    twos = tl.fma(size, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 0x4B000007))


@triton.jit
def _e2m1_stochastic(y, random):
    """As `_e2m1`, rounded up if the fraction of a step and the byte `random`, in 1/256, make a step."""
    n = (tl.minimum(tl.abs(y), 8.0) * 512.0).to(tl.int32)  # of NaN: of 8
    n = tl.minimum(n, tl.minimum((n >> 1) + 512, (n >> 2) + 1024))
    return tl.minimum((n + random.to(tl.int32)) >> 8, 7)


@triton.jit
def _eight(x):
    """The numbers with each index of the last axis, which has eight."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _append(word, y, code):
    """`word`, shifted by four bits, and e2m1 with the sign of y and the low three bits of `code`, whose next bits are
    zero. Their high bits leave the word, or stay in its high byte."""
    return (((word << 1) | (y.to(tl.uint32, bitcast=True) >> 31)) << 3) + code.to(tl.uint32, bitcast=True)


@triton.jit
def to_e2m1_words(y, random, CONVERT: tl.constexpr):
    """e2m1 of fp32, (n, words, 8), as words of uint32, the first number in the lowest four bits. `random`: a byte for
    each number, which rounds it, or None: nearest even."""
    ys = _eight(y)
    if CONVERT == "arithmetic":
        codes = _eight(_e2m1(y) if random is None else _e2m1_stochastic(y, random))
        word = tl.zeros(ys[0].shape, tl.uint32)
        for i in tl.static_range(8):
            word = _append(word, ys[7 - i], codes[7 - i])
        if random is None:
            word -= 0xFB000000  # what the high bits of `_e2m1` left: 0x4B000000 of the last two
    elif random is not None:
        r = _eight(random.to(tl.uint32))
        pairs = (r[0] | r[4] << 16, r[1] | r[5] << 16, r[2] | r[6] << 16, r[3] | r[7] << 16)
        word = to_e2m1x8_stochastic_by_halves(ys, pairs)
    else:
        word = to_e2m1x8(ys) if CONVERT == "fp4" else to_e2m1x8_by_halves(ys)
    return word
