"""Element-wise operations on register tiles and vectors: functions of one, two and three operands, and casts.

They work in a plain `@triton.jit` kernel, under Triton's interpreter and in an explicit kernel, on tiles of any
extents.
Transcendental functions are computed in fp32 and returned in the operand's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tritonkittens.inline_ptx import math as ptx_math
from tritonkittens.inline_ptx.convert import bf16_to_f32, to_bf16, to_f16
from tritonkittens.lang.core.backend import Callee, Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.dtypes import FP8, name_of
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.interpreter import in_fp32
from tritonkittens.lang.core.records import apply_pieces, dtype_of
from tritonkittens.lang.register.exponential import check_share, exp2_piece


@triton.jit
def _neg(x):
    # 0 - x would be +0 for x = 0, and so an instruction of its own
    return x * -1.0 if x.dtype.is_floating() else 0 - x


@triton.jit
def _relu(x):
    return tl.maximum(x, 0)


@triton.jit
def _reciprocal(x):
    return 1.0 / x


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    # (1 − e^−2|x|) / (1 + e^−2|x|) cancels near zero, where three terms of the Taylor series are exact to fp32
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    small = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.15, small, tl.where(x < 0, -large, large))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


# The fast forms use the special-function unit's 2^x and 1/x. The exact ones use a division or a library's erf and
# take three times the instructions.


@triton.jit
def _fast_sigmoid(x):
    return ptx_math.rcp(1.0 + ptx_math.ex2(x * -1.4426950408889634))


@triton.jit
def _fast_silu(x):
    return x * _fast_sigmoid(x)


@triton.jit
def _fast_gelu_tanh(x):
    # (1 + tanh u) / 2 is the sigmoid of 2u, which does not cancel for large negative u. The exponent is in base 2.
    return x * ptx_math.rcp(1.0 + ptx_math.ex2(x * (-2.302208198144325 - 0.10294324276962653 * (x * x))))


@triton.jit
def _fast_gelu(x):
    # Φ(x) is the base-2 sigmoid of x times a polynomial of x². The fit on |x| ≤ 6.5 minimises the largest error of Φ
    # (3e-8). Beyond 6.5 the last term stays positive, so Φ tends to 0 or 1.
    t = x * x
    logit = 2.3022093 + t * (
        0.104835122
        + t
        * (-9.40492294e-05 + t * (-1.59579938e-04 + t * (1.14398332e-05 + t * (-3.81631242e-07 + t * 5.06723502e-09))))
    )
    return x * ptx_math.rcp(1.0 + ptx_math.ex2(-x * logit))


# For results with an 8-bit significand, as bf16, one instruction of the unit is enough: tanh (PTX promises 2⁻¹¹). The
# sigmoid of 2u is (1 + tanh u) / 2. Measured: docs/notes/activations.md, `tests/gpu/test_fast_activations_gpu.py`.


@triton.jit
def _sigmoid_for_bf16(x):
    return 0.5 * ptx_math.tanh(0.5 * x) + 0.5


@triton.jit
def _silu_for_bf16(x):
    half = 0.5 * x
    return half * ptx_math.tanh(half) + half


@triton.jit
def _gelu_tanh_for_bf16(x):
    half = 0.5 * x
    return half * ptx_math.tanh(x * (0.7978845608028654 + 0.03567740813636141 * (x * x))) + half


@triton.jit
def _gelu_for_bf16(x):
    # As `_fast_gelu` with fewer terms. x² is clamped where the polynomial stops growing (|x| = 7). Relative
    # errors of Φ, in addition to tanh's: 4.7e-4 down to x = −3.5, 1.6e-2 to −4, 0.27 to −5.
    t = tl.minimum(x * x, 49.0)
    half = 0.5 * x
    return half * ptx_math.tanh(x * (0.7970342084848824 + t * (0.037354571460087055 - 0.000396915532229983 * t))) + half


@triton.jit
def _gelu_for_fp16(x):
    # max(x, 0) − |x|·Φ(−|x|), where a polynomial approximates log₂ Φ(v) for v ≤ 0. Relative error of Φ: at most
    # 1.2e-4 down to v = −4 and 8.4e-4 to −5; absolute error 6.2e-5. Only large positive x is clamped: there the
    # product would be ∞ · 0, while −∞ gives NaN as in torch.
    v = tl.minimum(x, tl.maximum(-x, -16.0))
    log_tail = -1.00017787 + v * (
        1.14841945 + v * (-0.465680969 + v * (0.04713539 + v * (0.00551501868 + v * 0.000289952328)))
    )
    return v * ptx_math.ex2(log_tail) + tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


def _in_fp32(t: Trace, fn: Callee, x: Traced) -> Traced:
    dtype = x.dtype
    if not dtype.is_floating():
        raise TileError(
            f"{fn if isinstance(fn, str) else fn.__name__.strip('_')}: needs floating-point elements, got "
            f"{name_of(dtype)}"
        )
    if dtype == tl.float32:
        return t.call(fn, x)
    return t.method(t.call(fn, t.method(x, "to", tl.float32)), "to", dtype)


def refuse_fp8(name: str, *operands: Traced) -> None:
    """Refuse fp8 operands by name before the compiler does: the hardware has no fp8 arithmetic."""
    for x in operands:
        if dtype_of(x) in FP8:
            raise TileError(
                f"{name}: no arithmetic on {name_of(dtype_of(x))} elements; tk.cast the tile to fp16, bf16 or fp32 "
                "first"
            )


def _unary(name: str, fn: Callee, meaning: str, any_dtype: bool = False) -> Callable[..., Traced]:
    def operation(t: Trace, x: Traced) -> Traced:
        x = t.scalar(x)
        if any_dtype:
            refuse_fp8(name, x)
        return apply_pieces(t, in_fp32(t, lambda p: t.call(fn, p)) if any_dtype else lambda p: _in_fp32(t, fn, p), x)

    operation.__name__ = operation.__qualname__ = name
    takes = "a float or integer tile" if any_dtype else "a tile of floats (computed in fp32)"
    operation.__doc__ = (
        f"Compute {meaning}, element by element.\n\n"
        f"`x` is {takes}, a vector or a scalar, of any extents. Returns a value of the shape and dtype of `x`.\n"
        f"Raises `TileError` for {'fp8' if any_dtype else 'integer'} elements."
    )
    return op(operation)


exp = _unary("exp", "exp", "e^x")


@op
def exp2(t: Trace, x: Traced, fma_share: Traced = 0) -> Traced:
    """Compute 2^x, element by element, by one MUFU.EX2 an element.

    Args:
        x: a tile of floats (computed in fp32), a vector or a scalar, of any extents.
        fma_share: the share of a thread's elements that the FMA units of sm_100 and newer compute instead, in a dozen
            instructions for two: 0, 0.25, 0.5, 0.75 or 1. Their relative error is 1.1e-4, less than rounding to fp16
            makes. Other chips ignore it.

    Returns:
        A value of the shape and dtype of `x`.

    Raises:
        TileError: for integer elements or another share.

    A softmax is limited by the special-function unit; a share on the FMA units makes it faster. Source:
    FlashAttention-4.
    """
    number = check_share("exp2", fma_share)

    def exp2(p: Traced) -> Traced:
        return exp2_piece(t, p, number)

    return apply_pieces(t, lambda p: _in_fp32(t, exp2, p), t.scalar(x))


log = _unary("log", "log", "the natural logarithm")
log2 = _unary("log2", "log2", "the binary logarithm")
sqrt = _unary("sqrt", "sqrt", "the square root")
rsqrt = _unary("rsqrt", "rsqrt", "1 / √x")
sin = _unary("sin", "sin", "the sine (radians)")
cos = _unary("cos", "cos", "the cosine (radians)")
erf = _unary("erf", "erf", "the error function")
tanh = _unary("tanh", _tanh, "the hyperbolic tangent")
reciprocal = _unary("reciprocal", _reciprocal, "1 / x")
floor = _unary("floor", "floor", "the largest integer ≤ x")
ceil = _unary("ceil", "ceil", "the smallest integer ≥ x")
abs = _unary("abs", "abs", "the absolute value", any_dtype=True)
neg = _unary("neg", _neg, "−x", any_dtype=True)
relu = _unary("relu", _relu, "max(x, 0), where NaN gives 0 as PTX `max` does", any_dtype=True)


def _rounded_to(fast: Traced) -> tl.dtype | None:
    """Return `fast` if it is an element type of at most 16 bits, to which results are rounded; else None."""
    return fast if isinstance(fast, tl.dtype) and fast.primitive_bitwidth <= 16 else None


@op
def gelu(t: Trace, x: Traced, approximate: Traced = "none", fast: Traced = False) -> Traced:
    """Compute the Gaussian error linear unit, element by element.

    Args:
        x: a float tile, vector or scalar.
        approximate: "none" is x·Φ(x) by erf, "tanh" the tanh form, as in `torch.nn.functional.gelu`.
        fast: True uses a quarter of the instructions, with an error of Φ below 3e-7 (fp32 inputs). An element type of
            at most 16 bits, to which the results are rounded, allows shorter forms still.

    Returns:
        A value of the shape and dtype of `x`.

    Raises:
        TileError: for another `approximate` or integer elements.

    The error of the shorter forms is at most a third of that rounding. The relative error of Φ(x) is 1.3e-4 from x =
    −4 on for fp16, and 6.6e-4 from x = −3.3 on for bf16 and fp8. The tanh form is shorter for bf16 and fp8 only; its
    relative error is 4.9e-4 from x = −3 on.
    """
    fast = not t.interpreted and unwrap(fast)
    short = _rounded_to(fast)
    if short is None:
        forms = {"none": _fast_gelu, "tanh": _fast_gelu_tanh} if fast else {"none": _gelu, "tanh": _gelu_tanh}
    elif short == tl.float16:
        forms = {"none": _gelu_for_fp16, "tanh": _fast_gelu_tanh}
    else:
        forms = {"none": _gelu_for_bf16, "tanh": _gelu_tanh_for_bf16}
    approximate = unwrap(approximate)
    if approximate not in forms:
        raise TileError(f"gelu(approximate={approximate!r}): must be 'none' or 'tanh'")
    return apply_pieces(t, lambda p: _in_fp32(t, forms[approximate], p), x)


def _short_form(t: Trace, fast: Traced, exact: Traced, quick: Traced, for_bf16: Traced) -> Traced:
    """Return the form that `fast` allows."""
    fast = not t.interpreted and unwrap(fast)
    return exact if not fast else quick if _rounded_to(fast) in (None, tl.float16) else for_bf16


@op
def sigmoid(t: Trace, x: Traced, fast: Traced = False) -> Traced:
    """Compute 1 / (1 + e^−x), element by element.

    `x` is a float tile, vector or scalar; the result has its shape and dtype. `fast` is as in `gelu`. The form for
    bf16 and fp8 has an error of 2.5e-4, also where the result is small.
    """
    form = _short_form(t, fast, _sigmoid, _fast_sigmoid, _sigmoid_for_bf16)
    return apply_pieces(t, lambda p: _in_fp32(t, form, p), x)


@op
def silu(t: Trace, x: Traced, fast: Traced = False) -> Traced:
    """Compute x · sigmoid(x), element by element.

    `x` is a float tile, vector or scalar; the result has its shape and dtype. `fast` is as in `gelu`. The form for
    bf16 and fp8 has a relative error of 4.9e-4 from x = −8 on.
    """
    form = _short_form(t, fast, _silu, _fast_silu, _silu_for_bf16)
    return apply_pieces(t, lambda p: _in_fp32(t, form, p), x)


@op
def copy(t: Trace, x: Traced) -> Traced:
    """Return the tile `x` itself. Values are immutable, so a copy costs nothing."""
    return x


@op
def cast(t: Trace, x: Traced, dtype: Traced, rounding: Traced = None) -> Traced:
    """Convert a tile, vector or scalar to another dtype, element by element.

    Args:
        x: a tile, vector or scalar of any dtype.
        dtype: the new dtype.
        rounding: None or "rtne" (to nearest, ties to even) or "rtz" (toward zero, from fp32 to fp16 or bf16).

    Returns:
        A value of the shape of `x`.

    Values beyond fp8's range become its largest finite value (e4m3: 448, e5m2: 57344). Floats become integers by
    truncation.

    Raises:
        TileError: for another rounding, or a rounding of a conversion that does not narrow a float.

    Source: PTX ISA, cvt with .satfinite.
    """
    dtype, rounding = unwrap(dtype), unwrap(rounding)
    if rounding not in (None, "rtne", "rtz"):
        raise TileError(f"cast(rounding={rounding!r}): must be None, 'rtne' (nearest even) or 'rtz' (toward zero)")

    def piece(p: Traced) -> Traced:
        narrower = (
            dtype.is_floating() and p.dtype.is_floating() and dtype.primitive_bitwidth < p.dtype.primitive_bitwidth
        )
        if rounding and not narrower:
            raise TileError(
                f"cast({name_of(p.dtype)} → {name_of(dtype)}, rounding={rounding!r}): only a conversion to a narrower "
                "float rounds"
            )
        return t.method(p, "to", dtype, fp_downcast_rounding=rounding) if rounding else t.method(p, "to", dtype)

    return apply_pieces(t, piece, x)


_PAIRS: dict[tuple[Any, Any], Callee] = {
    (tl.float32, tl.bfloat16): to_bf16,
    (tl.float32, tl.float16): to_f16,
    (tl.bfloat16, tl.float32): bf16_to_f32,
}


@op
def cast_pairs(t: Trace, x: Traced, dtype: Traced) -> Traced:
    """Convert a tile `x` to `dtype`, from fp32 to bf16 or fp16, or from bf16 to fp32, by instructions for the two
    elements of a register.

    The compiler finds the instructions that narrow by itself for values that are used at once. It may pack the values
    that a loop carries in the wrong order, and repack them in every iteration. It widens two elements of bf16 by three
    instructions; here it takes two.
    Other conversions do what `cast` does. Source: PTX ISA, cvt.bf16x2.
    """
    dtype = unwrap(dtype)
    convert = _PAIRS.get((dtype_of(x), dtype))
    if t.interpreted or convert is None:
        return t.call(cast, x, dtype)
    return apply_pieces(t, lambda p: t.call(convert, p), x)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _sub(a, b):
    return a - b


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _div(a, b):
    # Triton divides 16-bit floats into fp32. The cast gives a quotient the dtype of a product.
    quotient = a / b
    return quotient.to((a * b).dtype) if (a * b).dtype.is_floating() else quotient


@triton.jit
def _lt(a, b):
    return a < b


@triton.jit
def _le(a, b):
    return a <= b


@triton.jit
def _gt(a, b):
    return a > b


@triton.jit
def _ge(a, b):
    return a >= b


@triton.jit
def _eq(a, b):
    return a == b


@triton.jit
def _ne(a, b):
    return a != b


@triton.jit
def _fma(a, b, c):
    return a * b + c


def keep_type(t: Trace, fn: Callable[..., Traced]) -> Callable[..., Traced]:
    """Wrap `fn` so that a run-time fp32 scalar does not widen a tile of 16-bit floats, as in PyTorch.

    The operation runs in fp32 and returns the tile's dtype.
    """

    def computed(*operands: Traced) -> Traced:
        out = fn(*operands)
        tiles = {x.dtype for x in operands if isinstance(x, tl.tensor) and x.type.is_block()}
        if (
            len(tiles) != 1
            or not out.dtype.is_floating()
            or not (dtype := tiles.pop()).is_floating()
            or out.dtype == dtype
        ):
            return out
        return t.method(out, "to", dtype)

    return computed


def _nary(name: str, fn: Callee, meaning: str) -> Callable[..., Traced]:
    def binary(t: Trace, a: Traced, b: Traced) -> Traced:
        refuse_fp8(name, a, b)
        return apply_pieces(t, keep_type(t, in_fp32(t, lambda x, y: t.call(fn, x, y))), a, b)

    binary.__name__ = binary.__qualname__ = name
    binary.__doc__ = (
        f"Compute {meaning}, element by element.\n\n"
        "`a` and `b` are tiles or vectors of one shape, or one of them a scalar, which takes the tile's dtype.\n"
        "Triton's promotion applies to two dtypes. Returns a value of that shape. Raises `TileError` where shapes\n"
        "differ or elements are fp8."
    )
    return op(binary)


add = _nary("add", _add, "a + b")
sub = _nary("sub", _sub, "a − b")
mul = _nary("mul", _mul, "a · b")
div = _nary("div", _div, "a / b")
maximum = _nary("maximum", "maximum", "the larger of a and b (of a number and NaN the number, as PTX `max`)")
minimum = _nary("minimum", "minimum", "the smaller of a and b (of a number and NaN the number, as PTX `min`)")
lt = _nary("lt", _lt, "a < b as booleans")
le = _nary("le", _le, "a ≤ b as booleans")
gt = _nary("gt", _gt, "a > b as booleans")
ge = _nary("ge", _ge, "a ≥ b as booleans")
eq = _nary("eq", _eq, "a = b as booleans")
ne = _nary("ne", _ne, "a ≠ b as booleans")


@op
def fma(t: Trace, a: Traced, b: Traced, c: Traced) -> Traced:
    """Compute `a` · `b` + `c`, element by element, with one rounding where the target fuses.

    The operands are tiles or vectors of one shape, or scalars. Returns a value of that shape. Raises `TileError` for
    fp8 elements or where shapes differ. From sm_100 on, an instruction computes two elements of fp32.
    """
    refuse_fp8("fma", a, b, c)

    def fused(*operands: Traced) -> Traced:
        in_pairs = (
            not t.interpreted
            and t.chip.f32x2
            and all(isinstance(x, tl.tensor) and x.dtype == tl.float32 for x in operands)
            and any(x.type.is_block() for x in operands)
        )
        return t.call(ptx_math.fma_f32x2 if in_pairs else _fma, *operands)

    return apply_pieces(t, keep_type(t, in_fp32(t, fused)), a, b, c)


@op
def where(t: Trace, condition: Traced, a: Traced, b: Traced) -> Traced:
    """Return `a` where `condition` holds, else `b`, element by element.

    The operands are tiles or vectors of one shape, or scalars; `condition` is boolean. Raises `TileError` where
    shapes differ.
    """
    return apply_pieces(t, in_fp32(t, lambda c, x, y: t.call("where", c, x, y)), condition, a, b)
