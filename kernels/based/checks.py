"""What Based takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors, takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_beside, check_sequences
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import check_tensor
from tritonkittens.kernels.based.config import KEYS, STATE_ROWS

NAME = "based_attention"


def check_kinds(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, starts: Tensor | None) -> None:
    """Raise TypeError for what is no tensor, or one of several devices."""
    check_tensors(NAME, q=q, k=k, v=v)
    check_tensors(NAME, optional=True, initial_state=state, cu_seqlens=starts)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_distributed(type(x)):
            raise TypeError(f"{NAME}: {name} is a DTensor; give its shard, {name}.to_local()")


def check_shapes(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, starts: Tensor | None, normalize: bool) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    if q.ndim != 4 or q.shape[-1] != KEYS:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}; it must be (B, T, H, {KEYS})")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}, q {q.dtype}; they must be equal")
    if k.shape != q.shape:
        raise ValueError(f"{NAME}: k is {tuple(k.shape)}; it must be {tuple(q.shape)}, as q")
    if v.ndim != 4 or v.shape[:-1] != q.shape[:-1] or v.shape[-1] == 0:
        raise ValueError(f"{NAME}: v is {tuple(v.shape)}; it must be {(*q.shape[:-1], 'V')}".replace("'", ""))
    check_sequences(NAME, q, starts, state, (q.shape[2], STATE_ROWS, v.shape[-1] + normalize))


def check(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, starts: Tensor | None, normalize: bool) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(NAME, name, x, (torch.bfloat16,), "q", q)
    check_shapes(q, k, v, state, starts, normalize)
    check_beside(NAME, q, initial_state=state, cu_seqlens=starts)


def are_taken(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> bool:
    """Do the kernels take these operands, which fit together?"""
    fits = q.shape[-1] == KEYS and q.shape[0] <= MOST_SEQUENCES
    half = fits and takes((torch.bfloat16,), q, k, v, needs_tma=True)
    return half and takes((torch.bfloat16, torch.float32), q, state)
