"""The MMA of one thread, with its accumulator in tensor memory (PTX ISA 9.7.16.10)."""

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from .._asm import builtin, unwrap
from .._meaning import Instruction, Machine, NoMeaning, Register, from_bytes, lanes, meaning, unsigned
from .._products import accumulator_values, multiply_add, operand_values
from .._traced import Semantic, Traced
from .descriptors import KINDS, decode_descriptor, decode_instruction
from .issue import TARGETS, Read, Write, cta_group, ctas_of, issue


@builtin
def _mma_template(kind: Traced, a_in_tmem: Traced, ctas: Traced, _semantic: Semantic = None) -> Traced:
    kind, group = unwrap(kind), cta_group(ctas)
    if kind not in KINDS:
        raise ValueError(f"tcgen05.mma kind={kind!r}: the kind is one of {', '.join(KINDS)}")
    return tl.constexpr(
        f"tcgen05.mma.{group}.kind::{kind} [$0], {'[$1]' if unwrap(a_in_tmem) else '$1'}, $2, $3, accumulate;"
    )


@triton.jit
def mma(
    d,
    a,
    b,
    instruction,
    kind: tl.constexpr,
    accumulate=1,
    a_in_tmem: tl.constexpr = False,
    issuer: tl.constexpr = "warp",
    ctas: tl.constexpr = 1,
):
    """One MMA, asynchronously: d = a b + (d if accumulate else 0), for K = 32 bytes of each operand.

    d            tensor-memory address (int32 or descriptor) of the accumulator, m x n.
    a            uint64 shared descriptor, or with a_in_tmem a tensor-memory address; b: uint64 shared descriptor.
    instruction  int32 from `instruction_descriptor`; kind "f16", "tf32", "f8f6f4" or "i8" (sm_100a only) must agree
                 with it.
    ctas         2: the MMA of a pair of CTAs, issued in the one of even rank. Each CTA holds half the rows of a and d,
                 and half the columns of b, at the same addresses. All tcgen05 instructions of a kernel agree in `ctas`.
    PTX ISA 9.7.16.10.9.1 `tcgen05.mma`.
    """
    constraints: tl.constexpr = ("r", "r" if a_in_tmem else "l", "l", "r", "r")
    only: tl.constexpr = (100,) if kind == "i8" else TARGETS
    declarations: tl.constexpr = ".reg .pred accumulate; setp.ne.b32 accumulate, $4, 0;"
    issue(
        _mma_template(kind, a_in_tmem, ctas),
        (d, a, b, instruction, accumulate),
        constraints,
        issuer,
        declarations,
        only,
    )


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------

LANES = 128
# From an address to the same one in the other CTA of a pair: in shared memory, and in tensor memory, whose addresses
# have 32 bits
OTHER_SHARED, OTHER_TENSOR = 1 << 24, 1 << 32

# Bits of an operand in memory. fp4 and fp6 are missing: they lie in padded units of 16 elements, which nothing here
# decodes.
OPERAND_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


def cells(address: int, rows: int, columns: int) -> np.ndarray:
    """uint32 [rows, columns]: tensor-memory addresses (lane << 16 | column) of a matrix with one element a cell. 128
    rows lie in 128 lanes; 64 rows in the first 16 lanes of each warp's 32 (PTX ISA 9.7.16.10.5, "Layout F").
    """
    row = np.arange(rows)
    lane: np.ndarray = (address >> 16) + (row if rows == LANES else row % 16 + row // 16 * 32)
    return (lane[:, None] << 16 | (address & 0xFFFF) + np.arange(columns)[None, :]).astype(np.uint32)


def of_pair(addresses: np.ndarray, other: int, ctas: int) -> np.ndarray:
    """The addresses of the rows of one CTA, or of those of both, the issuing one's first."""
    return addresses if ctas == 1 else np.concatenate([addresses.astype(np.int64), addresses.astype(np.int64) + other])


@dataclass(frozen=True)
class Product:
    """One tcgen05.mma of one thread: D (tensor memory, `d` [m, n] addresses) = A B (+ D).

    a  int64 [m, k] byte addresses in the CTA's shared window, or with `a_in_tmem` [m, 8] addresses of the 32-bit
       columns that hold a row of 32 bytes
    b  int64 [n, k] byte addresses

    Addresses of the pair's other CTA are `OTHER_SHARED` or `OTHER_TENSOR` higher.
    """

    d: np.ndarray
    a: np.ndarray
    b: np.ndarray
    a_in_tmem: bool
    types: tuple[str, str, str]  # of a, b and d
    signs: tuple[int, int]
    accumulate: bool
    saturate: bool
    ctas: int = 1

    @property
    def operand_bits(self) -> int:
        """Bits of a number of the operands."""
        return OPERAND_BITS[self.types[0]]

    def run(self, read: Read, write: Write) -> None:
        """`read(space, addresses, nbytes)` gives uint8 [*addresses.shape, nbytes], `write(space, addresses, data)`
        takes such."""
        a_type, b_type, d_type = self.types
        bits = self.operand_bits
        if self.a_in_tmem:
            a = from_bytes(np.asarray(read("tensor", self.a, 4)).reshape(len(self.a), -1, bits // 8), bits)
        else:
            a = from_bytes(np.asarray(read("shared", self.a, bits // 8)), bits)
        b = from_bytes(np.asarray(read("shared", self.b, bits // 8)), bits)
        old = None
        if self.accumulate:
            words = from_bytes(np.asarray(read("tensor", self.d, 4)), 32)
            old = accumulator_values(unsigned(words, 16 if d_type == "f16" else 32), d_type)
        new = multiply_add(
            operand_values(a_type, a) * self.signs[0],
            operand_values(b_type, b) * self.signs[1],
            old,
            d_type,
            self.saturate,
        )
        write("tensor", self.d, np.ascontiguousarray(unsigned(new, 32)).view(np.uint8).reshape(*self.d.shape, 4))


@meaning(
    "tcgen05.mma.{group:cta_group::1|cta_group::2}.{kind:kind::f16|kind::tf32|kind::f8f6f4|kind::i8}", destinations=0
)
def _mma_meaning(
    t: Machine,
    i: Instruction,
    d: Register,
    a: Register,
    b: Register,
    instruction: Register,
    accumulate: Register,
    *rest: Register,
) -> None:
    if rest:
        raise NoMeaning("tcgen05.mma with disabled lanes or a scale of its input")
    kind = (i.fields["kind"] or "").removeprefix("kind::")
    in_tmem = np.asarray(a).dtype == np.uint32  # [an address] has 32 bits, a descriptor 64
    ctas = ctas_of(i)
    flags = np.broadcast_to(np.asarray(accumulate, bool), i.active.shape)
    for thread, to, left, right, code in zip(i.threads, *(lanes(x, i.active) for x in (d, a, b, instruction))):
        f = decode_instruction(code, kind, ctas)
        if f["a"] not in OPERAND_BITS or f["b"] not in OPERAND_BITS:
            raise NoMeaning(f"tcgen05.mma of {f['a']} x {f['b']}: fp4 and fp6 operands")
        if ctas == 2 and f["m"] == LANES:
            raise NoMeaning("tcgen05.mma of 128 rows by a pair of CTAs: which lanes hold which columns")
        size = OPERAND_BITS[f["a"]] // 8
        k, m, n = 32 // size, f["m"] // ctas, f["n"] // ctas  # of one CTA
        if in_tmem:
            rows = of_pair(cells(left, m, 8), OTHER_TENSOR, ctas)
        else:
            rows = of_pair(decode_descriptor(left).addresses(m, k, size, not f["trans_a"]), OTHER_SHARED, ctas)
        columns = of_pair(decode_descriptor(right).addresses(n, k, size, not f["trans_b"]), OTHER_SHARED, ctas)
        signs = (-1 if f["negate_a"] else 1, -1 if f["negate_b"] else 1)
        types = (f["a"], f["b"], f["d"])
        t.tcgen05_issue(
            Product(
                of_pair(cells(to, m, f["n"]), OTHER_TENSOR, ctas),
                rows,
                columns,
                bool(in_tmem),
                types,
                signs,
                bool(flags[thread]),
                f["saturate"],
                ctas,
            ),
            thread,
        )
