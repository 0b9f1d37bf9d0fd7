"""What a grouped product computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels.gemm.reference import activated, gemm_torch
from tritonkittens.kernels.grouped_gemm.checks import GATED, result_shape


def gated(y: Tensor, activation: str) -> Tensor:
    """The activation of the first half of the columns, times the second half."""
    first, second = y.chunk(2, -1)
    return activated(first, GATED[activation]) * second


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of a matrix that `rows` selects, zeros where it has none."""
    if x.shape[0] == 0:
        return x.new_zeros(rows.shape[0], x.shape[1])
    if x.is_floating_point() and x.element_size() == 1:  # torch selects no fp8
        return rows_of(x.view(torch.uint8), rows).view(x.dtype)
    inside = (rows >= 0) & (rows < x.shape[0])
    return torch.where(inside[:, None], x[torch.where(inside, rows, 0)], 0)


def grouped_gemm_torch(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    rows: Tensor | None = None,
    out_rows: Tensor | None = None,
    size: int | None = None,
) -> Tensor:
    """`grouped_gemm` in float64, group by group. Rows and columns that are not written are zero. `size`: rows of the
    result with `out_rows`. Waits for the device."""
    a, b = a.double(), b.double()
    a = a if rows is None else rows_of(a, rows)
    if out_rows is not None and offsets is not None:
        given = dict(bias=bias, gate=gate, scale_a=scale_a, scale_b=scale_b)
        y = grouped_gemm_torch(a, b, offsets, activation=activation, **given)
        out = y.new_zeros(y.shape[0] if size is None else size, y.shape[1])
        for i in range(int(offsets[-1]) if offsets.numel() else 0):
            if 0 <= out_rows[i] < out.shape[0]:
                out[out_rows[i]] = y[i]
        return out
    if offsets is None:
        return a @ b
    ends = offsets.tolist()
    parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if a.ndim == b.ndim:
        found = [a[:, part] @ b[part] for part in parts]
        return torch.stack(found) if found else a.new_zeros(0, a.shape[0], b.shape[1])
    out = a.new_zeros(result_shape(a, b, offsets, activation))
    if b.ndim == 2:
        for group, part in enumerate(parts):
            out[:, part] = a[group] @ b[:, part]
        return out

    def of_row(x: Tensor, part: slice) -> Tensor:
        return x.double() if x.numel() == 1 else x.double().reshape(-1, 1)[part]

    for group, part in enumerate(parts):
        if scale_a is not None and scale_b is not None and scale_b.ndim == 3:
            y = gemm_torch(a[part], b[group], scale_a=scale_a[part], scale_b=scale_b[group])
        else:
            y = a[part] @ b[group]
            y = y if scale_a is None else y * of_row(scale_a, part)
            if scale_b is not None:
                y = y * (scale_b.double() if scale_b.numel() == 1 else scale_b[group].double())
        y = y if bias is None else y + bias[group].double()
        y = gated(y, activation) if activation in GATED else activated(y, activation)
        y = y if gate is None else y * of_row(gate, part)
        out[part] = y if residual is None else y + residual[part].double()
    return out
