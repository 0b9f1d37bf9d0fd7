"""`hedgehog_attention` as torch sees it: an operator of torch.library."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import sequences_of
from tritonkittens.kernels.hedgehog.call_plan import run
from tritonkittens.kernels.hedgehog.checks import DIM, NAME, Operands, check_shapes


@torch.library.custom_op("tritonkittens::hedgehog_attention", mutates_args=())
def hedgehog_attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map_q: Tensor,
    map_k: Tensor,
    alpha: Tensor,
    beta: Tensor,
    kv: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator behind `hedgehog_attention`. The states are empty where they are not wanted."""
    o, state = run(Operands(q, k, v, map_q, map_k, alpha, beta, kv, z, cu_seqlens), final_state)
    return (o, *state) if state else (o, *(q.new_empty(0, dtype=torch.float32) for _ in range(2)))


@describes(hedgehog_attention_operator)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map_q: Tensor,
    map_k: Tensor,
    alpha: Tensor,
    beta: Tensor,
    kv: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_shapes(Operands(q, k, v, map_q, map_k, alpha, beta, kv, z, cu_seqlens))
    shape = (sequences_of(q, cu_seqlens), q.shape[2], DIM)
    z_after = q.new_empty(shape if final_state else 0, dtype=torch.float32)
    kv_after = q.new_empty((*shape, DIM), dtype=torch.float32).mT if final_state else z_after.clone()
    return v.new_empty(v.shape), kv_after, z_after


register(
    hedgehog_attention_operator,
    vmap_by_loop,
    refusing(f"{NAME} has no gradient yet; use {NAME}_torch, or torch.no_grad()"),
)
