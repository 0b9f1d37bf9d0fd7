"""`causal_conv1d` as torch sees it: an operator of torch.library, and its launch."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.kernels.causal_conv.checks import NAME, check, check_shapes
from tritonkittens.kernels.causal_conv.device.conv import causal_conv

ROWS, CHANNELS = 64, 64  # of a program


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, starts: Tensor | None, silu: bool
) -> Tensor:
    """`causal_conv1d` of plain tensors."""
    check(x, weight, bias, states, starts)
    y, (batches, channels, rows) = torch.empty_like(x), x.shape
    if not x.numel():
        return y
    ends = x if starts is None else starts[1:].contiguous()
    sequences = batches if starts is None else ends.shape[0]
    tensors = (x, weight, x if bias is None else bias.contiguous(), x if states is None else states, ends, y)
    numbers = (rows, channels, sequences, *x.stride(), *y.stride(), *weight.stride())
    of_states = (0, 0, 0) if states is None else states.stride()
    kinds = (weight.shape[1], bias is not None, states is not None, starts is not None, silu)
    extents = (max(16, power_of_two(sequences)), ROWS, CHANNELS)
    grid = (-(-rows // ROWS), -(-channels // CHANNELS), batches)
    causal_conv.bind(grid, *tensors, *numbers, *of_states, *kinds, *extents)(*tensors)
    return y


@torch.library.custom_op("tritonkittens::causal_conv1d", mutates_args=())
def causal_conv1d_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    """The operator behind `causal_conv1d`."""
    return run(x, weight, bias, initial_states, cu_seqlens, silu)


@describes(causal_conv1d_operator)
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    check_shapes(x, weight, bias, initial_states, cu_seqlens)
    return torch.empty_like(x)


register(
    causal_conv1d_operator, vmap_by_loop, refusing(f"{NAME} has no gradient yet; use {NAME}_torch, or torch.no_grad()")
)
