"""What mixers of sequences compute where no kernel does, in torch, chunk by chunk, in fp32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHUNK = 64


def wide(x: Tensor) -> torch.dtype:
    """The dtype of states and sums: fp32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (o, state after) of S ← exp(g) · S, S ← S + k vᵀ, o = scale · Sᵀq at each step. With beta, a step is that
    of the delta rule, S ← S + beta · k (v - Sᵀk)ᵀ.

    Args:
        q, k: (B, T, H, K).
        v: (B, T, HV, V). Head h of v uses head ⌊h · H / HV⌋ of q and k.
        g, beta: (B, T, HV). None: 0, and no delta rule.
        state: (B, HV, K, V); None: zeros.

    Returns (B, T, HV, V) and (B, HV, K, V), both in `wide(v)`.
    """
    dtype, heads = wide(v), v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    g = torch.zeros_like(v[..., 0]) if g is None else g
    delta, beta = beta is not None, torch.ones_like(g) if beta is None else beta
    q, k, v, g, beta = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g, beta))
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.to(dtype)
    found = []
    chunks = zip(*(x.split(CHUNK, 2) for x in (q, k, v, g, beta)), strict=True)
    for q_c, k_c, v_c, g_c, beta_c in chunks:
        total, rows = g_c.cumsum(-1), g_c.shape[-1]
        later = torch.ones(rows, rows, dtype=torch.bool, device=v.device).triu(1)
        fading = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        kept, beta_c = total.exp()[..., None], beta_c[..., None]
        if delta:  # v becomes what the steps of the chunk add: (I + lower(beta K Kᵀ ∘ fading))⁻¹ beta (V - kept K S)
            system = (beta_c * k_c) @ k_c.mT * fading
            missing = beta_c * (v_c - kept * (k_c @ state))
            v_c = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
        found.append(scale * (kept * (q_c @ state) + (q_c @ k_c.mT * fading) @ v_c))
        end = g_c.sum(-1)[..., None]
        state = end[..., None].exp() * state + ((end - total).exp()[..., None] * k_c).mT @ v_c
    return torch.cat(found, 2).transpose(1, 2), state


def taylor_features(x: Tensor, scale: float = 1.0) -> Tensor:
    """[1, scale · x, scale² · x ⊗ x] of the last dimension, in `wide(x)`."""
    x = scale * x.to(wide(x))
    return torch.cat([torch.ones_like(x[..., :1]), x, (x[..., :, None] * x[..., None, :]).flatten(-2)], -1)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    """Return silu of the causal convolution of each channel: x (B, C, L), weight (C, W), the rows before x
    (B, C, W - 1)."""
    rows, weight = torch.cat([before, x], -1).to(wide(x)), weight.to(wide(x))
    y = rows.new_zeros(()) if bias is None else bias.to(wide(x))[:, None]
    for tap in range(weight.shape[1]):
        y = y + weight[:, tap, None] * rows[..., tap : tap + x.shape[-1]]
    return nn.functional.silu(y).to(x.dtype)
