"""What the kernels of linear attention are compiled for, and how long sequences are cut into segments."""

from __future__ import annotations

from typing import NamedTuple

from tritonkittens.kernels._sequences import ROWS as ROWS
from tritonkittens.kernels._tensors import power_of_two

NARROWEST, WIDEST = 64, 128  # columns of a tile
MOST_KEYS = 256  # columns of Q and K
HEADS = 32  # whose gates a program sums
STATE_BLOCK = 1024  # numbers of a state that a program carries from segment to segment
SHORTEST = 8  # chunks of a segment
MOST_IDLE = 0.75  # of the blocks that fit a GPU: with as many tasks, sequences stay whole


class Shape(NamedTuple):
    """Columns of tiles, consumers that share those of V, and blocks of a multiprocessor."""

    key_dim: int
    value_dim: int
    consumers: int
    blocks: int


def shape_of(keys: int, values: int, heads: int, multiprocessors: int) -> Shape:
    """Return the shape for so many heads of all sequences. Two blocks share the columns of V of a head where that
    fills the GPU, and where two stages with more than `WIDEST` columns of K would not fit a multiprocessor."""
    key_dim, value_dim = (max(power_of_two(n), NARROWEST) for n in (keys, min(values, WIDEST)))
    tasks = heads * -(-values // value_dim)
    if key_dim > WIDEST or tasks < MOST_IDLE * multiprocessors <= 2 * tasks:
        value_dim = NARROWEST
    return Shape(key_dim, value_dim, value_dim // NARROWEST, 2 if key_dim + value_dim == 2 * NARROWEST else 1)


def span_of(longest: int, total: int, tasks_of_row: int, sequences: int, slots: int) -> int:
    """Return the rows of a segment: those of a sequence, unless too few sequences fill the GPU.

    longest: rows of the longest sequence, at most. tasks_of_row: heads, and blocks of columns of V.
    """
    whole = -(-max(longest, 1) // ROWS) * ROWS
    if sequences * tasks_of_row >= MOST_IDLE * slots:
        return whole
    chunks = max(SHORTEST, -(-total * tasks_of_row // (slots * ROWS)))
    return min(whole, chunks * ROWS)
