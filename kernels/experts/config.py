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


class Tile(NamedTuple):
    """Rows and columns of a program."""

    rows: int
    cols: int


def tile_of(width: int) -> Tile:
    """Return the tile for rows of `width` columns."""
    cols = max(min(power_of_two(width), WIDEST), NARROWEST)
    return Tile(NUMBERS // cols, cols)
