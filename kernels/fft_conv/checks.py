"""What FFT convolution takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor
from tritonkittens.kernels.fft_conv.config import LONGEST, SHORTEST, SIDE, filter_dtype

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


def check_length(n: int, causal: bool) -> None:
    """Raise ValueError for a transform of another length than the kernels have."""
    if n & (n - 1) or not SHORTEST <= n <= LONGEST:
        what = "the sum of the lengths of signal and filter is" if causal else "the length of u is"
        kind = f"at most {LONGEST}" if causal else f"a power of two from {SHORTEST} to {LONGEST}"
        raise ValueError(f"{NAME}: {what} {n}{' (up to a power of two)' if causal else ''}; it must be {kind}")


def check_shapes(u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, n: int) -> None:
    """Raise TypeError or ValueError for operands that do not fit together, of transforms of `n` numbers."""
    if u.ndim != 3:
        raise ValueError(f"{NAME}: u is {tuple(u.shape)}; it must be (B, H, L)")
    for name, x in (("pre_gate", pre_gate), ("post_gate", post_gate)):
        if x is not None and x.shape != u.shape:
            raise ValueError(f"{NAME}: {name} is {tuple(x.shape)}; it must be {tuple(u.shape)}, as u")
        if x is not None and x.dtype != u.dtype:
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}, u {u.dtype}; they must be equal")
    heads = u.shape[1]
    if is_spectrum(k):
        if tuple(k.shape) != (2, heads, n // SIDE, SIDE):
            raise ValueError(
                f"{NAME}: k is a spectrum {tuple(k.shape)}; for u {tuple(u.shape)} it must be "
                f"{(2, heads, n // SIDE, SIDE)}: fft_conv_filter(k, length, causal=…)"
            )
        if k.dtype != filter_dtype(u.dtype):
            raise TypeError(f"{NAME}: the spectrum k has dtype {k.dtype}; for u of {u.dtype} it must be "
                            f"{filter_dtype(u.dtype)}")  # fmt: skip
    elif k.ndim != 2 or k.shape[0] != heads or not 1 <= k.shape[1] <= n:
        raise ValueError(f"{NAME}: k is {tuple(k.shape)}; it must be ({heads}, Lk), Lk from 1 to {n}")
    elif k.dtype not in FILTERS:
        raise TypeError(f"{NAME}: k has dtype {k.dtype}; it must be {' or '.join(map(str, FILTERS))}")


def check(u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, n: int) -> None:
    """Raise TypeError or ValueError for operands that the kernels do not take."""
    check_tensor(NAME, "u", u, HALF_TYPES, "u", u)
    check_shapes(u, k, pre_gate, post_gate, n)
    for name, x in (("k", k), ("pre_gate", pre_gate), ("post_gate", post_gate)):
        if x is not None and x.device != u.device:
            raise ValueError(f"{NAME}: {name} is on {x.device}, u on {u.device}; all tensors must be on one device")
