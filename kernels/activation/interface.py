"""Gated activations for PyTorch tensors: `swiglu`, `geglu`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import (
    call,
    check_tensors,
    check_written,
    has_tangent,
    is_plain,
    overlaps,
    requires_grad,
)
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.activation.call_plan import Options, run_forward
from tritonkittens.kernels.activation.checks import NAMES, check_operands, check_options
from tritonkittens.kernels.activation.operators import GatedFunction


def swiglu(a: Tensor, b: Tensor | None = None, *, interleaved: bool = False, inplace_backward: bool = False) -> Tensor:
    """Return silu(a) · b, where silu(a) = a · sigmoid(a), element by element in fp32, rounded once.

    Args:
        a: (…, N) in bf16, fp16 or fp32. Without b (…, 2N), which has both: a is its first half, b the second. Any
            strides: it is read without a copy if the last stride is 1 and the leading dimensions merge into two.
        b: of the shape and dtype of a.
        interleaved: without b, columns of a and b alternate, a first.
        inplace_backward: the backward writes gradients over a and b, which saves their memory. It can run once, and a
            and b must not be used after it. No effect under torch.compile, and on operands that are copied.

    Returns (…, N) in the dtype of a. The backward reads a, b and dy, computes the activation again, and writes both
    gradients in one kernel launch, in the layout of the operands.

    Raises TypeError for other dtypes or a DTensor; ValueError for shapes that do not fit, for a forward-mode tangent,
    and for inplace_backward where a or b is a leaf, or elements share memory.

    Example::

        y = swiglu(x @ gate, x @ up)
        y = swiglu(x @ gate_up)
    """
    return _gated(Options("silu", interleaved), a, b, inplace_backward)


def geglu(
    a: Tensor,
    b: Tensor | None = None,
    *,
    approximate: str = "tanh",
    interleaved: bool = False,
    inplace_backward: bool = False,
) -> Tensor:
    """Return gelu(a) · b, element by element in fp32, rounded once. `approximate`: "tanh", or "none" for the form with
    erf, as in `torch.nn.functional.gelu`. All else is as of `swiglu`."""
    check_options(approximate)
    return _gated(Options("gelu_tanh" if approximate == "tanh" else "gelu", interleaved), a, b, inplace_backward)


def _gated(options: Options, a: Tensor, b: Tensor | None, inplace_backward: bool) -> Tensor:
    name = NAMES[options.kind]
    check_tensors(name, a=a)
    check_tensors(name, optional=True, b=b)
    if is_distributed(type(a)):
        raise TypeError(f"{name}: a is a DTensor; give its shard, a.to_local()")
    if has_tangent(a, b):
        raise ValueError(f"{name}: it has no forward-mode derivative; use torch's activations")
    if not is_plain(a, b):
        check_operands(a, b, *options)
        found: Tensor = call("gated_activation", a, b, *options)
        return found
    if requires_grad(a, b):
        if inplace_backward:
            _check_inplace(name, a, b)
        found = GatedFunction.apply(a, b, *options, inplace_backward)
        return found
    return run_forward(a, b, options)


def _check_inplace(name: str, a: Tensor, b: Tensor | None) -> None:
    """Raise ValueError for operands over which no gradients can be written."""
    for argument, x in (("a", a), ("b", b)):
        if x is not None:
            if x.is_leaf:
                raise ValueError(f"{name}: inplace_backward with {argument} a leaf, whose values must stay")
            check_written(name, x)
    if b is not None and overlaps(a, b):
        raise ValueError(f"{name}: inplace_backward with a and b that may share memory; give one tensor of both")
