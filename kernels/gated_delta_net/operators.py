"""`gated_delta_rule` as torch sees it: an operator of torch.library."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import sequences_of
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


register(
    gated_delta_rule_operator,
    vmap_by_loop,
    refusing(f"{NAME} has no gradient yet; use {NAME}_torch, or torch.no_grad()"),
)
