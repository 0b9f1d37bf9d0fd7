"""What a grouped product computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_gemm_torch(a: Tensor, b: Tensor, offsets: Tensor | None = None) -> Tensor:
    """`grouped_gemm` in float64, group by group. Rows and columns after the last group are zero. Waits for the
    device."""
    a, b = a.double(), b.double()
    if offsets is None:
        return a @ b
    ends = offsets.tolist()
    parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if a.ndim == b.ndim:
        found = [a[:, part] @ b[part] for part in parts]
        return torch.stack(found) if found else a.new_zeros(0, a.shape[0], b.shape[1])
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for group, part in enumerate(parts):
        if b.ndim == 3:
            out[part] = a[part] @ b[group]
        else:
            out[:, part] = a[group] @ b[:, part]
    return out
