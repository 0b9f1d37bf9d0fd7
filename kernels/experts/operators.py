"""Moves of rows between tokens and experts as torch sees them: operators of torch.library, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels.experts.call_plan import run_combine, run_combine_backward, run_gather


@torch.library.custom_op("tritonkittens::gather_tokens", mutates_args=())
def gather_operator(x: Tensor, choices: Tensor, ends: Tensor, places: Tensor) -> Tensor:
    """Rows of x by expert, zeros for choices whose expert is elsewhere."""
    return run_gather(x, choices, ends, places)


@describes(gather_operator)
def _(x: Tensor, choices: Tensor, ends: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(choices.shape[0], x.shape[1])


@torch.library.custom_op("tritonkittens::combine_tokens", mutates_args=())
def combine_operator(y: Tensor, weights: Tensor | None, choices: Tensor, ends: Tensor, places: Tensor) -> Tensor:
    """For each token the sum of weights · rows of y over its choices; the sum of rows without weights."""
    return run_combine(y, weights, places)


@describes(combine_operator)
def _(y: Tensor, weights: Tensor | None, choices: Tensor, ends: Tensor, places: Tensor) -> Tensor:
    return y.new_empty(places.shape[0], y.shape[1])


@torch.library.custom_op("tritonkittens::combine_tokens_backward", mutates_args=())
def backward_operator(dout: Tensor, y: Tensor, weights: Tensor, choices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y and weights."""
    dy, dw = run_combine_backward(dout, y, weights, choices, ends)
    return dy, dw


@describes(backward_operator)
def _(dout: Tensor, y: Tensor, weights: Tensor, choices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


# ---------------------------------------------------------------- gradients


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gather_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    check_no_tangent("gather_tokens")
    return call("combine_tokens", dy, None, *ctx.saved_tensors), None, None, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_gradients(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    check_no_tangent("combine_tokens")
    y, weights, choices, ends, places = ctx.saved_tensors
    if weights is None:
        return call("gather_tokens", dout, choices, ends, places), None, None, None, None
    dy, dw = call("combine_tokens_backward", dout, y, weights, choices, ends)
    return dy, dw, None, None, None


register(gather_operator, vmap_by_loop, _gather_gradients, _save_gather)
register(combine_operator, vmap_by_loop, _combine_gradients, _save_combine)
register(
    backward_operator,
    vmap_by_loop,
    refusing("combine_tokens_backward has no second derivative; weigh and add the rows in torch"),
)
