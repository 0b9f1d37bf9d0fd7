"""What the kernels of softmax and losses are compiled for: the parts of a call, and the tiles of programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritonkittens.kernels._tensors import power_of_two

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
TARGETS = (torch.int64, torch.int32)
WIDEST, NARROWEST = 262144, 16  # columns of a row, and of a tile
NUMBERS, WARPS = 32, (4, 32)  # numbers a thread has of whole rows, and warps of such a program
PART_NUMBERS = 8  # of a thread, of a part of a row
MOST_AT_ONCE = 8192  # columns of a row of logits that a program of cross entropy loads at once
MOST_BEYOND = 1.25  # times the columns of a row, if it has more than FEW: those of its tile, at most
FEW = 1024
MOST_OF_SOFTMAX = (32768, 16384)  # columns that a program of softmax and of its backward has at once
LOOP_COLS, STAGES = 512, 4  # columns of a warp in a loop over a wider row, and stages of the loop
GRADIENT_COLS = 1024  # columns of a warp of a chunk of a gradient
LONG = 16384  # columns, from which on such programs have 8 warps, not 4
REGISTERS = 64  # of a thread, so that 32 warps fit a multiprocessor
MORE_REGISTERS = 128  # with a soft-cap, whose exponentials limit the rate, and for loops over two operands
GROUP_BYTES = 16  # that a thread loads at once
SUM_ROWS = 4096  # rows whose losses a program adds up at once
MOST_SUMMED = 32768  # rows that one program adds up alone
SUM_PROGRAMS = 128  # that add up more
TOKENS, TOKENS_UNIT = 4096, 128  # whose logits exist at once, and what chunks of fewer are a multiple of
SCALE_BLOCK, SCALE_PROGRAMS = 4096, 8  # numbers that a program scales at once, and programs of a multiprocessor


@dataclass(frozen=True)
class Parts:
    """What a cross entropy has, a constant of the kernels.

    cap, smoothing: a soft-cap, label smoothing. skips: rows of ignored targets are not read. mean: incoming gradients
    are those of the mean. dlse: log-sum-exps have gradients. early: the sum of the losses starts before all are there.
    """

    cap: bool
    smoothing: bool
    skips: bool
    mean: bool = False
    dlse: bool = False
    early: bool = False


class Tiles(NamedTuple):
    """Tiles of `rows` rows and `cols` columns, `chunks` of which cover a row, of programs of `warps` warps."""

    rows: int
    cols: int
    chunks: int
    warps: int


def row_tiles(width: int, numbers: int = NUMBERS) -> Tiles:
    """Return tiles of whole rows, of `numbers` numbers a thread."""
    cols = max(power_of_two(width), NARROWEST)
    warps = min(max(cols // (32 * numbers), WARPS[0]), WARPS[1])
    return Tiles(max(1, warps * 32 * numbers // cols), cols, 1, warps)


def group_of(tiles: Tiles, itemsize: int) -> int:
    """Return the columns of a group of the online softmax: those that a thread loads at once."""
    return min(GROUP_BYTES // itemsize, tiles.cols)


def chunk_tiles(width: int, cols_of_warp: int) -> Tiles:
    """Return tiles of chunks of a row."""
    warps = 8 if width >= LONG else 4
    cols = cols_of_warp * warps
    return Tiles(1, cols, -(-width // cols), warps)


def softmax_tiles(width: int, backward: bool) -> tuple[Tiles, int]:
    """Return the tiles of softmax, and how many of them are parts of a row in registers; 0 for a loop over them.

    Columns beyond the edge cost time, so parts of long rows have 8 columns a thread. The backward has two operands.
    """
    numbers = NUMBERS // 2 if backward else NUMBERS
    if width > MOST_OF_SOFTMAX[backward]:
        return chunk_tiles(width, LOOP_COLS), 0
    if width <= FEW:
        return row_tiles(width, numbers), 1
    warps = row_tiles(width, numbers).warps
    cols = 32 * warps * PART_NUMBERS
    parts = -(-width // cols)
    return Tiles(1, cols, parts, warps), parts


def _is_whole(width: int) -> bool:
    """Return whether a program of cross entropy loads whole rows. Columns beyond the edge cost time."""
    return width <= FEW or (width <= MOST_AT_ONCE and power_of_two(width) <= MOST_BEYOND * width)


def loss_tiles(width: int) -> Tiles:
    """Return the tiles of the forward of cross entropy, which loops over chunks."""
    return row_tiles(width) if _is_whole(width) else chunk_tiles(width, LOOP_COLS)


def gradient_tiles(width: int) -> Tiles:
    """Return the tiles of the gradient of cross entropy, whose programs have a chunk of columns each."""
    return row_tiles(width) if _is_whole(width) else chunk_tiles(width, GRADIENT_COLS)


def stages_of(tiles: Tiles) -> int:
    """Return the stages of the loop over chunks, all but one of which are in shared memory."""
    return 1 if tiles.chunks == 1 else STAGES


def registers_of(parts: Parts) -> int:
    """Return the most registers of a thread of cross entropy."""
    return MORE_REGISTERS if parts.cap else REGISTERS
