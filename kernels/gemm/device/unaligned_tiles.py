"""Tiles of products that TMA cannot address: how such a product is split, and the choice of a split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import triton
import triton.language as tl

import tritonkittens.lang as tk

WORD = tl.constexpr(8)  # elements of 16 bytes, the widest load of a thread

FEW_ROWS = 64  # where words of B are read without a copy, see `is_faster_unaligned`
MAX_PARTS = 64

# Times, in those in which a block reads a tile of words
START = 4  # to start and end a block
SUM = 2  # to load the sums of parts, as many as registers hold
BY_ELEMENT = 4  # to read a tile by element

SMALL_RESULT = 1 << 15  # elements of C up to which small tiles are faster


@dataclass(frozen=True)
class Tiles:
    """How such a product is split: a block computes `rows` × `cols` of C over one of `parts` parts of K (of each
    class of rows, where these lie along K), `depth` at a time, with `warps` warps. `rows` 1: by multiply-adds, else by
    tensor cores. `wide`: is B read in words? With `stages` above 1, these pass through shared memory: asynchronous
    copies of `stages` − 1 tiles are in flight. With 1, the next tiles wait in registers. All but `parts` and `stages`
    are powers of two; `rows` is 1 or at least 16, `cols` at least 16, and `depth` too where tensor cores multiply.

    `packed`: a kernel in front copies A to rows of words (`packed.py`), for `wide`, 16 rows and 2 stages at least.
    `merges`: its blocks compute all classes of rows along K. `reduces`: a kernel behind adds the sums of parts.
    `strip`: rows whose sums of parts are added at a time, 0 for all.
    """

    rows: int
    cols: int
    depth: int
    warps: int = 4
    parts: int = 1
    wide: bool = False
    stages: int = 1
    packed: bool = False
    merges: bool = False
    reduces: bool = False
    strip: int = 0


@dataclass(frozen=True)
class BlockShape(tk.Knob):
    """Constants of the kernel: what a block computes, and how it reads B.

    Args:
        rows, cols, depth: of its tile, see `Tiles`.
        is_split: along K, in as many parts as the grid has along its second dimension.
        strip, unroll: rows, and parts, whose sums are loaded at a time.
        wide: the dimension along which B is read in words, "n" or "k"; "": B is read by element.
        start: elements from the beginning of a word to that of B.
        classes: of rows of words, which begin at different elements of a word.
        span: columns that a tile has of C. Fewer than `cols` where classes of rows are shifted against each other.
        stages: of the pipeline of tiles of B, see `Tiles`.
    """

    rows: int
    cols: int
    depth: int
    is_split: bool
    strip: int
    unroll: int
    wide: str
    start: int
    classes: int
    span: int
    stages: int


def words_along(strides: tuple[int, int]) -> str:
    """The dimension of B (strides of k, n) along which it can be read in words, "" for none. A row is as long as a word
    at least: only the first and the last one's words reach beyond the matrix."""
    bk, bn = strides
    return "n" if bn == 1 and bk >= WORD.value else "k" if bk == 1 and bn >= WORD.value else ""


def chosen(m: int, n: int, k: int, strides: tuple[int, int], slots: int) -> Tiles:
    """Tiles for a product of m ≤ n rows whose B has these strides, on so many multiprocessors (measured:
    docs/notes/gemm.md)."""
    along = words_along(strides)
    rows = min(max(16, triton.next_power_of_2(m)), FEW_ROWS)
    words = Tiles(rows, *((64, 64) if along == "k" else (128, 32)), wide=True, stages=4)
    if m == 1:
        tiles, blocks = _for_one_row(n, k, strides, slots)
    elif m <= FEW_ROWS and along and _are_few_sums(Extents(m, n, k, strides, words), k):
        tiles, blocks = words, 2 if rows > 16 else 3 if along == "k" else 4  # their registers leave room for so many
    elif m <= FEW_ROWS or m * n > SMALL_RESULT:
        tiles, blocks = Tiles(rows, 64, 64, 8 if rows == FEW_ROWS else 4), 2
    else:
        tiles, blocks = Tiles(32, 32, 64), 2
    return split(m, n, k, strides, slots * blocks, tiles)


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


def _are_few_sums(shape: Extents, k: int) -> bool:
    """Whether the sums of all classes, written and read again, take at most a sixth of B's memory traffic."""
    return shape.parts == 1 or 6 * 4 * shape.of.rows * shape.parts <= k


def split(m: int, n: int, k: int, strides: tuple[int, int], blocks: int, tiles: Tiles) -> Tiles:
    """`tiles` with the number of parts that takes the least time where so many blocks run at once; none is empty."""
    shape = Extents(m, n, k, strides, tiles)
    steps = triton.cdiv(shape.depth, tiles.depth)
    pace = (shape.classes if tiles.merges else 1) if tiles.wide else BY_ELEMENT  # a step of a part

    def time(parts: int) -> float:
        """In tiles of words that a block reads. A wave of few blocks takes as long as a full one."""
        waves, sums = triton.cdiv(shape.tiles * shape.parts * parts, blocks), shape.parts * parts
        if sums == 1:
            return waves * (pace * steps + START)
        written = 2 * tiles.rows / tiles.depth
        return waves * (pace * steps / parts + START + written) + shape.additions(sums)

    best = min(range(1, max(1, min(steps, MAX_PARTS // shape.parts)) + 1), key=time)
    return replace(tiles, parts=triton.cdiv(steps, triton.cdiv(steps, best)))


class Extents:
    """Extents of the kernel's grid and loop."""

    def __init__(self, m: int, n: int, k: int, strides: tuple[int, int], tiles: Tiles, start: int = 1):
        word = WORD.value
        self.of, self.start, self.strip = tiles, start, tiles.strip or tiles.rows
        self.along = words_along(strides) if tiles.wide else ""
        pitch = max(strides)
        self.classes = word // math.gcd(pitch, word) if self.along else 1
        is_shifted = self.along == "n" and (self.classes > 1 or start > 0)
        self.span = tiles.cols - word if is_shifted else tiles.cols
        if self.along == "k":
            self.columns, self.depth = (
                self.classes * triton.cdiv(triton.cdiv(n, self.classes), tiles.cols),
                k + word - 1,
            )
        else:
            self.columns, self.depth = triton.cdiv(n, self.span), triton.cdiv(k, self.classes)
        self.tiles = triton.cdiv(m, tiles.rows) * self.columns
        self.parts = (self.classes if self.along == "n" and not tiles.merges else 1) * tiles.parts
        self.chunk = triton.cdiv(triton.cdiv(self.depth, tiles.depth), tiles.parts) * tiles.depth

    def unroll(self, parts: int) -> int:
        """How many of so many parts' sums are loaded at a time: registers hold no more. A strip's sums take few."""
        loads = 32 * self.of.warps * (64 if self.of.strip else 32) // (self.strip * self.of.cols)
        return max(1, min(triton.next_power_of_2(parts), loads))

    def additions(self, parts: int) -> int:
        """The time in which so many parts of a tile are added, see `split`."""
        if self.of.reduces:
            return START + SUM * triton.cdiv(parts, 8)
        return SUM * (self.of.rows // self.strip) * triton.cdiv(parts, self.unroll(parts))

    def block(self) -> BlockShape:
        """The kernel's constants."""
        rows, cols, depth, unroll = self.of.rows, self.of.cols, self.of.depth, self.unroll(self.parts)
        start = self.start if self.along else 0
        is_split, stages = self.parts > 1, self.of.stages
        return BlockShape(
            rows, cols, depth, is_split, self.strip, unroll, self.along, start, self.classes, self.span, stages
        )
