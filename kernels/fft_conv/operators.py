"""`fft_conv` as torch sees it: operators of torch.library, whose gradients are calls of one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, register, vmap_by_loop
from tritonkittens.kernels.fft_conv.call_plan import run, run_correlation
from tritonkittens.kernels.fft_conv.checks import NAME, check_shapes, is_spectrum

GRADIENT = "fft_conv_filter_gradient"


@torch.library.custom_op(f"tritonkittens::{NAME}", mutates_args=())
def fft_conv_operator(
    u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, causal: bool, conjugated: bool = False
) -> Tensor:
    """The operator behind `fft_conv`. conjugated: it correlates, yᵢ = Σⱼ kⱼ u_{i+j}."""
    return run(u, k, pre_gate, post_gate, causal, conjugated)


@describes(fft_conv_operator)
def _(
    u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, causal: bool, conjugated: bool = False
) -> Tensor:
    check_shapes(u, k, pre_gate, post_gate, causal)
    return u.new_empty(u.shape)


@torch.library.custom_op(f"tritonkittens::{GRADIENT}", mutates_args=())
def fft_conv_filter_gradient_operator(u: Tensor, v: Tensor, taps: int, causal: bool) -> Tensor:
    """Σ_B Σₙ uₙ v_{n + j} for j < `taps`, (H, taps) fp32: the gradient of the filter of a convolution of u, where v is
    that of the result."""
    return run_correlation(u, v, taps, causal)


@describes(fft_conv_filter_gradient_operator)
def _(u: Tensor, v: Tensor, taps: int, causal: bool) -> Tensor:
    return u.new_empty(u.shape[1], taps, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, k, pre_gate, post_gate, ctx.causal, ctx.conjugated = inputs
    if is_spectrum(k) and k.requires_grad:
        raise ValueError(f"{NAME}: the spectrum k requires a gradient; give the filter itself")
    ctx.save_for_backward(u, k, pre_gate, post_gate)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """With x = pre · u and z = k ∗ x: dx = correlation of k and post · dy, du = pre · dx, dpre = u · dx,
    dpost = dy · z, dk = correlation of x and post · dy."""
    check_no_tangent(NAME)
    u, k, pre_gate, post_gate = ctx.saved_tensors
    needs, causal, conjugated = ctx.needs_input_grad, ctx.causal, ctx.conjugated
    du = dk = dpre = dpost = None
    dy = dy.to(u.dtype)
    if needs[0] and needs[2]:
        dx = call(NAME, dy, k, post_gate, None, causal, not conjugated)
        du, dpre = dx * pre_gate, dx * u
    elif needs[0]:
        du = call(NAME, dy, k, post_gate, pre_gate, causal, not conjugated)
    elif needs[2]:
        dpre = call(NAME, dy, k, post_gate, u, causal, not conjugated)
    if needs[3]:
        dpost = call(NAME, u, k, pre_gate, dy, causal, conjugated)
    if needs[1]:
        pair = _gated(u, pre_gate), _gated(dy, post_gate)
        dk = call(GRADIENT, *(reversed(pair) if conjugated else pair), k.shape[1], causal).to(k.dtype)
    return du, dk, dpre, dpost, None, None


def _save_signals(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, v, _, ctx.causal = inputs
    ctx.save_for_backward(u, v)


def _backward_of_gradient(ctx: Any, dg: Tensor) -> tuple[Any, ...]:
    check_no_tangent(GRADIENT)
    u, v = ctx.saved_tensors
    du = call(NAME, v, dg, None, None, ctx.causal, True) if ctx.needs_input_grad[0] else None
    dv = call(NAME, u, dg, None, None, ctx.causal, False) if ctx.needs_input_grad[1] else None
    return du, dv, None, None


register(fft_conv_operator, vmap_by_loop, _backward, _save)
register(fft_conv_filter_gradient_operator, vmap_by_loop, _backward_of_gradient, _save_signals)
