"""What the kernels of Based are compiled for, and the features of its states."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import power_of_two

KEYS = 16  # columns of q and k
STATE_ROWS = 1 + KEYS + KEYS * KEYS  # of a state as users see it
FEATURES = 192  # rows of a state as kernels see it: with zeros up to pieces of 64
SHIFTS = KEYS // 2 + 1  # of pairs i, i + shift
FIRST, CONSTANT = SHIFTS * KEYS, SHIFTS * KEYS + KEYS  # the row of k₀, and that of 1
SUMS = 64, KEYS  # the extents of sums of keys: `device.taylor`
NARROWEST, WIDEST = 64, 128  # columns of a tile of v
WHOLE = dict(dtype=torch.int64, device="cpu")  # of constants that are made before they go to a GPU


class Shape(NamedTuple):
    """Columns of a tile of v, consumers that share them, and blocks of a multiprocessor."""

    value_dim: int
    consumers: int
    blocks: int


def shape_of(values: int) -> Shape:
    """Return the shape for heads of so many columns of v."""
    value_dim = min(max(power_of_two(values), NARROWEST), WIDEST)
    return Shape(value_dim, value_dim // NARROWEST, 2 * NARROWEST // value_dim)


def pairs() -> tuple[Tensor, Tensor]:
    """(i, j) of the products that rows of a kernel's state belong to."""
    row = torch.arange(FIRST, **WHOLE)
    i = row % KEYS
    return i, (i + row // KEYS) % KEYS


@functools.cache
def rows_of_state(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(for each row of a user's state, the row of a kernel's; for each row of a kernel's state before the zeros, two
    rows of a user's, whose mean it is)."""
    i, j = pairs()
    first, square = torch.arange(KEYS, **WHOLE), 1 + KEYS
    kernel = torch.full((STATE_ROWS,), CONSTANT, **WHOLE)
    kernel[1 + first] = FIRST + first
    kernel[square + KEYS * i + j] = kernel[square + KEYS * j + i] = torch.arange(FIRST, **WHOLE)
    others = torch.cat([1 + first, torch.zeros(1, **WHOLE)])
    rows = (kernel, torch.cat([square + KEYS * i + j, others]), torch.cat([square + KEYS * j + i, others]))
    of_user, left, right = (x.to(device) for x in rows)
    return of_user, left, right


@functools.cache
def maps(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The maps that select columns of q and k: see `device.taylor`."""
    found = torch.zeros(64 + FEATURES, KEYS, dtype=torch.float32, device="cpu")
    row = torch.arange(64, **WHOLE)
    found[row, row % KEYS] = 1
    found[64 + torch.arange(FIRST, **WHOLE), pairs()[1]] = 1
    return found.to(device, dtype)


@functools.cache
def numbers(device: torch.device, scale: float) -> Tensor:
    """The factors of features; then, for those of the third piece, what is added to the second factors of products, and
    to products, and to sums for each row, whose number is in row 48: see `device.taylor`."""
    found, piece = torch.zeros(6 * 64, dtype=torch.float32, device="cpu"), 2 * 64
    found[:FIRST] = scale * scale
    found[:KEYS] = found[FIRST - KEYS : FIRST] = scale * scale / 2
    found[FIRST:CONSTANT], found[CONSTANT] = scale, 1
    found[FEATURES + FIRST - piece : FEATURES + CONSTANT - piece] = 1
    found[FEATURES + 64 + CONSTANT - piece] = found[FEATURES + 128 + 48] = 1
    return found.to(device)
