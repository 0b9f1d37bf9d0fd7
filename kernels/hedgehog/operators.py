"""`hedgehog_attention` as torch sees it: an operator of torch.library, and one of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import by_fields, or_empty, sequences_of, slots_of
from tritonkittens.kernels.hedgehog.backward_plan import GivenGradients, run_backward
from tritonkittens.kernels.hedgehog.call_plan import run
from tritonkittens.kernels.hedgehog.checks import DIM, NAME, Operands, check_shapes
from tritonkittens.kernels.linear_attention.config import ROWS


@torch.library.custom_op("tritonkittens::hedgehog_attention", mutates_args=())
@by_fields
def hedgehog_attention_operator(given: Operands, final_state: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator behind `hedgehog_attention`, and the sums of weights for its gradient. The states are empty where
    they are not wanted."""
    o, state, totals = run(given, final_state, True)
    assert totals is not None
    kv, z = state or (None, None)
    return o, or_empty(kv, o), or_empty(z, o), totals


@describes(hedgehog_attention_operator)
@by_fields
def _(given: Operands, final_state: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_shapes(given)
    q, starts = given.q, given.cu_seqlens
    shape = (sequences_of(q, starts), q.shape[2], DIM)
    z_after = q.new_empty(shape if final_state else 0, dtype=torch.float32)
    kv_after = q.new_empty((*shape, DIM), dtype=torch.float32).mT if final_state else z_after.clone()
    totals = q.new_empty(q.shape[2], slots_of(q, starts), ROWS, dtype=torch.float32)
    return q.new_empty(q.shape), kv_after, z_after, totals


@torch.library.custom_op("tritonkittens::hedgehog_attention_backward", mutates_args=())
@by_fields
def hedgehog_attention_backward_operator(
    given: Operands, more: GivenGradients
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the maps, alpha, beta, kv and z; the last two are empty where there is no state."""
    return run_backward(given, more)


@describes(hedgehog_attention_backward_operator)
@by_fields
def _(given: Operands, more: GivenGradients) -> tuple[Tensor, ...]:
    q = given.q
    return tuple(q.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape) for x in given[:9])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.final_state = inputs
    ctx.save_for_backward(*tensors, output[0], output[3])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, do: Tensor | None, d_kv: Tensor | None, d_z: Tensor | None, d_totals: Tensor | None
) -> tuple[Any, ...]:
    check_no_tangent(NAME)
    given, (o, totals) = Operands(*ctx.saved_tensors[:10]), ctx.saved_tensors[10:]
    if not ctx.final_state:
        d_kv = d_z = None
    if do is None and d_kv is None and d_z is None:
        return (None,) * 11
    if (d_kv is None) != (d_z is None):
        shape = (sequences_of(o, given.cu_seqlens), o.shape[2], DIM, DIM)
        d_kv, d_z = (
            o.new_zeros(n, dtype=torch.float32) if x is None else x for x, n in ((d_kv, shape), (d_z, shape[:3]))
        )
    do = torch.zeros_like(o) if do is None else do.to(o.dtype)
    found = call(f"{NAME}_backward", *given, o, totals, do, d_kv, d_z)
    wanted = zip(found, ctx.needs_input_grad, strict=False)
    return (*(x if needed else None for x, needed in wanted), None, None)


register(hedgehog_attention_operator, vmap_by_loop, _backward, _save)
register(
    hedgehog_attention_backward_operator, vmap_by_loop, refusing(f"{NAME} has no second derivative; use {NAME}_torch")
)
