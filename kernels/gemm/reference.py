"""What `gemm` computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tritonkittens.kernels._dispatch import is_forward_mode
from tritonkittens.kernels.gemm.microscaling import are_microscaled, numbers_of, plain_scales

BLOCK = 128  # of K and N, for block scales
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
GELU_FORMS: dict[str | None, str] = {"gelu": "none", "gelu_tanh": "tanh"}  # names of torch by ours


def checked_activation(activation: str | None) -> str | None:
    """The name of a built-in activation. Raises ValueError for one that is not in `ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"gemm(activation={activation!r}): must be one of {', '.join(map(repr, ACTIVATIONS))}")
    return activation


def activated(x: Tensor, activation: str | None) -> Tensor:
    """The activation of `gemm`, by name. Raises ValueError for another name."""
    if activation is None:
        return x
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate=GELU_FORMS[checked_activation(activation)])


def activation_gradient(grad: Tensor, x: Tensor, activation: str | None) -> Tensor:
    """grad · the derivative of the activation at `x`, differentiable itself. Raises ValueError for another name."""
    if activation is None:
        return grad
    if activation == "silu":
        if not (torch.is_grad_enabled() or is_forward_mode()):
            return torch.ops.aten.silu_backward(grad, x)
        share = x.sigmoid()
        return grad * share * (1 + x * (1 - share))  # torch differentiates silu_backward no further
    return torch.ops.aten.gelu_backward(grad, x, approximate=GELU_FORMS[checked_activation(activation)])


def epilogue(
    total: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gate · activation(total + bias), in the dtype of `total`."""
    dtype = total.dtype
    y = activated(total if bias is None else total + bias.to(dtype), activation)
    y = y if gate is None else y * gate.to(dtype)
    return y if residual is None else y + residual.to(dtype)


def _spread(scale: Tensor, shape: torch.Size, dims: tuple[int, ...]) -> Tensor:
    """Block scales, one for every element."""
    for dim in dims:
        scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale


def gemm_torch(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`gemm` computed in `dtype`, and not rounded; arguments as there."""
    if are_microscaled(scale_a, scale_b):
        assert scale_a is not None and scale_b is not None
        a = (numbers_of(a) * plain_scales(scale_a, a)).to(dtype)
        b = (numbers_of(b.mT) * plain_scales(scale_b, b.mT)).to(dtype).mT
        return epilogue(a @ b, bias, activation, gate, residual)
    a, b = a.to(dtype), b.to(dtype)
    blocks = -(-a.shape[-1] // BLOCK)
    if scale_a is not None:
        scale = scale_a.to(dtype)
        blockwise = scale.ndim == 2 and scale.shape == (a.shape[-2], blocks) and scale.shape[1] > 1
        a = a * (_spread(scale, a.shape, (1,)) if blockwise else scale.reshape(-1, 1) if scale.numel() > 1 else scale)
    if scale_b is not None:
        scale = scale_b.to(dtype)
        blockwise = (
            scale.ndim == 2
            and scale.shape == (blocks, -(-b.shape[-1] // BLOCK))
            and scale.numel() > 1
            and scale.shape != (1, b.shape[-1])
        )
        b = b * (_spread(scale, b.shape, (0, 1)) if blockwise else scale.reshape(1, -1) if scale.numel() > 1 else scale)
    return epilogue(a @ b, bias, activation, gate, residual)
