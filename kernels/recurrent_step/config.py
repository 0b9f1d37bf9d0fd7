"""What the kernel of a few rows is compiled for, and how many rows are few."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tritonkittens.kernels._tensors import power_of_two

# One row hides behind the bytes of the state, and up to eight are faster than a chunk (docs/notes/sequences.md).
MOST_ROWS = 8
LANE_KEYS = 32  # neighbouring numbers of a column, which eight lanes have
STATE_TILE = 4096  # numbers of a state that a program has, at most
FEWEST_COLUMNS = 8  # of a program
WARP_COLUMNS = 4  # that a warp reads at once
MOST_WARPS = 8
MOST_KEYS = 256
MOST_BATCHES = 65535  # the third extent of a grid


class Parts(NamedTuple):
    """Which operands a call has, is the state after wanted, and how the operands are given: as `Rule` says."""

    gates: bool
    beta: bool
    decay: bool
    bias: bool
    skip: bool
    silu: bool
    begins: bool
    ends: bool
    weights: bool
    softplus: bool
    log_decay: bool
    logits: bool
    unit: bool


class Shape(NamedTuple):
    """Parts of `LANE_KEYS` keys, columns of V, and warps of a program."""

    parts: int
    cols: int
    warps: int


def is_short(q: Tensor, starts: Tensor | None) -> bool:
    """Are rows few enough for the kernel? Packed sequences are not for it."""
    return starts is None and 1 <= q.shape[1] <= MOST_ROWS


def shape_of(keys: int, values: int, heads: int, multiprocessors: int) -> Shape:
    """Return the shape for so many heads of all sequences. Fewer columns fill a GPU where heads are few."""
    parts = -(-keys // LANE_KEYS)
    cols = min(STATE_TILE // (LANE_KEYS * power_of_two(parts)), power_of_two(values))
    while cols > FEWEST_COLUMNS and heads * -(-values // cols) < multiprocessors:
        cols //= 2
    return Shape(parts, cols, min(MOST_WARPS, max(1, cols // WARP_COLUMNS)))
