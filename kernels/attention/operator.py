"""`attention` for torch.compile and for gradients: an operator of torch.library, and a plain autograd function, which costs an eager call half as much."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonkittens.kernels.attention.decoding import attention_decode
from tritonkittens.kernels.attention.product import Scores, check, empty_like, run_backward, run_forward


@torch.library.custom_op("tritonkittens::attention", mutates_args=())
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, left: int, right: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log-sum-exp) of `attention`; `left` and `right` as in `Scores`; `deterministic` is for the gradients."""
    check(q, k, v)
    return _computed(q, k, v, Scores(scale, softcap, left, right))


def _computed(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    out = empty_like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run_forward(q, k, v, out, lse, scores)
    return out, lse


@attention_operator.register_fake
def _(q, k, v, scale, softcap, left, right, deterministic):  # type: ignore[no-untyped-def]
    return empty_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tritonkittens::attention_backward", mutates_args=())
def backward_operator(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float | None, left: int,
    right: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dQ, dK, dV) for the gradients of the output and, where given, of the log-sum-exp."""
    return run_backward(grad, grad_lse, q, k, v, out, lse, Scores(scale, softcap, left, right), deterministic)


@backward_operator.register_fake
def _(grad, grad_lse, q, k, v, out, lse, scale, softcap, left, right, deterministic):  # type: ignore[no-untyped-def]
    return tuple(empty_like(x, x.shape[3]) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *scores = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.scores = scores
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple:
    q, k, v, out, lse = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    gradients = torch.ops.tritonkittens.attention_backward(grad, grad_lse, q, k, v, out, lse, *ctx.scores)
    return *gradients, *(None for _ in ctx.scores)


attention_operator.register_autograd(_backward, setup_context=_save)


class AttentionFunction(torch.autograd.Function):
    """`attention` of operands that were checked, outside of traces and transforms: (output, log-sum-exp)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores, deterministic: bool) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out, lse = _computed(q, k, v, scores)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scores, ctx.deterministic = scores, deterministic
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        return *run_backward(grad, grad_lse, q, k, v, out, lse, ctx.scores, ctx.deterministic), None, None


@torch.library.custom_op("tritonkittens::attention_decode", mutates_args=())
def decode_operator(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, starts: Tensor | None, causal: bool, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The output of `attention_decode`."""
    return attention_decode(q, k, v, lengths=lengths, starts=starts, causal=causal, scale=scale, softcap=softcap)  # type: ignore[return-value]


@decode_operator.register_fake
def _(q, k, v, lengths, starts, causal, scale, softcap):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], v.shape[3])
