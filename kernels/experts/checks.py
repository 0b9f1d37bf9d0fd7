"""What the functions of experts refuse."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import takes
from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor
from tritonkittens.kernels.experts.config import INDICES, INPUTS, MOST_CHOICES
from tritonkittens.kernels.grouped_gemm.checks import MAX_GROUPS


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


def are_taken(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether the kernels take the operands of `experts`."""
    return (
        x.ndim == index.ndim == 2
        and 1 <= index.shape[1] <= MOST_CHOICES
        and 1 <= gate_up.shape[0] <= MAX_GROUPS
        and gate_up.dtype == down.dtype == x.dtype
        and index.device == weights.device == x.device
        and takes(HALF_TYPES, x, gate_up, down, needs_tma=True)
        and takes(INPUTS, weights)
        and takes(INDICES, index)
    )


def check_routing(name: str, routing: object) -> None:
    """Raise TypeError for what is no result of `route`."""
    if not isinstance(routing, tuple) or len(routing) != 3:
        raise TypeError(f"{name}: routing is {type(routing).__name__}; it must be a Routing, of route(index, experts)")


def check_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """Raise TypeError or ValueError for operands of `experts` that do not fit together."""
    if x.dtype not in HALF_TYPES:
        raise TypeError(f"experts: x has dtype {x.dtype}; it must be {' or '.join(map(str, HALF_TYPES))}")
    if x.ndim != 2:
        raise ValueError(f"experts: x has shape {tuple(x.shape)}; it must be (tokens, hidden)")
    for name, matrix in (("gate_up", gate_up), ("down", down)):
        if matrix.dtype != x.dtype:
            raise TypeError(f"experts: {name} has dtype {matrix.dtype}, x {x.dtype}; they must be equal")
    if gate_up.ndim != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != x.shape[1]:
        wanted = f"(experts, 2 · intermediate, {x.shape[1]})"
        raise ValueError(f"experts: gate_up has shape {tuple(gate_up.shape)}; it must be {wanted}")
    shape = (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2)
    if tuple(down.shape) != shape:
        raise ValueError(
            f"experts: down has shape {tuple(down.shape)}; it must be {shape}, (experts, hidden, intermediate)"
        )
    if index.ndim != 2 or index.shape[0] != x.shape[0]:
        raise ValueError(f"experts: index has shape {tuple(index.shape)}; it must be ({x.shape[0]}, choices)")
    if weights.shape != index.shape:
        raise ValueError(
            f"experts: weights has shape {tuple(weights.shape)}; it must be {tuple(index.shape)}, as index"
        )


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
