"""What `linear_attention` computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (o, final state) of `linear_attention` in float64, step by step as the recurrence."""
    q, k, v = (x.double() for x in (q, k, v))
    batches, length, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    gates = q.new_zeros(q.shape[:3]) if decay is None else -decay.double().expand(q.shape[:3])
    kept = torch.exp(gates if g is None else g.double())[..., None, None]
    bounds = [(b, 0, length) for b in range(batches)]
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        bounds = [(0, *pair) for pair in zip(starts, starts[1:], strict=False)]
    o, states = torch.zeros_like(v), []
    for n, (batch, begin, end) in enumerate(bounds):
        zeros = torch.zeros(heads, dim, v.shape[-1], dtype=torch.float64, device=q.device)
        state = zeros if initial_state is None else initial_state[n].double()
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            state = kept[batch, t] * state + k[batch, t, :, :, None] * v[batch, t, :, None, :]
            o[batch, t] = scale * (q[batch, t, :, None] @ state).squeeze(1)
        states.append(state)
    return o, torch.stack(states) if states else v.new_zeros(0, heads, dim, v.shape[-1])
