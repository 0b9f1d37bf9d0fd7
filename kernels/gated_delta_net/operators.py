"""`gated_delta_rule` as torch sees it: an operator of torch.library, and one of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import by_fields, or_empty, sequences_of
from tritonkittens.kernels.gated_delta_net.backward_plan import run_backward
from tritonkittens.kernels.gated_delta_net.call_plan import run
from tritonkittens.kernels.gated_delta_net.checks import NAME, Operands, check_shapes


@torch.library.custom_op("tritonkittens::gated_delta_rule", mutates_args=())
@by_fields
def gated_delta_rule_operator(given: Operands, scale: float, final_state: bool) -> tuple[Tensor, Tensor]:
    """The operator behind `gated_delta_rule`. The state is empty where it is not wanted."""
    o, state = run(given, scale, final_state)
    return o, or_empty(state, o)


def _state_like(given: Operands, wanted: bool) -> Tensor:
    q, v = given.q, given.v
    shape = (sequences_of(q, given.cu_seqlens), v.shape[2], v.shape[-1], q.shape[-1])
    return or_empty(q.new_empty(shape, dtype=torch.float32).mT if wanted else None, q)


@describes(gated_delta_rule_operator)
@by_fields
def _(given: Operands, scale: float, final_state: bool) -> tuple[Tensor, Tensor]:
    check_shapes(given)
    return given.v.new_empty(given.v.shape), _state_like(given, final_state)


@torch.library.custom_op("tritonkittens::gated_delta_rule_backward", mutates_args=())
@by_fields
def gated_delta_rule_backward_operator(
    given: Operands, do: Tensor, d_final: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and the initial state, which is empty where there is none."""
    *found, d_initial = run_backward(given, do, d_final, scale)
    return *found, or_empty(d_initial, do)


@describes(gated_delta_rule_backward_operator)
@by_fields
def _(given: Operands, do: Tensor, d_final: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in given[:5]), _state_like(given, given.initial_state is not None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.final_state = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
    check_no_tangent(NAME)
    given = Operands(*ctx.saved_tensors)
    d_final = d_final if ctx.final_state else None
    if do is None and d_final is None:
        return (None,) * 9
    do = torch.zeros_like(given.v) if do is None else do.to(given.v.dtype)
    *found, d_state = call(f"{NAME}_backward", *given, do, d_final, ctx.scale)
    wanted = zip((*found, None if given.initial_state is None else d_state), ctx.needs_input_grad, strict=False)
    return (*(x if needed else None for x, needed in wanted), None, None, None)


register(gated_delta_rule_operator, vmap_by_loop, _backward, _save)
register(
    gated_delta_rule_backward_operator, vmap_by_loop, refusing(f"{NAME} has no second derivative; use {NAME}_torch")
)
