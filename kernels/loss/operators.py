"""Softmax and cross entropy as torch sees them: operators of torch.library, and autograd functions for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    call,
    check_no_tangent,
    describes,
    have_memory,
    is_plain,
    refusing,
    register,
    vmap_by_loop,
)
from tritonkittens.kernels.loss.call_plan import (
    Options,
    run_cross_entropy,
    run_cross_entropy_backward,
    run_softmax,
    run_softmax_backward,
)
from tritonkittens.kernels.loss.checks import check_rows, check_target

# ---------------------------------------------------------------- softmax


@torch.library.custom_op("tritonkittens::softmax", mutates_args=())
def softmax_operator(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The operator behind `softmax`."""
    return run_softmax(x, out_dtype)


@describes(softmax_operator)
def _(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    check_rows("softmax", "x", x)
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


@torch.library.custom_op("tritonkittens::softmax_backward", mutates_args=())
def softmax_backward_operator(dy: Tensor, y: Tensor, x_dtype: torch.dtype) -> Tensor:
    """The gradient of x, of this dtype, from that of y = softmax(x)."""
    return run_softmax_backward(dy, y, x_dtype)


@describes(softmax_backward_operator)
def _(dy: Tensor, y: Tensor, x_dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=x_dtype)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.x_dtype = inputs[0].dtype


def _softmax_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    check_no_tangent("softmax")
    (y,) = ctx.saved_tensors
    if not torch.is_grad_enabled() and is_plain(dy, y) and have_memory(dy, y):
        return run_softmax_backward(dy, y, ctx.x_dtype), None
    return call("softmax_backward", dy, y, ctx.x_dtype), None


class SoftmaxFunction(torch.autograd.Function):
    """A softmax of a checked operand in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = run_softmax(*inputs)
        _save_softmax(ctx, inputs, output)
        return output

    backward = staticmethod(_softmax_gradient)


# ---------------------------------------------------------------- cross entropy


def _absent(x: Tensor | None, like: Tensor) -> Tensor:
    """Return a result of an operator, which is a tensor: an empty one for None."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


@torch.library.custom_op("tritonkittens::cross_entropy", mutates_args=())
def cross_entropy_operator(
    input: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    lse_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator behind `cross_entropy`; returns the loss, log-sum-exps of the rows, and for a mean the number of
    rows that are not ignored, else an empty tensor."""
    options = Options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, lse_wanted)
    loss, lse, count = run_cross_entropy(input, target, options)
    return loss, lse, _absent(count, input)


@describes(cross_entropy_operator)
def _(input: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(*args)
    check_rows("cross_entropy", "input", input)
    check_target("cross_entropy", target, tuple(input.shape[:-1]), input.device, "input")
    rows, fp32 = target.shape, torch.float32
    return (
        input.new_empty(rows if options.reduction == "none" else (), dtype=fp32),
        input.new_empty(rows, dtype=fp32),
        input.new_empty(() if options.reduction == "mean" else 0, dtype=fp32),
    )


@torch.library.custom_op("tritonkittens::cross_entropy_backward", mutates_args=())
def cross_entropy_backward_operator(
    dloss: Tensor,
    dlse: Tensor | None,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    count: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    lse_wanted: bool,
) -> Tensor:
    """The gradient of the logits, from those of the loss and of the log-sum-exps."""
    options = Options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, lse_wanted)
    return run_cross_entropy_backward(dloss, dlse, input, target, lse, count, options)


@describes(cross_entropy_backward_operator)
def _(dloss: Tensor, dlse: Tensor | None, input: Tensor, *args: Any) -> Tensor:
    return input.new_empty(input.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (input, target), options = inputs[:2], Options(*inputs[2:8])
    _, lse, count = output
    ctx.options, ctx.inplace = options, False
    ctx.save_for_backward(input, target, lse, count if options.reduction == "mean" else None)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dloss: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    check_no_tangent("cross_entropy")
    input, target, lse, count = ctx.saved_tensors
    nothing = [None] * (1 + len(Options._fields))
    if dloss is None and dlse is None:
        return None, *nothing
    if dloss is None:
        dloss = torch.zeros_like(lse if ctx.options.reduction == "none" else lse.sum())
    given = (dloss, dlse if ctx.options.lse_wanted else None, input, target, lse, count)
    if not torch.is_grad_enabled() and is_plain(*given) and have_memory(*given):
        return run_cross_entropy_backward(*given, ctx.options, ctx.inplace), *nothing
    return call("cross_entropy_backward", *given, *ctx.options), *nothing


class CrossEntropyFunction(torch.autograd.Function):
    """A cross entropy of checked operands in eager mode. Arguments are those of the operator, and whether the gradient
    may be written over the logits; results are the loss and log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, inplace: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        losses = run_cross_entropy(inputs[0], inputs[1], Options(*inputs[2:]))
        _save(ctx, inputs, losses)
        ctx.inplace = inplace
        return losses.loss, losses.lse

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_gradient(ctx, dloss, dlse)


def _second(name: str, advice: str) -> Any:
    return refusing(f"{name} has no second derivative; use torch's {advice}")


register(softmax_operator, vmap_by_loop, _softmax_gradient, _save_softmax)
register(softmax_backward_operator, vmap_by_loop, _second("softmax_backward", "softmax"))
register(cross_entropy_operator, vmap_by_loop, _gradient, _save)
register(cross_entropy_backward_operator, vmap_by_loop, _second("cross_entropy_backward", "cross entropy"))
