"""Grouped matrix products for PyTorch tensors: `grouped_gemm`."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import announce_write, check_tensors, is_plain, requires_grad, write
from tritonkittens.kernels._tensors import check_rising
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.grouped_gemm.autograd import product
from tritonkittens.kernels.grouped_gemm.call_plan import computed, is_grouped, scattered
from tritonkittens.kernels.grouped_gemm.checks import Operands, check, check_counts, check_kinds, result_shape


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
    counts: Tensor | None = None,
    rows: Tensor | None = None,
    out_rows: Tensor | None = None,
    debug: bool = False,
) -> Tensor:
    """Return the products of several groups, computed in one kernel, as `torch.nn.functional.grouped_mm`.

    Group g ends before offsets[g], and begins where the group before it ends. The host does not read the offsets.
    Groups of rows take the epilogue of `gemm`: residual + gate · activation((a·b) · scale_a · scale_b + bias). More on
    layouts, scales and selected rows: docs/kernels.md.

    Args:
        a, b: both bf16 or both fp16, any strides. Groups of rows: (M, K) and (G, K, N), also fp8 (e4m3 and e5m2 may
            mix). Groups of K: (M, K) and (K, N). Groups of columns: (G, M, K) and (K, N). A batch: (G, M, K) and (G, K,
            N).
        offsets: int32 (G,), rising, G up to 1,024; None for a batch. Groups may be empty, and end anywhere.
        bias, gate, residual: (G, N), (M,) or a number, and (M, N), for groups of rows.
        activation: as of `gemm`; or "swiglu" or "geglu" (by tanh), without bias and scales, of 2N columns: N that are
            activated, then N that these gate.
        scale_a, scale_b: fp32 (M,) and (G, N), or numbers. Of fp8 also (M, ⌈K/128⌉) and (G, ⌈K/128⌉, ⌈N/128⌉).
        out_dtype: bf16, fp16, fp32 or fp8; None: that of a, bf16 for fp8.
        out: receives the result. Rows (columns) after the last group keep their values.
        config: a `Config` instead of the chosen one, with schedule="persistent".
        counts: int32 (G,): the first counts[g] rows of each group of a batch. gate and scale_a are then (G, M), or
            scale_a (G, M, ⌈K/128⌉), and residual (G, M, N). No gradient.
        rows: int32 (M,), for groups of rows: row i of the product is a[rows[i]] · b[g], and 0 outside of a.
        out_rows: int32 (M,), for groups of rows: row i of the product is row out_rows[i] of the result, each at most
            once, and is not written outside of it. gate and scale_a are of the product's rows. No residual.
        debug: check the values of offsets or counts, for which the host waits for the device. Otherwise wrong ones give
            undefined results, but no access outside the tensors.

    Returns (M, N) for groups of rows, and for groups of columns, with its columns contiguous; else (G, M, N), zeros for
    an empty group of K. Rows (columns) after the last group are undefined without `out`. Of 16-bit operands it is
    differentiable in a, b, bias, gate and residual.

    Raises TypeError or ValueError for other operands; ArchitectureError on a GPU without TMA.

    Example::

        offsets = torch.bincount(expert_of_token, minlength=experts).cumsum(0, dtype=torch.int32)
        y = grouped_gemm(tokens_by_expert, weights.mT, offsets)
    """
    operands = Operands(bias, gate, residual, scale_a, scale_b, rows, out_rows)
    check_kinds(a, b, offsets if counts is None else counts, operands, out)
    if counts is not None:
        if offsets is not None or (a.ndim, b.ndim) != (3, 3):
            raise ValueError(
                f"grouped_gemm: counts are for a (G, M, K) and b (G, K, N), without offsets; a is {tuple(a.shape)}, b "
                f"is {tuple(b.shape)}"
            )
        if rows is not None or out_rows is not None:
            raise ValueError("grouped_gemm: counts with rows or out_rows; give offsets")
        check_counts(counts, a.shape[0], a.shape[1] if debug else None)
        return _masked(a, b, counts, operands, activation, out_dtype, out, config)
    if offsets is None:
        check(a, b, None, operands, activation, out_dtype, out)
        return gemm(a, b, out_dtype=out_dtype, out=out, config=config)
    if debug:
        result_shape(a, b, offsets)
        most = operands.height(a) if b.ndim == 3 else b.shape[-2 if a.ndim == 2 else -1]
        check_rising("grouped_gemm", "offsets", offsets, most, are_ends=True)
    if out is None:
        return product(a, b, offsets, operands, activation, out_dtype, config)
    if not is_plain(a, b, offsets, *operands, out) or requires_grad(a, b, *operands, out):
        result = product(a, b, offsets, operands._replace(out_rows=None), activation, out_dtype, config)
        if out_rows is not None:
            return write("grouped_gemm", scattered(result, out_rows, offsets, out.clone()), out)
        if a.ndim != b.ndim and out.shape == result.shape:
            result = torch.where(is_grouped(out, offsets, -2 if a.ndim == 2 else -1), result, out)
        return write("grouped_gemm", result, out)
    announce_write(out)
    return computed(a, b, offsets, operands, activation, out_dtype, out, config)


def ends_of_groups(ids: Tensor, groups: int) -> Tensor:
    """Return the `offsets` of rows that carry the number of their group, as DeepGEMM's contiguous layout.

    Rows may be anywhere: no segment needs to be aligned. The host does not read `ids`, and a CUDA graph may hold the
    call.

    Args:
        ids: int32 (M,), the group of each row, not falling; −1 for padding.
        groups: the number of groups.

    Returns int32 (groups,). Padding belongs to the group before it, padding before all rows to group 0: `grouped_gemm`
    multiplies these rows as it does the group's. Padding after all rows belongs to no group.

    Raises TypeError or ValueError for ids of another dtype or shape.

    Example::

        offsets = ends_of_groups(m_indices, experts)
        y = grouped_gemm(a, weights.mT, offsets, scale_a=scale_a, scale_b=scale_weights.mT)
    """
    check_tensors("ends_of_groups", ids=ids)
    if ids.dtype != torch.int32:
        raise TypeError(f"ends_of_groups: ids has dtype {ids.dtype}; it must be torch.int32")
    if ids.ndim != 1:
        raise ValueError(f"ends_of_groups: ids is {tuple(ids.shape)}; it must be (M,)")
    numbers = torch.arange(groups, dtype=torch.int32, device=ids.device)
    if ids.shape[0] == 0:
        return torch.zeros_like(numbers)
    ends = torch.searchsorted(ids.cummax(0).values, numbers, right=True, out_int32=True)
    after = torch.arange(1, ids.shape[0] + 1, dtype=torch.int32, device=ids.device)
    return torch.minimum(ends, torch.where(ids < 0, 0, after).amax())


def _masked(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    config: Config | None,
) -> Tensor:
    """`grouped_gemm` with counts, as groups of rows that begin at equal distances."""
    groups, rows = a.shape[:2]

    def in_rows(x: Tensor | None, dims: int) -> Tensor | None:
        """The first two dimensions of an operand as one, where it has `dims`."""
        return x if x is None or x.ndim != dims or x.shape[:2] != (groups, rows) else x.flatten(0, 1)

    scale_a = in_rows(operands.scale_a, 2)
    if scale_a is not None and scale_a.ndim == 3 and scale_a.shape[:2] == (groups, rows):
        scale_a = scale_a.movedim(2, 0).flatten(1).mT  # where this copies, M is contiguous as in the kernel
    packed = operands._replace(gate=in_rows(operands.gate, 2), residual=in_rows(operands.residual, 3), scale_a=scale_a)
    if out is None:
        return product(a.flatten(0, 1), b, counts, packed, activation, out_dtype, config, True).unflatten(
            0, (groups, rows)
        )
    if not is_plain(a, b, counts, *operands, out) or requires_grad(a, b, *operands, out):
        raise TypeError("grouped_gemm: counts with out= has no gradient and is not traced; leave out= away")
    announce_write(out)
    home = out.flatten(0, 1) if out.ndim == 3 else out
    computed(a.flatten(0, 1), b, counts, packed, activation, out_dtype, home, config, True)
    return out if home.data_ptr() == out.data_ptr() else out.copy_(home.view(out.shape))
