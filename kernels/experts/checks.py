"""What the functions of experts refuse."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._tensors import check_tensor
from tritonkittens.kernels.experts.config import INDICES, INPUTS, MOST_CHOICES


def check_index(index: Tensor, experts: int) -> None:
    """Raise TypeError or ValueError for what are no choices of tokens."""
    if index.dtype not in INDICES:
        raise TypeError(f"route: index has dtype {index.dtype}; it must be {' or '.join(map(str, INDICES))}")
    if index.ndim != 2 or not 1 <= index.shape[1] <= MOST_CHOICES:
        raise ValueError(
            f"route: index has shape {tuple(index.shape)}; it must be (tokens, choices), 1 to {MOST_CHOICES} of a token"
        )
    if not isinstance(experts, int) or isinstance(experts, bool) or not 1 <= experts < 1 << 15:
        raise ValueError(f"route: experts={experts!r}; it must be an integer from 1 to {(1 << 15) - 1}")


def check_rows(name: str, argument: str, x: Tensor, rows: int, wanted: str) -> None:
    """Raise TypeError or ValueError for what is no matrix of `rows` rows on a device with kernels."""
    check_tensor(name, argument, x, INPUTS, argument, x)
    if x.ndim != 2 or x.shape[0] != rows or x.shape[1] == 0:
        raise ValueError(f"{name}: {argument} has shape {tuple(x.shape)}; it must be ({rows}, columns), {wanted}")


def check_weights(weights: Tensor, places: Tensor, y: Tensor) -> None:
    """Raise TypeError or ValueError for what is no number for each choice."""
    check_tensor("combine_tokens", "weights", weights, INPUTS, "y", y)
    if weights.shape != places.shape:
        raise ValueError(
            f"combine_tokens: weights has shape {tuple(weights.shape)}; it must be {tuple(places.shape)}, a number for "
            "each choice"
        )
