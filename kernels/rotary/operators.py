"""Rotary embedding as torch sees it: an operator of torch.library, and autograd functions for eager calls."""

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
from tritonkittens.kernels.rotary.call_plan import Operands, Options, result_like, run_norm_backward, run_rotary
from tritonkittens.kernels.rotary.checks import check_operands

TENSORS = len(Operands._fields)


@torch.library.custom_op("tritonkittens::rotary", mutates_args=())
def rotary_operator(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    seqlen_offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    unsqueeze_dim: int,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The operator behind `rotary`; returns q and k, an empty tensor where k is left out."""
    operands = Operands(q, k, cos, sin, position_ids, seqlen_offsets, cu_seqlens, q_weight, k_weight)
    found = run_rotary(operands, Options(unsqueeze_dim, rotary_dim, interleaved, inverse, eps))
    return found[0], q.new_empty(0) if k is None else found[1]


@describes(rotary_operator)
def _(*args: Any) -> tuple[Tensor, Tensor]:
    operands, options = Operands(*args[:TENSORS]), Options(*args[TENSORS:])
    check_operands(operands, options)
    return result_like(operands.q), operands.q.new_empty(0) if operands.k is None else result_like(operands.k)


@torch.library.custom_op("tritonkittens::rotary_inplace", mutates_args=("q", "k"))
def inplace_operator(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    seqlen_offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    unsqueeze_dim: int,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
    eps: float,
) -> None:
    """`rotary` in the memory of q and k, without gradients."""
    operands = Operands(q, k, cos, sin, position_ids, seqlen_offsets, cu_seqlens, q_weight, k_weight)
    run_rotary(operands, Options(unsqueeze_dim, rotary_dim, interleaved, inverse, eps), inplace=True)


@describes(inplace_operator)
def _(*args: Any) -> None:
    check_operands(Operands(*args[:TENSORS]), Options(*args[TENSORS:]))


@torch.library.custom_op("tritonkittens::rotary_norm_backward", mutates_args=())
def norm_backward_operator(
    dq: Tensor,
    dk: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    seqlen_offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    unsqueeze_dim: int,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rotary` with norms: of q, of k, an empty tensor where it is left out, and of weights, (1 or 2, D).
    dq, dk: gradients of the results."""
    operands = Operands(q, k, cos, sin, position_ids, seqlen_offsets, cu_seqlens, q_weight, k_weight)
    grads = [dq] if dk is None else [dq, dk]
    found = run_norm_backward(grads, operands, Options(unsqueeze_dim, rotary_dim, interleaved, inverse, eps))
    return found[0], q.new_empty(0) if k is None else found[1], found[-1]


@describes(norm_backward_operator)
def _(dq: Tensor, dk: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, weight = args[0], args[1], args[TENSORS - 2]
    weights = weight.new_empty(1 if k is None else 2, weight.shape[0])
    return result_like(q), q.new_empty(0) if k is None else result_like(k), weights


# ---------------------------------------------------------------- gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    operands, ctx.options = Operands(*inputs[:TENSORS]), Options(*inputs[TENSORS:])
    ctx.has_norm = operands.q_weight is not None
    ctx.save_for_backward(*(operands[:2] if ctx.has_norm else (None, None)), *operands[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Gradients of q and k, and of weights. Without norms, they are a rotation by the opposite angles, which has a
    gradient, too."""
    check_no_tangent("rotary")
    needed = [ctx.needs_input_grad[i] or ctx.needs_input_grad[TENSORS - 2 + i] for i in (0, 1)]
    wanted = [i for i, g in enumerate(grads[:2]) if g is not None and needed[i]]
    found: list[Any] = [None] * TENSORS
    if wanted:
        given, weights = _rotated_back(ctx, [grads[i] for i in wanted], wanted)
        for n, i in enumerate(wanted):
            found[i] = given[n]
            if weights is not None and ctx.needs_input_grad[TENSORS - 2 + i]:
                found[TENSORS - 2 + i] = weights[n]
    return *found, *[None] * len(Options._fields)


def _rotated_back(ctx: Any, grads: list[Any], wanted: list[int]) -> tuple[Any, Tensor | None]:
    """Gradients of q, of k, or of both, and of their weights. One alone takes the place of q."""
    saved = Operands(*ctx.saved_tensors)
    pad = [None] * (2 - len(grads))
    direct = not torch.is_grad_enabled() and is_plain(*grads, *saved) and have_memory(*grads, *saved)
    if not ctx.has_norm:
        options = ctx.options._replace(inverse=not ctx.options.inverse)
        operands = Operands(*[*grads, *pad, *saved[2:]])
        return (run_rotary(operands, options) if direct else call("rotary", *operands, *options)), None
    heads, weights = ([saved[first + i] for i in wanted] for first in (0, TENSORS - 2))
    operands = Operands(*[*heads, *pad, *saved[2:-2], *weights, *pad])
    if direct:
        found = run_norm_backward(grads, operands, ctx.options)
    else:
        found = call("rotary_norm_backward", *grads, *pad, *operands, *ctx.options)
    return found, found[-1]


class RotaryFunction(torch.autograd.Function):
    """`rotary` of checked operands in eager mode; arguments as of the operator. Returns q and k, or q alone."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        found = run_rotary(Operands(*inputs[:TENSORS]), Options(*inputs[TENSORS:]))
        _save(ctx, inputs, found)
        return tuple(found) if len(found) > 1 else found[0]

    backward = staticmethod(_gradients)


class RotaryInplaceFunction(torch.autograd.Function):
    """The rotation of one tensor in its memory. autograd takes one tensor at a time where tensors are views."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        run_rotary(Operands(*inputs[:TENSORS]), Options(*inputs[TENSORS:]), inplace=True)
        _save(ctx, inputs, None)
        ctx.mark_dirty(inputs[0])
        return inputs[0]

    backward = staticmethod(_gradients)


def rotate_inplace(operands: Operands, options: Options) -> None:
    """Rotate plain tensors in their memory, without gradients."""
    run_rotary(operands, options, inplace=True)
    for x in operands.heads:
        announce_write(x)


register(rotary_operator, vmap_by_loop, _gradients, _save)
register(
    norm_backward_operator,
    vmap_by_loop,
    refusing("rotary_norm_backward has no second derivative; use torch's operations"),
)
