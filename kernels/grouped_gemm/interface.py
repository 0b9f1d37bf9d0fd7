"""Grouped matrix products for PyTorch tensors: `grouped_gemm`."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import announce_write, is_plain, requires_grad, write
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.grouped_gemm.autograd import product
from tritonkittens.kernels.grouped_gemm.call_plan import computed, is_grouped
from tritonkittens.kernels.grouped_gemm.checks import check_kinds, check_offsets, result_shape


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
    debug: bool = False,
) -> Tensor:
    """Return the products of several groups, computed in one kernel, as `torch.nn.functional.grouped_mm`.

    Group g ends before offsets[g], and begins where the group before it ends. The host does not read the offsets.

    Args:
        a, b: both bf16 or both fp16, of any strides (`w.mT` of a transposed matrix). With offsets:
            (M, K) and (G, K, N): rows [of g] of the result are a[rows of g] · b[g];
            (M, K) and (K, N): result[g] is a[:, K of g] · b[K of g], zeros for an empty group;
            (G, M, K) and (K, N): columns [of g] of the result are a[g] · b[:, columns of g].
            Without offsets (G, M, K) and (G, K, N): result[g] is a[g] · b[g].
        offsets: int32 (G,), on the device of a, rising, at most 1,024 groups. Groups may be empty, and begin and end
            anywhere.
        out_dtype: bf16, fp16 or fp32; None: that of a.
        out: receives the result. Rows (columns) after the last group keep their values.
        config: a `Config` instead of the one that is chosen by shapes; schedule="persistent".
        debug: check on the host that offsets rise and end inside. That waits for the device.

    Returns (M, N), (G, M, N), (M, N), (G, M, N). Rows (columns) after the last group are not defined without `out`.
    Groups of columns give a result whose columns are contiguous. Differentiable in a and b, any number of times.

    Raises TypeError or ValueError for what does not fit together; ArchitectureError on a GPU without TMA.

    Example::

        ends = torch.bincount(expert_of_token, minlength=experts).cumsum(0, dtype=torch.int32)
        y = grouped_gemm(tokens_by_expert, weights.mT, ends)
    """
    check_kinds(a, b, offsets, out)
    if offsets is None:
        result_shape(a, b, offsets)
        return gemm(a, b, out_dtype=out_dtype, out=out, config=config)
    if debug:
        result_shape(a, b, offsets)
        check_offsets(offsets, a.shape[-2] if b.ndim == 3 else b.shape[-2 if a.ndim == 2 else -1])
    if out is None:
        return product(a, b, offsets, out_dtype, config)
    if not is_plain(a, b, offsets, out) or requires_grad(a, b, out):
        result = product(a, b, offsets, out_dtype, config)
        if a.ndim != b.ndim and out.shape == result.shape:
            result = torch.where(is_grouped(out, offsets, -2 if a.ndim == 2 else -1), result, out)
        return write("grouped_gemm", result, out)
    announce_write(out)
    return computed(a, b, offsets, out_dtype, out, config)
