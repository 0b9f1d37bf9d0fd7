"""Conversions between floating-point formats (PTX ISA 9.7.9 `cvt`), element by element on tiles of any shape, in plain
Triton and explicit kernels.

Instructions that convert two values into one packed register are applied to neighbouring elements of one tile. e2m1
(fp4) has no tile type: two values share a byte, so `to_e2m1x2(low, high)` takes two tiles and returns one of bytes.
"""

from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl

from ._asm import builtin, require, unwrap
from ._formats import FORMATS, decode, encode
from ._glue import integer, width
from ._meaning import Bits, Instruction, Machine, NoMeaning, Register, join, meaning, split, unsigned
from ._traced import Semantic, Traced


def narrow16_asm(mnemonic: str) -> str:
    """Two float32 ($1, $2) into one packed 16-bit pair ($0). PTX puts its first source into the upper half."""
    return f"{mnemonic} $0, $2, $1;"


def narrow8_asm(mnemonic: str, source: str) -> str:
    """Four elements into four bytes ($0): from float32 in $1..$4, or from packed 16-bit pairs in $1, $2."""
    first, second = ("$2, $1", "$4, $3") if source == "f32" else ("$1", "$2")
    return f"{{ .reg .b16 low, high; {mnemonic} low, {first}; {mnemonic} high, {second}; mov.b32 $0, {{low, high}}; }}"


def widen8_asm(mnemonic: str) -> str:
    """Four bytes ($2) into two packed 16-bit pairs ($0, $1)."""
    return f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $2; {mnemonic} $0, low; {mnemonic} $1, high; }}"


def widen16_asm(mnemonic: str) -> str:
    """The packed bf16 pair $2 into two float32 ($0, $1), whose upper halves are those bits."""
    return f"{mnemonic} $0, $2, 16; and.b32 $1, $2, 0xffff0000;"


def narrow4_asm(mnemonic: str) -> str:
    """Four bytes ($0), each holding e2m1 of one element of $1..$4 in its low and of $5..$8 in its high four bits."""
    steps = " ".join(f"{mnemonic} b{i}, ${5 + i}, ${1 + i};" for i in range(4))
    return f"{{ .reg .b8 b0, b1, b2, b3; {steps} mov.b32 $0, {{b0, b1, b2, b3}}; }}"


def narrow4_word_asm(mnemonic: str) -> str:
    """A word ($0) of eight e2m1, of $1 to $8 from the lowest four bits on."""
    steps = " ".join(f"{mnemonic} b{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4))
    return f"{{ .reg .b8 b0, b1, b2, b3; {steps} mov.b32 $0, {{b0, b1, b2, b3}}; }}"


# Added to 1024 in the halves of each pair, so that the float16 bits of all eight, summed 4 bits apart, leave a word
# zero.
_OFFSETS = ((0, 85), (0, 0), (92, 85), (0, 0))


# The last lines of a form: a word ($0) of the bits `a` without signs, and of the signs of elements i and i + 4 in h<i>.
_SIGNS = (
    "prmt.b32 even, h0, h2, 0xfbd9; prmt.b32 odd, h1, h3, 0xfbd9; "
    "lop3.b32 even, even, odd, 0x0f0f0f0f, 0xe4; lop3.b32 $0, even, 0x88888888, a, 0xea; }"
)


def halves4_word_asm(mnemonic: str) -> str:
    """`narrow4_word_asm` by arithmetic on packed float16.

    A product with 513 · 2**-23 puts 1.0 near the least normal float16, so both formats have their denormal numbers at
    the same place, and each tie of e2m1 is a tie of float16 that rounds to the same side. What the conversion to
    float16 leaves is never a tie, so the rest needs no exact factor. The bits of e2m1 count steps of 0.5 up to 2, from
    there on of 1 up to 4, then of 2 up to 6: with y = 2044/2048 · 2**14 h, they are
    min(2 y + 1, y + 3, 7) - sat(3 - y / 2), whose sums are rounded to whole numbers by the 1024 that is added.
    """
    lines = [
        "{ .reg .f32 low, high; .reg .b32 h<4>, k<4>, size, a, b, c, even, odd, two, one, half, three, p1, p3, p7;",
        "mov.b32 two, 0x77fc77fc; mov.b32 one, 0x73fc73fc; mov.b32 half, 0xeffceffc; mov.b32 three, 0x42004200;",
    ]
    for i, (low, high) in enumerate(_OFFSETS):  # elements i and i + 4 in a register
        offset = 0x64006400 + (high << 16) + low
        lines += [
            *(f"mov.b32 p{n}, {offset + 0x10001 * n:#x};" for n in (1, 3, 7)),
            f"mul.rn.f32 low, ${i + 1}, 0f38804000; mul.rn.f32 high, ${i + 5}, 0f38804000;",
            f"{mnemonic} h{i}, high, low; abs.f16x2 size, h{i};",
            "fma.rn.f16x2 a, size, two, p1; fma.rn.f16x2 b, size, one, p3;",
            "min.f16x2 a, a, b; min.f16x2 a, a, p7;",
            f"fma.rn.sat.f16x2 c, size, half, three; sub.rn.f16x2 k{i}, a, c;",
        ]
    lines += ["mad.lo.u32 a, k3, 16, k2; mad.lo.u32 a, a, 16, k1; mad.lo.u32 a, a, 16, k0;", _SIGNS]
    return " ".join(lines)


def stochastic4_word_asm(mnemonic: str) -> str:
    """As `halves4_word_asm`, stochastic: $9 to $12 hold r of elements i and i + 4 in their halves.

    With 1.0 at the least normal float16, the bits of e2m1 are bits 9 to 11 of a float16, and a step has 512 parts.
    """
    lines = [
        "{ .reg .f32 low, high; .reg .b32 h<4>, a, b, even, odd, most;",
        "mov.b32 most, 0x0e000e00;",  # the bits of 6.0
    ]
    for i, shift in enumerate(("shr.u32 b, b, 9;", "shr.u32 b, b, 5;", "shr.u32 b, b, 1;", "shl.b32 b, b, 3;")):
        lines += [
            f"mul.rn.f32 low, ${i + 1}, 0f38800000; mul.rn.f32 high, ${i + 5}, 0f38800000;",
            f"{mnemonic} h{i}, high, low; abs.f16x2 b, h{i}; min.f16x2 b, b, most;",
            f"mad.lo.u32 b, ${i + 9}, 2, b; and.b32 b, b, most; {shift} {'add.u32 a, a, b;' if i else 'mov.b32 a, b;'}",
        ]
    return " ".join([*lines, _SIGNS])


def widen4_asm(mnemonic: str) -> str:
    """The four bytes of $4 into float16: low halves to the packed pairs $0, $1, high halves to $2, $3."""
    steps = " ".join(f"{mnemonic} w{i}, b{i};" for i in range(4))
    # Each w holds (low, high) of one byte; the permutations gather two low and two high halves.
    gather = (
        "prmt.b32 $0, w0, w1, 0x5410; prmt.b32 $1, w2, w3, 0x5410; prmt.b32 $2, w0, w1, 0x7632; prmt.b32 $3, "
        "w2, w3, 0x7632;"
    )
    return f"{{ .reg .b8 b0, b1, b2, b3; .reg .b32 w0, w1, w2, w3; mov.b32 {{b0, b1, b2, b3}}, $4; {steps} {gather} }}"


def stochastic16_asm(mnemonic: str) -> str:
    """Two float32 ($1, $2) into a packed 16-bit pair ($0); the low halves of the random words $3, $4 round them."""
    return f"{{ .reg .b32 bits; prmt.b32 bits, $3, $4, 0x5410; {mnemonic} $0, $2, $1, bits; }}"


_GATHER_BYTES = (
    ".reg .b32 bits, bits2; prmt.b32 bits, ${0}, ${1}, 0x0040; prmt.b32 bits2, ${2}, ${3}, 0x0040; "
    "prmt.b32 bits, bits, bits2, 0x5410;"
)


def stochastic8_asm(mnemonic: str) -> str:
    """Four float32 ($1..$4) into four bytes ($0); the low bytes of the random words $5..$8 round them."""
    return f"{{ {_GATHER_BYTES.format(5, 6, 7, 8)} {mnemonic} $0, {{$4, $3, $2, $1}}, bits; }}"


def stochastic4_asm(mnemonic: str) -> str:
    """Four bytes ($0) of e2m1 pairs: low halves from $1..$4, high halves from $5..$8; the low bytes of $9..$12 make one
    32-bit random word.
    """
    pairs = f"{mnemonic} first, {{$6, $2, $5, $1}}, bits; {mnemonic} second, {{$8, $4, $7, $3}}, bits;"
    return (
        f"{{ {_GATHER_BYTES.format(9, 10, 11, 12)} .reg .b16 first, second; {pairs} mov.b32 $0, {{first, second}}; }}"
    )


# form -> (template builder, LLVM constraints, elements a block). "narrow8_f16" and the like read packed pairs.
FORMS: dict[str, tuple[Callable[[str], str], str, int]] = {
    "narrow32": (lambda m: f"{m} $0, $1;", "=r,f", 1),
    "narrow16": (narrow16_asm, "=r,f,f", 2),
    "narrow8_f32": (lambda m: narrow8_asm(m, "f32"), "=r,f,f,f,f", 4),
    "narrow8_f16": (lambda m: narrow8_asm(m, "f16"), "=r,r,r", 4),
    "narrow4": (narrow4_asm, "=r,f,f,f,f,f,f,f,f", 4),
    "narrow4_word": (narrow4_word_asm, "=r,f,f,f,f,f,f,f,f", 1),
    "halves4_word": (halves4_word_asm, "=r,f,f,f,f,f,f,f,f", 1),
    "stochastic4_word": (stochastic4_word_asm, "=r,f,f,f,f,f,f,f,f,r,r,r,r", 1),
    "widen16": (widen16_asm, "=f,=f,r", 2),
    "widen8": (widen8_asm, "=r,=r,r", 4),
    "widen4": (widen4_asm, "=r,=r,=r,=r,r", 4),
    "stochastic16": (stochastic16_asm, "=r,f,f,r,r", 2),
    "stochastic8": (stochastic8_asm, "=r,f,f,f,f,r,r,r,r", 4),
    "stochastic4": (stochastic4_asm, "=r,f,f,f,f,f,f,f,f,r,r,r,r", 4),
}


@builtin
def _convert(
    form: Traced,
    mnemonic: Traced,
    args: Traced,
    sources: Traced,
    dtype: Traced,
    minimum: Traced = None,
    only: Traced = None,
    _semantic: Semantic = None,
) -> Traced:
    """Emits `mnemonic` in `form` over tiles whose element types are `sources`; `dtype` is the result's element type, or
    a tuple of them."""
    form, mnemonic, sources, dtype = unwrap(form), unwrap(mnemonic), unwrap(sources), unwrap(dtype)
    require(mnemonic, unwrap(minimum), unwrap(only), _semantic=_semantic)
    args = [_semantic.to_tensor(unwrap(arg)) for arg in args]
    types = tuple(str(arg.dtype) for arg in args)
    if types != sources:
        raise TypeError(f"{mnemonic} converts ({', '.join(sources)}), not ({', '.join(types)})")
    build, constraints, pack = FORMS[form]
    out = tl.inline_asm_elementwise(build(mnemonic), constraints, args, dtype, True, pack, _semantic=_semantic)
    return tl.tuple(out) if isinstance(out, tuple) else out


@builtin
def _variant(mnemonic: Traced, what: Traced, value: Traced, allowed: Traced, _semantic: Semantic = None) -> Traced:
    """constexpr: `mnemonic` with its `{}` filled by `value`, which must be one of `allowed`."""
    mnemonic, value, allowed = unwrap(mnemonic), unwrap(value), unwrap(allowed)
    if value not in allowed:
        raise ValueError(
            f"{mnemonic.replace('{}', '')}: {unwrap(what)} is {', '.join(map(repr, allowed))}, not {value!r}"
        )
    modifier = {False: "", True: ".relu"}.get(value, f".{value}")
    return tl.constexpr(mnemonic.replace("{}", modifier, 1))


@builtin
def _is_type(x: Traced, name: Traced, _semantic: Semantic = None) -> Traced:
    return tl.constexpr(str(x.dtype) == unwrap(name))


@triton.jit
def to_bf16(x, rounding: tl.constexpr = "rn", relu: tl.constexpr = False):
    """float32 to bfloat16, two at a time; rounding "rn" (nearest even) or "rz" (toward zero), relu sets negative values
    to 0. sm_80+.

    PTX ISA 9.7.9 `cvt.rn.bf16x2.f32`.
    """
    mnemonic: tl.constexpr = _variant(
        _variant("cvt{}{}.bf16x2.f32", "rounding", rounding, ("rn", "rz")), "relu", relu, (False, True)
    )
    return _convert("narrow16", mnemonic, (x,), ("fp32",), tl.bfloat16, 80)


@triton.jit
def to_f16(x, rounding: tl.constexpr = "rn", relu: tl.constexpr = False):
    """float32 to float16, two at a time; rounding "rn" (nearest even) or "rz" (toward zero), relu sets negative values
    to 0. sm_80+.

    PTX ISA 9.7.9 `cvt.rn.f16x2.f32`.
    """
    mnemonic: tl.constexpr = _variant(
        _variant("cvt{}{}.f16x2.f32", "rounding", rounding, ("rn", "rz")), "relu", relu, (False, True)
    )
    return _convert("narrow16", mnemonic, (x,), ("fp32",), tl.float16, 80)


@triton.jit
def to_tf32(x, rounding: tl.constexpr = "rna", relu: tl.constexpr = False):
    """float32 rounded to the 10-bit mantissa of tf32, kept as float32. rounding "rna" (nearest, ties away; sm_80+),
    "rn" or "rz" (sm_90+).

    relu needs "rn" or "rz". PTX ISA 9.7.9 `cvt.rna.tf32.f32`.
    """
    if rounding == "rna":
        ties_away: tl.constexpr = _variant("cvt.rna{}.tf32.f32", "relu with rounding 'rna'", relu, (False,))
        return _convert("narrow32", ties_away, (x,), ("fp32",), tl.float32, 80)
    else:
        rounded: tl.constexpr = _variant("cvt{}{}.tf32.f32", "rounding", rounding, ("rna", "rn", "rz"))
        mnemonic: tl.constexpr = _variant(rounded, "relu", relu, (False, True))
        return _convert("narrow32", mnemonic, (x,), ("fp32",), tl.float32, 90)


@triton.jit
def to_e4m3(x, relu: tl.constexpr = False):
    """float32 or float16 to fp8 e4m3, nearest even, finite values beyond ±448 become ±448. sm_89+. PTX ISA 9.7.9
    `cvt.rn.satfinite.e4m3x2`.
    """
    if _is_type(x, "fp16"):
        halves: tl.constexpr = _variant("cvt.rn.satfinite{}.e4m3x2.f16x2", "relu", relu, (False, True))
        return _convert("narrow8_f16", halves, (x,), ("fp16",), tl.float8e4nv, 89)
    else:
        mnemonic: tl.constexpr = _variant("cvt.rn.satfinite{}.e4m3x2.f32", "relu", relu, (False, True))
        return _convert("narrow8_f32", mnemonic, (x,), ("fp32",), tl.float8e4nv, 89)


@triton.jit
def to_e5m2(x, relu: tl.constexpr = False):
    """float32 or float16 to fp8 e5m2, nearest even, finite values beyond ±57344 become ±57344. sm_89+. PTX ISA 9.7.9
    `cvt.rn.satfinite.e5m2x2`.
    """
    if _is_type(x, "fp16"):
        halves: tl.constexpr = _variant("cvt.rn.satfinite{}.e5m2x2.f16x2", "relu", relu, (False, True))
        return _convert("narrow8_f16", halves, (x,), ("fp16",), tl.float8e5, 89)
    else:
        mnemonic: tl.constexpr = _variant("cvt.rn.satfinite{}.e5m2x2.f32", "relu", relu, (False, True))
        return _convert("narrow8_f32", mnemonic, (x,), ("fp32",), tl.float8e5, 89)


@triton.jit
def e4m3_to_f16(x, relu: tl.constexpr = False):
    """fp8 e4m3 to float16 (exact). sm_89+. PTX ISA 9.7.9 `cvt.rn.f16x2.e4m3x2`."""
    mnemonic: tl.constexpr = _variant("cvt.rn{}.f16x2.e4m3x2", "relu", relu, (False, True))
    return _convert("widen8", mnemonic, (x,), ("fp8e4nv",), tl.float16, 89)


@triton.jit
def e5m2_to_f16(x, relu: tl.constexpr = False):
    """fp8 e5m2 to float16 (exact). sm_89+. PTX ISA 9.7.9 `cvt.rn.f16x2.e5m2x2`."""
    mnemonic: tl.constexpr = _variant("cvt.rn{}.f16x2.e5m2x2", "relu", relu, (False, True))
    return _convert("widen8", mnemonic, (x,), ("fp8e5",), tl.float16, 89)


@triton.jit
def bf16_to_f32(x):
    """bfloat16 to float32 (exact), two at a time, in two instructions. sm_80+. PTX ISA 9.7.8 `shl`, `and`."""
    return _convert("widen16", "shl.b32", (x,), ("bf16",), tl.float32, 80)


@triton.jit
def to_e2m1x2(low, high, relu: tl.constexpr = False):
    """Two float32 tiles to one uint8 tile of fp4 e2m1 pairs (`low` in bits 0-3), nearest even, finite values beyond ±6
    become ±6.

    sm_100a, sm_103a, sm_120a. PTX ISA 9.7.9 `cvt.rn.satfinite.e2m1x2.f32`.
    """
    mnemonic: tl.constexpr = _variant("cvt.rn.satfinite{}.e2m1x2.f32", "relu", relu, (False, True))
    return _convert("narrow4", mnemonic, (low, high), ("fp32", "fp32"), tl.uint8, None, (100, 103, 120))


@triton.jit
def to_e2m1x8(xs):
    """Eight float32 tiles to one uint32 tile of fp4 e2m1 (`xs[0]` in bits 0-3), nearest even, finite values beyond ±6
    become ±6.

    sm_100a, sm_103a, sm_120a. PTX ISA 9.7.9 `cvt.rn.satfinite.e2m1x2.f32`.
    """
    mnemonic: tl.constexpr = "cvt.rn.satfinite.e2m1x2.f32"
    return _convert("narrow4_word", mnemonic, xs, ("fp32",) * 8, tl.uint32, None, (100, 103, 120))


_EIGHT_AND_BITS = tl.constexpr(("fp32",) * 8 + ("uint32",) * 4)


@triton.jit
def to_e2m1x8_by_halves(xs):
    """As `to_e2m1x8`, with the same bits, by arithmetic on packed float16. sm_80+."""
    return _convert("halves4_word", "cvt.rn.f16x2.f32", xs, ("fp32",) * 8, tl.uint32, 80)


@triton.jit
def to_e2m1x8_stochastic_by_halves(xs, bits):
    """Eight float32 tiles to one uint32 tile of fp4 e2m1 (`xs[0]` in bits 0-3), by arithmetic on packed float16. A
    magnitude is rounded up if the fraction of a step, in parts of 1/256, and r make a step; beyond 6 it becomes 6, and
    NaN 6. `bits`: four uint32 tiles; tile i holds r of `xs[i]`, and of `xs[i + 4]` in its upper half. sm_80+.
    """
    return _convert("stochastic4_word", "cvt.rz.f16x2.f32", xs + bits, _EIGHT_AND_BITS, tl.uint32, 80)


@triton.jit
def e2m1x2_to_f16(pairs, relu: tl.constexpr = False):
    """A uint8 tile of fp4 e2m1 pairs to two float16 tiles (low halves, high halves), exact. sm_100a, sm_103a, sm_120a.

    PTX ISA 9.7.9 `cvt.rn.f16x2.e2m1x2`.
    """
    mnemonic: tl.constexpr = _variant("cvt.rn{}.f16x2.e2m1x2", "relu", relu, (False, True))
    return _convert("widen4", mnemonic, (pairs,), ("uint8",), (tl.float16, tl.float16), None, (100, 103, 120))


@triton.jit
def to_ue8m0(x, rounding: tl.constexpr = "rz"):
    """float32 to ue8m0, the power-of-two scale of MX formats, as uint8 (exponent plus 127). rounding "rz" (down) or
    "rp" (up).

    sm_100a, sm_103a, sm_120a. PTX ISA 9.7.9 `cvt.rz.satfinite.ue8m0x2.f32`.
    """
    mnemonic: tl.constexpr = _variant("cvt{}.satfinite.ue8m0x2.f32", "rounding", rounding, ("rz", "rp"))
    return _convert("narrow8_f32", mnemonic, (x,), ("fp32",), tl.uint8, None, (100, 103, 120))


@triton.jit
def ue8m0_to_bf16(x):
    """ue8m0 scales (uint8, exponent plus 127) to bfloat16. sm_100a, sm_103a, sm_120a. PTX ISA 9.7.9
    `cvt.rn.bf16x2.ue8m0x2`."""
    return _convert("widen8", "cvt.rn.bf16x2.ue8m0x2", (x,), ("uint8",), tl.bfloat16, None, (100, 103, 120))


@triton.jit
def to_bf16_stochastic(x, bits, relu: tl.constexpr = False):
    """float32 to bfloat16, rounded up with the probability of the discarded fraction; `bits` is a uint32 tile of x's
    shape, its low 16 bits are used.

    sm_100a, sm_103a. PTX ISA 9.7.9 `cvt.rs.bf16x2.f32`.
    """
    mnemonic: tl.constexpr = _variant("cvt.rs{}.bf16x2.f32", "relu", relu, (False, True))
    return _convert("stochastic16", mnemonic, (x, bits), ("fp32", "uint32"), tl.bfloat16, None, (100, 103))


@triton.jit
def to_f16_stochastic(x, bits, relu: tl.constexpr = False):
    """float32 to float16, rounded up with the probability of the discarded fraction; `bits` is a uint32 tile of x's
    shape, its low 13 bits are used.

    sm_100a, sm_103a. PTX ISA 9.7.9 `cvt.rs.f16x2.f32`.
    """
    mnemonic: tl.constexpr = _variant("cvt.rs{}.f16x2.f32", "relu", relu, (False, True))
    return _convert("stochastic16", mnemonic, (x, bits), ("fp32", "uint32"), tl.float16, None, (100, 103))


@triton.jit
def to_e4m3_stochastic(x, bits, relu: tl.constexpr = False):
    """float32 to fp8 e4m3 with stochastic rounding, saturating; `bits` is a uint32 tile of x's shape, its low 8 bits
    are used.

    sm_100a, sm_103a. PTX ISA 9.7.9 `cvt.rs.satfinite.e4m3x4.f32`.
    """
    mnemonic: tl.constexpr = _variant("cvt.rs{}.satfinite.e4m3x4.f32", "relu", relu, (False, True))
    return _convert("stochastic8", mnemonic, (x, bits), ("fp32", "uint32"), tl.float8e4nv, None, (100, 103))


@triton.jit
def to_e5m2_stochastic(x, bits, relu: tl.constexpr = False):
    """float32 to fp8 e5m2 with stochastic rounding, saturating; `bits` is a uint32 tile of x's shape, its low 8 bits
    are used.

    sm_100a, sm_103a. PTX ISA 9.7.9 `cvt.rs.satfinite.e5m2x4.f32`.
    """
    mnemonic: tl.constexpr = _variant("cvt.rs{}.satfinite.e5m2x4.f32", "relu", relu, (False, True))
    return _convert("stochastic8", mnemonic, (x, bits), ("fp32", "uint32"), tl.float8e5, None, (100, 103))


@triton.jit
def to_e2m1x2_stochastic(low, high, bits, relu: tl.constexpr = False):
    """Two float32 tiles to one uint8 tile of fp4 e2m1 pairs with stochastic rounding, saturating; the low 8 bits of the
    uint32 `bits` are used.

    sm_100a, sm_103a. PTX ISA 9.7.9 `cvt.rs.satfinite.e2m1x4.f32`.
    """
    mnemonic: tl.constexpr = _variant("cvt.rs{}.satfinite.e2m1x4.f32", "relu", relu, (False, True))
    return _convert("stochastic4", mnemonic, (low, high, bits), ("fp32", "fp32", "uint32"), tl.uint8, None, (100, 103))


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------

_NARROW = "e4m3|e5m2|e2m3|e3m2|e2m1|ue8m0"
_RANDOM_BITS = {"bf16": 16, "f16": 13, "e4m3": 8, "e5m2": 8, "e2m1": 8, "e2m3": 8, "e3m2": 8}


def _values(x: Register, kind: str) -> np.ndarray | np.float64:
    return np.float64(x) if isinstance(x, float) else decode(kind, x)


def _round(i: Instruction, x: np.ndarray | np.float64, to: str, random: Register = 0) -> Bits:
    """The bits of values x in format `to`, with the instruction's rounding, `.relu` (negative becomes 0, NaN stays) and
    `.satfinite`."""
    if i.fields.get("relu"):
        x = np.where(np.isnan(x) | (x > 0), x, 0.0)
    return encode(
        to, x, i.fields["rounding"] or "rn", bool(i.fields.get("satfinite")), random, _RANDOM_BITS.get(to, 16)
    )


_HOW = "{rounding:rn|rz|rp}.{satfinite:satfinite}?.{relu:relu}?"


@meaning(f"cvt.{_HOW}.{{to:f16x2|bf16x2}}.f32", f"cvt.{_HOW}.{{to:{_NARROW.replace('|', 'x2|')}x2}}.f32")
def _cvt_pair(t: Machine, i: Instruction, high: Register, low: Register) -> Register:
    """The first source goes to the upper half; two fp4 share a byte."""
    to = (i.fields["to"] or "").removesuffix("x2")
    parts = [_round(i, _values(x, "f32"), to) for x in (low, high)]
    if to == "e2m1":
        return parts[0] | parts[1] << np.uint8(4)
    return join(parts, 32 if to.endswith("f16") else 16)


@meaning(f"cvt.{_HOW}.{{to:{_NARROW.replace('|', 'x2|')}x2}}.{{source:f16x2|bf16x2}}")
def _cvt_packed(t: Machine, i: Instruction, pair: Register) -> Register:
    to, source = (i.fields["to"] or "").removesuffix("x2"), (i.fields["source"] or "").removesuffix("x2")
    parts = [_round(i, decode(source, x), to) for x in split(pair, 32, 2)]
    return parts[0] | parts[1] << np.uint8(4) if to == "e2m1" else join(parts, 16)


@meaning(f"cvt.{_HOW}.{{to:f16x2|bf16x2}}.{{source:{_NARROW.replace('|', 'x2|')}x2}}")
def _cvt_widen(t: Machine, i: Instruction, pair: Register) -> Register:
    to, source = (i.fields["to"] or "").removesuffix("x2"), (i.fields["source"] or "").removesuffix("x2")
    parts = (
        split(pair, 16, 2) if source != "e2m1" else (unsigned(pair, 8) & np.uint8(15), unsigned(pair, 8) >> np.uint8(4))
    )
    return join([_round(i, decode(source, x), to) for x in parts], 32)


@meaning("cvt.{rounding:rs}.{relu:relu}?.{satfinite:satfinite}?.{to:f16x2|bf16x2}.f32")
def _cvt_stochastic_pair(t: Machine, i: Instruction, high: Register, low: Register, random: Register) -> Register:
    """Round each half with its half of `random`: the low 16 (bf16) or 13 (f16) bits are added below the last kept
    bit, and the rest is cut off.
    """
    to = (i.fields["to"] or "").removesuffix("x2")
    mask = np.uint16((1 << _RANDOM_BITS[to]) - 1)
    return join(
        [_round(i, _values(x, "f32"), to, bits & mask) for x, bits in zip((low, high), split(random, 32, 2))], 32
    )


@meaning(
    f"cvt.{{rounding:rs}}.{{relu:relu}}?.{{satfinite:satfinite}}.{{to:{_NARROW.replace('|ue8m0', '').replace('|', 'x4|')}x4}}.f32"  # noqa: E501
)
def _cvt_stochastic_four(t: Machine, i: Instruction, sources: Register, random: Register) -> Register:
    """The last of the four sources goes to the lowest place; byte k of `random` rounds the result in place k."""
    to = (i.fields["to"] or "").removesuffix("x4")
    parts = [_round(i, _values(x, "f32"), to, bits) for x, bits in zip(sources[::-1], split(random, 32, 4))]
    if FORMATS[to].bits == 4:
        pairs = [parts[k] | parts[k + 1] << np.uint8(4) for k in (0, 2)]
        return join(pairs, 16)
    return join(parts, 32)


@meaning("cvt.{rounding:rna|rn|rz}.{satfinite:satfinite}?.{relu:relu}?.tf32.f32")
def _cvt_tf32(t: Machine, i: Instruction, x: Register) -> Register:
    """With rna the H200 only cuts a NaN's low bits off, so that one without others becomes an infinity; rn and rz give
    the canonical NaN."""
    values = _values(x, "f32")
    bits = _round(i, values, "tf32")
    return (
        np.where(np.isnan(values), unsigned(x, 32) & np.uint32(0xFFFFE000), bits)
        if i.fields["rounding"] == "rna"
        else bits
    )


@meaning(
    "cvt.{rounding:rn|rz|rm|rp}?.{ftz:ftz}?.{relu:relu}?.{satfinite:satfinite}?.{to:f16|bf16|f32|f64}.{source:f16|bf16|f32|f64}"
)
def _cvt_float(t: Machine, i: Instruction, x: Register) -> Register:
    if i.fields["ftz"]:
        raise NoMeaning("cvt.ftz")
    return _round(i, _values(x, i.fields["source"] or ""), i.fields["to"] or "")


@meaning("cvt.{rounding:rn|rz|rm|rp}.{to:f16|bf16|f32|f64}.{source:u8|u16|u32|s8|s16|s32}")
def _cvt_from_integer(t: Machine, i: Instruction, x: Register) -> Register:
    return _round(i, integer(x, i.fields["source"] or "").astype(np.float64), i.fields["to"] or "")


@meaning("cvt.{rounding:rni|rzi|rmi|rpi}.{ftz:ftz}?.{to:u8|u16|u32|s8|s16|s32}.{source:f16|bf16|f32|f64}")
def _cvt_to_integer(t: Machine, i: Instruction, x: Register) -> Register:
    """Clamps to the type's range; NaN becomes 0."""
    to = i.fields["to"] or ""
    x = _values(x, i.fields["source"] or "")
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[i.fields["rounding"] or ""](
        np.where(np.isnan(x), 0.0, x)
    )
    bits = width(to)
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if to[0] == "s" else (0.0, 2.0**bits - 1)
    return np.clip(whole, low, high).astype(np.int64).astype(np.uint64)
