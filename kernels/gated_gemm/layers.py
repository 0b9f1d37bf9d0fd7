"""Gated products of the linear layers of modules."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tritonkittens.kernels._dispatch import autocast, autocasts, requires_grad, takes, unseen_by_function_modes
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.gated_gemm.interface import gated_gemm

LEAST_ROWS = 2048  # from which on one kernel was measured to be faster than two


def _is_product(layer: nn.Module, kind: type[nn.Linear]) -> bool:
    """Does a layer compute x · Wᵀ, and nothing else?"""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    alone = type(layer) is kind and "forward" not in layer.__dict__ and not (hooks or _has_any_global_hook())
    return alone and layer.bias is None and getattr(layer, "activation", None) is None


@unseen_by_function_modes
def gated_product(x: Tensor, activation: str, kind: type[nn.Linear], *layers: nn.Module) -> Tensor | None:
    """Return activation(gate(x)) · up(x) of two linear layers, or of one that has the rows of both, by one kernel.
    `kind`: the class of layers.

    None where that does not take the layers or x, for fewer rows than `LEAST_ROWS`, and where a gradient is wanted: its
    backward would compute both products again.
    """
    if not all(_is_product(layer, kind) for layer in layers):
        return None
    weights, dtype = [layer.weight for layer in layers], autocasts(x.device)
    if dtype is not None:
        x, *weights = (autocast(t, dtype) for t in (x, *weights))
    if requires_grad(x, *weights) or not takes((x.dtype,), x, *weights, needs_tma=True) or x.dtype not in HALF_TYPES:
        return None
    gate, up = weights if len(weights) == 2 else weights[0].chunk(2)
    fits = x.ndim and gate.shape == up.shape and gate.shape[1] == x.shape[-1] and math.prod(x.shape[:-1]) >= LEAST_ROWS
    return gated_gemm(x, gate.T, up.T, activation=activation) if fits else None
