"""`mamba_chunk_scan` as torch sees it: an operator of torch.library, and one for its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import by_fields, or_empty, sequences_of
from tritonkittens.kernels.mamba2.backward_plan import run_backward
from tritonkittens.kernels.mamba2.call_plan import run
from tritonkittens.kernels.mamba2.checks import NAME, Operands, check_shapes

TENSORS = len(Operands._fields)


@torch.library.custom_op("tritonkittens::mamba_chunk_scan", mutates_args=())
@by_fields
def mamba_chunk_scan_operator(
    given: Operands, dt_softplus: bool, dt_least: float, dt_most: float, final_states: bool
) -> tuple[Tensor, Tensor]:
    """The operator behind `mamba_chunk_scan`. The states are empty where they are not wanted."""
    y, states = run(given, dt_softplus, (dt_least, dt_most), final_states)
    return y, or_empty(states, y)


@describes(mamba_chunk_scan_operator)
@by_fields
def _(given: Operands, dt_softplus: bool, dt_least: float, dt_most: float, final_states: bool) -> tuple[Tensor, Tensor]:
    check_shapes(given, (dt_least, dt_most))
    x = given.x
    shape = (sequences_of(x, given.cu_seqlens), *x.shape[2:], given.B.shape[-1]) if final_states else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("tritonkittens::mamba_chunk_scan_backward", mutates_args=())
@by_fields
def backward_operator(
    given: Operands, dt_softplus: bool, dt_least: float, dt_most: float, dy: Tensor, d_states: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x to initial_states, empty where there is no such operand."""
    *found, _ = run_backward(given, dt_softplus, (dt_least, dt_most), dy, d_states)
    return tuple(given.x.new_empty(0) if t is None else t for t in found)


@describes(backward_operator)
@by_fields
def _(given: Operands, *others: Any) -> tuple[Tensor, ...]:
    return tuple(given.x.new_empty(0) if t is None else t.new_empty(t.shape) for t in given[: TENSORS - 1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS])
    *ctx.options, ctx.final_states = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, d_states: Tensor | None) -> tuple[Any, ...]:
    check_no_tangent(NAME)
    given = Operands(*ctx.saved_tensors)
    d_states = d_states if ctx.final_states else None
    if dy is None and d_states is None:
        return (None,) * (TENSORS + 4)
    dy = torch.zeros_like(given.x) if dy is None else dy
    found = call(f"{NAME}_backward", *given, *ctx.options, dy, d_states)
    found = [None if t is None else d for t, d in zip(given[: TENSORS - 1], found, strict=True)]
    return *found, *[None] * 5


register(mamba_chunk_scan_operator, vmap_by_loop, _backward, _save)
register(backward_operator, vmap_by_loop, refusing(f"{NAME} has no second derivative; use {NAME}_torch"))
