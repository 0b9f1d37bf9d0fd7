"""The losses in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_torch(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return the loss of `cross_entropy` and the log-sum-exps of the rows, in `dtype`.

    Targets are classes or `ignore_index`. Other arguments are those of `cross_entropy`.
    """
    x = input.to(dtype)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    kept = target != ignore_index
    lse = torch.logsumexp(x, -1)
    chosen = x.gather(-1, target.long().clamp(0, x.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    losses = lse - (1 - label_smoothing) * chosen + lse_square_scale * lse.square()
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(-1)
    losses = torch.where(kept, losses, 0.0)
    if reduction == "none":
        return losses, lse
    return losses.sum() / (kept.sum() if reduction == "mean" else 1), lse
