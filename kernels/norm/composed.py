"""Norms of mixers of sequences, of the kernels of this and another family: of heads to length 1, and with a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import takes, unseen_by_function_modes
from tritonkittens.kernels.activation import swiglu
from tritonkittens.kernels.norm.config import INPUTS, WIDEST
from tritonkittens.kernels.norm.interface import rms_norm


@unseen_by_function_modes
def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor | None:
    """Return x / √(Σ x² + eps) over the last dimension, or None where the kernel does not take x."""
    dim = x.shape[-1]
    if not (takes(INPUTS, x) and 1 <= dim <= WIDEST):
        return None
    # √(Σ x² + eps) = √dim · √(mean of x² + eps / dim)
    weight = torch.full((dim,), dim**-0.5, dtype=torch.float32, device=x.device)
    y: Tensor = rms_norm(x, weight, eps=eps / dim, out_dtype=x.dtype)
    return y


@unseen_by_function_modes
def gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, *, norm_before_gate: bool, group_size: int | None = None
) -> Tensor | None:
    """Return rms_norm(x) · weight · silu(gate), or rms_norm(x · silu(gate)) · weight, or None where the kernels do not
    take the tensors.

    Args:
        x, gate: (…, N). gate is cast to the dtype of x. None: x is gated already.
        weight: (N,).
        norm_before_gate: which of both.
        group_size: how many neighbouring columns are normalised together, a divisor of N. None: N.

    Returns (…, N) in the dtype of x. Rounds between norm and gate.
    """
    columns = x.shape[-1]
    group = columns if group_size is None else group_size
    if not (takes(INPUTS, x, gate, weight) and (gate is None or x.shape == gate.shape) and 1 <= group <= WIDEST):
        return None
    gate = None if gate is None else gate.to(x.dtype)
    y = x if gate is None or norm_before_gate else swiglu(gate, x)
    if group == columns:
        y = rms_norm(y, weight, eps=eps, out_dtype=x.dtype)
    else:
        grouped: Tensor = rms_norm(y.unflatten(-1, (-1, group)), eps=eps, out_dtype=torch.float32)
        y = (grouped.flatten(-2) * weight).to(x.dtype)
    return swiglu(gate, y) if gate is not None and norm_before_gate else y
