"""Norms of rows for PyTorch tensors: `rms_norm`, `layer_norm`."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    autocasts,
    call,
    check_no_gradient,
    check_tensors,
    has_tangent,
    is_plain,
    requires_grad,
)
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.norm.call_plan import Operands, Options, run_forward, run_mask
from tritonkittens.kernels.norm.checks import check_operands, check_options
from tritonkittens.kernels.norm.operators import NormFunction

Results: TypeAlias = Tensor | tuple[Tensor | None, ...]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    *,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    seed: Tensor | None = None,
) -> Results:
    """Normalise the rows of z = dropout(rowscale · x) + dropout(x1) + residual; only x is required.

    y = (z - mean) / √(variance + eps) · weight + bias, with the biased variance, as flash-attn's `layer_norm_fn`.
    Statistics and sums are in fp32.

    Args:
        x: (…, N) in bf16, fp16 or fp32, N from 1 to 65,536. Any strides: it is read without a copy if the last stride
            is 1 and x can be seen as (A, B, N) with any two strides.
        weight, bias: (N,), of one of these dtypes, the same for all four parameters.
        residual, x1: of the shape of x, each in any of these dtypes.
        weight1, bias1: (N,): a second result y1 of the same z.
        eps: at least 0. The default is 1e-6, as in flash-attn; torch's is 1e-5.
        dropout_p: the probability with which an element becomes 0; others are divided by 1 - dropout_p.
        rowscale: x.shape[:-1], without a gradient. Excludes x1.
        prenorm: also return z, in the dtype of residual; without one in that of x, or in fp32 with residual_in_fp32. y
            is the norm of z as rounded to this dtype. z is x itself if nothing changes x.
        zero_centered_weight: multiply by weight + 1, and weight1 + 1.
        return_dropout_mask: also return the masks of x and x1, True where dropout keeps an element; None where there is
            no dropout, or no x1.
        out_dtype: of y and y1; None: that of x, and fp32 under `torch.autocast` on a GPU.
        seed: int64 (2,), seed and offset of Philox, from which the backward computes the mask again. None: from torch's
            generator. Equal seeds drop the same elements.

    Returns y, or a tuple of y, y1 (with weight1), z (with prenorm) and both masks (with return_dropout_mask). Gradients
    have the same bits in every run.

    Raises TypeError for other dtypes, an eps that is no number, or a DTensor; ValueError for a shape, device or option
    that does not fit, a rowscale that requires a gradient, or a forward-mode tangent.

    Example::

        y, stream = layer_norm(x, weight, bias, residual=stream, prenorm=True)
    """
    given = dict(weight=weight, bias=bias, residual=residual, x1=x1, weight1=weight1, bias1=bias1, rowscale=rowscale)
    options = Options(eps, dropout_p, False, zero_centered_weight, residual_in_fp32, out_dtype)
    return _norm(options, x, given, seed, prenorm, return_dropout_mask)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float | None = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    *,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    seed: Tensor | None = None,
) -> Results:
    """RMSNorm over the last dimension: y = z / √(mean of z² + eps) · weight + bias. Arguments and results: see
    `layer_norm`. eps=None is fp32's epsilon, as in torch's `rms_norm` of these dtypes."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    given = dict(weight=weight, bias=bias, residual=residual, x1=x1, weight1=weight1, bias1=bias1, rowscale=rowscale)
    options = Options(eps, dropout_p, True, zero_centered_weight, residual_in_fp32, out_dtype)
    return _norm(options, x, given, seed, prenorm, return_dropout_mask)


def _norm(
    options: Options, x: Tensor, given: dict[str, Tensor | None], seed: Tensor | None, prenorm: bool, masks: bool
) -> Results:
    name, p = options.name, options.dropout_p
    check_options(name, options.eps, p, options.out_dtype)
    check_tensors(name, x=x)
    check_tensors(name, optional=True, **given, seed=seed)
    if is_distributed(type(x)):
        raise TypeError(f"{name}: x is a DTensor; normalise its shard, x.to_local()")
    if has_tangent(x, *given.values()):
        raise ValueError(f"{name}: it has no forward-mode derivative; use torch's norms")
    check_no_gradient(name, "detach it", rowscale=given["rowscale"])
    if options.out_dtype is None and x.device.type != "cpu" and autocasts(x.device) is not None:
        options = options._replace(out_dtype=torch.float32)
    if p > 0 and seed is None:
        seed = torch.randint(0, 2**62, (2,), device=x.device)
    if p == 0:
        seed = None
    operands = Operands(x, **given, seed=seed)
    results = _called(operands, options)
    y, y1, z = results[:3]
    found = [y]
    if operands.weight1 is not None:
        found.append(y1)
    if prenorm:
        found.append(x if operands.z_dtype(options) is None else z)
    if masks:
        found += [_mask(operands, p, 0), None if operands.x1 is None else _mask(operands, p, 1)]
    return tuple(found) if len(found) > 1 else y


def _called(operands: Operands, options: Options) -> Any:
    if not is_plain(*operands):
        check_operands(options.name, **operands._asdict())
        return call("norm", *operands, *options)
    if requires_grad(*operands):
        return NormFunction.apply(*operands, *options)
    return run_forward(operands, options)


def _mask(operands: Operands, p: float, branch: int) -> Tensor | None:
    if operands.seed is None:
        return None
    args = (operands.x.detach(), operands.seed, p, branch)
    return run_mask(*args) if is_plain(operands.x) else call("norm_dropout_mask", *args)
