"""What the gated delta rule takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors, takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_beside, check_sequences
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor

NAME = "gated_delta_rule"
MOST_KEYS = 128  # columns of q and k
GATES = (torch.float32, torch.bfloat16, torch.float16)


def check_kinds(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, starts: Tensor | None
) -> None:
    """Raise TypeError for what is no tensor, or one of several devices."""
    check_tensors(NAME, q=q, k=k, v=v, g=g, beta=beta)
    check_tensors(NAME, optional=True, initial_state=state, cu_seqlens=starts)
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if is_distributed(type(x)):
            raise TypeError(f"{NAME}: {name} is a DTensor; give its shard, {name}.to_local()")


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, starts: Tensor | None
) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    if q.ndim != 4 or not 1 <= q.shape[-1] <= MOST_KEYS or q.shape[2] == 0:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}; it must be (B, T, H, K), K from 1 to {MOST_KEYS}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}, q {q.dtype}; they must be equal")
    if k.shape != q.shape:
        raise ValueError(f"{NAME}: k is {tuple(k.shape)}; it must be {tuple(q.shape)}, as q")
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2] or 0 in v.shape[2:]:
        raise ValueError(
            f"{NAME}: v is {tuple(v.shape)}; it must be ({q.shape[0]}, {q.shape[1]}, HV, V), HV a multiple of the "
            f"{q.shape[2]} heads of q"
        )
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            raise ValueError(f"{NAME}: {name} is {tuple(x.shape)}; it must be {tuple(v.shape[:3])}, a number a head")
        if x.dtype not in GATES:
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}; it must be {' or '.join(map(str, GATES))}")
    check_sequences(NAME, q, starts, state, (v.shape[2], q.shape[-1], v.shape[-1]))


def check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, starts: Tensor | None
) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(NAME, name, x, HALF_TYPES, "q", q)
    check_shapes(q, k, v, g, beta, state, starts)
    check_beside(NAME, q, g=g, beta=beta, initial_state=state, cu_seqlens=starts)


def are_taken(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> bool:
    """Do the kernels take these operands, which fit together?"""
    fits = 1 <= q.shape[-1] <= MOST_KEYS and q.shape[0] <= MOST_SEQUENCES and q.dtype == k.dtype == v.dtype
    half = fits and takes(HALF_TYPES, q, k, v, needs_tma=True)
    return half and takes(GATES, q, g, beta, state)
