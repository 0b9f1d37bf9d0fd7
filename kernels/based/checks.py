"""What Based takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_alike, check_sequences, check_taken
from tritonkittens.kernels.based.config import KEYS, STATE_ROWS

NAME = "based_attention"


class Operands(NamedTuple):
    """The tensors of a call, as `based_attention` names them."""

    q: Tensor
    k: Tensor
    v: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


def check_shapes(given: Operands, normalize: bool) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    q, k, v, state, starts = given
    if q.ndim != 4 or q.shape[-1] != KEYS:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}; it must be (B, T, H, {KEYS})")
    check_alike(NAME, q, k, v)
    if v.ndim != 4 or v.shape[:-1] != q.shape[:-1] or v.shape[-1] == 0:
        raise ValueError(f"{NAME}: v is {tuple(v.shape)}; it must be {(*q.shape[:-1], 'V')}".replace("'", ""))
    check_sequences(NAME, q, starts, state, (q.shape[2], STATE_ROWS, v.shape[-1] + normalize))


def check(given: Operands, normalize: bool) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    check_taken(NAME, given, (torch.bfloat16,))
    check_shapes(given, normalize)


def are_taken(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> bool:
    """Do the kernels take these operands, which fit together?"""
    fits = q.shape[-1] == KEYS and q.shape[0] <= MOST_SEQUENCES
    half = fits and takes((torch.bfloat16,), q, k, v, needs_tma=True)
    return half and takes((torch.bfloat16, torch.float32), q, state)
