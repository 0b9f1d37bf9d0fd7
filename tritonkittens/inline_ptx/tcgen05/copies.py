"""Copies into tensor memory and inside it: cp and shift (PTX ISA 9.7.16.9)."""

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from .._asm import builtin, unwrap
from .._meaning import Instruction, Machine, NoMeaning, Register, lanes, meaning
from .._traced import Semantic, Traced
from .descriptors import decode_descriptor
from .issue import Read, Write, cta_group, ctas_of, issue
from .products import OTHER_SHARED, OTHER_TENSOR

# shape -> the multicasts that it has
COPIES = {
    "128x256b": ("",),
    "4x256b": ("",),
    "128x128b": ("",),
    "64x128b": ("warpx2::02_13", "warpx2::01_23"),
    "32x128b": ("warpx4",),
}

EXPANSIONS = ("", "b8x16.b6x16_p32", "b8x16.b4x16_p64")


@builtin
def _copy_template(
    shape: Traced, multicast: Traced, expand: Traced, ctas: Traced, _semantic: Semantic = None
) -> Traced:
    shape, multicast, expand = unwrap(shape), unwrap(multicast), unwrap(expand)
    if shape not in COPIES or multicast not in COPIES[shape] or expand not in EXPANSIONS:
        rows = "; ".join(f"{name} {' or '.join(map(repr, modes))}" for name, modes in COPIES.items())
        raise ValueError(
            f"tcgen05.cp shape={shape!r}, multicast={multicast!r}, expand={expand!r}: shapes with their multicast are "
            f"{rows}; expand is one of {EXPANSIONS}"
        )
    return tl.constexpr(
        ".".join(part for part in (f"tcgen05.cp.{cta_group(ctas)}", shape, multicast, expand) if part) + " [$0], $1;"
    )


@triton.jit
def cp(
    address,
    descriptor,
    shape: tl.constexpr = "128x256b",
    multicast: tl.constexpr = "",
    expand: tl.constexpr = "",
    issuer: tl.constexpr = "warp",
    ctas: tl.constexpr = 1,
):
    """Copies shared memory (uint64 descriptor) to tensor memory, asynchronously, in order with later mma of the same
    thread.

    shape "128x256b", "4x256b", "128x128b", "64x128b" (multicast "warpx2::02_13" or "warpx2::01_23") or "32x128b"
    (multicast "warpx4"); expand "b8x16.b6x16_p32" or "b8x16.b4x16_p64" spreads 6- or 4-bit elements to bytes. ctas=2:
    each CTA of a pair copies from its own shared memory to its own tensor memory, at the same addresses. PTX ISA
    9.7.16.9.1 `tcgen05.cp`.
    """
    issue(_copy_template(shape, multicast, expand, ctas), (address, descriptor), ("r", "l"), issuer)


@triton.jit
def shift(address, issuer: tl.constexpr = "warp"):
    """Moves the rows from `address` (lane a multiple of 32) down by one, asynchronously. PTX ISA 9.7.16.9.2
    `tcgen05.shift.down`."""
    issue("tcgen05.shift.cta_group::1.down [$0];", (address,), ("r",), issuer)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """One tcgen05.cp of one thread: 32-bit words from byte addresses `source` int64 [words] of the CTA's shared window
    to `targets` [copies, words]. Of a pair, those of the other CTA are `OTHER_SHARED` and `OTHER_TENSOR` higher."""

    source: np.ndarray
    targets: np.ndarray
    ctas: int = 1

    def run(self, read: Read, write: Write) -> None:
        """`read` and `write` as in `Product.run`."""
        for cta in range(self.ctas):
            data = np.asarray(read("shared", self.source + cta * OTHER_SHARED, 4))
            for target in self.targets:
                write("tensor", target.astype(np.int64) + cta * OTHER_TENSOR, data)


# cp shape -> (rows, bytes of a row, for each copy the lane of each row)
_ROWS32, _ROWS64 = np.arange(32), np.arange(64)

_COPY_LANES: dict[str, tuple[int, int, list[np.ndarray]]] = {
    "128x256b": (128, 32, [np.arange(128)]),
    "128x128b": (128, 16, [np.arange(128)]),
    "4x256b": (4, 32, [np.arange(4) * 32]),
    "64x128b.warpx2::02_13": (64, 16, [_ROWS64, _ROWS64 + 64]),
    "64x128b.warpx2::01_23": (64, 16, [_ROWS64 % 32 + _ROWS64 // 32 * 64 + second for second in (0, 32)]),
    "32x128b.warpx4": (32, 16, [_ROWS32 + 32 * warp for warp in range(4)]),
}


@meaning(
    "tcgen05.cp.{group:cta_group::1|cta_group::2}.{shape:128x256b|4x256b|128x128b|64x128b|32x128b}.{multicast:warpx2::02_13|warpx2::01_23|warpx4}?.{expand}*",
    destinations=0,
)
def _cp_meaning(t: Machine, i: Instruction, address: Register, descriptor: Register) -> None:
    if i.fields["expand"]:
        raise NoMeaning(f"{i.fields['expand']}: where the bits of expanded elements go")
    shape = ".".join(x for x in (i.fields["shape"], i.fields["multicast"]) if x)
    if shape not in _COPY_LANES:
        raise NoMeaning(f"tcgen05.cp.{shape}")
    rows, nbytes, copies = _COPY_LANES[shape]
    for thread, to, matrix in zip(i.threads, lanes(address, i.active), lanes(descriptor, i.active)):
        source = decode_descriptor(matrix).addresses(rows, nbytes, 1, True)[:, ::4]
        targets = [
            (to >> 16) + lane[:, None] << 16 | (to & 0xFFFF) + np.arange(nbytes // 4)[None, :] for lane in copies
        ]
        cells = np.stack(targets).astype(np.uint32).reshape(len(copies), -1)
        t.tcgen05_issue(Copy(source.reshape(-1), cells, ctas_of(i)), thread)


@meaning("tcgen05.shift.cta_group::1.down", destinations=0)
def _shift_meaning(t: Machine, i: Instruction, address: Register) -> None:
    raise NoMeaning("which lanes tcgen05.shift moves where is not known here")
