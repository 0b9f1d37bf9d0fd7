"""`mamba_chunk_scan` as torch sees it: an operator of torch.library."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import describes, refusing, register, vmap_by_loop
from tritonkittens.kernels._sequences import sequences_of
from tritonkittens.kernels.mamba2.call_plan import run
from tritonkittens.kernels.mamba2.checks import NAME, Operands, check_shapes


@torch.library.custom_op("tritonkittens::mamba_chunk_scan", mutates_args=())
def mamba_chunk_scan_operator(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_least: float,
    dt_most: float,
    final_states: bool,
) -> tuple[Tensor, Tensor]:
    """The operator behind `mamba_chunk_scan`. The states are empty where they are not wanted."""
    given = Operands(x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens)
    y, states = run(given, dt_softplus, (dt_least, dt_most), final_states)
    return y, x.new_empty(0, dtype=torch.float32) if states is None else states


@describes(mamba_chunk_scan_operator)
def _(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_least: float,
    dt_most: float,
    final_states: bool,
) -> tuple[Tensor, Tensor]:
    check_shapes(Operands(x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens), (dt_least, dt_most))
    shape = (sequences_of(x, cu_seqlens), *x.shape[2:], B.shape[-1]) if final_states else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


register(
    mamba_chunk_scan_operator,
    vmap_by_loop,
    refusing(f"{NAME} has no gradient yet; use {NAME}_torch, or torch.no_grad()"),
)
