"""What Hedgehog takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_sequences, check_taken

NAME = "hedgehog_attention"
DIM, MAPPED = 128, 64  # columns of heads, and of a map
MAPS = ("map_q", "map_k")


class Operands(NamedTuple):
    """The tensors of a call, as `hedgehog_attention` names them; its state is kv and z."""

    q: Tensor
    k: Tensor
    v: Tensor
    map_q: Tensor
    map_k: Tensor
    alpha: Tensor
    beta: Tensor
    kv: Tensor | None = None
    z: Tensor | None = None
    cu_seqlens: Tensor | None = None


def check_shapes(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    q = given.q
    if q.ndim != 4 or q.shape[-1] != DIM:
        raise ValueError(f"{NAME}: q is {tuple(q.shape)}; it must be (B, T, H, {DIM})")
    heads = q.shape[2]
    shapes = dict(k=q.shape, v=q.shape, **dict.fromkeys(MAPS, (heads, DIM, MAPPED)), alpha=(heads,), beta=(heads,))
    for name, shape in shapes.items():
        x, dtype = getattr(given, name), torch.float32 if name in ("alpha", "beta") else q.dtype
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{NAME}: {name} is {tuple(x.shape)}; it must be {tuple(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}; it must be {dtype}")
    for i, (name, state) in enumerate((("initial_state[0]", given.kv), ("initial_state[1]", given.z))):
        check_sequences(NAME, q, given.cu_seqlens, state, (heads, DIM, DIM)[: 3 - i], ("q", name))


def check(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that the kernel does not take."""
    check_taken(NAME, given, (torch.bfloat16,), ("q", "k", "v", *MAPS))
    check_shapes(given)


def are_taken(*tensors: Tensor) -> bool:
    """Do the kernels take these rows (B, T, H, 128) and maps (H, 128, 64), which fit together?"""
    rows, maps = ([x for x in tensors if x.ndim == n] for n in (4, 3))
    fits = all(x.shape[-1] == DIM and x.shape[0] <= MOST_SEQUENCES for x in rows)
    fits = fits and all(x.shape[-1] == MAPPED for x in maps)
    return fits and takes((torch.bfloat16,), *tensors, needs_tma=True)
