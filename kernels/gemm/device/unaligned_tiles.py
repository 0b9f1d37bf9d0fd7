"""Tiles of products that TMA cannot address: how such a product is split, and the choice of a split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import triton
import triton.language as tl

import tritonkittens.lang as tk

WORD = tl.constexpr(8)  # elements of 16 bytes, the widest load of a thread

FEW_ROWS = 64  # of a product, and of a tile, where B is read by element
MOST_PACKED = 128  # rows of a product whose A is packed
SMALL_PRODUCT = 1 << 26  # multiply-adds up to which one launch is fastest
SMALL_RESULT = 1 << 15  # elements of C up to which small tiles are faster
MAX_PARTS = 64
ADDED_AT_ONCE = 8  # parts of a product whose A is packed

# Times, in those in which a block reads a tile of words
START = 4  # to start and end a block
SUM = 2  # to load the sums of parts, as many as registers hold
BY_ELEMENT = 4  # to read a tile by element


@dataclass(frozen=True)
class Tiles:
    """How such a product is split.

    Args:
        rows, cols: of C, which a block computes. `rows` 1: by multiply-adds; else at least 16, by tensor cores.
        depth: of K, of a step.
        warps: of a block.
        parts: of K, of each class of rows where these lie along K.
        wide: read B in words where it has any, see `words_along`. With several rows, all rows of A are packed.
        stages: tiles in shared memory, where A is packed (at least 2) or words lie along K: asynchronous copies of all
            but one are in flight. Otherwise, and with 1, the next tiles wait in registers.

    All but `parts` and `stages` are powers of two. `cols` is at least 16, and `depth` too where tensor cores multiply.
    """

    rows: int
    cols: int
    depth: int
    warps: int = 4
    parts: int = 1
    wide: bool = False
    stages: int = 1

    def packs(self, strides: tuple[int, int]) -> bool:
        """Whether A is packed for a B of these strides (`packed.py`)."""
        return self.rows > 1 and self.wide and words_along(strides) != ""


@dataclass(frozen=True)
class BlockShape(tk.Knob):
    """Constants of the kernels: what a block computes, and how it reads B.

    Args:
        rows, cols, depth, stages: see `Tiles`. `stages` 1: no pipeline.
        is_split: along K, in as many parts as the grid has along its second dimension.
        unroll: parts whose sums are loaded at a time.
        wide: the dimension along which B is read in words, "n" or "k"; "": B is read by element.
        start: elements from the beginning of a word to that of B.
        classes: of rows of words, which begin at different elements of a word.
        span: columns that a tile has of C. Fewer than `cols` where classes of rows are shifted against each other.
    """

    rows: int
    cols: int
    depth: int
    stages: int
    is_split: bool
    unroll: int
    wide: str
    start: int
    classes: int
    span: int


def words_along(strides: tuple[int, int]) -> str:
    """The dimension of B (strides of k, n) along which it can be read in words, "" for none. A row is as long as a word
    at least: only the first and the last one's words reach beyond the matrix."""
    bk, bn = strides
    return "n" if bn == 1 and bk >= WORD.value else "k" if bk == 1 and bn >= WORD.value else ""


def classes_of(strides: tuple[int, int]) -> int:
    """Classes of rows of words of a B that has these strides, see `BlockShape`."""
    return WORD.value // math.gcd(max(strides), WORD.value)


def chosen(m: int, n: int, k: int, strides: tuple[int, int], slots: int) -> Tiles:
    """Tiles for a product of m ≤ n rows whose B has these strides, on so many multiprocessors (measured:
    docs/notes/gemm.md)."""
    along = words_along(strides)
    rows = min(max(16, triton.next_power_of_2(m)), FEW_ROWS)
    if m == 1:
        tiles, blocks = _for_one_row(n, k, strides, slots)
    elif along and m <= MOST_PACKED and m * n * k > SMALL_PRODUCT:
        tiles, blocks = packed(m, along)
    elif m <= FEW_ROWS or m * n > SMALL_RESULT:
        tiles, blocks = Tiles(rows, 64, 64, 8 if rows == FEW_ROWS else 4), 2
    else:
        tiles, blocks = Tiles(32, 32, 64), 2
    return split(m, n, k, strides, slots * blocks, tiles)


def packed(m: int, along: str) -> tuple[Tiles, int]:
    """(tiles without parts, blocks of a multiprocessor) for m rows that are packed; words of B run along "n" or "k"."""
    rows = max(16, triton.next_power_of_2(m))
    if rows <= 32 and along == "k":
        return Tiles(rows, 64, 64, wide=True, stages=6), 3
    if rows <= 64:
        return Tiles(rows, 128, 64, wide=True, stages=4), 2
    stages, blocks = (4, 1) if along == "k" else (3, 2)
    return Tiles(rows, 128, 64, 8, wide=True, stages=stages), blocks


# For one row: tiles, and how many blocks a multiprocessor holds
ONE_ROW = {
    "n": (
        (Tiles(1, 128, 16, 4, wide=True), 7),
        (Tiles(1, 256, 8, 4, wide=True), 7),
        (Tiles(1, 256, 16, 4, wide=True), 4),
    ),
    "k": ((Tiles(1, 16, 128, 2, wide=True, stages=4), 6),),
    "": ((Tiles(1, 64, 128, 4), 2),),
}


def _for_one_row(n: int, k: int, strides: tuple[int, int], slots: int) -> tuple[Tiles, int]:
    """(tiles, blocks of a multiprocessor): the smallest tiles of which there is room for two parts at least."""
    *smaller, last = ONE_ROW[words_along(strides)]
    for tiles, blocks in smaller:
        shape = Extents(1, n, k, strides, tiles)
        if 2 * shape.tiles * shape.parts <= blocks * slots:
            return tiles, blocks
    return last


def split(m: int, n: int, k: int, strides: tuple[int, int], blocks: int, tiles: Tiles) -> Tiles:
    """`tiles` with the number of parts that takes the least time where so many blocks run at once; none is empty."""
    shape = Extents(m, n, k, strides, tiles)
    steps = triton.cdiv(shape.depth, tiles.depth)
    pace = 1 if tiles.wide else BY_ELEMENT

    def time(parts: int) -> float:
        """In tiles of words that a block reads. A wave of few blocks takes as long as a full one."""
        waves, sums = triton.cdiv(shape.tiles * shape.parts * parts, blocks), shape.parts * parts
        if sums == 1:
            return waves * (pace * steps + START)
        written = 2 * tiles.rows / tiles.depth
        if shape.is_packed:  # by a kernel of its own, whose blocks read as fast
            added = START + shape.tiles * sums * written / blocks
        else:
            added = SUM * triton.cdiv(sums, shape.unroll(sums))
        return waves * (pace * steps / parts + START + written) + added

    best = min(range(1, max(1, min(steps, MAX_PARTS // shape.parts)) + 1), key=time)
    return replace(tiles, parts=triton.cdiv(steps, triton.cdiv(steps, best)))


class Extents:
    """Extents of a product's grid and loop, for a B of these strides that begins `start` elements behind a word's
    beginning.

    along, classes, span: see `BlockShape`. depth: of B, in its own class. tiles, parts: of the grid. chunk: depth of a
    part.
    """

    def __init__(self, m: int, n: int, k: int, strides: tuple[int, int], tiles: Tiles, start: int = 1):
        word = WORD.value
        self.of, self.start = tiles, start
        self.along = words_along(strides) if tiles.wide else ""
        self.is_packed = tiles.packs(strides)
        self.classes = classes_of(strides) if self.along else 1
        is_shifted = self.along == "n" and (self.classes > 1 or start > 0)
        self.span = tiles.cols - word if is_shifted else tiles.cols
        if self.along == "k":
            self.depth = k + word - 1
            columns = self.classes * triton.cdiv(triton.cdiv(n, self.classes), tiles.cols)
        else:
            self.depth = triton.cdiv(k, self.classes)
            columns = triton.cdiv(n, self.span)
        self.tiles = triton.cdiv(m, tiles.rows) * columns
        self.parts = (self.classes if self.along == "n" else 1) * tiles.parts
        self.chunk = triton.cdiv(triton.cdiv(self.depth, tiles.depth), tiles.parts) * tiles.depth

    def unroll(self, parts: int) -> int:
        """How many of so many parts' sums are loaded at a time: registers hold no more."""
        if self.is_packed:
            return ADDED_AT_ONCE
        loads = 32 * 32 * self.of.warps // (self.of.rows * self.of.cols)
        return max(1, min(triton.next_power_of_2(parts), loads))

    def block(self) -> BlockShape:
        """The kernels' constants."""
        of = self.of
        stages = of.stages if self.is_packed or self.along == "k" else 1
        start, unroll = self.start if self.along else 0, self.unroll(self.parts)
        return BlockShape(
            of.rows, of.cols, of.depth, stages, self.parts > 1, unroll, self.along, start, self.classes, self.span
        )
