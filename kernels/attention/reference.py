"""Attention in plain torch: the reference of the tests, and the path of forward-mode derivatives."""

from __future__ import annotations

import math

import torch

LIMIT = 1 << 30  # keys on an open side of a window


def sides(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right): the keys that a query sees before and after its own."""
    left, right = window or (None, None)
    left, right = (LIMIT if side is None else side for side in (left, right))
    return left, min(right, 0) if causal else right


def visible(queries: int, keys: int, left: int, right: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Boolean (queries, keys): the keys that each query sees. The last query's own key is the last key."""
    own = torch.arange(queries, device=device)[:, None] + keys - queries
    j = torch.arange(keys, device=device)
    return (j >= own - left) & (j <= own + right)


def attention_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of `attention` in `dtype`, not rounded, differentiable any number of times."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = q.to(dtype) @ k.mT * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[2], k.shape[2], *sides(causal, window), device=q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    any_key = seen.any(-1)[:, None]
    scores = scores.masked_fill(~any_key, 0.0)  # derivatives of finite scores are finite
    weights = torch.where(any_key, scores.softmax(-1), 0.0)
    return weights @ v, torch.where(seen.any(-1), scores.logsumexp(-1), float("-inf"))
