"""`causal_conv1d` as torch sees it: an operator of torch.library, one for its gradients, and their launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import by_fields, most_of, sequences_of
from tritonkittens.kernels.causal_conv.checks import NAME, Operands, check, check_shapes
from tritonkittens.kernels.causal_conv.device.conv import causal_conv, causal_conv_gradients

ROWS, CHANNELS, SPAN = 16, 512, 256  # rows and channels of a block, rows of which a program sums gradients


def _launch(
    kernel: Any, given: Operands, silu: bool, read: list[Tensor], written: list[Tensor], blocks: int, *numbers: int
) -> None:
    """Launch a kernel on tensors that it reads before x and writes, whose first has strides."""
    x, weight, bias, states, starts = given
    (batches, channels, rows), home, sequences = x.shape, written[0], sequences_of(x, starts)
    ends = x if starts is None else starts[1:].contiguous()
    tensors = (*read, x, weight, x if bias is None else bias.contiguous(), x if states is None else states, ends)
    of_states = (0, 0, 0) if states is None else states.stride()
    strides = (t for pair in (*(t.stride() for t in read), x.stride(), home.stride()) for t in pair)
    has = (weight.shape[1], bias is not None, states is not None, starts is not None, silu)
    all_numbers = (rows, channels, sequences, *strides, *weight.stride(), *of_states, *numbers)
    constants = (*has, most_of(sequences), ROWS, CHANNELS)
    grid = (blocks, -(-channels // CHANNELS), batches)
    kernel.bind(grid, *tensors, *written, *all_numbers, *constants)(*tensors, *written)


def run(given: Operands, silu: bool) -> Tensor:
    """`causal_conv1d` of plain tensors."""
    check(given)
    y = torch.empty_like(given.x)
    if y.numel():
        _launch(causal_conv, given, silu, [], [y], -(-y.shape[2] // ROWS))
    return y


def run_backward(dy: Tensor, given: Operands, silu: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial_states."""
    x, weight, bias, states, _ = given
    (batches, channels, rows), width = x.shape, weight.shape[1]
    dx, spans = torch.empty_like(x), -(-rows // SPAN)
    parts = x.new_empty(batches, spans, width + 1, channels, dtype=torch.float32)
    d_states = None if states is None else states.new_zeros(states.shape)
    if x.numel():
        written = [dx, parts, dx if d_states is None else d_states]
        _launch(causal_conv_gradients, given, silu, [dy], written, spans, SPAN)
    sums = parts.sum((0, 1))
    d_bias = None if bias is None else sums[-1].to(bias.dtype, copy=True)
    return dx, sums[:-1].T.to(weight.dtype).contiguous(), d_bias, d_states


@torch.library.custom_op("tritonkittens::causal_conv1d", mutates_args=())
@by_fields
def causal_conv1d_operator(given: Operands, silu: bool) -> Tensor:
    """The operator behind `causal_conv1d`."""
    return run(given, silu)


@describes(causal_conv1d_operator)
@by_fields
def _(given: Operands, silu: bool) -> Tensor:
    check_shapes(given)
    return torch.empty_like(given.x)


@torch.library.custom_op("tritonkittens::causal_conv1d_backward", mutates_args=())
@by_fields
def backward_operator(given: Operands, dy: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and initial_states, empty where there is no such operand."""
    dx, dw, db, ds = run_backward(dy, given, silu)
    return dx, dw, dx.new_empty(0) if db is None else db, dx.new_empty(0) if ds is None else ds


@describes(backward_operator)
@by_fields
def _(given: Operands, dy: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias, states, _ = given
    beside = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (bias, states))
    return torch.empty_like(x), weight.new_empty(weight.shape), *beside


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    check_no_tangent(NAME)
    given = Operands(*ctx.saved_tensors)
    if dy is None:
        return (None,) * 6
    found = call(f"{NAME}_backward", *given, dy, ctx.silu)
    return *(None if t is None else d for t, d in zip(given[:4], found, strict=True)), None, None


register(causal_conv1d_operator, vmap_by_loop, _backward, _save)
register(backward_operator, vmap_by_loop, refusing(f"{NAME} has no second derivative; use {NAME}_torch"))
