"""What the kernels of experts are compiled for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonkittens.kernels._tensors import power_of_two

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
INDICES = (torch.int64, torch.int32)
NUMBERS = 4096  # that a program has at once
WIDEST, NARROWEST = 2048, 16  # columns of a tile
MOST_CHOICES = 32  # of a token


class Fused(NamedTuple):
    """What the first product of `experts` does besides, where no gradient is wanted.

    gathers: it reads the rows of tokens, without a copy of them by expert. gates: its epilogue applies the activation.
    `python -m bench experts` measures both.
    """

    gathers: bool = False
    gates: bool = False


FUSED = Fused()


class Tile(NamedTuple):
    """Rows and columns of a program."""

    rows: int
    cols: int


def tile_of(width: int) -> Tile:
    """Return the tile for rows of `width` columns."""
    cols = max(min(power_of_two(width), WIDEST), NARROWEST)
    return Tile(NUMBERS // cols, cols)
