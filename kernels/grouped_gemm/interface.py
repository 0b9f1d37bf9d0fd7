"""Grouped matrix products for PyTorch tensors: `grouped_gemm`."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import announce_write, is_plain, requires_grad, write
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.grouped_gemm.autograd import product
from tritonkittens.kernels.grouped_gemm.call_plan import computed, is_grouped
from tritonkittens.kernels.grouped_gemm.checks import Operands, check, check_kinds, check_offsets, result_shape


def grouped_gemm(
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
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
    debug: bool = False,
) -> Tensor:
    """Return the products of several groups, computed in one kernel, as `torch.nn.functional.grouped_mm`.

    Group g ends before offsets[g], and begins where the group before it ends. The host does not read the offsets.

    Args:
        a, b: both bf16 or both fp16, of any strides (`w.mT` of a transposed matrix). With offsets:
            (M, K) and (G, K, N): rows [of g] of the result are a[rows of g] · b[g]; also fp8 (e4m3 and e5m2 may mix);
            (M, K) and (K, N): result[g] is a[:, K of g] · b[K of g], zeros for an empty group;
            (G, M, K) and (K, N): columns [of g] of the result are a[g] · b[:, columns of g].
            Without offsets (G, M, K) and (G, K, N): result[g] is a[g] · b[g].
        offsets: int32 (G,), on the device of a, rising, at most 1,024 groups. Groups may be empty, and begin and end
            anywhere.
        bias, activation, gate, residual, scale_a, scale_b: with groups of rows, the result is residual + gate ·
            activation((a·b) · scale_a · scale_b + bias), as of `gemm`. bias (G, N), gate (M,), such as a router's
            weights, residual (M, N); scale_a (M,) and scale_b (G, N) in fp32. gate and scales may be one number.
            activation also "swiglu" or "geglu" (by tanh), without bias and scales: of 2N columns, N that are activated
            and then N that these gate.
        out_dtype: bf16, fp16, fp32 or fp8; None: that of a, bf16 for fp8.
        out: receives the result. Rows (columns) after the last group keep their values.
        config: a `Config` instead of the one that is chosen by shapes; schedule="persistent".
        debug: check on the host that offsets rise and end inside. That waits for the device.

    Returns (M, N), (G, M, N), (M, N), (G, M, N). Rows (columns) after the last group are not defined without `out`.
    Groups of columns give a result whose columns are contiguous. Of 16-bit operands it is differentiable in a, b, bias,
    gate and residual.

    Raises TypeError or ValueError for what does not fit together; ArchitectureError on a GPU without TMA.

    Example::

        ends = torch.bincount(expert_of_token, minlength=experts).cumsum(0, dtype=torch.int32)
        y = grouped_gemm(tokens_by_expert, weights.mT, ends)
    """
    operands = Operands(bias, gate, residual, scale_a, scale_b)
    check_kinds(a, b, offsets, operands, out)
    if offsets is None:
        check(a, b, None, operands, activation, out_dtype, out)
        return gemm(a, b, out_dtype=out_dtype, out=out, config=config)
    if debug:
        result_shape(a, b, offsets)
        check_offsets(offsets, a.shape[-2] if b.ndim == 3 else b.shape[-2 if a.ndim == 2 else -1])
    if out is None:
        return product(a, b, offsets, operands, activation, out_dtype, config)
    if not is_plain(a, b, offsets, *operands, out) or requires_grad(a, b, *operands, out):
        result = product(a, b, offsets, operands, activation, out_dtype, config)
        if a.ndim != b.ndim and out.shape == result.shape:
            result = torch.where(is_grouped(out, offsets, -2 if a.ndim == 2 else -1), result, out)
        return write("grouped_gemm", result, out)
    announce_write(out)
    return computed(a, b, offsets, operands, activation, out_dtype, out, config)
