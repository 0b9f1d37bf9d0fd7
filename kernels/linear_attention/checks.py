"""What linear attention takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_alike, check_gates, check_sequences, check_taken
from tritonkittens.kernels._tensors import FLOATS, HALF_TYPES
from tritonkittens.kernels.linear_attention.config import MOST_KEYS

NAME = "linear_attention"


class Operands(NamedTuple):
    """The tensors of a call, as `linear_attention` names them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None = None
    g: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


def check_shapes(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    q, k, v, decay, g, state, starts = given
    if q.ndim != 4 or not 1 <= q.shape[-1] <= MOST_KEYS:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}; it must be (B, T, H, K), K from 1 to {MOST_KEYS}")
    check_alike(NAME, q, k, v)
    if v.ndim != 4 or v.shape[:-1] != q.shape[:-1] or v.shape[-1] == 0:
        raise ValueError(f"{NAME}: v is {tuple(v.shape)}; it must be {(*q.shape[:-1], 'V')}".replace("'", ""))
    if decay is not None and tuple(decay.shape) != (q.shape[2],):
        raise ValueError(f"{NAME}: decay is {tuple(decay.shape)}; it must be {(q.shape[2],)}")
    if decay is not None and decay.dtype != torch.float32:
        raise TypeError(f"{NAME}: decay has dtype {decay.dtype}; it must be torch.float32")
    if g is not None and decay is not None:
        raise ValueError(f"{NAME}: give decay, the same in each step, or g, not both")
    check_gates(NAME, v, g=g)
    check_sequences(NAME, q, starts, state, (*q.shape[2:], v.shape[-1]))


def check(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    check_taken(NAME, given, HALF_TYPES)
    check_shapes(given)


def are_taken(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None) -> bool:
    """Do the kernels take these operands, which fit together?"""
    fits = 1 <= q.shape[-1] <= MOST_KEYS and q.shape[0] <= MOST_SEQUENCES and q.dtype == k.dtype == v.dtype
    return fits and takes(HALF_TYPES, q, k, v, needs_tma=True) and takes(FLOATS, q, decay, state)
