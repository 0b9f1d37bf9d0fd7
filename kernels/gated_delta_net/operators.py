"""`gated_delta_rule` as torch sees it: an operator of torch.library, and one of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import sequences_of
from tritonkittens.kernels.gated_delta_net.backward_plan import Operands, run_backward
from tritonkittens.kernels.gated_delta_net.call_plan import run
from tritonkittens.kernels.gated_delta_net.checks import NAME, check_shapes


@torch.library.custom_op("tritonkittens::gated_delta_rule", mutates_args=())
def gated_delta_rule_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    final_state: bool,
) -> tuple[Tensor, Tensor]:
    """The operator behind `gated_delta_rule`. The state is empty where it is not wanted."""
    o, state = run(q, k, v, g, beta, initial_state, cu_seqlens, scale, final_state)
    return o, q.new_empty(0, dtype=torch.float32) if state is None else state


@describes(gated_delta_rule_operator)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    final_state: bool,
) -> tuple[Tensor, Tensor]:
    check_shapes(q, k, v, g, beta, initial_state, cu_seqlens)
    shape = (sequences_of(q, cu_seqlens), v.shape[2], v.shape[-1], q.shape[-1])
    state = q.new_empty(shape, dtype=torch.float32).mT if final_state else q.new_empty(0, dtype=torch.float32)
    return v.new_empty(v.shape), state


@torch.library.custom_op("tritonkittens::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    d_final: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and the initial state, which is empty where there is none."""
    given = Operands(q, k, v, g, beta, initial_state, cu_seqlens)
    *found, d_initial = run_backward(given, do, d_final, scale)
    return (*found, q.new_empty(0, dtype=torch.float32) if d_initial is None else d_initial)


@describes(gated_delta_rule_backward_operator)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    d_final: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, d_beta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    shape = (sequences_of(q, cu_seqlens), v.shape[2], v.shape[-1], q.shape[-1])
    state = q.new_empty(0 if initial_state is None else shape, dtype=torch.float32)
    return dq, dk, dv, dg, d_beta, state if initial_state is None else state.mT


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.final_state = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
    check_no_tangent(NAME)
    q, k, v, g, beta, state, starts = ctx.saved_tensors
    d_final = d_final if ctx.final_state else None
    if do is None and d_final is None:
        return (None,) * 9
    do = torch.zeros_like(v) if do is None else do.to(v.dtype)
    *found, d_state = call(f"{NAME}_backward", q, k, v, g, beta, state, starts, do, d_final, ctx.scale)
    wanted = zip((*found, None if state is None else d_state), ctx.needs_input_grad, strict=False)
    return (*(x if needed else None for x, needed in wanted), None, None, None)


register(gated_delta_rule_operator, vmap_by_loop, _backward, _save)
register(
    gated_delta_rule_backward_operator, vmap_by_loop, refusing(f"{NAME} has no second derivative; use {NAME}_torch")
)
