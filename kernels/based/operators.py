"""`based_attention` as torch sees it: an operator of torch.library, and that of gradients of q and k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import by_fields, or_empty, sequences_of
from tritonkittens.kernels.based.call_plan import run, run_gradient
from tritonkittens.kernels.based.checks import NAME, Operands, check_shapes
from tritonkittens.kernels.based.config import KEYS, STATE_ROWS

GRADIENT = "based_gradient"


@torch.library.custom_op("tritonkittens::based_attention", mutates_args=())
@by_fields
def based_attention_operator(
    given: Operands, scale: float, normalize: bool, final_state: bool, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The operator behind `based_attention`. The state is empty where it is not wanted. reverse: time runs from the
    last row to the first."""
    o, state = run(given, scale, normalize, final_state, reverse)
    return o, or_empty(state, o)


@describes(based_attention_operator)
@by_fields
def _(
    given: Operands, scale: float, normalize: bool, final_state: bool, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    check_shapes(given, normalize)
    q, v = given.q, given.v
    shape = (sequences_of(q, given.cu_seqlens), q.shape[2], STATE_ROWS, v.shape[-1] + normalize)
    return v.new_empty(v.shape), q.new_empty(shape if final_state else 0, dtype=torch.float32)


@torch.library.custom_op("tritonkittens::based_gradient", mutates_args=())
@by_fields
def based_gradient_operator(given: Operands, y: Tensor, scale: float, reverse: bool) -> Tensor:
    """The gradient of q, where y is that of the results of `based_attention` without `normalize`."""
    found = run_gradient(given, y, scale, reverse)
    return found if found.is_contiguous() else found.contiguous()


@describes(based_gradient_operator)
@by_fields
def _(given: Operands, y: Tensor, scale: float, reverse: bool) -> Tensor:
    check_shapes(given, False)
    return given.q.new_empty(given.q.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.normalize, ctx.final_state, ctx.reverse = inputs
    ctx.save_for_backward(*tensors, output[0] if ctx.normalize else None)
    ctx.set_materialize_grads(False)


def _parts(ctx: Any, do: Tensor, begin: Tensor | None) -> list[tuple[Any, ...]]:
    """(values, gradients of results, state before, gradient of that after) without a normaliser: with one, results are
    n / z, where n has the values v, and z has ones."""
    q, k, v, state, starts, o = ctx.saved_tensors
    if not ctx.normalize:
        return [(v, do, state, begin)]
    (left, last), (dn, dz) = ((None, None) if x is None else (x[..., :-1], x[..., -1:]) for x in (state, begin))
    ones = torch.ones_like(v[..., :1])
    z = call(NAME, q, k, ones, last, starts, ctx.scale, False, False, ctx.reverse)[0].float() + 1e-6
    of_n = (do / z).to(v.dtype)
    of_z = -(of_n.float() * o).sum(-1, keepdim=True)  # of what was rounded: both nearly cancel in rows
    return [(v, of_n, left, dn), (ones, of_z.to(v.dtype), last, dz)]


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).float().sum(0).to(parts[0].dtype)


def _factors(scale: float, device: torch.device) -> Tensor:
    """What the weights multiply rows of a state with."""
    found = torch.full((STATE_ROWS, 1), scale * scale / 2, dtype=torch.float32, device=device)
    found[: 1 + KEYS] = scale
    found[:1] = 1
    return found


def _backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
    """dqᵢ = scale · Σ_{j ≤ i} (doᵢ·vⱼ) (1 + x) kⱼ, dkⱼ the same with time reversed, and dvⱼ = Σ_{i ≥ j} (1 + x + x²/2)
    doᵢ is Based, too. The gradient of the state after is the state before, whose rows have factors of their own."""
    check_no_tangent(NAME)
    q, k, v, state, starts, _ = ctx.saved_tensors
    needs, scale, reverse = ctx.needs_input_grad, ctx.scale, ctx.reverse
    d_final = d_final if ctx.final_state else None
    if do is None and d_final is None:
        return (None,) * 9
    do = torch.zeros_like(v) if do is None else do.to(v.dtype)
    factors = None if d_final is None and not needs[3] else _factors(scale, q.device)
    parts = _parts(ctx, do, None if d_final is None else d_final / factors)
    dq = dk = dv = d_state = None
    if needs[0]:
        dq = _sum([call(GRADIENT, q, k, x, s, starts, y, scale, reverse) for x, y, s, _ in parts])
    if needs[1]:
        dk = _sum([call(GRADIENT, k, q, y, s, starts, x, scale, not reverse) for x, y, _, s in parts])
    if needs[2] or needs[3]:
        given = parts if needs[3] else parts[:1]
        found = [call(NAME, k, q, y, s, starts, scale, False, bool(needs[3]), not reverse) for _, y, _, s in given]
        dv = found[0][0] if needs[2] else None
        d_state = torch.cat([s for _, s in found], -1) * factors if needs[3] else None
    return dq, dk, dv, d_state, None, None, None, None, None


register(based_attention_operator, vmap_by_loop, _backward, _save)
register(based_gradient_operator, vmap_by_loop, refusing(f"{NAME} has no second derivative; use {NAME}_torch"))
