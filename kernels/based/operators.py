"""`based_attention` as torch sees it: an operator of torch.library."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import sequences_of
from tritonkittens.kernels.based.call_plan import run
from tritonkittens.kernels.based.checks import NAME, check_shapes
from tritonkittens.kernels.based.config import STATE_ROWS


@torch.library.custom_op("tritonkittens::based_attention", mutates_args=())
def based_attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    final_state: bool,
) -> tuple[Tensor, Tensor]:
    """The operator behind `based_attention`. The state is empty where it is not wanted."""
    o, state = run(q, k, v, initial_state, cu_seqlens, scale, normalize, final_state)
    return o, q.new_empty(0, dtype=torch.float32) if state is None else state


@describes(based_attention_operator)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    final_state: bool,
) -> tuple[Tensor, Tensor]:
    check_shapes(q, k, v, initial_state, cu_seqlens, normalize)
    shape = (sequences_of(q, cu_seqlens), q.shape[2], STATE_ROWS, v.shape[-1] + normalize)
    return v.new_empty(v.shape), q.new_empty(shape if final_state else 0, dtype=torch.float32)


register(
    based_attention_operator,
    vmap_by_loop,
    refusing(f"{NAME} has no gradient yet; use {NAME}_torch, or torch.no_grad()"),
)
