"""Matrix operands in shared memory as wgmma's and tcgen05's 64-bit descriptors both give them: address, strides,
swizzle.

Bits 0-13 hold the address, bits 16-29 the leading byte offset and bits 32-45 the stride byte offset, each in units of
16 bytes. The other bits differ (PTX ISA 9.7.15.5.1 and 9.7.16.4.1).
"""

from dataclasses import dataclass

import numpy as np

SWIZZLE_WIDTHS = (0, 32, 64, 128)  # bytes


def check_swizzle(swizzle: int) -> None:
    """Raise ValueError for a width in bytes that no swizzle has."""
    if swizzle not in SWIZZLE_WIDTHS:
        raise ValueError(f"swizzle={swizzle}: it is 0, 32, 64 or 128 bytes")


def stride_bits(leading: int, stride: int, swizzle: int) -> int:
    """The two byte offsets at their places in a descriptor. Raises ValueError for offsets or a swizzle (bytes) that no
    descriptor holds."""
    check_swizzle(swizzle)
    for name, value in (("leading_bytes", leading), ("stride_bytes", stride)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise ValueError(f"{name}={value}: it is a multiple of 16 below {1 << 18}")
    return leading >> 4 << 16 | stride >> 4 << 32


def descriptor_asm(target: str, address: str, constant: int, scratch: str) -> str:
    """`target` (64 bits) = the descriptor of the 32-bit shared `address`; `scratch` is a 32-bit register."""
    field = f"and.b32 {scratch}, {address}, 0x3ffff; shr.u32 {scratch}, {scratch}, 4; cvt.u64.u32 {target}, {scratch};"
    return f"{field} or.b64 {target}, {target}, {constant:#x};"


@dataclass(frozen=True)
class MatrixDescriptor:
    """Where an operand lies in shared memory: byte address in the CTA's window, byte offsets, swizzle width in bytes,
    base offset in rows of 128 bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int
    base_offset: int

    def addresses(self, rows: int, k: int, element_bytes: int, k_major: bool) -> np.ndarray:
        """int64 [rows, k]: the byte address in the CTA's shared window of each element (`rows`: the axis that is not
        K).

        The canonical layouts of PTX ISA 9.7.15.5.1: groups of 8 rows of 16, 32, 64 or 128 contiguous bytes. K-major:
        `stride` leads to the next 8 rows, and without swizzling `leading` to the next 16 bytes of K. MN-major with
        swizzling: a row is `swizzle` bytes along MN, `leading` apart from the next such, and K runs over the rows, 8 of
        them `stride` apart; without swizzling the two change their parts. The swizzle exchanges 16-byte units by the
        address bits 7 to 9.
        """
        row: np.ndarray = np.arange(rows, dtype=np.int64)[:, None]
        column: np.ndarray = np.arange(k, dtype=np.int64)[None, :]
        along: np.ndarray
        width = self.swizzle or 16
        if k_major:
            along = column * element_bytes
            offsets = (
                row % 8 * width
                + row // 8 * self.stride
                + (along if self.swizzle else along // 16 * self.leading + along % 16)
            )
        else:
            along = row * element_bytes
            panel, group = (self.leading, self.stride) if self.swizzle else (self.stride, self.leading)
            offsets = along % width + along // width * panel + column % 8 * width + column // 8 * group
        places = self.start + offsets
        units = {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]
        return places ^ ((places - 128 * self.base_offset) >> 7 & units) << 4

    @classmethod
    def decode(cls, descriptor: int, swizzle: int) -> "MatrixDescriptor":
        """The matrix of a 64-bit descriptor whose swizzle mode means `swizzle` bytes."""
        leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        return cls((descriptor & 0x3FFF) << 4, leading, stride, swizzle, descriptor >> 49 & 7)
