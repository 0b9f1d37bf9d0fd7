"""Floating-point instructions (PTX ISA 9.7.3 to 9.7.5), element by element on tiles of any shape, in plain Triton and in explicit kernels.

16-bit tiles use the packed `x2` instruction, two elements each; one instruction runs where `tl.*` would emit a software sequence or a
conversion to float32. All `approx` forms flush denormal float32 numbers to zero (`.ftz`) and have the error the PTX ISA states.
"""

import triton
import triton.language as tl

from ._asm import builtin, require, unwrap

# instruction -> element type -> (PTX mnemonic, lowest architecture). 16-bit types are packed two to a register.
INSTRUCTIONS = {
    "ex2": {"fp32": ("ex2.approx.ftz.f32", 80), "fp16": ("ex2.approx.f16x2", 80), "bf16": ("ex2.approx.ftz.bf16x2", 90)},
    "lg2": {"fp32": ("lg2.approx.ftz.f32", 80)},
    "rcp": {"fp32": ("rcp.approx.ftz.f32", 80)},
    "rsqrt": {"fp32": ("rsqrt.approx.ftz.f32", 80)},
    "sqrt": {"fp32": ("sqrt.approx.ftz.f32", 80)},
    "sin": {"fp32": ("sin.approx.ftz.f32", 80)},
    "cos": {"fp32": ("cos.approx.ftz.f32", 80)},
    "tanh": {"fp32": ("tanh.approx.f32", 80), "fp16": ("tanh.approx.f16x2", 80), "bf16": ("tanh.approx.bf16x2", 90)},
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
    """The instruction on operands as they are: `$0` is the result, `$1`… the inputs. Returns (template, elements an instruction)."""
    return f"{mnemonic} {', '.join(f'${i}' for i in range(inputs + 1))};", 2 if mnemonic.endswith("16x2") else 1


def f32x2_asm(mnemonic: str, inputs: int) -> tuple[str, int]:
    """The instruction on pairs of float32 in 64-bit registers: `$0, $1` are the results, then two operands an input."""
    names = [f"a{i}" for i in range(inputs)]
    pack = "".join(f"mov.b64 {name}, {{${2 + 2 * i}, ${3 + 2 * i}}}; " for i, name in enumerate(names))
    return f"{{ .reg .b64 d, {', '.join(names)}; {pack}{mnemonic} d, {', '.join(names)}; mov.b64 {{$0, $1}}, d; }}", 2


@builtin
def _apply(name, args, _semantic=None):
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
    """2**x. float32 (relative error 2**-22), float16 packed (2**-9.9), bfloat16 packed (2**-7, sm_90+). PTX ISA 9.7.3 / 9.7.4 `ex2`."""
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
    """tanh(x). float32 and float16 packed (relative error 2**-11), bfloat16 packed (2**-8, sm_90+). PTX ISA 9.7.3 / 9.7.4 `tanh.approx`."""
    return _apply("tanh", (x,))


@triton.jit
def add(a, b):
    """a + b rounded to nearest even and never fused into an fma: float32, float16 packed, bfloat16 packed (sm_90+). PTX ISA `add.rn`."""
    return _apply("add", (a, b))


@triton.jit
def sub(a, b):
    """a - b rounded to nearest even and never fused into an fma: float32, float16 packed, bfloat16 packed (sm_90+). PTX ISA `sub.rn`."""
    return _apply("sub", (a, b))


@triton.jit
def mul(a, b):
    """a * b rounded to nearest even and never fused into an fma: float32, float16 packed, bfloat16 packed (sm_90+). PTX ISA `mul.rn`."""
    return _apply("mul", (a, b))


@triton.jit
def fma(a, b, c):
    """a * b + c with one rounding: float32, float16 packed, bfloat16 packed (sm_80+). PTX ISA `fma.rn`."""
    return _apply("fma", (a, b, c))


@triton.jit
def fma_relu(a, b, c):
    """max(a * b + c, 0) with one rounding; NaN stays NaN: float16 and bfloat16 packed (sm_80+). PTX ISA 9.7.4 `fma.rn.relu`."""
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
    """The largest of three float32 in one instruction (sm_100+); NaN inputs are ignored. PTX ISA 9.7.3 `max.f32` with three inputs."""
    return _apply("max3", (a, b, c))


@triton.jit
def min3(a, b, c):
    """The smallest of three float32 in one instruction (sm_100+); NaN inputs are ignored. PTX ISA 9.7.3 `min.f32` with three inputs."""
    return _apply("min3", (a, b, c))
