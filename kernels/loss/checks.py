"""What softmax and the losses refuse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor
from tritonkittens.kernels.loss.config import INPUTS, TARGETS, WIDEST

REDUCTIONS = ("mean", "sum", "none")


def check_dtype(name: str, argument: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = INPUTS) -> None:
    """Raise TypeError for a tensor of another dtype."""
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: {argument} has dtype {x.dtype}; it must be {' or '.join(map(str, dtypes))}")


def check_rows(name: str, argument: str, x: Tensor) -> None:
    """Raise TypeError or ValueError for what are no rows of 1 to WIDEST numbers."""
    check_dtype(name, argument, x)
    if x.ndim == 0 or not 1 <= x.shape[-1] <= WIDEST:
        raise ValueError(
            f"{name}: {argument} has shape {tuple(x.shape)}; its last dimension must have 1 to {WIDEST} elements"
        )


def check_target(name: str, target: Tensor, shape: tuple[int, ...], device: torch.device, first: str) -> None:
    """Raise TypeError or ValueError for targets that are no index for each row of the operand `first`."""
    check_dtype(name, "target", target, TARGETS)
    if tuple(target.shape) != shape:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}; it must be {shape}, an index for each row of {first}"
        )
    if target.device != device:
        raise ValueError(
            f"{name}: target is on {target.device}, {first} on {device}; all tensors must be on one device"
        )


def check_linear(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Raise TypeError or ValueError for operands of `linear_cross_entropy` that do not fit together."""
    name = "linear_cross_entropy"
    check_dtype(name, "input", input, HALF_TYPES)
    if input.ndim == 0 or input.shape[-1] == 0:
        raise ValueError(f"{name}: input has shape {tuple(input.shape)}; it must be (…, features), with a feature")
    features = input.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != features or not 1 <= weight.shape[0] <= WIDEST:
        raise ValueError(
            f"{name}: linear_weight has shape {tuple(weight.shape)}; it must be (classes, {features}), of 1 "
            f"to {WIDEST} classes"
        )
    if bias is not None and tuple(bias.shape) != (len(weight),):
        raise ValueError(f"{name}: linear_bias has shape {tuple(bias.shape)}; it must be ({len(weight)},)")
    for argument, t in (("linear_weight", weight), ("linear_bias", bias)):
        if t is not None and t.dtype != input.dtype:
            raise TypeError(f"{name}: {argument} has dtype {t.dtype}, input {input.dtype}; they must be equal")
        if t is not None and t.device != input.device:
            raise ValueError(
                f"{name}: {argument} is on {t.device}, input on {input.device}; all tensors must be on one device"
            )
    check_target(name, target, tuple(input.shape[:-1]), input.device, "input")


def check_options(name: str, reduction: str, label_smoothing: float, softcap: float | None) -> None:
    """Raise ValueError for an option that does not exist."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction={reduction!r}; it must be {' or '.join(map(repr, REDUCTIONS))}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing={label_smoothing!r}; it must be in [0, 1]")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap={softcap!r}; it must be positive and finite, or None for none")


def check_in_range(name: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise IndexError for a target that is neither a class nor `ignore_index`. It waits for the GPU."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise IndexError(
            f"{name}: target {int(target[wrong][0])} is neither in [0, {classes}) nor ignore_index={ignore_index}"
        )


def check_reachable(name: str, argument: str, x: Tensor) -> None:
    """Raise ValueError for a tensor that no kernel reaches."""
    check_tensor(name, argument, x, INPUTS, argument, x)
