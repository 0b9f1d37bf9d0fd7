"""What linear attention takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors, takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_beside, check_sequences
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor
from tritonkittens.kernels.linear_attention.config import MOST_KEYS

NAME = "linear_attention"
GATES = (torch.float32, torch.bfloat16, torch.float16)


def check_kinds(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, g: Tensor | None, state: Tensor | None, ends: Tensor | None
) -> None:
    """Raise TypeError for what is no tensor, or one of several devices."""
    check_tensors(NAME, q=q, k=k, v=v)
    check_tensors(NAME, optional=True, decay=decay, g=g, initial_state=state, cu_seqlens=ends)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_distributed(type(x)):
            raise TypeError(f"{NAME}: {name} is a DTensor; give its shard, {name}.to_local()")


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, g: Tensor | None, state: Tensor | None, starts: Tensor | None
) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    if q.ndim != 4 or not 1 <= q.shape[-1] <= MOST_KEYS:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}; it must be (B, T, H, K), K from 1 to {MOST_KEYS}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}, q {q.dtype}; they must be equal")
    if k.shape != q.shape:
        raise ValueError(f"{NAME}: k is {tuple(k.shape)}; it must be {tuple(q.shape)}, as q")
    if v.ndim != 4 or v.shape[:-1] != q.shape[:-1] or v.shape[-1] == 0:
        raise ValueError(f"{NAME}: v is {tuple(v.shape)}; it must be {(*q.shape[:-1], 'V')}".replace("'", ""))
    if decay is not None and tuple(decay.shape) != (q.shape[2],):
        raise ValueError(f"{NAME}: decay is {tuple(decay.shape)}; it must be {(q.shape[2],)}")
    if decay is not None and decay.dtype != torch.float32:
        raise TypeError(f"{NAME}: decay has dtype {decay.dtype}; it must be torch.float32")
    if g is not None:
        if decay is not None:
            raise ValueError(f"{NAME}: give decay, the same in each step, or g, not both")
        if g.shape != q.shape[:3]:
            raise ValueError(f"{NAME}: g is {tuple(g.shape)}; it must be {tuple(q.shape[:3])}, a number a head")
        if g.dtype not in GATES:
            raise TypeError(f"{NAME}: g has dtype {g.dtype}; it must be {' or '.join(map(str, GATES))}")
    check_sequences(NAME, q, starts, state, (*q.shape[2:], v.shape[-1]))


def check(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, g: Tensor | None, state: Tensor | None, starts: Tensor | None
) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(NAME, name, x, HALF_TYPES, "q", q)
    check_shapes(q, k, v, decay, g, state, starts)
    check_beside(NAME, q, decay=decay, g=g, initial_state=state, cu_seqlens=starts)


def are_taken(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None) -> bool:
    """Do the kernels take these operands, which fit together?"""
    fits = 1 <= q.shape[-1] <= MOST_KEYS and q.shape[0] <= MOST_SEQUENCES and q.dtype == k.dtype == v.dtype
    return fits and takes(HALF_TYPES, q, k, v, needs_tma=True) and takes(GATES, q, decay, state)
