"""What calls of the kernels of experts do: their launches, and the memory of their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from tritonkittens.kernels._rows import MULTIPLE
from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.experts.checks import check_rows, check_weights
from tritonkittens.kernels.experts.config import tile_of
from tritonkittens.kernels.experts.device.rows import combine_rows, combine_rows_backward, gather_rows

Allocate: TypeAlias = Callable[[], Tensor]
_plans: dict[Hashable, Any] = {}  # by what is known of a call


class Plan:
    """The launch of one kernel for tensors of one kind. Rows that are not contiguous are copied."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], results: Sequence[Allocate], *numbers: Any):
        self.kernel, self.grid, self.results, self.numbers = kernel, grid, results, numbers
        self.bound: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> list[Tensor]:
        found = [allocate() for allocate in self.results]
        if self.grid[0]:
            given = (*((tensors[0] if t is None else t).contiguous() for t in tensors), *found)  # type: ignore[union-attr]
            if self.bound is None:
                self.bound = self.kernel.bind(self.grid, *given, *self.numbers)
            self.bound(*given)
        return found


def _remembered(make: Callable[..., Plan], *tensors: Tensor | None) -> list[Tensor]:
    """Results of the plan that `make` returns for tensors of this kind."""
    key = (make, signature(*tensors))
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, make(*tensors))
    found: list[Tensor] = plan(*tensors)
    return found


def _shape(width: int, count: int) -> tuple[tuple[int, int, int], int, tuple[int, int, int]]:
    """Return the grid for `count` rows, the columns in units, and the tile and its unit."""
    tile, unit = tile_of(width), math.gcd(MULTIPLE, width)
    return (-(-count // tile.rows), -(-width // tile.cols), 1), width // unit, (*tile, unit)


def _gather(x: Tensor, choices: Tensor, ends: Tensor) -> Plan:
    (tokens, width), count = x.shape, choices.shape[0]
    grid, cols, tile = _shape(width, count)
    result = allocator((count, width), x.dtype, x.device)
    return Plan(gather_rows, grid, [result], tokens, count, ends.shape[0], cols, count // max(tokens, 1), *tile)


def run_gather(x: Tensor, choices: Tensor, ends: Tensor, places: Tensor) -> Tensor:
    """`gather_tokens` of plain tensors."""
    check_rows("gather_tokens", "x", x, places.shape[0], "a row for each token")
    return _remembered(_gather, x, choices, ends)[0]


def _combine(y: Tensor, weights: Tensor | None, places: Tensor) -> Plan:
    (tokens, k), count, width = places.shape, places.numel(), y.shape[-1]
    grid, cols, tile = _shape(width, tokens)
    result = allocator((tokens, width), y.dtype, y.device)
    return Plan(combine_rows, grid, [result], tokens, count, cols, weights is not None, k, *tile)


def run_combine(y: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """`combine_tokens` of plain tensors."""
    check_rows("combine_tokens", "y", y, places.numel(), "a row for each choice")
    if weights is not None:
        check_weights(weights, places, y)
    return _remembered(_combine, y, weights, places)[0]


def _combine_backward(dout: Tensor, y: Tensor, weights: Tensor, choices: Tensor, ends: Tensor) -> Plan:
    (tokens, k), (count, width) = weights.shape, y.shape
    grid, cols, tile = _shape(width, count)
    results = [allocator(tuple(t.shape), t.dtype, t.device) for t in (y, weights)]
    numbers = (tokens, count, ends.shape[0], cols, k, *tile)
    return Plan(combine_rows_backward, (grid[0], 1, 1), results, *numbers)


def run_combine_backward(dout: Tensor, y: Tensor, weights: Tensor, choices: Tensor, ends: Tensor) -> list[Tensor]:
    """Gradients of y and weights."""
    return _remembered(_combine_backward, dout, y, weights, choices, ends)
