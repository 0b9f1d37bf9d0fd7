"""Floating-point instructions (PTX ISA 9.7.3 to 9.7.5), element by element on tiles of any shape, in plain Triton and
in explicit kernels.

16-bit tiles use the packed `x2` instruction, two elements each; one instruction runs where `tl.*` would emit a software
sequence or a conversion to float32. All `approx` forms flush denormal float32 numbers to zero (`.ftz`) and have the
error the PTX ISA states.
"""

from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl

from ._asm import builtin, require, unwrap
from ._formats import decode, encode, fma_to_odd, storage
from ._meaning import Instruction, Machine, Register, join, meaning, split, unsigned
from ._traced import Semantic, Traced

# instruction -> element type -> (PTX mnemonic, lowest architecture). 16-bit types are packed two to a register.
INSTRUCTIONS = {
    "ex2": {
        "fp32": ("ex2.approx.ftz.f32", 80),
        "fp16": ("ex2.approx.f16x2", 80),
        "bf16": ("ex2.approx.ftz.bf16x2", 90),
    },
    "lg2": {"fp32": ("lg2.approx.ftz.f32", 80)},
    "rcp": {"fp32": ("rcp.approx.ftz.f32", 80)},
    "rsqrt": {"fp32": ("rsqrt.approx.ftz.f32", 80)},
    "sqrt": {"fp32": ("sqrt.approx.ftz.f32", 80)},
    "sin": {"fp32": ("sin.approx.ftz.f32", 80)},
    "cos": {"fp32": ("cos.approx.ftz.f32", 80)},
    "tanh": {"fp32": ("tanh.approx.f32", 80), "fp16": ("tanh.approx.f16x2", 80), "bf16": ("tanh.approx.bf16x2", 90)},
    "neg": {"fp32": ("neg.f32", 80), "fp16": ("neg.f16x2", 80), "bf16": ("neg.bf16x2", 80)},
    "add": {"fp32": ("add.rn.f32", 80), "fp16": ("add.rn.f16x2", 80), "bf16": ("add.rn.bf16x2", 90)},
    "sub": {"fp32": ("sub.rn.f32", 80), "fp16": ("sub.rn.f16x2", 80), "bf16": ("sub.rn.bf16x2", 90)},
    "mul": {"fp32": ("mul.rn.f32", 80), "fp16": ("mul.rn.f16x2", 80), "bf16": ("mul.rn.bf16x2", 90)},
    "fma": {"fp32": ("fma.rn.f32", 80), "fp16": ("fma.rn.f16x2", 80), "bf16": ("fma.rn.bf16x2", 80)},
    "fma_relu": {"fp16": ("fma.rn.relu.f16x2", 80), "bf16": ("fma.rn.relu.bf16x2", 80)},
    "add_f32x2": {"fp32": ("add.rn.f32x2", 100)},
    "mul_f32x2": {"fp32": ("mul.rn.f32x2", 100)},
    "fma_f32x2": {"fp32": ("fma.rn.f32x2", 100)},
    "max3": {"fp32": ("max.f32", 100)},
    "min3": {"fp32": ("min.f32", 100)},
}


def direct_asm(mnemonic: str, inputs: int) -> tuple[str, int]:
    """The instruction on its operands: `$0` is the result, `$1`… the inputs. Returns (template, elements an
    instruction).
    """
    return f"{mnemonic} {', '.join(f'${i}' for i in range(inputs + 1))};", 2 if mnemonic.endswith("16x2") else 1


def f32x2_asm(mnemonic: str, inputs: int) -> tuple[str, int]:
    """The instruction on pairs of float32 in 64-bit registers: `$0, $1` are the results, then two operands an input."""
    names = [f"a{i}" for i in range(inputs)]
    pack = "".join(f"mov.b64 {name}, {{${2 + 2 * i}, ${3 + 2 * i}}}; " for i, name in enumerate(names))
    return f"{{ .reg .b64 d, {', '.join(names)}; {pack}{mnemonic} d, {', '.join(names)}; mov.b64 {{$0, $1}}, d; }}", 2


@builtin
def _apply(name: Traced, args: Traced, _semantic: Semantic = None) -> Traced:
    """Emits instruction `name` over the broadcast `args`, which must agree in their element type."""
    name = unwrap(name)
    require(name, 80, _semantic=_semantic)
    args = [_semantic.to_tensor(unwrap(arg)) for arg in args]
    types, table = [str(arg.dtype) for arg in args], INSTRUCTIONS[name]
    if types[0] not in table or set(types) != {types[0]}:
        raise TypeError(f"{name}({', '.join(types)}): the operands must all have one type, of {', '.join(table)}")
    mnemonic, minimum = table[types[0]]
    require(mnemonic, minimum, _semantic=_semantic)
    template, pack = (f32x2_asm if mnemonic.endswith("f32x2") else direct_asm)(mnemonic, len(args))
    letter, registers = ("f", pack) if types[0] == "fp32" else ("r", 1)
    constraints = ",".join([f"={letter}"] * registers + [letter] * (registers * len(args)))
    return tl.inline_asm_elementwise(template, constraints, args, args[0].dtype, True, pack, _semantic=_semantic)


@triton.jit
def ex2(x):
    """2**x. float32 (relative error 2**-22), float16 packed (2**-9.9), bfloat16 packed (2**-7, sm_90+). PTX ISA 9.7.3 /
    9.7.4 `ex2`."""
    return _apply("ex2", (x,))


@triton.jit
def lg2(x):
    """log2(x) of float32, absolute error 2**-22 near 1. PTX ISA 9.7.3 `lg2.approx.ftz.f32`."""
    return _apply("lg2", (x,))


@triton.jit
def rcp(x):
    """1/x of float32, error 1 ulp. PTX ISA 9.7.3 `rcp.approx.ftz.f32`."""
    return _apply("rcp", (x,))


@triton.jit
def rsqrt(x):
    """1/sqrt(x) of float32, relative error 2**-22.9. PTX ISA 9.7.3 `rsqrt.approx.ftz.f32`."""
    return _apply("rsqrt", (x,))


@triton.jit
def sqrt(x):
    """sqrt(x) of float32, relative error 2**-23. PTX ISA 9.7.3 `sqrt.approx.ftz.f32`."""
    return _apply("sqrt", (x,))


@triton.jit
def sin(x):
    """sin(x) of float32, x in radians, absolute error 2**-20.5 in [-2 pi, 2 pi]. PTX ISA 9.7.3 `sin.approx.ftz.f32`."""
    return _apply("sin", (x,))


@triton.jit
def cos(x):
    """cos(x) of float32, x in radians, absolute error 2**-20.5 in [-2 pi, 2 pi]. PTX ISA 9.7.3 `cos.approx.ftz.f32`."""
    return _apply("cos", (x,))


@triton.jit
def tanh(x):
    """tanh(x). float32 and float16 packed (relative error 2**-11), bfloat16 packed (2**-8, sm_90+). PTX ISA 9.7.3 /
    9.7.4 `tanh.approx`."""
    return _apply("tanh", (x,))


@triton.jit
def neg(x):
    """-x of float32, packed float16 or packed bfloat16. PTX ISA 9.7.3 / 9.7.4 `neg`."""
    return _apply("neg", (x,))


@triton.jit
def add(a, b):
    """a + b rounded to nearest even and never fused into an fma: float32, float16 packed, bfloat16 packed (sm_90+). PTX
    ISA `add.rn`."""
    return _apply("add", (a, b))


@triton.jit
def sub(a, b):
    """a - b rounded to nearest even and never fused into an fma: float32, float16 packed, bfloat16 packed (sm_90+). PTX
    ISA `sub.rn`."""
    return _apply("sub", (a, b))


@triton.jit
def mul(a, b):
    """a * b rounded to nearest even and never fused into an fma: float32, float16 packed, bfloat16 packed (sm_90+). PTX
    ISA `mul.rn`."""
    return _apply("mul", (a, b))


@triton.jit
def fma(a, b, c):
    """a * b + c with one rounding: float32, float16 packed, bfloat16 packed (sm_80+). PTX ISA `fma.rn`."""
    return _apply("fma", (a, b, c))


@triton.jit
def fma_relu(a, b, c):
    """max(a * b + c, 0) with one rounding; NaN stays NaN: float16 and bfloat16 packed (sm_80+). PTX ISA 9.7.4
    `fma.rn.relu`."""
    return _apply("fma_relu", (a, b, c))


@triton.jit
def add_f32x2(a, b):
    """a + b of float32, two elements an instruction (sm_100+). PTX ISA 9.7.3 `add.rn.f32x2`."""
    return _apply("add_f32x2", (a, b))


@triton.jit
def mul_f32x2(a, b):
    """a * b of float32, two elements an instruction (sm_100+). PTX ISA 9.7.3 `mul.rn.f32x2`."""
    return _apply("mul_f32x2", (a, b))


@triton.jit
def fma_f32x2(a, b, c):
    """a * b + c of float32 with one rounding, two elements an instruction (sm_100+). PTX ISA 9.7.3 `fma.rn.f32x2`."""
    return _apply("fma_f32x2", (a, b, c))


@triton.jit
def max3(a, b, c):
    """The largest of three float32 in one instruction (sm_100+); NaN inputs are ignored. PTX ISA 9.7.3 `max.f32` with
    three inputs."""
    return _apply("max3", (a, b, c))


@triton.jit
def min3(a, b, c):
    """The smallest of three float32 in one instruction (sm_100+); NaN inputs are ignored. PTX ISA 9.7.3 `min.f32` with
    three inputs."""
    return _apply("min3", (a, b, c))


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------

_FLOATS = "f32|f64|f16|bf16|f16x2|bf16x2|f32x2"


def _unpack(x: Register, kind: str) -> list[np.ndarray]:
    """float64 values of a register or immediate: one, or two of a packed kind (low first)."""
    if isinstance(x, float):
        return [np.asarray(x, np.float64)] * (2 if kind.endswith("x2") else 1)
    if not kind.endswith("x2"):
        return [decode(kind, x)]
    element = kind[:-2]
    bits = 64 if element == "f32" else 32
    return [decode(element, part) for part in split(x, bits, 2)]


def _packed(values: list[np.ndarray], kind: str, rounding: str = "rn") -> np.ndarray:
    element = kind.removesuffix("x2")
    parts = [encode(element, value, rounding) for value in values]
    return parts[0] if len(parts) == 1 else join(parts, 64 if element == "f32" else 32)


def _flush(x: np.ndarray) -> np.ndarray:
    """.ftz: subnormal float32 (and bfloat16) numbers become zeros of their sign."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def _elementwise(i: Instruction, function: Callable[..., np.ndarray], *sources: Register) -> np.ndarray:
    """`function` of float64 values, element by element, with the instruction's rounding, `.ftz`, `.sat` and `.relu`."""
    kind = i.fields["type"] or ""
    ftz = bool(i.fields.get("ftz")) and kind.startswith(("f32", "bf16"))
    out = []
    with np.errstate(all="ignore"):
        for values in zip(*(_unpack(x, kind) for x in sources)):
            value = function(*(_flush(v) for v in values) if ftz else values)
            if i.fields.get("relu"):
                value = np.where(np.isnan(value) | (value > 0), value, 0.0)
            if i.fields.get("sat"):
                value = np.where(value > 0, np.minimum(value, 1.0), 0.0)  # NaN and minus zero become zero
            out.append(_flush(value) if ftz else value)
        bits = _packed(out, kind, i.fields.get("rounding") or "rn")
    if ftz:  # values that rounding makes subnormal
        exponent, sign = (0x7F800000, 1 << 31) if kind.startswith("f32") else (0x7F80, 1 << 15)
        count = 2 if kind.endswith("x2") else 1
        size = storage(kind.removesuffix("x2"))
        parts = [
            np.where(part & part.dtype.type(exponent), part, part & part.dtype.type(sign))
            for part in split(bits, size * count, count)
        ]
        return join(parts, size * count)
    return bits


def _fused(i: Instruction, a: np.ndarray, b: np.ndarray | np.float64, c: np.ndarray) -> np.ndarray:
    """Return a b + c before its last rounding: exact float64 for float64, rounded to odd for narrower types. Rounding
    down, an exact sum of zero is minus zero.
    """
    if i.fields["type"] == "f64":
        return a + c  # b is 1: there is no fma.f64 here
    return -fma_to_odd(-a, b, -c) if i.fields["rounding"] == "rm" else fma_to_odd(a, b, c)


_ROUNDED = f"{{rounding:rn|rz|rm|rp}}?.{{ftz:ftz}}?.{{sat:sat}}?.{{type:{_FLOATS}}}"


@meaning(f"add.{_ROUNDED}")
def _add(t: Machine, i: Instruction, a: Register, b: Register) -> Register:
    return _elementwise(i, lambda x, y: _fused(i, x, np.float64(1), y), a, b)


@meaning(f"sub.{_ROUNDED}")
def _sub(t: Machine, i: Instruction, a: Register, b: Register) -> Register:
    return _elementwise(i, lambda x, y: _fused(i, x, np.float64(1), -y), a, b)


@meaning(f"mul.{_ROUNDED}")
def _mul(t: Machine, i: Instruction, a: Register, b: Register) -> Register:
    return _elementwise(i, np.multiply, a, b)


@meaning(
    f"fma.{{rounding:rn|rz|rm|rp}}.{{ftz:ftz}}?.{{sat:sat}}?.{{relu:relu}}?.{{type:{_FLOATS.replace('f64|', '')}}}"
)
def _fma(t: Machine, i: Instruction, a: Register, b: Register, c: Register) -> Register:
    return _elementwise(i, lambda x, y, z: _fused(i, x, y, z), a, b, c)


@meaning(f"neg.{{ftz:ftz}}?.{{type:{_FLOATS}}}", f"abs.{{ftz:ftz}}?.{{type:{_FLOATS}}}")
def _sign(t: Machine, i: Instruction, a: Register) -> Register:
    return _elementwise(i, np.negative if i.mnemonic.startswith("neg") else np.abs, a)


def _extreme(nan: bool, largest: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The larger or smaller of two; a zero is larger than minus zero; NaN where `nan`, else the operand that is
    none."""

    def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        first = np.where(a == b, np.signbit(a) != largest, (a > b) == largest)
        out = np.where(first, a, b)
        if nan:
            return np.where(np.isnan(a) | np.isnan(b), np.nan, out)
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, out))

    return choose


@meaning(f"max.{{ftz:ftz}}?.{{nan:NaN}}?.{{type:{_FLOATS}}}", f"min.{{ftz:ftz}}?.{{nan:NaN}}?.{{type:{_FLOATS}}}")
def _max_min(t: Machine, i: Instruction, a: Register, b: Register, c: Register = None) -> Register:
    choose = _extreme(bool(i.fields["nan"]), i.mnemonic.startswith("max"))
    if c is None:
        return _elementwise(i, choose, a, b)
    return _elementwise(i, lambda x, y, z: choose(choose(x, y), z), a, b, c)


# Approximations: computed in float64 and rounded once, so their error is half a unit in the last place; the hardware's
# is below the bound in the shim's docstring (ex2 2**-22 relative, lg2 2**-22 absolute near 1, rcp 1 ulp, rsqrt
# 2**-22.9, sqrt 2**-23, sin and cos 2**-20.5 absolute, tanh 2**-11).
_FUNCTIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@meaning(
    *(f"{name}.approx.{{ftz:ftz}}?.{{type:f32|f16|bf16|f16x2|bf16x2}}" for name in ("ex2", "tanh")),
    *(f"{name}.approx.{{ftz:ftz}}?.{{type:f32}}" for name in ("lg2", "rcp", "rsqrt", "sqrt", "sin", "cos")),
)
def _approximate(t: Machine, i: Instruction, x: Register) -> Register:
    return _elementwise(i, _FUNCTIONS[i.mnemonic.split(".")[0]], x)


@meaning(
    "div.{approx:approx|full|rn}.{ftz:ftz}?.{type:f32}", "sqrt.rn.{ftz:ftz}?.{type:f32}", "rcp.rn.{ftz:ftz}?.{type:f32}"
)
def _exact(t: Machine, i: Instruction, a: Register, b: Register = None) -> Register:
    """Round once more from float64. That is exact for quotients and roots of float32 (53 bits are more than twice
    24).
    """
    return (
        _elementwise(i, np.divide, a, b) if b is not None else _elementwise(i, _FUNCTIONS[i.mnemonic.split(".")[0]], a)
    )


@meaning("copysign.{type:f32}")
def _copysign(t: Machine, i: Instruction, a: Register, b: Register) -> Register:
    """PTX: the sign of the first, the magnitude of the second."""
    return unsigned(b, 32) & np.uint32(0x7FFFFFFF) | unsigned(a, 32) & np.uint32(0x80000000)
