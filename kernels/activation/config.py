"""What the kernels of gated activations are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonkittens.kernels._tensors import power_of_two

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("silu", "gelu", "gelu_tanh")
NUMBERS = 2048  # of each operand that a program has
WIDEST, NARROWEST = 1024, 16  # columns of a tile
MOST_IDLE = 0.04  # of a row's columns that tiles may have beyond its end, where narrower tiles avoid it


@dataclass(frozen=True)
class Shape:
    """An activation and the tile of a program, a constant of the kernels. unit: what strides and columns are multiples
    of. interleaved: columns of a and b alternate in one tensor."""

    kind: str
    interleaved: bool
    rows: int
    cols: int
    unit: int


def shape_of(kind: str, interleaved: bool, width: int, unit: int) -> Shape:
    """Return the shape for rows of `width` columns."""
    cols = max(min(power_of_two(width), WIDEST), NARROWEST)
    while cols > WIDEST // 8 and -(-width // cols) * cols > (1 + MOST_IDLE) * width:
        cols //= 2
    return Shape(kind, interleaved, NUMBERS // cols, cols, unit)
