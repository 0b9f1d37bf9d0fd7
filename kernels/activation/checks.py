"""What the gated activations refuse."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._tensors import check_tensor
from tritonkittens.kernels.activation.config import INPUTS

NAMES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu"}  # public functions by activation


def check_options(approximate: str) -> None:
    """Raise ValueError for a form of GELU that does not exist."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: approximate={approximate!r}; it must be 'none' or 'tanh'")


def check_operands(a: Tensor, b: Tensor | None, kind: str, interleaved: bool) -> None:
    """Raise TypeError or ValueError for operands that do not fit each other."""
    name = NAMES[kind]
    if a.dtype not in INPUTS:
        raise TypeError(f"{name}: a has dtype {a.dtype}; it must be {' or '.join(map(str, INPUTS))}")
    if a.ndim == 0:
        raise ValueError(f"{name}: a has shape (); it must have a dimension at least")
    if b is None:
        if a.shape[-1] % 2:
            raise ValueError(
                f"{name}: a has shape {tuple(a.shape)}; without b its last dimension must be even, the columns of both"
            )
        return
    if interleaved:
        raise ValueError(f"{name}: interleaved with b; columns alternate in one tensor")
    if b.device != a.device:
        raise ValueError(f"{name}: b is on {b.device}, a on {a.device}; all tensors must be on one device")
    if b.dtype != a.dtype:
        raise TypeError(f"{name}: b has dtype {b.dtype}, a {a.dtype}; they must be equal")
    if b.shape != a.shape:
        raise ValueError(f"{name}: b has shape {tuple(b.shape)}; it must be {tuple(a.shape)}, that of a")


def check_reachable(a: Tensor, kind: str) -> None:
    """Raise ValueError for a tensor that no kernel reaches."""
    check_tensor(NAMES[kind], "a", a, INPUTS, "a", a)
