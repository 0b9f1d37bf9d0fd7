"""The norms as torch sees them: operators of torch.library, and an autograd function for eager calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    call,
    check_no_tangent,
    describes,
    have_memory,
    is_plain,
    refusing,
    register,
    vmap_by_loop,
)
from tritonkittens.kernels.norm.call_plan import (
    PARAMS,
    Gradients,
    Operands,
    Options,
    Wanted,
    run_backward,
    run_forward,
    run_mask,
)
from tritonkittens.kernels.norm.checks import check_operands

TENSORS = len(Operands._fields)


def _filled(found: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Results of an operator, which are all tensors: an empty one for None."""
    return tuple(like.new_empty(0) if t is None else t for t in found)


@torch.library.custom_op("tritonkittens::norm", mutates_args=())
def norm_operator(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    rowscale: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    rms: bool,
    zero_centered_weight: bool,
    residual_in_fp32: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator behind the norms; returns y, y1, z, means and reciprocal standard deviations of the rows, empty
    where there is none; z is empty where it is x."""
    operands = Operands(x, weight, bias, residual, x1, weight1, bias1, rowscale, seed)
    options = Options(eps, dropout_p, rms, zero_centered_weight, residual_in_fp32, out_dtype)
    return _filled(run_forward(operands, options), x)


@describes(norm_operator)
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands, options = Operands(*args[:TENSORS]), Options(*args[TENSORS:])
    check_operands(options.name, **operands._asdict())
    x, dtype, z_dtype = operands.x, options.out_dtype or operands.x.dtype, operands.z_dtype(options)
    rows = math.prod(x.shape[:-1])  # torch.Size.numel() would fix symbolic sizes
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape if operands.weight1 is not None else 0, dtype=dtype),
        x.new_empty(0) if z_dtype is None else x.new_empty(x.shape, dtype=z_dtype),
        x.new_empty(0) if options.rms else x.new_empty(rows, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@torch.library.custom_op("tritonkittens::norm_backward", mutates_args=())
def backward_operator(
    dy: Tensor | None,
    dy1: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    weight1: Tensor | None,
    rowscale: Tensor | None,
    seed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    x_dtype: torch.dtype,
    x1_dtype: torch.dtype | None,
    param_dtype: torch.dtype | None,
    has_residual: bool,
    params_wanted: str,
    dropout_p: float,
    rms: bool,
    zero_centered_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the norms: of x, x1 and residual, empty where equal to that of x, and those of weight, bias, weight1
    and bias1 that are wanted, as one tensor."""
    given = Gradients(dy, dy1, dz, z, weight, weight1, rowscale, seed, mean, rstd)
    wanted = Wanted(x_dtype, x1_dtype, param_dtype, has_residual, params_wanted, dropout_p, rms, zero_centered_weight)
    return _filled(run_backward(given, wanted), z)


@describes(backward_operator)
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = len(Gradients._fields)
    given, wanted = Gradients(*args[:tensors]), Wanted(*args[tensors:])
    z, dtypes = given.z, wanted.result_dtypes(given.z, given.rowscale)
    dx, dx1, dr = (z.new_empty(0) if dtype is None else z.new_empty(z.shape, dtype=dtype) for dtype in dtypes)
    shape = (sum(wanted.grads), z.shape[-1])
    return dx, dx1, dr, z.new_empty(shape, dtype=wanted.param_dtype or torch.float32)


@torch.library.custom_op("tritonkittens::norm_dropout_mask", mutates_args=())
def mask_operator(x: Tensor, seed: Tensor, dropout_p: float, branch: int) -> Tensor:
    """Which elements of x (branch 0) or x1 (branch 1) dropout keeps."""
    return run_mask(x, seed, dropout_p, branch)


@describes(mask_operator)
def _(x: Tensor, seed: Tensor, dropout_p: float, branch: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


# ---------------------------------------------------------------- gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    operands, options = Operands(*inputs[:TENSORS]), Options(*inputs[TENSORS:])
    _, _, z, mean, rstd = output
    ctx.has_z = operands.z_dtype(options) is not None
    o = operands
    ctx.save_for_backward(
        z if ctx.has_z else o.x, o.weight, o.weight1, o.rowscale, o.seed, None if options.rms else mean, rstd
    )
    param_dtype = next((t.dtype for name in PARAMS if (t := getattr(o, name)) is not None), None)
    wanted = " ".join(name for name in PARAMS if ctx.needs_input_grad[Operands._fields.index(name)])
    x1_dtype = None if o.x1 is None else o.x1.dtype
    dropped = (options.dropout_p, options.rms, options.zero_centered_weight)
    ctx.wanted = Wanted(o.x.dtype, x1_dtype, param_dtype, o.residual is not None, wanted, *dropped)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dy1: Tensor | None, dz: Tensor | None, *_: Any) -> tuple[Any, ...]:
    check_no_tangent("rms_norm" if ctx.wanted.rms else "layer_norm")
    wanted = ctx.wanted
    z, weight, weight1, rowscale, seed, mean, rstd = ctx.saved_tensors
    given = Gradients(
        dy, dy1 if weight1 is not None else None, dz if ctx.has_z else None, z, weight, weight1, rowscale, seed, mean,
        rstd,
    )  # fmt: skip
    if not torch.is_grad_enabled() and is_plain(*given) and have_memory(*given):
        found: list[Any] = run_backward(given, wanted)
    else:
        found = list(call("norm_backward", *given, *wanted))
    dx = found[0]
    dtypes = wanted.result_dtypes(z, rowscale)
    dx1, dr = (dx if dtype is None else t for t, dtype in zip(found[1:3], dtypes[1:], strict=True))
    rows = iter(found[3].unbind())
    dw, db, dw1, db1 = (next(rows) if grad else None for grad in wanted.grads)
    residual = dr if wanted.residual else None
    x1 = dx1 if wanted.x1 is not None else None
    return dx, dw, db, residual, x1, dw1, db1, *[None] * (2 + len(Options._fields))


class NormFunction(torch.autograd.Function):
    """A norm of checked operands in eager mode; arguments and results as of the operator, None for empty tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        output = tuple(run_forward(Operands(*inputs[:TENSORS]), Options(*inputs[TENSORS:])))
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


def _second(name: str) -> Any:
    return refusing(f"{name} has no second derivative; use torch's norms")


register(norm_operator, vmap_by_loop, _gradients, _save)
register(backward_operator, vmap_by_loop, _second("norm_backward"))
register(mask_operator, vmap_by_loop, refusing("norm_dropout_mask has no gradient"))
