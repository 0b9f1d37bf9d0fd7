"""Element addresses in a swizzled shared tile, and the bank conflicts of reading them. Host arithmetic only.

A row is cut into spans of S bytes (the swizzle: 32, 64 or 128). The spans of one column block lie below each other,
so a block is a contiguous array of `rows` × S bytes.
Within every 1024 bytes, the 16-byte chunks of a 128-byte line are permuted by XOR with the line's number. Shared
memory has 32 banks of 4 bytes, and one wavefront serves each bank once.
Source: PTX ISA, "Swizzling modes".
"""

from __future__ import annotations

from collections.abc import Iterable

CHUNK = 16  # bytes that the swizzle keeps together
LINE = 128  # bytes of one wavefront: 32 banks of 4 bytes
BANK = 4
BANKS = LINE // BANK


def offset(row: int, byte: int, rows: int, swizzle: int) -> int:
    """Return the byte offset in shared memory of byte `byte` of row `row` in a tile of `rows` rows (one power-of-two
    piece).
    """
    block, within = divmod(byte, swizzle)
    linear = block * rows * swizzle + row * swizzle + within
    return linear ^ (linear // LINE % (swizzle // CHUNK) * CHUNK)


def bank(row: int, byte: int, rows: int, swizzle: int) -> int:
    """Return the bank (0 … 31) that holds a byte."""
    return offset(row, byte, rows, swizzle) % LINE // BANK


def wavefronts(offsets: Iterable[int], width: int) -> int:
    """Count the wavefronts of lanes that read `width` bytes each at `offsets`: the most different words in one bank."""
    words = {(o + w) // BANK for o in offsets for w in range(0, width, BANK)}
    banks = [word % BANKS for word in words]
    return max(banks.count(b) for b in set(banks))


def picture_rows(rows: int, row_bytes: int, swizzle: int, count: int = 8) -> list[list[int]]:
    """Return the first bank of every 16-byte chunk of the first `count` rows."""
    return [[bank(r, c, rows, swizzle) for c in range(0, row_bytes, CHUNK)] for r in range(min(count, rows))]
