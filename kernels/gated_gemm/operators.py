"""`gated_gemm` as torch sees it: an operator of torch.library, and an autograd function for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_no_tangent, describes, register, vmap_by_loop
from tritonkittens.kernels.gated_gemm.call_plan import computed
from tritonkittens.kernels.gated_gemm.checks import check_shapes
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.gemm.autograd import laid_out_as
from tritonkittens.kernels.gemm.config import Config


@torch.library.custom_op("tritonkittens::gated_gemm", mutates_args=())
def gated_gemm_operator(a: Tensor, gate: Tensor, up: Tensor, activation: str, config: str | None = None) -> Tensor:
    """The operator behind `gated_gemm`; a is a matrix, `config` text."""
    return computed(a, gate, up, activation, None if config is None else Config.from_text(config))


@describes(gated_gemm_operator)
def _(a: Tensor, gate: Tensor, up: Tensor, activation: str, config: str | None = None) -> Tensor:
    check_shapes(a, gate, up, activation)
    return a.new_empty(a.shape[0], gate.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.activation = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Both products are computed again: keeping them would take twice the memory of the result."""
    check_no_tangent("gated_gemm")
    a, gate, up = ctx.saved_tensors
    d_gate, d_up = call("gated_activation_backward", grad, gemm(a, gate), gemm(a, up), ctx.activation, False)
    needs, d_a = ctx.needs_input_grad, None
    if needs[0]:
        d_a = gemm(d_up, up.mT, residual=gemm(d_gate, gate.mT))
    return (
        d_a,
        laid_out_as(gate, a.mT, d_gate) if needs[1] else None,
        laid_out_as(up, a.mT, d_up) if needs[2] else None,
        None,
        None,
    )


register(gated_gemm_operator, vmap_by_loop, _backward, _save)


class GatedGemmFunction(torch.autograd.Function):
    """`gated_gemm` of matrices in eager mode; arguments as of the operator, but `config` as it is."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save(ctx, inputs, None)
        return computed(*inputs)

    backward = staticmethod(_backward)
