"""What `based_attention` computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def _features(x: Tensor) -> Tensor:
    """[1, x, x ⊗ x] of the last dimension."""
    return torch.cat([torch.ones_like(x[..., :1]), x, (x[..., :, None] * x[..., None, :]).flatten(-2)], -1)


def based_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (o, final state) of `based_attention` in float64, from all weights at once."""
    q, k, v = (x.double() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1) if normalize else v
    bounds = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        bounds = [(0, *pair) for pair in zip(starts, starts[1:], strict=False)]
    o, dim = torch.zeros_like(values), q.shape[-1]
    states = values.new_zeros(len(bounds), q.shape[2], 1 + dim + dim * dim, values.shape[-1])
    for n, (batch, begin, end) in enumerate(bounds):
        q_n, k_n, v_n = (x[batch, begin:end].transpose(0, 1) for x in (q, k, values))
        x = scale * q_n @ k_n.mT
        found = (1 + x + x * x / 2).tril() @ v_n
        states[n] = _features(k_n).mT @ v_n
        if initial_state is not None:
            before, (one, first) = initial_state[n].double(), (1, 1 + dim)
            states[n] += before
            x = scale * q_n
            squares = _features(x)[..., first:] / 2
            found = found + before[:, None, 0] + x @ before[:, one:first] + squares @ before[:, first:]
        o[batch, begin:end] = found.transpose(0, 1)
    return (o[..., :-1] / (o[..., -1:] + 1e-6) if normalize else o), states
