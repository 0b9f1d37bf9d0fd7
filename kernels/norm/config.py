"""What the kernels of the norms are compiled for: the parts of a call, and the tiles of programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritonkittens.kernels._tensors import power_of_two

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 65536  # columns
NUMBERS = 32  # of a tile in a thread
FEWEST, MOST_WARPS = 4, 32  # warps of a program
NARROWEST = 16  # columns of a tile


@dataclass(frozen=True)
class Parts:
    """Which operands and results a call has, a constant of the kernels.

    `centre`: what is added to weights. `z`: z is stored, since it is not x. Of a backward: `residual` and `x1` say that
    their gradients are stored apart from that of x, `dz` that z has a gradient as a result, `grads` which of weight,
    bias, weight1 and bias1 want gradients.
    """

    rms: bool
    centre: float
    weight: bool
    bias: bool
    weight1: bool
    bias1: bool
    rowscale: bool
    x1: bool
    dropout: bool
    residual: bool
    z: bool
    dz: bool = False
    grads: tuple[bool, ...] = ()


class Tiles(NamedTuple):
    """Tiles of `rows` rows and `cols` columns, `chunks` of which cover a row, of programs of `warps` warps."""

    rows: int
    cols: int
    chunks: int
    warps: int


def tiles_of(width: int, most_warps: int) -> Tiles:
    """Return tiles of NUMBERS numbers a thread: whole rows, unless a row takes more than `most_warps` warps. Chunks are
    of half as many columns, so that fewer of the last one's are beyond the edge."""
    cols = max(power_of_two(width), NARROWEST)
    most = most_warps * 32 * NUMBERS
    cols = cols if cols <= most else most // 2
    warps = max(FEWEST, cols // (32 * NUMBERS))
    return Tiles(max(1, FEWEST * 32 * NUMBERS // cols), cols, -(-width // cols), warps)


def programs_of(tiles: Tiles, rows: int, multiprocessors: int) -> int:
    """Return the number of persistent programs of the backward: 16 warps a multiprocessor, or fewer for few rows."""
    return min(-(-rows // tiles.rows), multiprocessors * max(1, 16 // tiles.warps))
