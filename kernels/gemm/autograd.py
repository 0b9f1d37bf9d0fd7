"""`gemm` as torch sees it: an operator of torch.library, a plain autograd function, which costs an eager call less, and
which of both a call takes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._ahead import followed_by_backward
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import (
    announce_write,
    describes,
    have_memory,
    is_compiling,
    is_forward_mode,
    is_plain,
    register,
    requires_grad,
    vmap_by_loop,
)
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import addressable
from tritonkittens.kernels.gemm.call_plan import as_matrix, by_operator, computed, rounded
from tritonkittens.kernels.gemm.checks import (
    FP8,
    Operands,
    check,
    check_accumulation,
    check_config,
    check_kinds,
    places_of,
    result_dtype,
    result_shape,
)
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.gemm.device.unaligned import takes
from tritonkittens.kernels.gemm.epilogue import Epilogue
from tritonkittens.kernels.gemm.microscaling import FP4
from tritonkittens.kernels.gemm.reference import activated, activation_gradient, gemm_torch


@torch.library.custom_op("tritonkittens::gemm", mutates_args=())
def gemm_operator(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gate: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype | None,
    config: str | None,
    accumulate: str = "fp32",
) -> Tensor:
    """The operator behind `gemm`; arguments as there, `config` as text."""
    chosen = None if config is None else Config.from_text(config)
    return computed(a, b, (bias, gate, residual, scale_a, scale_b), activation, out_dtype, chosen, accumulate)


@describes(gemm_operator)
def _(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gate: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype | None,
    config: str | None,
    accumulate: str = "fp32",
) -> Tensor:
    return a.new_empty(result_shape(a, b), dtype=result_dtype(a, out_dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
    a, b, bias, activation, gate, residual, scale_a, scale_b, out_dtype, config, _ = inputs
    if a.dtype in (*FP8, FP4) and (a.requires_grad or b.requires_grad):
        raise TypeError(
            f"gemm of {a.dtype} has no gradient: the operands of {'a 4' if a.dtype == FP4 else 'an 8'}-bit product are "
            "results of a quantisation"
        )
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None and scale.requires_grad:
            raise ValueError(
                f"gemm: {name} requires a gradient, which gemm does not compute; scales are results of a quantisation"
            )
    ctx.save_for_backward(a, b, bias, gate, scale_a, scale_b)
    ctx.activation = activation
    ctx.shapes = [None if t is None else (t.shape, t.dtype) for t in (a, b, bias, gate, residual)]


def laid_out_as(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left · right, with the dimension contiguous that is so in `x`: torch keeps a gradient that lies as its parameter
    does, and copies another. (The weight of a `Linear` is multiplied transposed.)"""
    return product(right.mT, left.mT).mT if x.stride(-2) == 1 and x.stride(-1) != 1 else product(left, right)


def _copied_once(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The gradient of a·b as both products with it read it: where TMA cannot address its rows, each would copy them."""
    if addressable(grad) or any(
        takes(left, right, None, grad.dtype, None) for left, right in ((grad, b.mT), (a.mT, grad))
    ):
        return grad
    return as_addressable(grad)


def _summed(x: Tensor | None, like: Any) -> Tensor | None:
    """A gradient with the shape and dtype of the operand that was broadcast."""
    if x is None:
        return None
    shape, dtype = like
    if x.shape == shape and x.dtype == dtype:
        return x
    return (x if x.dtype == dtype else x.float()).sum_to_size(shape).to(dtype)  # torch sums in fp32 and rounds once


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The product is computed again where the activation's or the gate's gradient needs it: a product costs less than
    keeping its result."""
    a, b, bias, gate, scale_a, scale_b = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad = grad.float() if grad.dtype in FP8 else grad
    d_total = grad if gate is None else grad * gate
    d_gate = None
    if ctx.activation is not None or (gate is not None and needs[4]):
        total = product(a, b, bias=bias, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
        d_gate = grad * activated(total, ctx.activation) if gate is not None and needs[4] else None
        if ctx.activation is not None:
            d_total = activation_gradient(d_total.float(), total, ctx.activation)
    d_bias = _summed(d_total, ctx.shapes[2]) if needs[2] else None
    d_residual = _summed(grad, ctx.shapes[4]) if needs[5] else None
    d_a, d_b = _of_operands(ctx, d_total, a, b, scale_a, scale_b) if needs[0] or needs[1] else (None, None)
    return d_a, d_b, d_bias, None, _summed(d_gate, ctx.shapes[3]), d_residual, None, None, None, None, None


def _of_operands(
    ctx: Any, d_total: Tensor, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a and b, where wanted, for that of the scaled product."""
    needs, d_sum = ctx.needs_input_grad, d_total
    for scale, shape in ((scale_a, (-1, 1)), (scale_b, (1, -1))):
        if scale is not None:
            d_sum = d_sum * scale.reshape(shape if scale.numel() > 1 else ())
    d_sum = d_sum.to(a.dtype).contiguous()
    is_flat = b.ndim == 2 and a.ndim > 2 and a.is_contiguous()
    if is_flat:  # the rows of a batch are those of one product
        a, d_sum = as_matrix(a), as_matrix(d_sum)
    if needs[0] and needs[1] and not d_sum.requires_grad and is_plain(d_sum, a, b) and have_memory(d_sum):
        d_sum = _copied_once(d_sum, a, b)
    d_a = d_b = None
    if needs[0]:
        d_a = laid_out_as(a, d_sum, b.mT)
        d_a = _summed(d_a.view(ctx.shapes[0][0]) if is_flat else d_a, ctx.shapes[0])
    if needs[1]:
        if b.ndim == 2:
            a, d_sum = as_matrix(a), as_matrix(d_sum)
        d_b = _summed(laid_out_as(b, a.mT, d_sum), ctx.shapes[1])
    return d_a, d_b


def _vmap(operator: Any, dims: tuple[int | None, ...], size: int, *args: Any) -> tuple[Tensor, int]:
    """Samples of matrices, and of residuals and gates of the result's shape, are one batch more; those of vectors, and
    products with scales of blocks, are products of their own."""
    a, b, _, _, gate, residual, *scales = args[:8]
    matrices = dims[:2] != (None, None) and all(dim is None for name, dim in enumerate(dims) if name not in (0, 1, 5))
    blocks = any(scale is not None and (scale.ndim == 2 or scale.dtype != torch.float32) for scale in scales)
    if not matrices or blocks or (gate is not None and gate.ndim > 1 and (gate.ndim > 2 or gate.numel() > 1)):
        return vmap_by_loop(operator, dims, size, *args)
    rank = max(x.ndim - (dim is not None) for x, dim in zip((a, b), dims))

    def samples_first(x: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return x
        x = x.movedim(dim, 0)
        return x.reshape(size, *[1] * (rank + 1 - x.ndim), *x.shape[1:])

    given = list(args)
    given[:2] = (samples_first(x, dim) for x, dim in zip((a, b), dims))
    if residual is not None:
        given[5] = residual.expand(size, *residual.shape) if dims[5] is None else residual.movedim(dims[5], 0)
    return operator(*given), 0


register(gemm_operator, _vmap, _backward, _save)


def _first_call(
    a: Tensor, b: Tensor, operands: Operands, activation: Any, *others: Any
) -> AbstractContextManager[None]:
    """The context of the first product of a kind that wants gradients."""
    bias, *rest = operands
    return followed_by_backward(GemmFunction.apply, a, b, bias, activation, *rest, *others)


class GemmFunction(torch.autograd.Function):
    """`gemm` in eager mode; arguments as of the operator, but `config` as it is."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save(ctx, inputs, None)
        a, b, bias, activation, gate, residual, scale_a, scale_b, out_dtype, config, accumulate = inputs
        operands = (bias, gate, residual, scale_a, scale_b)
        return computed(a, b, operands, activation, out_dtype, config, accumulate, None, _first_call)

    backward = staticmethod(_backward)


# ---------------------------------------------------------------- dispatch


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
    accumulate: str = "fp32",
) -> Tensor:
    """`gemm` without `out`: differentiable any number of times, and seen by torch where it has to be."""
    operands = (bias, gate, residual, scale_a, scale_b)
    if not is_plain(a, b, bias, gate, residual, scale_a, scale_b):
        return _dispatched(a, b, operands, activation, out_dtype, config, accumulate)
    if requires_grad(a, b, bias, gate, residual, scale_a, scale_b):
        check_config(config)
        if not have_memory(a, b, *operands):
            return by_operator(a, b, operands, activation, out_dtype, config, accumulate)
        return GemmFunction.apply(
            a, b, bias, activation, gate, residual, scale_a, scale_b, out_dtype, config, accumulate
        )
    return computed(a, b, operands, activation, out_dtype, config, accumulate)


def _dispatched(
    a: Tensor,
    b: Tensor,
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    config: Config | None,
    accumulate: str,
) -> Tensor:
    """`gemm` for operands that torch has to see: by the operator, which torch traces and batches, or with tangents by
    torch's own operations."""
    bias, gate, residual, scale_a, scale_b = operands
    check_kinds(a, b, operands, None)
    check_config(config)
    if not is_compiling() and (is_forward_mode() or is_distributed(type(a))):  # the operator sees shards
        check(a, b, operands, activation, out_dtype, None)
        check_accumulation(a, accumulate, config)
        places_of(a, b, operands)
    if is_forward_mode():
        with torch.autocast(a.device.type, enabled=False):
            total = gemm_torch(
                a,
                b,
                bias=bias,
                activation=activation,
                gate=gate,
                residual=residual,
                scale_a=scale_a,
                scale_b=scale_b,
                dtype=torch.float32,
            )
        return rounded(total, result_dtype(a, out_dtype))
    return by_operator(a, b, operands, activation, out_dtype, config, accumulate)


def product_with(
    epilogue: Epilogue,
    a: Tensor,
    b: Tensor,
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    config: Config | None,
    accumulate: str,
) -> Tensor:
    """`gemm` with a user's epilogue. Raises TypeError where torch would have to see or differentiate it."""
    if not isinstance(epilogue, Epilogue):
        raise TypeError(f"gemm(epilogue={epilogue!r}): must be an Epilogue of a @triton.jit function")
    given = (*operands, *epilogue.tensors)
    check_kinds(a, b, given, out)
    said = f"gemm(epilogue={epilogue!r})"
    if activation is not None:
        raise ValueError(f"{said}: it stands where activation={activation!r} would; give one of them")
    if not is_plain(a, b, *given, out) or not have_memory(a, b, *given):
        raise TypeError(
            f"{said}: torch.compile, torch.func, fake tensors, tensor subclasses and forward-mode differentiation "
            "cannot see into it; under "
            "torch.compile call gemm in a function with torch.compiler.disable"
        )
    if requires_grad(a, b, *given, out):
        raise TypeError(
            f"{said}: it has no backward, but a gradient is wanted of an operand; call it under torch.no_grad, or "
            "detach its operands"
        )
    if out is not None:
        announce_write(out)
    return computed(a, b, given, epilogue.function, out_dtype, config, accumulate, out)
