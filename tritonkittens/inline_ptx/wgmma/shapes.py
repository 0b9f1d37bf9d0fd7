"""Which wgmma.mma_async there are: element types, shapes and immediates, and their PTX (PTX ISA 9.7.15.2)."""

from collections.abc import Sequence
from typing import NamedTuple

# Triton's element type -> PTX's. float32 operands are read as tf32 (the low 13 mantissa bits are ignored).
PTX_TYPES = {
    "fp16": "f16",
    "bf16": "bf16",
    "fp32": "tf32",
    "fp8e4nv": "e4m3",
    "fp8e5": "e5m2",
    "int8": "s8",
    "uint8": "u8",
}

# PTX operand type -> (bits, accumulator types); the two operands' types must come from one row of GROUPS.
OPERANDS = {
    "f16": (16, ("f32", "f16")),
    "bf16": (16, ("f32",)),
    "tf32": (32, ("f32",)),
    "e4m3": (8, ("f32", "f16")),
    "e5m2": (8, ("f32", "f16")),
    "s8": (8, ("s32",)),
    "u8": (8, ("s32",)),
}

GROUPS = (("f16",), ("bf16",), ("tf32",), ("e4m3", "e5m2"), ("s8", "u8"))


class Multiply(NamedTuple):
    """One wgmma.mma_async: 64 x `n` accumulator of PTX type `d`, operands of PTX types `a` and `b`, and the
    immediates."""

    n: int
    d: str
    a: str
    b: str
    a_in_registers: bool = False
    trans_a: bool = False
    trans_b: bool = False
    scale_a: int = 1
    scale_b: int = 1
    saturate: bool = False

    @property
    def k(self) -> int:
        """Columns of A that one instruction consumes: 32 bytes of them."""
        return 256 // OPERANDS[self.a][0]

    @property
    def mnemonic(self) -> str:
        """The instruction's name in PTX."""
        saturate = ".satfinite" if self.saturate else ""
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}{saturate}.{self.d}.{self.a}.{self.b}"

    @property
    def accumulators(self) -> int:
        """32-bit accumulator registers of one thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2


def valid_n(a: str) -> tuple[int, ...]:
    """The N that PTX ISA 9.7.15.2 allows for operand type `a`: every multiple of 8 up to 256; for integers multiples of
    16 above 24, and 8 and 24.
    """
    return tuple(n for n in range(8, 257, 8) if a not in ("s8", "u8") or n % 16 == 0 or n in (8, 24))


def check(multiply: Multiply) -> Multiply:
    """`multiply` itself. Errors: ValueError where the PTX ISA has no such instruction; the message states the rule."""
    m = multiply
    given = f"wgmma m64n{m.n} {m.d} += {m.a} x {m.b}"
    if not any(m.a in group and m.b in group for group in GROUPS):
        rows = "; ".join(" or ".join(group) for group in GROUPS)
        raise ValueError(f"{given}: both operands come from one of: {rows}")
    if m.d not in OPERANDS[m.a][1]:
        raise ValueError(f"{given}: {m.a} operands accumulate in {' or '.join(OPERANDS[m.a][1])}")
    if m.n not in valid_n(m.a):
        rule = "8, 16, 24 or a multiple of 16 from 32 to 256" if m.d == "s32" else "a multiple of 8 from 8 to 256"
        raise ValueError(f"{given}: N is {rule}, not {m.n}")
    if (m.trans_a or m.trans_b) and OPERANDS[m.a][0] != 16:
        raise ValueError(
            f"{given} with trans_a={m.trans_a}, trans_b={m.trans_b}: only 16-bit operands may be MN-major; {m.a} must "
            "be contiguous in K"
        )
    if m.trans_a and m.a_in_registers:
        raise ValueError(f"{given} with trans_a: a register operand has no major-ness")
    if m.scale_a not in (1, -1) or m.scale_b not in (1, -1):
        raise ValueError(f"{given} with scale_a={m.scale_a}, scale_b={m.scale_b}: the immediates are 1 or -1")
    if m.d == "s32" and (m.scale_a, m.scale_b) != (1, 1):
        raise ValueError(f"{given} with scale_a={m.scale_a}, scale_b={m.scale_b}: integer operands cannot be negated")
    if m.saturate and m.d != "s32":
        raise ValueError(f"{given} with saturate: only integer accumulators saturate")
    return m


def mma_async_asm(
    multiply: Multiply, accumulators: Sequence[str], a: str | Sequence[str], b: str, predicate: str
) -> str:
    """The instruction: 32-bit accumulator registers, A (a descriptor register, or four fragment registers), B's
    descriptor, scale-d predicate.
    """
    m = check(multiply)
    operand_a = a if isinstance(a, str) else "{" + ", ".join(a) + "}"
    operands = ["{" + ", ".join(accumulators) + "}", operand_a, b, predicate]
    if m.d != "s32":
        operands += [str(m.scale_a), str(m.scale_b)]
    if OPERANDS[m.a][0] == 16:
        operands += [] if m.a_in_registers else [str(int(m.trans_a))]
        operands += [str(int(m.trans_b))]
    return f"{m.mnemonic} {', '.join(operands)};"


def operand_type(given: object, what: str) -> str:
    """The PTX type of a Triton type, or of a PTX type's name. Errors: ValueError for others, which names `what`."""
    kind = PTX_TYPES.get(str(given), given)
    if kind not in OPERANDS:
        raise ValueError(
            f"wgmma {what}={kind}: name one of {', '.join(OPERANDS)} or a Triton type; a descriptor or a packed tile "
            "does not tell"
        )
    return str(kind)
