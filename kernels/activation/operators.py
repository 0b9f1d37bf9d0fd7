"""Gated activations as torch sees them: operators of torch.library, and an autograd function for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    announce_write,
    call,
    check_no_tangent,
    describes,
    have_memory,
    is_plain,
    refusing,
    register,
    vmap_by_loop,
)
from tritonkittens.kernels.activation.call_plan import Options, run_backward, run_forward
from tritonkittens.kernels.activation.checks import NAMES, check_operands


@torch.library.custom_op("tritonkittens::gated_activation", mutates_args=())
def gated_operator(a: Tensor, b: Tensor | None, kind: str, interleaved: bool) -> Tensor:
    """The operator behind `swiglu` and `geglu`. kind: "silu", "gelu" or "gelu_tanh"."""
    return run_forward(a, b, Options(kind, interleaved))


@describes(gated_operator)
def _(a: Tensor, b: Tensor | None, kind: str, interleaved: bool) -> Tensor:
    check_operands(a, b, kind, interleaved)
    return a.new_empty(*a.shape[:-1], a.shape[-1] // (2 if b is None else 1))


@torch.library.custom_op("tritonkittens::gated_activation_backward", mutates_args=())
def backward_operator(dy: Tensor, a: Tensor, b: Tensor | None, kind: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gradients of a and b; an empty tensor where b is left out."""
    found = run_backward(dy, a, b, Options(kind, interleaved))
    return found[0], a.new_empty(0) if b is None else found[1]


@describes(backward_operator)
def _(dy: Tensor, a: Tensor, b: Tensor | None, kind: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(0) if b is None else a.new_empty(a.shape)


# ---------------------------------------------------------------- gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor, inplace: bool = False) -> None:
    a, b, *options = inputs
    ctx.inplace = inplace
    ctx.options = Options(*options)
    ctx.save_for_backward(a, b)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    check_no_tangent(NAMES[ctx.options.kind])
    if dy is None:
        return None, None, None, None
    a, b = ctx.saved_tensors
    if not torch.is_grad_enabled() and is_plain(dy, a, b) and have_memory(dy, a, b):
        found: Any = run_backward(dy, a, b, ctx.options, ctx.inplace)
        for x in found if ctx.inplace else ():
            announce_write(x)  # another backward that saved it, this one the second time too, then raises
    else:
        found = call("gated_activation_backward", dy, a, b, *ctx.options)
    return found[0], None if b is None else found[1], None, None


class GatedFunction(torch.autograd.Function):
    """A gated activation of checked operands in eager mode; arguments and result as of the operator, and whether
    gradients are written over the operands."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, kind: str, interleaved: bool, inplace: bool) -> Tensor:
        output = run_forward(a, b, Options(kind, interleaved))
        _save(ctx, (a, b, kind, interleaved), output, inplace)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        return *_gradients(ctx, dy), None


register(gated_operator, vmap_by_loop, _gradients, _save)
register(
    backward_operator,
    vmap_by_loop,
    refusing("gated_activation_backward has no second derivative; use torch's activations"),
)
