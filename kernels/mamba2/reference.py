"""What `mamba_chunk_scan` computes, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mamba_chunk_scan_torch(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    """Return (y, final states) of `mamba_chunk_scan` in float64, step by step as the recurrence."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    batches, length, heads, columns = x.shape
    B, C = (t.repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias.double()
    dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    bounds = [(b, 0, length) for b in range(batches)]
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        bounds = [(0, *pair) for pair in zip(starts, starts[1:], strict=False)]
    y, states = torch.zeros_like(x), []
    for n, (batch, begin, end) in enumerate(bounds):
        zeros = x.new_zeros(heads, columns, B.shape[-1])
        state = zeros if initial_states is None else initial_states[n].double()
        for t in range(begin, end):
            weighted = dt[batch, t, :, None] * x[batch, t]
            state = (A * dt[batch, t]).exp()[:, None, None] * state + weighted[:, :, None] * B[batch, t, :, None]
            y[batch, t] = (state @ C[batch, t, :, :, None]).squeeze(-1)
        states.append(state)
    if D is not None:
        skipped = (D.double() if D.ndim == 2 else D.double()[:, None]) * x
        end = length if cu_seqlens is None else int(cu_seqlens[-1])
        y = y + torch.cat([skipped[:, :end], torch.zeros_like(skipped[:, end:])], 1)
    y = y if z is None else y * torch.nn.functional.silu(z.double())
    return y, torch.stack(states) if states else x.new_zeros(0, heads, columns, B.shape[-1])
