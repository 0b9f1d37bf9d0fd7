"""What a causal convolution takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tritonkittens.kernels._dispatch import takes
from tritonkittens.kernels._sequences import MOST_SEQUENCES, check_float, check_sequences, check_taken, sequences_of
from tritonkittens.kernels._tensors import FLOATS

NAME = "causal_conv1d"
WIDEST = 4  # taps


class Operands(NamedTuple):
    """The tensors of a call, as `causal_conv1d` names them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    initial_states: Tensor | None = None
    cu_seqlens: Tensor | None = None


def check_shapes(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that do not fit together."""
    x, weight, bias, states, starts = given
    if x.ndim != 3:
        raise ValueError(f"{NAME}: x is {tuple(x.shape)}; it must be (B, C, L)")
    channels = x.shape[1]
    if weight.ndim != 2 or weight.shape[0] != channels or not 1 <= weight.shape[1] <= WIDEST:
        raise ValueError(f"{NAME}: weight is {tuple(weight.shape)}; it must be ({channels}, W), W from 1 to {WIDEST}")
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"{NAME}: bias is {tuple(bias.shape)}; it must be {(channels,)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            check_float(NAME, name, t)
    check_sequences(NAME, x, starts, None, (), ("x", "initial_states"))
    if states is not None:
        if tuple(states.shape) != (wanted := (sequences_of(x, starts), channels, weight.shape[1] - 1)):
            raise ValueError(f"{NAME}: initial_states is {tuple(states.shape)}; it must be {wanted}")
        if states.dtype != x.dtype:
            raise TypeError(f"{NAME}: initial_states has dtype {states.dtype}, x {x.dtype}; they must be equal")


def check(given: Operands) -> None:
    """Raise TypeError or ValueError for operands that the kernel does not take."""
    check_taken(NAME, given, FLOATS, ("x",))
    check_shapes(given)


def are_taken(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None) -> bool:
    """Does the kernel take these operands, which fit together?"""
    fits = 1 <= weight.shape[-1] <= WIDEST and x.shape[0] <= MOST_SEQUENCES
    alike = states is None or states.dtype == x.dtype
    return fits and alike and takes(FLOATS, x, weight, bias, states)
