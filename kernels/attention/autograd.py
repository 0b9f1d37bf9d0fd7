"""`attention` for torch.compile and for gradients: an operator of torch.library, and a plain autograd function, which costs an eager call half as much."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    call,
    check_no_tangent,
    have_memory,
    is_plain,
    refusing,
    register,
    second_derivative_of,
    vmap_by_batch,
    vmap_by_loop,
)
from tritonkittens.kernels.attention.call_plan import CallPlan, Scores, check, computed, empty_like
from tritonkittens.kernels.attention.decoding import decode
from tritonkittens.kernels.attention.fp8 import of_fp8
from tritonkittens.kernels.attention.gradients import run_backward


@torch.library.custom_op("tritonkittens::attention", mutates_args=())
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, left: int, right: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log-sum-exp) of `attention`; `left` and `right` as in `Scores`; `deterministic` is for the gradients."""
    check(q, k, v)
    return computed(q, k, v, CallPlan(Scores(scale, softcap, left, right)))


@attention_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, left: int, right: int, deterministic: bool
) -> tuple[Tensor, Tensor]:
    return empty_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tritonkittens::attention_backward", mutates_args=())
def backward_operator(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float | None, left: int,
    right: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dQ, dK, dV) for the gradients of the output and, where given, of the log-sum-exp."""
    return run_backward(grad, grad_lse, q, k, v, out, lse, Scores(scale, softcap, left, right), deterministic)


@backward_operator.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_like(x, x.shape[3]) for x in (q, k, v))


register(backward_operator, vmap_by_batch, second_derivative_of("attention"))


def _save(ctx: Any, q: Tensor, k: Tensor, v: Tensor, output: tuple[Tensor, Tensor], scores: Scores, deterministic: bool) -> None:
    ctx.save_for_backward(q, k, v, *output)
    ctx.scores, ctx.deterministic = scores, deterministic
    ctx.set_materialize_grads(False)


def _save_of_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, softcap, left, right, deterministic = inputs
    _save(ctx, q, k, v, output, Scores(scale, softcap, left, right), deterministic)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    check_no_tangent("attention")
    q, k, v, out, lse = ctx.saved_tensors
    grad, scores = torch.zeros_like(out) if grad is None else grad, ctx.scores
    # With gradients enabled these may be differentiated again, which the operator refuses.
    if not torch.is_grad_enabled() and is_plain(grad, grad_lse, q, k, v) and have_memory(grad, grad_lse):
        return run_backward(grad, grad_lse, q, k, v, out, lse, scores, ctx.deterministic)
    numbers = (scores.scale, scores.softcap, scores.left, scores.right, ctx.deterministic)
    return call("attention_backward", grad, grad_lse, q, k, v, out, lse, *numbers)


def _backward_of_operator(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return *_gradients(ctx, grad, grad_lse), None, None, None, None, None


register(attention_operator, vmap_by_batch, _backward_of_operator, _save_of_operator)


class AttentionFunction(torch.autograd.Function):
    """`attention` of operands that were checked, in eager mode: a call that is known."""

    @staticmethod
    def forward(ctx: Any, known: CallPlan, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> tuple[Tensor, Tensor]:
        output = computed(q, k, v, known)
        _save(ctx, q, k, v, output, known.checked_scores, deterministic)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        dq, dk, dv = _gradients(ctx, grad, grad_lse)
        return None, dq, dk, dv, None


@torch.library.custom_op("tritonkittens::attention_decode", mutates_args=())
def decode_operator(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, starts: Tensor | None, pages: Tensor | None, causal: bool, scale: float | None,
    softcap: float | None, parts: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log-sum-exp) of `attention_decode`."""
    return decode(q, k, v, lengths, starts, pages, causal, scale, softcap, True, parts)


@decode_operator.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    parts: int | None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tritonkittens::attention_fp8", mutates_args=())
def fp8_operator(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, causal: bool, left: int | None,
    right: int | None, scale: float | None, softcap: float | None, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log-sum-exp) of `attention_fp8`; `left` and `right` are its window."""
    return of_fp8(q, k, v, q_scale, k_scale, v_scale, causal, (left, right), scale, softcap, True, out_dtype)


@fp8_operator.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    causal: bool,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=out_dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def _vmap_decode(operator: Any, dims: tuple[int | None, ...], size: int, *args: Any) -> tuple[Any, Any]:
    """Pools of pages have no dimension of sequences."""
    paged = args[5] is not None
    return (vmap_by_loop if paged else vmap_by_batch)(operator, dims, size, *args)


register(decode_operator, _vmap_decode, refusing("attention_decode has no gradient; use attention"))
register(fp8_operator, vmap_by_batch, refusing("attention_fp8 has no gradient; use attention of 16-bit operands"))
