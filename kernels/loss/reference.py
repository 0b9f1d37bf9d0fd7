"""The losses in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels.loss.checks import check_options, check_target


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

    The loss of a target that is neither a class nor `ignore_index` is NaN. Arguments and errors are those of
    `cross_entropy`.
    """
    check_options("cross_entropy", reduction, label_smoothing, softcap)
    check_target("cross_entropy", target, tuple(input.shape[:-1]), input.device, "input")
    x = input.to(dtype)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    kept, is_class = target != ignore_index, (target >= 0) & (target < x.shape[-1])
    lse = torch.logsumexp(x, -1)
    chosen = x.gather(-1, torch.where(is_class, target, 0).long().unsqueeze(-1)).squeeze(-1)
    chosen = torch.where(is_class, chosen, torch.nan)
    losses = lse - (1 - label_smoothing) * chosen + lse_square_scale * lse.square()
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(-1)
    losses = torch.where(kept, losses, 0.0)
    if reduction == "none":
        return losses, lse
    return losses.sum() / (kept.sum() if reduction == "mean" else 1), lse
