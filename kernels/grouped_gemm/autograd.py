"""`grouped_gemm` as torch sees it: an operator of torch.library, and an autograd function for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    call,
    check_no_tangent,
    describes,
    have_memory,
    is_plain,
    register,
    requires_grad,
    vmap_by_loop,
)
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.grouped_gemm.call_plan import computed, is_grouped
from tritonkittens.kernels.grouped_gemm.checks import check_config, check_kinds, result_shape


@torch.library.custom_op("tritonkittens::grouped_gemm", mutates_args=())
def grouped_gemm_operator(
    a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype | None, config: str | None
) -> Tensor:
    """The operator behind `grouped_gemm`; arguments as there, `config` as text."""
    return computed(a, b, offsets, out_dtype, None, None if config is None else Config.from_text(config))


@describes(grouped_gemm_operator)
def _(a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype | None, config: str | None) -> Tensor:
    shape, dtype = result_shape(a, b, offsets), out_dtype or a.dtype
    # groups of columns are computed as groups of rows
    return a.new_empty(shape[::-1], dtype=dtype).mT if a.ndim == 3 else a.new_empty(shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
    a, b, offsets, *_ = inputs
    ctx.save_for_backward(a, b, offsets)


def _laid_out_as(x: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The product of left and right, with the dimension contiguous that is so in `x`: torch keeps a gradient that lies
    as its parameter does, and copies another."""
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return product(right.mT, left.mT, offsets).mT
    return product(left, right, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """With groups of rows, C = A·B[g]: dA = dC·B[g]ᵀ, and dB = Aᵀ·dC is a product with groups of its depth; and the
    other way round. Rows of dA after the last group are zeros."""
    check_no_tangent("grouped_gemm")
    a, b, offsets = ctx.saved_tensors
    needs, grad = ctx.needs_input_grad, grad.to(a.dtype)
    d_a = d_b = None
    if needs[0]:
        d_a = _laid_out_as(a, grad, b.mT, offsets)
        d_a = torch.where(is_grouped(d_a, offsets, -2 if b.ndim == 3 else -1), d_a, 0) if a.ndim == 2 else d_a
    if needs[1]:
        d_b = _laid_out_as(b, a.mT, grad, offsets)
        d_b = torch.where(is_grouped(d_b, offsets, -1 if a.ndim == 3 else -2), d_b, 0) if b.ndim == 2 else d_b
    return d_a, d_b, None, None, None


register(grouped_gemm_operator, vmap_by_loop, _backward, _save)


class GroupedGemmFunction(torch.autograd.Function):
    """`grouped_gemm` in eager mode; arguments as of the operator, but `config` as it is."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save(ctx, inputs, None)
        a, b, offsets, out_dtype, config = inputs
        return computed(a, b, offsets, out_dtype, None, config)

    backward = staticmethod(_backward)


def product(
    a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None, config: Config | None = None
) -> Tensor:
    """`grouped_gemm` with offsets, without `out`: differentiable any number of times, and seen by torch where it has to
    be."""
    if is_distributed(type(a)) or is_distributed(type(b)):
        raise TypeError("grouped_gemm: an operand is a DTensor; multiply its shard, x.to_local()")
    if not is_plain(a, b, offsets) or not have_memory(a, b, offsets):
        check_kinds(a, b, offsets, None)
        check_config(config, a, b)
        result_shape(a, b, offsets)
        return call("grouped_gemm", a, b, offsets, out_dtype, None if config is None else config.to_text())
    if requires_grad(a, b):
        return GroupedGemmFunction.apply(a, b, offsets, out_dtype, config)
    return computed(a, b, offsets, out_dtype, None, config)
