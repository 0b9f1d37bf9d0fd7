"""A linear layer and cross entropy as torch sees them: operators of torch.library, and an autograd function for eager
calls.

The forward computes the gradients that are wanted, for a gradient of the loss of 1, while it has the logits. The
backward scales them. Without a reduction, and in fp16, the backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tritonkittens.kernels.loss.call_plan import Options
from tritonkittens.kernels.loss.checks import check_linear
from tritonkittens.kernels.loss.linear import (
    Wanted,
    forward_differentiates,
    run_linear_cross_entropy,
    run_linear_cross_entropy_backward,
    run_scale,
)

TENSORS = 4  # input, weight, target, bias
OPTIONS = len(Options._fields)
NO_SECOND = "linear_cross_entropy_backward has no second derivative; use torch's linear and cross entropy"


def _filled(found: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results of an operator, which are all tensors: an empty one for None."""
    dinput, dweight, dbias = (like.new_empty(0) if t is None else t for t in found)
    return dinput, dweight, dbias


@torch.library.custom_op("tritonkittens::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_operator(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    lse_wanted: bool,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator behind `linear_cross_entropy`; returns the loss, and the gradients that are wanted, of a loss whose
    own gradient is 1, else empty tensors."""
    options = Options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, lse_wanted)
    wanted = Wanted(input_wanted, weight_wanted, bias_wanted)
    loss, gradients = run_linear_cross_entropy(input, linear_weight, target, linear_bias, options, wanted)
    return loss, *_filled(gradients, input)


@describes(linear_cross_entropy_operator)
def _(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_linear(input, linear_weight, target, linear_bias)
    options, wanted = Options(*args[:OPTIONS]), Wanted(*args[OPTIONS:])
    loss = input.new_empty(target.shape if options.reduction == "none" else (), dtype=torch.float32)
    found = [
        t.new_empty(t.shape) if is_wanted and t is not None and forward_differentiates(options, t.dtype) else None
        for t, is_wanted in zip((input, linear_weight, linear_bias), wanted, strict=True)
    ]
    return loss, *_filled(found, input)


@torch.library.custom_op("tritonkittens::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward_operator(
    dloss: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    lse_wanted: bool,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that are wanted, for any gradient of the loss, else empty tensors."""
    options = Options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, lse_wanted)
    wanted = Wanted(input_wanted, weight_wanted, bias_wanted)
    given = (dloss, input, linear_weight, target, linear_bias)
    return _filled(run_linear_cross_entropy_backward(*given, options, wanted), input)


@describes(linear_cross_entropy_backward_operator)
def _(
    dloss: Tensor, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = Wanted(*args[OPTIONS:])
    operands = (input, linear_weight, linear_bias)
    return _filled(
        [
            t.new_empty(t.shape) if is_wanted and t is not None else None
            for t, is_wanted in zip(operands, wanted, strict=True)
        ],
        input,
    )


# ---------------------------------------------------------------- gradients


def _needed(ctx: Any) -> Wanted:
    return Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])


def _arranged(gradients: Sequence[Tensor | None], arguments: int) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments of an operator."""
    dinput, dweight, dbias = gradients
    return dinput, dweight, None, dbias, *[None] * (arguments - TENSORS)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options, ctx.wanted = Options(*inputs[TENSORS : TENSORS + OPTIONS]), Wanted(*inputs[TENSORS + OPTIONS :])
    computed = forward_differentiates(ctx.options, inputs[0].dtype) and all(
        has or not needs for has, needs in zip(ctx.wanted, _needed(ctx), strict=True)
    )
    ctx.computed = computed
    ctx.save_for_backward(*(output[1:] if computed else inputs[:TENSORS]))


def _gradient(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """In plain torch operations where the forward computed gradients, which torch may trace and batch."""
    check_no_tangent("linear_cross_entropy")
    arguments, needed = TENSORS + OPTIONS + len(Wanted._fields), _needed(ctx)
    if not ctx.computed:
        found = call("linear_cross_entropy_backward", dloss, *ctx.saved_tensors, *ctx.options, *needed)
        return _arranged([t if is_needed else None for t, is_needed in zip(found, needed, strict=True)], arguments)
    scaled = [
        (t.float() * dloss).to(t.dtype) if is_needed else None
        for t, is_needed in zip(ctx.saved_tensors, needed, strict=True)
    ]
    return _arranged(scaled, arguments)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """A linear layer and its loss of checked operands in eager mode; arguments as of the operator, without what is
    wanted."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.options = options = Options(*inputs[TENSORS:])
        input, weight, target, bias = inputs[:TENSORS]
        loss, gradients = run_linear_cross_entropy(input, weight, target, bias, options, _needed(ctx))
        ctx.computed = forward_differentiates(options, input.dtype)
        ctx.save_for_backward(*(gradients if ctx.computed else inputs[:TENSORS]))
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        check_no_tangent("linear_cross_entropy")
        if torch.is_grad_enabled():
            raise NotImplementedError(NO_SECOND)
        arguments, saved, needed = TENSORS + OPTIONS, ctx.saved_tensors, _needed(ctx)
        is_direct = is_plain(dloss, *saved) and have_memory(dloss, *saved)
        if not ctx.computed:
            if is_direct:
                input, weight, target, bias = saved
                given = (dloss, input, weight, target, bias, ctx.options, needed)
                return _arranged(run_linear_cross_entropy_backward(*given), arguments)
            found = call("linear_cross_entropy_backward", dloss, *saved, *ctx.options, *needed)
            return _arranged([t if is_needed else None for t, is_needed in zip(found, needed, strict=True)], arguments)
        if not is_direct:
            return _arranged([None if t is None else (t.float() * dloss).to(t.dtype) for t in saved], arguments)
        if torch._C._autograd._get_current_graph_task_keep_graph():  # another backward scales them, too
            saved = [None if t is None else t.clone() for t in saved]
        return _arranged([None if t is None else run_scale(t, dloss) for t in saved], arguments)


register(linear_cross_entropy_operator, vmap_by_loop, _gradient, _save)
register(linear_cross_entropy_backward_operator, vmap_by_loop, refusing(NO_SECOND))
