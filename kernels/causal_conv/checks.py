"""What a causal convolution takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors, takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_beside, check_sequences
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import check_tensor

NAME = "causal_conv1d"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 4  # taps


def check_kinds(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, starts: Tensor | None) -> None:
    """Raise TypeError for what is no tensor, or one of several devices."""
    check_tensors(NAME, x=x, weight=weight)
    check_tensors(NAME, optional=True, bias=bias, initial_states=states, cu_seqlens=starts)
    if is_distributed(type(x)):
        raise TypeError(f"{NAME}: x is a DTensor; give its shard, x.to_local()")


def check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, starts: Tensor | None) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    if x.ndim != 3:
        raise ValueError(f"{NAME}: x is {tuple(x.shape)}; it must be (B, C, L)")
    channels = x.shape[1]
    if weight.ndim != 2 or weight.shape[0] != channels or not 1 <= weight.shape[1] <= WIDEST:
        raise ValueError(f"{NAME}: weight is {tuple(weight.shape)}; it must be ({channels}, W), W from 1 to {WIDEST}")
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"{NAME}: bias is {tuple(bias.shape)}; it must be {(channels,)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype not in DTYPES:
            raise TypeError(f"{NAME}: {name} has dtype {t.dtype}; it must be {' or '.join(map(str, DTYPES))}")
    check_sequences(NAME, x, starts, None, (), ("x", "initial_states"))
    if states is not None:
        sequences = x.shape[0] if starts is None else starts.shape[0] - 1
        if tuple(states.shape) != (wanted := (sequences, channels, weight.shape[1] - 1)):
            raise ValueError(f"{NAME}: initial_states is {tuple(states.shape)}; it must be {wanted}")
        if states.dtype != x.dtype:
            raise TypeError(f"{NAME}: initial_states has dtype {states.dtype}, x {x.dtype}; they must be equal")


def check(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, starts: Tensor | None) -> None:
    """Raise TypeError or ValueError for operands that the kernel does not take."""
    check_tensor(NAME, "x", x, DTYPES, "x", x)
    check_shapes(x, weight, bias, states, starts)
    check_beside(NAME, x, "x", weight=weight, bias=bias, initial_states=states, cu_seqlens=starts)


def are_taken(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None) -> bool:
    """Does the kernel take these operands, which fit together?"""
    fits = 1 <= weight.shape[-1] <= WIDEST and x.shape[0] <= MOST_SEQUENCES
    alike = states is None or states.dtype == x.dtype
    return fits and alike and takes(DTYPES, x, weight, bias, states)
