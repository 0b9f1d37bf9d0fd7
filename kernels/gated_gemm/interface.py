"""Gated products for PyTorch tensors: `gated_gemm`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, has_tangent, have_memory, is_plain, requires_grad
from tritonkittens.kernels.gated_gemm.call_plan import computed
from tritonkittens.kernels.gated_gemm.checks import check_config, check_kinds, check_shapes
from tritonkittens.kernels.gated_gemm.operators import GatedGemmFunction
from tritonkittens.kernels.gemm.call_plan import as_matrix
from tritonkittens.kernels.gemm.config import Config


def gated_gemm(
    a: Tensor, gate: Tensor, up: Tensor, *, activation: str = "silu", config: Config | None = None
) -> Tensor:
    """Return activation(a·gate) · (a·up), the first half of a gated MLP, in one kernel. Sums and the activation are in
    fp32, rounded once.

    Args:
        a: (…, K) in bf16 or fp16, of any strides.
        gate, up: (K, N) in the dtype of a, of any strides: `w.T` of the weight of a linear layer, `w[:n].T` and
            `w[n:].T` of one weight with both, `w[0::2].T` and `w[1::2].T` where their rows alternate.
        activation: "silu" (SwiGLU), or "gelu_tanh" (GeGLU).
        config: a `Config` instead of the one that is chosen by shapes.

    Returns (…, N) in the dtype of a. Differentiable once, in all operands: the backward computes both products again.

    Raises TypeError or ValueError for what does not fit together; ArchitectureError on a GPU without TMA.

    Example::

        h = gated_gemm(x, mlp.gate_proj.weight.T, mlp.up_proj.weight.T)
    """
    check_kinds(a, gate, up)
    if has_tangent(a, gate, up):
        raise ValueError("gated_gemm: it has no forward-mode derivative; use torch's operations")
    check_shapes(a, gate, up, activation)
    rows = as_matrix(a) if a.ndim > 1 else a[None]
    if not is_plain(a, gate, up) or not have_memory(a, gate, up):
        check_config(config)
        found: Tensor = call("gated_gemm", rows, gate, up, activation, None if config is None else config.to_text())
    elif requires_grad(a, gate, up):
        found = GatedGemmFunction.apply(rows, gate, up, activation, config)
    else:
        found = computed(rows, gate, up, activation, config)
    return found if a.ndim == 2 else found.view(*a.shape[:-1], gate.shape[1])
