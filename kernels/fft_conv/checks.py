"""What FFT convolution takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor
from tritonkittens.kernels.fft_conv.config import (
    LONGEST,
    NARROW,
    SHORTEST,
    SIDE,
    TILE,
    filter_dtype,
    is_length,
    transform_length,
)

NAME = "fft_conv"
FILTERS = (torch.float32, torch.bfloat16, torch.float16)


def is_spectrum(k: Tensor) -> bool:
    """Is it the result of `fft_conv_filter`?"""
    return k.ndim == 4


def check_kinds(u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None) -> None:
    """Raise TypeError for what is no tensor, or one of several devices."""
    check_tensors(NAME, u=u, k=k)
    check_tensors(NAME, optional=True, pre_gate=pre_gate, post_gate=post_gate)
    for name, x in (("u", u), ("k", k)):
        if is_distributed(type(x)):
            raise TypeError(f"{NAME}: {name} is a DTensor; give its shard, {name}.to_local()")


def length_of(u: Tensor, k: Tensor, causal: bool) -> int:
    """The numbers of a transform for such operands."""
    return k.shape[2] * k.shape[3] if is_spectrum(k) else transform_length(u.shape[-1], causal)


def check_length(length: int, causal: bool) -> None:
    """Raise ValueError for signals of a length that the kernels do not have."""
    if not is_length(transform_length(length, causal)):
        others = (
            f"a power of two from {SHORTEST} to {LONGEST}, or from {TILE} to {SIDE * TILE} a multiple of {TILE} or of "
            "1/16 of the next power of two"
        )
        wanted = f"at most {LONGEST}" if causal else others
        raise ValueError(f"{NAME}: u has length {length}; it must be {wanted}")


def check_shapes(u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, causal: bool) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    if u.ndim != 3:
        raise ValueError(f"{NAME}: u is {tuple(u.shape)}; it must be (B, H, L)")
    for name, x in (("pre_gate", pre_gate), ("post_gate", post_gate)):
        if x is not None and x.shape != u.shape:
            raise ValueError(f"{NAME}: {name} is {tuple(x.shape)}; it must be {tuple(u.shape)}, as u")
        if x is not None and x.dtype != u.dtype:
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}, u {u.dtype}; they must be equal")
    if is_spectrum(k):
        _check_spectrum(u, k, causal)
        return
    _, heads, length = u.shape
    if k.ndim != 2 or k.shape[0] != heads or k.shape[1] == 0 or not (causal or k.shape[1] <= length):
        most = "" if causal else f", Lk from 1 to {length}"
        raise ValueError(f"{NAME}: k is {tuple(k.shape)}; it must be ({heads}, Lk){most}")
    if k.dtype not in FILTERS:
        raise TypeError(f"{NAME}: k has dtype {k.dtype}; it must be {' or '.join(map(str, FILTERS))}")


def _check_spectrum(u: Tensor, k: Tensor, causal: bool) -> None:
    _, heads, length = u.shape
    *_, count, width = k.shape
    needed, n = NARROW if causal else SIDE, count * width
    if not causal and width == NARROW or causal and width == SIDE:
        made = f"k is a spectrum made with causal={not causal}"
        raise ValueError(f"{NAME}: {made}; this call has causal={causal}")
    if tuple(k.shape) != (2, heads, count, needed):
        shape = f"(2, {heads}, N / {needed}, {needed})"
        raise ValueError(f"{NAME}: the spectrum k is {tuple(k.shape)}; it must be {shape}")
    if length > n or (length < n and not causal):
        what = "at most" if causal else "just as"
        raise ValueError(f"{NAME}: k is a spectrum of {n} numbers; u {tuple(u.shape)} must be {what} long")
    if k.dtype != filter_dtype(u.dtype):
        wanted = f"for u of {u.dtype} it must be {filter_dtype(u.dtype)}"
        raise TypeError(f"{NAME}: the spectrum k has dtype {k.dtype}; {wanted}")


def check(u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, causal: bool) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    check_tensor(NAME, "u", u, HALF_TYPES, "u", u)
    check_shapes(u, k, pre_gate, post_gate, causal)
    check_length(u.shape[-1], causal)
    if not is_length(n := length_of(u, k, causal)):
        raise ValueError(f"{NAME}: k is a spectrum of {n} numbers, which no call of {NAME}_filter makes")
    for name, x in (("k", k), ("pre_gate", pre_gate), ("post_gate", post_gate)):
        if x is not None and x.device != u.device:
            raise ValueError(f"{NAME}: {name} is on {x.device}, u on {u.device}; all tensors must be on one device")
