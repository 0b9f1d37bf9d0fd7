"""`linear_attention` as torch sees it: an operator of torch.library.

Its gradients are calls of itself, or where gates have gradients, too, of a second operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import by_fields, or_empty, present, sequences_of, transposed
from tritonkittens.kernels.linear_attention.backward_plan import run_backward, summed
from tritonkittens.kernels.linear_attention.call_plan import run
from tritonkittens.kernels.linear_attention.checks import NAME, Operands, check_shapes
from tritonkittens.kernels.linear_attention.config import MOST_KEYS


@torch.library.custom_op("tritonkittens::linear_attention", mutates_args=())
@by_fields
def linear_attention_operator(
    given: Operands, scale: float, final_state: bool, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The operator behind `linear_attention`. The state is empty where it is not wanted. reverse: time runs from the
    last row to the first."""
    o, state = run(given, scale, final_state, reverse)
    return o, or_empty(state, o)


@describes(linear_attention_operator)
@by_fields
def _(given: Operands, scale: float, final_state: bool, reverse: bool = False) -> tuple[Tensor, Tensor]:
    check_shapes(given)
    q, v = given.q, given.v
    shape = (sequences_of(q, given.cu_seqlens), q.shape[2], v.shape[-1], q.shape[-1])
    return v.new_empty(v.shape), or_empty(q.new_empty(shape, dtype=torch.float32).mT if final_state else None, q)


@torch.library.custom_op("tritonkittens::linear_attention_backward", mutates_args=())
@by_fields
def backward_operator(
    given: Operands, do: Tensor, d_final: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the gates (`decay` or `g`) and the state, which is empty where there is none."""
    *found, state = run_backward(given, do, d_final, scale)
    return *found, or_empty(state, do)


@describes(backward_operator)
@by_fields
def _(
    given: Operands, do: Tensor, d_final: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, decay, g, state, _ = given
    if state is not None:
        state = torch.empty_like(state.mT, memory_format=torch.contiguous_format).mT
    return *(x.new_empty(x.shape) for x in present(q, k, v, decay, g)), or_empty(state, q)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.final_state, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _of_keys(do: Tensor, v: Tensor, k: Tensor, gates: tuple[Any, ...], state: Tensor | None, *others: Any) -> Tensor:
    """Σ of `linear_attention` of do, v and k over blocks of the columns of v, of which the kernel takes `MOST_KEYS`."""
    if v.shape[-1] <= MOST_KEYS:
        found: Tensor = call(NAME, do, v, k, *gates, state, *others)[0]
        return found
    blocks = [slice(i, i + MOST_KEYS) for i in range(0, v.shape[-1], MOST_KEYS)]
    parts = [
        call(NAME, do[..., at], v[..., at], k, *gates, None if state is None else state[..., at, :], *others)[0]
        for at in blocks
    ]
    return summed(parts)


def _backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
    """Gradients are linear attention, too, those of k and v with time reversed: dqᵢ = Σ_{j ≤ i} e^{Gᵢ-Gⱼ} (doᵢ·vⱼ) kⱼ,
    dkⱼ = Σ_{i ≥ j} e^{Gᵢ-Gⱼ} (vⱼ·doᵢ) qᵢ and dvⱼ = Σ_{i ≥ j} e^{Gᵢ-Gⱼ} (kⱼ·qᵢ) doᵢ. The gradient of the state after is
    the state before."""
    check_no_tangent(NAME)
    q, k, v, *gates, state, starts = ctx.saved_tensors
    needs, scale, reverse = ctx.needs_input_grad, ctx.scale, ctx.reverse
    d_final = d_final if ctx.final_state else None
    if do is None and d_final is None:
        return (None,) * 10
    do = torch.zeros_like(v) if do is None else do.to(v.dtype)
    if needs[3] or needs[4]:
        if reverse:
            raise NotImplementedError(f"{NAME}: its second derivatives have no gradients of gates")
        dq, dk, dv, of_gates, d_state = call(f"{NAME}_backward", q, k, v, *gates, state, starts, do, d_final, scale)
        of_gates = (of_gates, None) if needs[3] else (None, of_gates)
        return dq, dk, dv, *of_gates, d_state if needs[5] else None, None, None, None, None
    begin = None if d_final is None else d_final / scale
    dq = dk = dv = d_state = None
    if needs[0]:
        dq = _of_keys(do, v, k, gates, transposed(state), starts, scale, False, reverse)
    if needs[1]:
        dk = _of_keys(v, do, q, gates, transposed(begin), starts, scale, False, not reverse)
    if needs[2] or needs[5]:
        dv, d_state = call(NAME, k, q, do, *gates, begin, starts, scale, bool(needs[5]), not reverse)
        d_state = d_state * scale if needs[5] else None
    return dq, dk, dv if needs[2] else None, None, None, d_state, None, None, None, None


register(linear_attention_operator, vmap_by_loop, _backward, _save)
register(
    backward_operator,
    vmap_by_loop,
    refusing(f"{NAME} has no second derivative where gates have gradients; detach them, or use {NAME}_torch"),
)
