"""What the scan of Mamba-2 takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_float, check_sequences, check_taken
from tritonkittens.kernels._tensors import FLOATS, HALF_TYPES
from tritonkittens.kernels.linear_attention.config import MOST_KEYS

NAME = "mamba_chunk_scan"


class Operands(NamedTuple):
    """The tensors of a call, as `mamba_chunk_scan` names them."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_states: Tensor | None = None
    cu_seqlens: Tensor | None = None


def _check_shape(name: str, x: Tensor | None, *wanted: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) not in wanted:
        raise ValueError(f"{NAME}: {name} is {tuple(x.shape)}; it must be {' or '.join(map(str, wanted))}")


def check_shapes(given: Operands, dt_limit: tuple[float, float]) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    x, B = given.x, given.B
    if x.ndim != 4 or 0 in x.shape[2:]:
        raise ValueError(f"{NAME}: x is {tuple(x.shape)}; it must be (B, L, H, P)")
    heads = x.shape[2]
    if B.ndim != 4 or B.shape[:2] != x.shape[:2] or not B.shape[2] or heads % B.shape[2]:
        raise ValueError(
            f"{NAME}: B is {tuple(B.shape)}; it must be ({x.shape[0]}, {x.shape[1]}, G, N), G a divisor of {heads}"
        )
    if not 1 <= B.shape[-1] <= MOST_KEYS:
        raise ValueError(f"{NAME}: B is {tuple(B.shape)}; N must be 1 to {MOST_KEYS}")
    _check_shape("dt", given.dt, tuple(x.shape[:3]))
    _check_shape("A", given.A, (heads,))
    _check_shape("C", given.C, tuple(B.shape))
    _check_shape("D", given.D, (heads,), (heads, x.shape[-1]))
    _check_shape("z", given.z, tuple(x.shape))
    _check_shape("dt_bias", given.dt_bias, (heads,))
    for name, t in (("B", B), ("C", given.C), ("z", given.z)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{NAME}: {name} has dtype {t.dtype}, x {x.dtype}; they must be equal")
    if given.A.dtype != torch.float32:
        raise TypeError(f"{NAME}: A has dtype {given.A.dtype}; it must be torch.float32")
    for name, t in (("dt", given.dt), ("D", given.D), ("dt_bias", given.dt_bias)):
        if t is not None:
            check_float(NAME, name, t)
    if not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"{NAME}: dt_limit is {dt_limit}; it must be (least, most), both at least 0")
    of_state = (*x.shape[2:], B.shape[-1])
    check_sequences(NAME, x, given.cu_seqlens, given.initial_states, of_state, ("x", "initial_states"))


def check(given: Operands, dt_limit: tuple[float, float]) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    check_taken(NAME, given, HALF_TYPES, ("x", "B", "C", *(() if given.z is None else ("z",))))
    check_shapes(given, dt_limit)


def are_taken(given: Operands) -> bool:
    """Do the kernels take these operands, which fit together?"""
    x, dt, A, B, C, D, z, dt_bias, states, _ = given
    fits = 1 <= B.shape[-1] <= MOST_KEYS and x.shape[0] <= MOST_SEQUENCES and A.dtype == torch.float32
    alike = x.dtype == B.dtype == C.dtype and (z is None or z.dtype == x.dtype)
    half = alike and takes(HALF_TYPES, x, B, C, z, needs_tma=True)
    return fits and half and takes(FLOATS, x, dt, A, D, dt_bias, states)
