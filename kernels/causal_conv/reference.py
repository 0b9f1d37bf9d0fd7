"""What `causal_conv1d` computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv1d_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Return `causal_conv1d` in float64, sequence by sequence."""
    x, weight = x.double(), weight.double()
    channels, width = weight.shape
    sequences = list(x.unbind(0))
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        sequences = [x[0, :, a:b] for a, b in zip(starts, starts[1:], strict=False)]
    found = []
    for n, rows in enumerate(sequences):
        before = x.new_zeros(channels, width - 1) if initial_states is None else initial_states[n].double()
        rows = torch.cat([before, rows], 1)
        taps = [weight[:, w, None] * rows[:, w : rows.shape[1] - width + 1 + w] for w in range(width)]
        found.append(sum(taps, torch.zeros_like(taps[0])))
    y = torch.stack(found) if cu_seqlens is None else torch.cat([x.new_zeros(channels, 0), *found], 1)[None]
    y = y if bias is None else y + bias.double()[:, None]
    y = y if activation is None else torch.nn.functional.silu(y)
    return torch.cat([y, x.new_zeros(*y.shape[:2], x.shape[2] - y.shape[2])], 2)
