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
from tritonkittens.kernels.gemm.checks import FP8, result_dtype
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.gemm.reference import activated, activation_gradient
from tritonkittens.kernels.grouped_gemm.call_plan import NOTHING, computed, is_grouped
from tritonkittens.kernels.grouped_gemm.checks import GATED, Operands, check_config, check_kinds, result_shape
from tritonkittens.kernels.grouped_gemm.reference import gated, rows_of

FIRST, LAST = 3, 3 + len(Operands._fields)  # arguments of the operator that are operands of the epilogue


@torch.library.custom_op("tritonkittens::grouped_gemm", mutates_args=())
def grouped_gemm_operator(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    rows: Tensor | None,
    out_rows: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    config: str | None,
    masked: bool = False,
) -> Tensor:
    """The operator behind `grouped_gemm`; arguments as there, `config` as text, `masked` as of `computed`."""
    operands = Operands(bias, gate, residual, scale_a, scale_b, rows, out_rows)
    chosen = None if config is None else Config.from_text(config)
    return computed(a, b, offsets, operands, activation, out_dtype, None, chosen, masked)


@describes(grouped_gemm_operator)
def _(a: Tensor, b: Tensor, offsets: Tensor, *others: Any) -> Tensor:
    activation, out_dtype = others[LAST - FIRST :][:2]
    rows = Operands(*others[: LAST - FIRST]).rows
    shape, dtype = result_shape(a, b, offsets, activation, rows), result_dtype(a, out_dtype)
    # groups of columns are computed as groups of rows
    return a.new_empty(shape[::-1], dtype=dtype).mT if a.ndim == 3 else a.new_empty(shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
    a, b, offsets, bias, gate, residual, scale_a, scale_b, rows, out_rows, ctx.activation, *_ = inputs
    if inputs[-1] and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise TypeError("grouped_gemm with counts has no gradient; pack the rows, and give offsets")
    if a.dtype in FP8 and (a.requires_grad or b.requires_grad):
        raise TypeError(
            f"grouped_gemm of {a.dtype} has no gradient: the operands of an 8-bit product are results of a quantisation"
        )
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None and (scale.requires_grad or a.requires_grad or b.requires_grad):
            raise ValueError(f"grouped_gemm: {name} with operands that require gradients; scales have no gradient")
    ctx.save_for_backward(a, b, offsets, bias, gate, rows, out_rows)
    ctx.residual_dtype = None if residual is None else residual.dtype


def _laid_out_as(x: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The product of left and right, with the dimension contiguous that is so in `x`: torch keeps a gradient that lies
    as its parameter does, and copies another."""
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return product(right.mT, left.mT, offsets).mT
    return product(left, right, offsets)


def _of_sums(grad: Tensor, total: Tensor, activation: str | None) -> Tensor:
    """The gradient of sums for that of their activation."""
    if activation not in GATED:
        return activation_gradient(grad, total, activation)
    first, second = total.chunk(2, -1)
    by = GATED[activation]
    return torch.cat([activation_gradient(grad * second, first, by), grad * activated(first, by)], -1)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """With groups of rows, C = A·B[g]: dA = dC·B[g]ᵀ, and dB = Aᵀ·dC is a product with groups of its depth; and the
    other way round. Gradients of rows after the last group are zeros. The product is computed again where the gradient
    of an activation or a gate needs it, as of `gemm`. Rows of a that are selected are gathered first."""
    check_no_tangent("grouped_gemm")
    a, b, offsets, bias, gate, rows, out_rows = ctx.saved_tensors
    needs, tokens = ctx.needs_input_grad, a.shape[0]
    a, grad = a if rows is None else rows_of(a, rows), grad if out_rows is None else rows_of(grad, out_rows)
    d_bias = d_gate = d_residual = None
    d_total = grad
    if b.ndim == 3 and a.ndim == 2:
        inside = is_grouped(grad, offsets, -2)
        if needs[FIRST + 2]:
            d_residual = torch.where(inside, grad, 0).to(ctx.residual_dtype)
        d_total = grad if gate is None else grad * gate.reshape(-1, 1)
        if ctx.activation is not None or (gate is not None and needs[FIRST + 1]):
            total = product(a, b, offsets, NOTHING._replace(bias=bias), out_dtype=torch.float32)
            if gate is not None and needs[FIRST + 1]:
                y = gated(total, ctx.activation) if ctx.activation in GATED else activated(total, ctx.activation)
                d_gate = torch.where(inside, grad * y, 0).float()
                d_gate = d_gate.sum_to_size(gate.reshape(-1, 1).shape).view(gate.shape).to(gate.dtype)
            d_total = _of_sums(d_total.float(), total, ctx.activation)
    d_total = d_total.to(a.dtype)
    if needs[FIRST]:
        ones = a.new_ones(1, a.shape[0])
        d_bias = product(ones, d_total, offsets, out_dtype=torch.float32).squeeze(1).to(bias.dtype)
    d_a = d_b = None
    if needs[0]:
        d_a = _laid_out_as(a, d_total, b.mT, offsets)
        d_a = torch.where(is_grouped(d_a, offsets, -2 if b.ndim == 3 else -1), d_a, 0) if a.ndim == 2 else d_a
    if needs[1]:
        d_b = _laid_out_as(b, a.mT, d_total, offsets)
        d_b = torch.where(is_grouped(d_b, offsets, -1 if a.ndim == 3 else -2), d_b, 0) if b.ndim == 2 else d_b
    if d_a is not None and rows is not None:
        inside = torch.where((rows >= 0) & (rows < tokens), rows, tokens)
        d_a = d_a.new_zeros(tokens + 1, d_a.shape[1], dtype=torch.float32).index_add(0, inside, d_a.float())
        d_a = d_a[:-1].to(a.dtype)
    return d_a, d_b, None, d_bias, d_gate, d_residual, *[None] * 8


register(grouped_gemm_operator, vmap_by_loop, _backward, _save)


class GroupedGemmFunction(torch.autograd.Function):
    """`grouped_gemm` in eager mode; arguments as of the operator, but `config` as it is."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save(ctx, inputs, None)
        a, b, offsets = inputs[:FIRST]
        activation, out_dtype, config, masked = inputs[LAST:]
        return computed(a, b, offsets, Operands(*inputs[FIRST:LAST]), activation, out_dtype, None, config, masked)

    backward = staticmethod(_backward)


def product(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    operands: Operands = NOTHING,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
    masked: bool = False,
) -> Tensor:
    """`grouped_gemm` with offsets, without `out`: differentiable any number of times, and seen by torch where it has to
    be."""
    if is_distributed(type(a)) or is_distributed(type(b)):
        raise TypeError("grouped_gemm: an operand is a DTensor; multiply its shard, x.to_local()")
    if not is_plain(a, b, offsets, *operands) or not have_memory(a, b, offsets, *operands):
        check_kinds(a, b, offsets, operands, None)
        check_config(config, a, b, operands, activation)
        result_shape(a, b, offsets, activation, operands.rows)
        chosen = None if config is None else config.to_text()
        return call("grouped_gemm", a, b, offsets, *operands, activation, out_dtype, chosen, masked)
    if requires_grad(a, b, *operands):
        return GroupedGemmFunction.apply(a, b, offsets, *operands, activation, out_dtype, config, masked)
    return computed(a, b, offsets, operands, activation, out_dtype, None, config, masked)
