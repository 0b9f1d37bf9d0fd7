"""What the kernels of the gated delta rule are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from tritonkittens.kernels._tensors import power_of_two

NARROWEST, WIDEST = 64, 128  # columns of a tile


class Shape(NamedTuple):
    """Columns of tiles, and consumers that share those of V."""

    key_dim: int
    value_dim: int
    consumers: int


def shape_of(keys: int, values: int, heads: int, multiprocessors: int) -> Shape:
    """Return the shape for so many heads of all sequences. Blocks of fewer columns of V fill a GPU where heads are
    few."""
    key_dim, value_dim = (min(max(power_of_two(n), NARROWEST), WIDEST) for n in (keys, values))
    if heads * -(-values // value_dim) <= multiprocessors // 2:
        value_dim = NARROWEST
    return Shape(key_dim, value_dim, value_dim // NARROWEST)
