"""What `hedgehog_attention` computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # rows


def _features(x: Tensor, maps: Tensor) -> Tensor:
    """[softmax(x M), softmax(-x M)] of x (..., heads, rows, 128)."""
    y = x @ maps
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, features: tuple[Tensor, Tensor], alpha: Tensor, beta: Tensor, kv: Tensor, z: Tensor
) -> Tensor:
    """The result of a sequence; all tensors are (..., heads, rows, columns), kv and z the state before."""
    f_q, f_k = features
    row = torch.arange(q.shape[-2], device=q.device)
    apart = row[:, None] // BLOCK - row // BLOCK
    scores = (q @ k.mT).masked_fill((row[:, None] < row) | (apart > 1), float("-inf"))
    window = torch.exp((scores - scores.amax(-1, keepdim=True)) * q.shape[-1] ** -0.5)
    alpha, beta = alpha[:, None, None], beta[:, None, None]
    weights = beta * window + alpha * (f_q @ f_k.mT).masked_fill(apart < 2, 0.0)
    total = weights.sum(-1, keepdim=True) + alpha * (f_q @ z[..., None])
    return (weights @ v + alpha * (f_q @ kv)) / total


def hedgehog_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map_q: Tensor,
    map_k: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return (o, final state) of `hedgehog_attention` from all weights at once, computed in `dtype`."""
    q, k, v, map_q, map_k, alpha, beta = (x.to(dtype) for x in (q, k, v, map_q, map_k, alpha, beta))
    batches, length, heads, dim = q.shape
    bounds = [(slice(None), 0, length)]  # sequences of one length are computed together
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        bounds = [(slice(1), *pair) for pair in zip(starts, starts[1:], strict=False)]
    count = batches if cu_seqlens is None else len(bounds)
    kv, z = (q.new_zeros(count, heads, 2 * map_k.shape[-1], *n) for n in ((dim,), ()))
    if initial_state is not None:
        kv, z = (x.to(dtype) for x in initial_state)
    found: list[Tensor] = [v[:, :0]]
    after: list[tuple[Tensor, Tensor]] = []
    for n, (batch, begin, end) in enumerate(bounds):
        q_n, k_n, v_n = (x[batch, begin:end].transpose(1, 2) for x in (q, k, v))
        before = (kv, z) if cu_seqlens is None else (kv[n : n + 1], z[n : n + 1])
        maps = _features(q_n, map_q), _features(k_n, map_k)
        if end > begin:
            found.append(_attend(q_n, k_n, v_n, maps, alpha, beta, *before).transpose(1, 2))
        earlier = max(end - begin - 1, 0) // BLOCK * BLOCK  # rows before the last block
        f_k, v_n = maps[1][:, :, :earlier], v_n[:, :, :earlier]
        after.append((before[0] + f_k.mT @ v_n, before[1] + f_k.sum(2)))
    found.append(q.new_zeros(batches, length - sum(x.shape[1] for x in found), heads, dim))
    return torch.cat(found, 1), (
        torch.cat([kv[:0], *(x[0] for x in after)]),
        torch.cat([z[:0], *(x[1] for x in after)]),
    )
