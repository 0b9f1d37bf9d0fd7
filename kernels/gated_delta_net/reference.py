"""What `gated_delta_rule` computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_rule_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (o, final state) of `gated_delta_rule` in float64, step by step as the recurrence."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    heads = v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(heads // max(q.shape[2], 1), 2) for x in (q, k))
    bounds = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        bounds = [(0, *pair) for pair in zip(starts, starts[1:], strict=False)]
    o, states = torch.zeros_like(v), []
    for n, (batch, begin, end) in enumerate(bounds):
        zeros = torch.zeros(heads, q.shape[-1], v.shape[-1], dtype=torch.float64, device=q.device)
        state = zeros if initial_state is None else initial_state[n].double()
        for t in range(begin, end):
            k_t, fading = k[batch, t, :, :, None], g[batch, t].exp()[:, None, None]
            state = fading * state
            missing = v[batch, t, :, None] - k_t.mT @ state
            state = state + beta[batch, t, :, None, None] * (k_t @ missing)
            o[batch, t] = scale * (q[batch, t, :, None] @ state).squeeze(1)
        states.append(state)
    return o, torch.stack(states) if states else v.new_zeros(0, heads, q.shape[-1], v.shape[-1])
