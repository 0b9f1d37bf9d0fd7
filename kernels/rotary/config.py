"""What the kernel of rotary embeddings is compiled for: a head, and the tokens and heads of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritonkittens.kernels._tensors import power_of_two

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
LARGEST_DIM = 1024  # of a head
WARPS = 4
VECTOR = 16  # bytes of a load
HEADS = 8  # of a program at most
PROGRAMS = 8  # of a multiprocessor, which a launch has if there are heads enough
PERSISTENT_PROGRAMS = 4  # of a multiprocessor, in the backward of norms


@dataclass(frozen=True)
class Head:
    """A head, and how tokens find their angles; a constant of the kernel.

    half: pairs of columns that rotate. rest: columns that do not, 0 if they stay as they are. unit: what strides and
    parts of a head are multiples of. packed, placed: positions come from the beginnings of packed sequences, and from
    ids or offsets. norm: heads are normalised first. backward: of heads with norms.
    early: the kernel that sums gradients of weights may start before this one ends.
    """

    half: int
    rest: int
    unit: int
    interleaved: bool
    packed: bool
    placed: bool
    norm: bool
    backward: bool
    early: bool


class Tiles(NamedTuple):
    """Tokens and heads of a program."""

    tokens: int
    heads: int


def tiles_of(head: Head, element_bytes: int, tokens: int, heads: int, multiprocessors: int) -> Tiles:
    """Return tiles in which each thread loads two vectors of a head, and more where columns do not rotate: parts of
    a head are vectors then.

    Few tokens fill no tile: of a smaller one, two threads would have an element, which one could read after the other
    has written it in place. They have few heads a program, so that programs occupy all multiprocessors.
    """
    numbers = 32 * WARPS * VECTOR // element_bytes * (4 if head.rest and not head.norm else 2)
    columns = 2 * power_of_two(head.half) + (power_of_two(head.rest) if head.rest else 0)
    rows = 1 << max((numbers // columns).bit_length() - 1, 0)
    groups = -(-multiprocessors * PROGRAMS // -(-max(tokens, 1) // rows))
    return Tiles(rows, max(1, min(HEADS, heads // groups)))


def programs_of(tiles: Tiles, tokens: int, groups: int, multiprocessors: int) -> int:
    """Return the number of persistent programs, as many for each group of heads."""
    return groups * min(-(-tokens // tiles.tokens), max(1, multiprocessors * PERSISTENT_PROGRAMS // groups))
