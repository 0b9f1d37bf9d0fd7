"""How a call of `attention` reaches its plan: directly, by an autograd function, or by an operator of torch.library.

Plain tensors that want gradients take an autograd function, which costs half the host time of an operator.
torch.compile, make_fx, vmap and tensor subclasses see the operator, which has the same backward.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tritonkittens.kernels._ahead import followed_by_backward
from tritonkittens.kernels._dispatch import (
    announce_write,
    call,
    check_no_tangent,
    check_tensors,
    describes,
    has_tangent,
    have_memory,
    is_compiling,
    is_forward_mode,
    is_plain,
    overlaps,
    overlaps_within,
    reaches,
    refusing,
    register,
    requires_grad,
    second_derivative_of,
    vmap_by_batch,
    vmap_by_loop,
)
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.attention.backward_plan import run_backward
from tritonkittens.kernels.attention.call_plan import (
    CallPlan,
    Scores,
    compute,
    empty_like,
    run_forward,
    scores_of,
    write_results,
)
from tritonkittens.kernels.attention.checks import (
    check,
    check_max_seqlen,
    check_ranges,
    check_seqlens,
    check_varlen,
    check_window,
)
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.decode_plan import run_decode
from tritonkittens.kernels.attention.fp8_plan import run_fp8
from tritonkittens.kernels.attention.ranges_plan import compute_ranges, compute_ranges_backward
from tritonkittens.kernels.attention.reference import attention_torch
from tritonkittens.kernels.attention.varlen_backward_plan import Operands, run_varlen_backward
from tritonkittens.kernels.attention.varlen_plan import compute_varlen, longest_sequences, run_varlen_forward

Window: TypeAlias = tuple[int | None, int | None]
Results: TypeAlias = Tensor | tuple[Tensor, Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: CallPlan,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Results:
    """`attention` of plain tensors that were checked, by the `plan` of such calls."""
    scores = plan.checked_scores
    if requires_grad(q, k, v):
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        of_new_result = plan if out is None else CallPlan(scores)  # launches are bound to the strides of `out`
        return write_results(AttentionFunction.apply(of_new_result, q, k, v, config, deterministic), out, return_lse)
    if out is not None:
        plan.reaches = plan.reaches or reaches(out, q, k, v)
        if requires_grad(out) or overlaps_within(plan.reaches, out, q, k, v):
            return write_results(compute(q, k, v, CallPlan(scores), config), out, return_lse)
        announce_write(out)
    result = out if out is not None else plan.new_result(q, v)
    lse = plan.new_lse(q) if return_lse else None
    run_forward(q, k, v, result, lse, scores, config, plan if config is None else None)
    return result if lse is None else (result, lse)


def attend_by_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
    deterministic: bool | None,
    out: Tensor | None,
) -> Results:
    """`attention` of tensors that torch traces, batches or fakes; with tangents by torch's own operations."""
    check_tensors("attention", q=q, k=k, v=v)
    check_tensors("attention", optional=True, out=out)
    scores = scores_of(q, scale, softcap, *check_window(causal, window))
    if not is_compiling() and (is_forward_mode() or is_distributed(type(q))):  # the operator sees shards
        check(q, k, v)
    if is_forward_mode():
        with torch.autocast(q.device.type, enabled=False):
            found = attention_torch(
                q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, dtype=torch.float32
            )
        return write_results((found[0].to(q.dtype), found[1]), out, return_lse)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    found = call("attention", q, k, v, scores.scale, scores.softcap, scores.left, scores.right, deterministic)
    return write_results(found, out, return_lse)


@torch.library.custom_op("tritonkittens::attention", mutates_args=())
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, left: int, right: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log-sum-exp) of `attention`; `left` and `right` as in `Scores`; `deterministic`: of the gradients."""
    check(q, k, v)
    return compute(q, k, v, CallPlan(Scores(scale, softcap, left, right)))


@describes(attention_operator)
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, left: int, right: int, deterministic: bool
) -> tuple[Tensor, Tensor]:
    return empty_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tritonkittens::attention_backward", mutates_args=())
def backward_operator(
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
    """(dQ, dK, dV) for the gradients of the output and, where given, of the log-sum-exp."""
    return run_backward(grad, grad_lse, q, k, v, out, lse, Scores(scale, softcap, left, right), deterministic)


@describes(backward_operator)
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
    return empty_like(q, q.shape[3]), empty_like(k, k.shape[3]), empty_like(v, v.shape[3])


register(backward_operator, vmap_by_batch, second_derivative_of("attention"))


def _save(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, output: tuple[Tensor, Tensor], scores: Scores, deterministic: bool
) -> None:
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
    # With gradients enabled these may be differentiated again: the operator raises an error then.
    if not torch.is_grad_enabled() and is_plain(grad, grad_lse, q, k, v) and have_memory(grad, grad_lse):
        return run_backward(grad, grad_lse, q, k, v, out, lse, scores, ctx.deterministic)
    numbers = (scores.scale, scores.softcap, scores.left, scores.right, ctx.deterministic)
    return call("attention_backward", grad, grad_lse, q, k, v, out, lse, *numbers)


def _backward_of_operator(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return *_gradients(ctx, grad, grad_lse), None, None, None, None, None


register(attention_operator, vmap_by_batch, _backward_of_operator, _save_of_operator)


def _output(*args: Any) -> Tensor:
    """The output alone: few backwards have a gradient of the log-sum-exp."""
    return AttentionFunction.apply(*args)[0]


class AttentionFunction(torch.autograd.Function):
    """`attention` of checked operands in eager mode. It costs half the host time of the operator."""

    @staticmethod
    def forward(
        ctx: Any, plan: CallPlan, q: Tensor, k: Tensor, v: Tensor, config: Config | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        if plan.is_new:
            plan.is_new = False
            with followed_by_backward(_output, CallPlan(plan.checked_scores), q, k, v, config, deterministic):
                output = compute(q, k, v, plan, config)
        else:
            output = compute(q, k, v, plan, config)
        _save(ctx, q, k, v, output, plan.checked_scores, deterministic)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        dq, dk, dv = _gradients(ctx, grad, grad_lse)
        return None, dq, dk, dv, None, None


# ---------------------------------------------------------------- packed sequences


def attend_varlen(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scores: Scores,
    longest: tuple[int | None, int | None],
    return_lse: bool,
    deterministic: bool | None,
    out: Tensor | None,
    plain: bool,
) -> Results:
    """`attention_varlen` of (q, k, v, cu_seqlens_q, cu_seqlens_k), checked where they are `plain`.

    `longest`: max_seqlen_q and max_seqlen_k.
    """
    q, k, v, *_ = tensors
    if not plain or requires_grad(q, k, v):
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        numbers = (scores.scale, scores.softcap, scores.left, scores.right, deterministic)
        differentiable = VarlenFunction.apply if plain else functools.partial(call, "attention_varlen")
        return write_results(differentiable(*tensors, *longest, *numbers), out, return_lse)
    if out is not None:
        if requires_grad(out) or overlaps(out, *tensors):
            return write_results(compute_varlen(*tensors, *longest, scores), out, return_lse)
        announce_write(out)
    result = out if out is not None else q.new_empty(*q.shape[:2], v.shape[2])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if return_lse else None
    run_varlen_forward(*tensors, result, lse, longest_sequences(q, k, *longest), scores)
    return result if lse is None else (result, lse)


def check_varlen_call(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: Tensor | None,
    longest: tuple[int | None, int | None],
    plain: bool,
    debug: bool,
) -> None:
    """Check a call of `attention_varlen`. The operator checks what a trace cannot."""
    q, k, v, cu_seqlens_q, cu_seqlens_k = tensors
    if plain:
        check_varlen(*tensors, out)
    else:
        check_tensors("attention_varlen", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        check_tensors("attention_varlen", optional=True, out=out)
        if has_tangent(q, k, v):
            raise ValueError("attention_varlen: it has no forward-mode derivative; use attention of each sequence")
    for argument, value in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        check_max_seqlen(argument, value)
    if debug and plain:
        check_seqlens("q", cu_seqlens_q.tolist(), q.shape[0], longest[0])
        check_seqlens("k", cu_seqlens_k.tolist(), k.shape[0], longest[1])


@torch.library.custom_op("tritonkittens::attention_varlen", mutates_args=())
def varlen_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float,
    softcap: float | None,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of `attention_varlen`; `left`, `right` as in `Scores`; `deterministic`: of the
    gradients."""
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    return compute_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, Scores(scale, softcap, left, right)
    )


@describes(varlen_operator)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float,
    softcap: float | None,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _varlen_gradients(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float,
    softcap: float | None,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) for the gradients of the output and, where given, of the log-sum-exp."""
    operands = Operands(grad, grad_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    longest = longest_sequences(q, k, max_seqlen_q, max_seqlen_k)
    return run_varlen_backward(operands, longest, Scores(scale, softcap, left, right), deterministic)


varlen_backward_operator = torch.library.custom_op(
    "tritonkittens::attention_varlen_backward", _varlen_gradients, mutates_args=()
)


@describes(varlen_backward_operator)
def _(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, starts_q, starts_k)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _backward_of_varlen(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    check_no_tangent("attention_varlen")
    q, k, v, out, lse, starts_q, starts_k = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    # With gradients enabled these may be differentiated again: the operator raises an error then.
    direct = not torch.is_grad_enabled() and is_plain(grad, grad_lse, q, k, v) and have_memory(grad, grad_lse)
    run = _varlen_gradients if direct else functools.partial(call, "attention_varlen_backward")
    gradients = run(grad, grad_lse, q, k, v, out, lse, starts_q, starts_k, *ctx.rest)
    return *gradients, *(None for _ in range(2 + len(ctx.rest)))


register(varlen_operator, vmap_by_loop, _backward_of_varlen, _save_varlen)
register(varlen_backward_operator, vmap_by_loop, second_derivative_of("attention_varlen"))


_varlen_kinds: set[tuple[Any, ...]] = set()  # of calls whose backwards were begun


def _varlen_output(*inputs: Any) -> Tensor:
    """The output alone, as `_output`."""
    return VarlenFunction.apply(*inputs)[0]


class VarlenFunction(torch.autograd.Function):
    """`attention_varlen` of checked operands in eager mode; arguments as of the operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, starts_q, starts_k, longest_q, longest_k, scale, softcap, left, right, _ = inputs
        kind = (q.dtype, q.shape[1:], k.shape[1:], v.shape[2], *inputs[7:])
        first = kind not in _varlen_kinds
        _varlen_kinds.add(kind)
        with followed_by_backward(_varlen_output, *inputs) if first else nullcontext():
            scores = Scores(scale, softcap, left, right)
            output = compute_varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, scores)
        _save_varlen(ctx, inputs, output)
        return output

    backward = staticmethod(_backward_of_varlen)


# ---------------------------------------------------------------- decoding, fp8


@torch.library.custom_op("tritonkittens::attention_decode", mutates_args=())
def decode_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of `attention_decode`."""
    return run_decode(q, k, v, lengths, starts, pages, causal, scale, softcap, True, num_splits)


@describes(decode_operator)
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
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tritonkittens::attention_fp8", mutates_args=())
def fp8_operator(
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
    """(output, log-sum-exp) of `attention_fp8`; `left` and `right` are its window."""
    return run_fp8(q, k, v, q_scale, k_scale, v_scale, causal, (left, right), scale, softcap, True, out_dtype)


@describes(fp8_operator)
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
    """The samples of vmap join the batch, except where k and v are pools of pages, which have no batch."""
    paged = args[5] is not None
    return (vmap_by_loop if paged else vmap_by_batch)(operator, dims, size, *args)


register(decode_operator, _vmap_decode, refusing("attention_decode has no gradient; use attention"))
register(fp8_operator, vmap_by_batch, refusing("attention_fp8 has no gradient; use attention of 16-bit operands"))


# ---------------------------------------------------------------- ranges


@torch.library.custom_op("tritonkittens::attention_ranges", mutates_args=())
def ranges_operator(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of `attention_ranges`."""
    check(q, k, v)
    check_ranges(q, ranges)
    return compute_ranges(q, k, v, ranges, scale, softcap)


@describes(ranges_operator)
def _(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    return empty_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


ranges_backward_operator = torch.library.custom_op(
    "tritonkittens::attention_ranges_backward", compute_ranges_backward, mutates_args=()
)


@describes(ranges_backward_operator)
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q, q.shape[3]), empty_like(k, k.shape[3]), empty_like(v, v.shape[3])


def _save_ranges(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ranges, *scores = inputs
    ctx.save_for_backward(q, k, v, ranges, *output)
    ctx.scores = scores
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_of_ranges(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    check_no_tangent("attention_ranges")
    gradients = (
        (None,) * 3 if grad is None else call("attention_ranges_backward", grad, *ctx.saved_tensors, *ctx.scores)
    )
    return *gradients, *(None,) * 3


register(ranges_operator, vmap_by_batch, _backward_of_ranges, _save_ranges)
register(ranges_backward_operator, vmap_by_batch, second_derivative_of("attention_ranges"))
