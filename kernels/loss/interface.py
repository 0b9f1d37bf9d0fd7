"""Softmax and losses of rows for PyTorch tensors: `softmax`, `cross_entropy`, `linear_cross_entropy`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import (
    autocast,
    autocasts,
    call,
    check_tensors,
    has_tangent,
    is_plain,
    requires_grad,
)
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.loss.call_plan import Options, run_cross_entropy, run_softmax
from tritonkittens.kernels.loss.checks import (
    check_dtype,
    check_in_range,
    check_linear,
    check_options,
    check_reachable,
    check_rows,
    check_target,
)
from tritonkittens.kernels.loss.config import INPUTS
from tritonkittens.kernels.loss.linear import Wanted, run_linear_cross_entropy
from tritonkittens.kernels.loss.linear_operators import LinearCrossEntropyFunction
from tritonkittens.kernels.loss.operators import CrossEntropyFunction, SoftmaxFunction


def _check_kind(name: str, argument: str, x: Any) -> None:
    check_tensors(name, **{argument: x})
    if is_distributed(type(x)):
        raise TypeError(f"{name}: {argument} is a DTensor; give its shard, {argument}.to_local()")
    if has_tangent(x):
        raise ValueError(f"{name}: it has no forward-mode derivative; use torch's {name}")


def _options(
    ignore_index: int, reduction: str, smoothing: float, square: float, softcap: float | None, lse_wanted: bool
) -> Options:
    cap = None if softcap is None else float(softcap)  # an int would be another kernel
    return Options(ignore_index, reduction, float(smoothing), float(square), cap, lse_wanted)


def softmax(x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return exp(x) / Σ exp(x) over the last dimension, computed in fp32.

    Args:
        x: (…, N) in bf16, fp16 or fp32, N from 1 to 262,144. Any strides: it is read without a copy if the last stride
            is 1 and x can be seen as (A, B, N) with any two strides. Otherwise it is copied first.
        out_dtype: of the result; by default that of x, and fp32 under `torch.autocast` on a GPU.

    NaN and infinities give what `torch.softmax` gives. It is differentiable once.

    Raises TypeError for other dtypes or a DTensor; ValueError for another N, a device without kernels, or a
    forward-mode tangent.

    Example::

        p = softmax(scores, out_dtype=torch.float32)
    """
    _check_kind("softmax", "x", x)
    if out_dtype is None and x.device.type != "cpu" and autocasts(x.device) is not None:
        out_dtype = torch.float32
    if out_dtype is not None and out_dtype not in INPUTS:
        raise TypeError(f"softmax: out_dtype={out_dtype}; it must be {' or '.join(map(str, INPUTS))}")
    if not is_plain(x):
        check_rows("softmax", "x", x)
        result: Tensor = call("softmax", x, out_dtype)
        return result
    return SoftmaxFunction.apply(x, out_dtype) if requires_grad(x) else run_softmax(x, out_dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_lse: bool = False,
    inplace_backward: bool = False,
    debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the cross entropy of rows of logits with target classes, in fp32.

    The loss of a row is lse - (1 - label_smoothing) · t[target] - label_smoothing · mean(t) + lse_square_scale · lse²,
    with t = softcap · tanh(input / softcap), or t = input, and lse = log Σ exp(t).

    Args:
        input: (…, V) logits in bf16, fp16 or fp32, V from 1 to 262,144, any strides, as of `softmax`. Classes are in
            the last dimension, in torch in the second.
        target: input.shape[:-1], int64 or int32.
        ignore_index: rows with this target have a loss and a gradient of 0, and no part in the mean.
        reduction: "mean" over the rows that are not ignored (NaN without any, as in torch), "sum", or "none".
        label_smoothing: in [0, 1].
        lse_square_scale: the factor of lse², the z-loss.
        softcap: bounds logits smoothly; None: no bound.
        return_lse: also return lse, fp32 of shape input.shape[:-1], also of ignored rows. It is differentiable.
        inplace_backward: the backward may write the gradient over the logits. Later uses of the logits then raise
            torch's error for tensors modified in place. No effect on a leaf, under torch.compile, transforms, or if
            elements share memory.
        debug: wait for the GPU, and raise IndexError for a target that is neither a class nor ignore_index. Without it,
            the loss of such a row is NaN.

    Returns the loss, a number or target.shape for "none"; with return_lse a tuple of it and lse. Results and gradients
    have the same bits in every run. NaN and infinities give what torch gives, in ignored rows 0.

    Raises TypeError for other dtypes or a DTensor; ValueError for a shape, device or option that does not fit, or a
    forward-mode tangent.

    Example::

        loss = cross_entropy(logits, target, label_smoothing=0.1, lse_square_scale=1e-4)
    """
    name = "cross_entropy"
    _check_kind(name, "input", input)
    check_tensors(name, target=target)
    check_options(name, reduction, label_smoothing, softcap)
    check_dtype(name, "input", input)
    if debug:
        check_in_range(name, target, input.shape[-1], ignore_index)
    options = _options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, return_lse)
    found: Any
    if not is_plain(input, target):
        check_rows(name, "input", input)
        check_target(name, target, tuple(input.shape[:-1]), input.device, "input")
        found = call(name, input, target, *options)
    elif requires_grad(input):
        found = CrossEntropyFunction.apply(inplace_backward and not input.is_leaf, input, target, *options)
    else:
        found = run_cross_entropy(input, target, options)
    loss, lse = found[:2]
    return (loss, lse) if return_lse else loss


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    debug: bool = False,
) -> Tensor:
    """Return cross_entropy(input · linear_weightᵀ + linear_bias, target), without the logits of all tokens in memory.

    Logits are computed for a chunk of tokens, in the dtype of input. In bf16, with "mean" or "sum", the forward also
    computes their gradient, over their memory, and its products with weight and input; the backward scales these by the
    gradient of the loss. With "none", and in fp16, where a loss may be scaled so that its gradients fit, the backward
    computes the logits again, and then the gradients. Nothing waits for the GPU.

    Args:
        input: (…, features), bf16 or fp16. Any strides.
        linear_weight: (classes, features), as of `torch.nn.Linear`, of 1 to 262,144 classes. linear_bias: (classes,).
            Both have the dtype of input. Under `torch.autocast` all three are cast, as operands of a product are.
        target, …: as in `cross_entropy`, with target.shape = input.shape[:-1].

    Memory besides operands, their casts and gradients: the logits of at most 4,096 tokens. The gradient of
    linear_weight is summed in its dtype, and rounded once for each 4,096 tokens. A second backward of one graph copies
    the gradients.

    Returns the loss in fp32: a number, or target.shape for "none".

    Raises TypeError for other dtypes or a DTensor; ValueError for a shape, device or option that does not fit, or a
    forward-mode tangent; ArchitectureError on a GPU without TMA, but for some small products (see `gemm`).

    Example::

        loss = linear_cross_entropy(hidden, lm_head.weight, labels)
    """
    name = "linear_cross_entropy"
    _check_kind(name, "input", input)
    _check_kind(name, "linear_weight", linear_weight)
    check_tensors(name, target=target)
    check_tensors(name, optional=True, linear_bias=linear_bias)
    check_options(name, reduction, label_smoothing, softcap)
    dtype = autocasts(input.device)
    if dtype is not None:
        input, linear_weight = autocast(input, dtype), autocast(linear_weight, dtype)
        linear_bias = linear_bias if linear_bias is None else autocast(linear_bias, dtype)
    check_linear(input, linear_weight, target, linear_bias)
    if debug:
        check_in_range(name, target, len(linear_weight), ignore_index)
    options = _options(ignore_index, reduction, label_smoothing, lse_square_scale, softcap, False)
    operands = (input, linear_weight, target, linear_bias)
    loss: Tensor
    if not is_plain(*operands):
        grads = torch.is_grad_enabled()
        wanted = Wanted(*(grads and t is not None and t.requires_grad for t in (input, linear_weight, linear_bias)))
        loss = call(name, *operands, *options, *wanted)[0]
        return loss
    check_reachable(name, "input", input)
    if requires_grad(input, linear_weight, linear_bias):
        loss = LinearCrossEntropyFunction.apply(*operands, *options)
        return loss
    return run_linear_cross_entropy(*operands, options, Wanted(False, False, False))[0]
