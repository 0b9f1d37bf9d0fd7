"""What the gated delta rule takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tritonkittens.kernels._dispatch import takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_alike, check_gates, check_sequences, check_taken
from tritonkittens.kernels._tensors import FLOATS, HALF_TYPES

NAME = "gated_delta_rule"
MOST_KEYS = 128  # columns of q and k


class Operands(NamedTuple):
    """The tensors of a call, as `gated_delta_rule` names them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


def check_shapes(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    q, k, v, g, beta, state, starts = given
    if q.ndim != 4 or not 1 <= q.shape[-1] <= MOST_KEYS or q.shape[2] == 0:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}; it must be (B, T, H, K), K from 1 to {MOST_KEYS}")
    check_alike(NAME, q, k, v)
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2] or 0 in v.shape[2:]:
        raise ValueError(
            f"{NAME}: v is {tuple(v.shape)}; it must be ({q.shape[0]}, {q.shape[1]}, HV, V), HV a multiple of the "
            f"{q.shape[2]} heads of q"
        )
    check_gates(NAME, v, g=g, beta=beta)
    check_sequences(NAME, q, starts, state, (v.shape[2], q.shape[-1], v.shape[-1]))


def check(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    check_taken(NAME, given, HALF_TYPES)
    check_shapes(given)


def are_taken(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> bool:
    """Do the kernels take these operands, which fit together?"""
    fits = 1 <= q.shape[-1] <= MOST_KEYS and q.shape[0] <= MOST_SEQUENCES and q.dtype == k.dtype == v.dtype
    half = fits and takes(HALF_TYPES, q, k, v, needs_tma=True)
    return half and takes(FLOATS, q, g, beta, state)
