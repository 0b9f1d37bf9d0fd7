"""The MMA of one thread with block scales: each number of A and B is multiplied by the scale of its block along K (PTX
ISA 9.7.16.10.7, "Block Scaling").

Scales lie in tensor memory. A column of 32 lanes holds a word of four scales along K for 32 rows of A, or 32 columns of
B; the lanes of each warp hold a copy. 128 rows take 4 columns, 256 take 8. An MMA reads some bytes of each word.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from .._asm import builtin, unwrap
from .._formats import decode
from .._meaning import Instruction, Machine, PtxFault, Register, from_bytes, lanes, meaning
from .._products import accumulator_values, multiply_add
from .._traced import Semantic, Traced
from .descriptors import checked_fields, decode_descriptor
from .issue import Read, Write, cta_group, ctas_of, issue
from .products import LANES, OTHER_SHARED, OTHER_TENSOR, cells, of_pair

LANE_GROUP = 32  # rows of A, or columns of B, whose scales are in one column


class Kind(NamedTuple):
    """What an MMA with block scales multiplies: its name in PTX, operand types by their codes, the format of scales,
    whether it is ue8m0, and the numbers along K of an MMA and of a scale."""

    name: str
    operands: dict[str, int]
    scales: str
    ue8m0: bool
    k: int
    block: int

    @property
    def scales_of_step(self) -> int:
        """The scales of a row that one MMA reads."""
        return self.k // self.block


SCALED_KINDS = {
    "mxf8f6f4": Kind("mxf8f6f4.block_scale", {"e4m3": 0, "e5m2": 1}, "ue8m0", True, 32, 32),
    "mxf4": Kind("mxf4.block_scale", {"e2m1": 1}, "ue8m0", True, 64, 32),
    "mxf4nvf4": Kind("mxf4nvf4.block_scale.block16", {"e2m1": 1}, "e4m3", False, 64, 16),
}


@constexpr_function
def scaled_instruction_descriptor(
    kind: str, m: int, n: int, a: str, b: str, scale_id: int = 0, ctas: int = 1, *, b_scale_id: int | None = None
) -> int:
    """int: the 32-bit instruction descriptor of `mma_scaled` with operands that have K contiguous (PTX ISA 9.7.16.4.2).
    Works on the host and in kernels.

    kind "mxf8f6f4", "mxf4" or "mxf4nvf4"; m 128, n a multiple of 8 up to 256; for a pair of CTAs (ctas=2) m is 256, and
    n a multiple of 16. a, b: PTX operand types. scale_id: the first of the bytes of a word that are A's scales;
    b_scale_id: those of B, by default the same. Errors: ValueError that states the rule.
    """
    given = f"tcgen05.mma kind {kind} with block scales, m={m}, n={n}, {a} x {b}, scale_id={scale_id}"
    if kind not in SCALED_KINDS:
        raise ValueError(f"{given}: the kind is one of {', '.join(SCALED_KINDS)}")
    known = SCALED_KINDS[kind]
    if a not in known.operands or b not in known.operands:
        raise ValueError(f"{given}: operands are {', '.join(known.operands)}")
    if m != LANES * ctas or n % (8 * ctas) or not 8 * ctas <= n <= 256:
        raise ValueError(f"{given}: m is {LANES * ctas}, n a multiple of {8 * ctas} up to 256")
    b_id = scale_id if b_scale_id is None else b_scale_id
    if any(first % known.scales_of_step or not 0 <= first < 4 for first in (scale_id, b_id)):
        raise ValueError(f"{given}: scale ids are multiples of {known.scales_of_step} below 4")
    return (
        b_id << 4
        | known.operands[a] << 7
        | known.operands[b] << 10
        | n >> 3 << 17
        | int(known.ue8m0) << 23
        | m >> 7 << 27
        | scale_id << 29
    )


def decode_scaled_instruction(descriptor: int, kind: str, ctas: int = 1) -> dict[str, Any]:
    """The fields of `scaled_instruction_descriptor`'s 32 bits, by its parameters' names. PtxFault for others."""
    types = {code: name for name, code in SCALED_KINDS[kind].operands.items()}
    a, b = descriptor >> 7 & 7, descriptor >> 10 & 7
    if a not in types or b not in types:
        raise PtxFault(f"instruction descriptor {descriptor:#x} of kind {kind}: types {a} and {b}")
    fields = dict(
        kind=kind,
        m=(descriptor >> 27 & 3) << 7,
        n=(descriptor >> 17 & 63) << 3,
        a=types[a],
        b=types[b],
        scale_id=descriptor >> 29 & 3,
        b_scale_id=descriptor >> 4 & 3,
    )
    return checked_fields(descriptor, fields, scaled_instruction_descriptor, ctas)


@builtin
def _template(kind: Traced, ctas: Traced, _semantic: Semantic = None) -> Traced:
    kind = unwrap(kind)
    if kind not in SCALED_KINDS:
        raise ValueError(f"tcgen05.mma kind={kind!r} with block scales: the kind is one of {', '.join(SCALED_KINDS)}")
    return tl.constexpr(
        f"tcgen05.mma.{cta_group(ctas)}.kind::{SCALED_KINDS[kind].name} [$0], $1, $2, $3, [$4], [$5], accumulate;"
    )


@triton.jit
def mma_scaled(
    d,
    a,
    b,
    instruction,
    scales_a,
    scales_b,
    kind: tl.constexpr,
    accumulate=1,
    issuer: tl.constexpr = "warp",
    ctas: tl.constexpr = 1,
):
    """One MMA with block scales, asynchronously: d = (a scales_a) (b scales_b) + (d if accumulate else 0), for K = 32
    bytes of each operand.

    d, a, b      as in `mma`, a in shared memory.
    instruction  int32 from `scaled_instruction_descriptor`; the kind must agree with it.
    scales_a     tensor-memory address (int32 or descriptor) of the scales of a's rows; scales_b: of b's columns.
    ctas         as in `mma`. Each CTA of a pair holds the scales of its own rows of a, and those of all columns of b,
                 at the same addresses.
    PTX ISA 9.7.16.10.9.1 `tcgen05.mma`, .block_scale.
    """
    issue(
        _template(kind, ctas),
        (d, a, b, instruction, scales_a, scales_b, accumulate),
        ("r", "l", "l", "r", "r", "r", "r"),
        issuer,
        ".reg .pred accumulate; setp.ne.b32 accumulate, $6, 0;",
    )


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


def _scale_cells(address: int, rows: int) -> np.ndarray:
    """uint32 [4, rows]: the tensor-memory addresses of the words with the scales of each row, as the lanes of each warp
    hold them."""
    row: np.ndarray = np.arange(rows)
    copy: np.ndarray = np.arange(LANES // LANE_GROUP)[:, None] * LANE_GROUP
    column: np.ndarray = (address & 0xFFFF) + row // LANE_GROUP
    return ((address >> 16) + copy + row % LANE_GROUP << 16 | column).astype(np.uint32)


@dataclass(frozen=True)
class ScaledProduct:
    """One tcgen05.mma with block scales of one thread: D (tensor memory, `d` [m, n] addresses) = A B (+ D).

    a, b                int64 [m, 32] and [n, 32] byte addresses in the CTA's shared window
    scales_a, scales_b  [4, m] and [ctas, 4, n] addresses of words of scales in tensor memory, of which copies are equal

    Addresses of the pair's other CTA are `OTHER_SHARED` or `OTHER_TENSOR` higher. Each CTA of a pair multiplies its
    rows with its own scales of B.
    """

    d: np.ndarray
    a: np.ndarray
    b: np.ndarray
    scales_a: np.ndarray
    scales_b: np.ndarray
    kind: str
    types: tuple[str, str]
    scale_ids: tuple[int, int]
    accumulate: bool
    ctas: int = 1

    @property
    def operand_bits(self) -> int:
        """Bits of a number of the operands."""
        return 8 * self.a.shape[1] // SCALED_KINDS[self.kind].k

    def run(self, read: Read, write: Write) -> None:
        """As of `Product`."""
        a, b = (
            self._numbers(name, np.asarray(read("shared", x, 1)))
            for name, x in zip(self.types, (self.a, self.b), strict=True)
        )
        a = a * self._scales(read, self.scales_a, self.scale_ids[0])
        old: np.ndarray | None = None
        if self.accumulate:
            old = accumulator_values(from_bytes(np.asarray(read("tensor", self.d, 4)), 32), "f32")
        rows, found = len(a) // self.ctas, []
        for cta, scales in enumerate(self.scales_b):
            own = slice(cta * rows, (cta + 1) * rows)
            columns = b * self._scales(read, scales, self.scale_ids[1])
            found.append(multiply_add(a[own], columns, None if old is None else old[own], "f32"))
        data = np.ascontiguousarray(np.concatenate(found)).view(np.uint8)
        write("tensor", self.d, data.reshape(*self.d.shape, 4))

    def _numbers(self, name: str, data: np.ndarray) -> np.ndarray:
        """The numbers [rows, K] of 32 bytes a row; of fp4, two from each byte, the lower bits first."""
        data = data.reshape(len(data), -1)
        if self.operand_bits == 4:
            data = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
        return decode(name, data)

    def _scales(self, read: Read, words: np.ndarray, first: int) -> np.ndarray:
        """The factors [rows, K] of an operand."""
        kind = SCALED_KINDS[self.kind]
        data = np.asarray(read("tensor", words, 4)).reshape(*words.shape, 4)
        if (data != data[0]).any():
            raise PtxFault("the copies of block scales in the lanes of the four warps differ")
        used = data[0][:, first : first + kind.scales_of_step]
        return np.repeat(decode(kind.scales, used), kind.block, axis=1)


@meaning(
    "tcgen05.mma.{group:cta_group::1|cta_group::2}.{kind:kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4}.block_scale"
    ".{block:block16}?",
    destinations=0,
)
def _mma_scaled_meaning(
    t: Machine,
    i: Instruction,
    d: Register,
    a: Register,
    b: Register,
    instruction: Register,
    scales_a: Register,
    scales_b: Register,
    accumulate: Register,
) -> None:
    kind, ctas = (i.fields["kind"] or "").removeprefix("kind::"), ctas_of(i)
    if (i.fields["block"] is not None) != (kind == "mxf4nvf4"):
        raise PtxFault(f"tcgen05.mma kind::{kind} with {i.fields['block'] or 'no size of its blocks'}")
    flags = np.broadcast_to(np.asarray(accumulate, bool), i.active.shape)
    operands = (lanes(x, i.active) for x in (d, a, b, instruction, scales_a, scales_b))
    for thread, to, left, right, code, of_a, of_b in zip(i.threads, *operands):
        f = decode_scaled_instruction(code, kind, ctas)
        m, n = f["m"] // ctas, f["n"] // ctas  # of one CTA
        rows, columns = (decode_descriptor(x).addresses(y, 32, 1, True) for x, y in ((left, m), (right, n)))
        own: np.ndarray = _scale_cells(of_b, f["n"]).astype(np.int64)
        t.tcgen05_issue(
            ScaledProduct(
                of_pair(cells(to, m, f["n"]), OTHER_TENSOR, ctas),
                of_pair(rows, OTHER_SHARED, ctas),
                of_pair(columns, OTHER_SHARED, ctas),
                of_pair(_scale_cells(of_a, m).T, OTHER_TENSOR, ctas).T,
                np.stack([own + cta * OTHER_TENSOR for cta in range(ctas)]),
                kind,
                (f["a"], f["b"]),
                (f["scale_id"], f["b_scale_id"]),
                bool(flags[thread]),
                ctas,
            ),
            thread,
        )
