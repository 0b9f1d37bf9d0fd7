"""What the norms refuse."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import check_eps, check_tensor
from tritonkittens.kernels.norm.config import INPUTS, WIDEST


def _check_dtype(name: str, argument: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = INPUTS) -> None:
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: {argument} has dtype {x.dtype}; it must be {' or '.join(map(str, dtypes))}")


def _check_shape(name: str, argument: str, x: Tensor, shape: tuple[int, ...], wanted: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: {argument} has shape {tuple(x.shape)}; it must be {shape}, {wanted}")


def check_options(name: str, eps: float, dropout_p: float, out_dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError for an option that does not exist."""
    check_eps(name, eps)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{name}: dropout_p={dropout_p!r}; it must be in [0, 1)")
    if out_dtype is not None and out_dtype not in INPUTS:
        raise TypeError(f"{name}: out_dtype={out_dtype}; it must be {' or '.join(map(str, INPUTS))}")


def check_operands(name: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise TypeError or ValueError for operands that do not fit x. `others`: by their names in `layer_norm`."""
    _check_dtype(name, "x", x)
    if x.ndim == 0 or not 1 <= x.shape[-1] <= WIDEST:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; its last dimension must have 1 to {WIDEST} elements")
    given = {argument: t for argument, t in others.items() if t is not None}
    params = {argument: t for argument, t in given.items() if argument[:4] in ("weig", "bias")}
    for argument, t in given.items():
        if argument == "seed":
            _check_dtype(name, argument, t, (torch.int64,))
            _check_shape(name, argument, t, (2,), "a seed and an offset")
        elif argument == "rowscale":
            _check_dtype(name, argument, t)
            _check_shape(name, argument, t, tuple(x.shape[:-1]), "a number for each row of x")
        else:
            _check_dtype(name, argument, t)
            if argument in params:
                _check_shape(name, argument, t, (x.shape[-1],), "a number for each column of x")
            else:
                _check_shape(name, argument, t, tuple(x.shape), "that of x")
        if t.device != x.device:
            raise ValueError(f"{name}: {argument} is on {t.device}, x on {x.device}; all tensors must be on one device")
    for argument, t in params.items():
        first = next(iter(params))
        if t.dtype != params[first].dtype:
            raise TypeError(
                f"{name}: {argument} has dtype {t.dtype}, {first} {params[first].dtype}; they must be equal"
            )
    _check_pairs(name, given)


def _check_pairs(name: str, given: dict[str, Tensor]) -> None:
    if "bias1" in given and "weight1" not in given:
        raise ValueError(f"{name}: bias1 without weight1; there is a second result with weight1 only")
    if "x1" in given and "rowscale" in given:
        raise ValueError(f"{name}: x1 and rowscale; rowscale scales x alone, so they go not together")


def check_reachable(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor that no kernel reaches."""
    check_tensor(name, "x", x, INPUTS, "x", x)
