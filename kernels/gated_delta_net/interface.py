"""The gated delta rule for PyTorch tensors: `gated_delta_rule`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, has_tangent, have_memory, is_plain, requires_grad
from tritonkittens.kernels.gated_delta_net.call_plan import run
from tritonkittens.kernels.gated_delta_net.checks import NAME, check_kinds, check_shapes


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the gated delta rule, as of Gated DeltaNet and Qwen3-Next: at each step S ← exp(g) · S, then
    S ← S + beta · k (v - Sᵀk)ᵀ, and o = scale · Sᵀq.

    Arguments are those of fla's `chunk_gated_delta_rule`, but q and k are not normalised, `cu_seqlens` is int32,
    options are given by name, and o is returned alone unless the state is wanted. Source: Yang et al., Gated Delta
    Networks (2024).

    Args:
        q, k: (B, T, H, K) in bf16 or fp16, K from 1 to 128, of any strides; keys longer than 1 let S grow.
        v: (B, T, HV, V) in the dtype of q, V at least 1. Head h of v uses head ⌊h · H / HV⌋ of q and k.
        g: (B, T, HV) in fp32, bf16 or fp16, at most 0: the logarithm of what is kept.
        beta: (B, T, HV), as g: from 0 to 1 usually.
        scale: None: K^-0.5.
        initial_state: (B, HV, K, V) fp32, S before the first step; None: zeros.
        output_final_state: also return S after the last step.
        cu_seqlens: (N + 1,) int32 for N sequences, up to 1,024, packed along T, B = 1: sequence n has the rows from
            element n up to element n + 1. They begin with 0 and never decrease. States are then (N, HV, K, V).

    Returns (B, T, HV, V) in the dtype of v, and with output_final_state the state (B, HV, K, V) in fp32. Rows after the
    last packed sequence are not defined, nor are their gradients. States are carried in fp32 and multiplied in it
    or in the dtype of q. Differentiable once, in q, k, v, g, beta and the state, but not in forward mode.

    Raises TypeError or ValueError for what does not fit together; ArchitectureError on a GPU without TMA.

    Example::

        o, state = gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        o, state = gated_delta_rule(*next_step, initial_state=state, output_final_state=True)
    """
    check_kinds(q, k, v, g, beta, initial_state, cu_seqlens)
    if has_tangent(q, k, v, g, beta, initial_state):
        raise ValueError(f"{NAME}: it has no forward-mode derivative; use {NAME}_torch")
    check_shapes(q, k, v, g, beta, initial_state, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    operands = (q, k, v, g, beta, initial_state, cu_seqlens)
    if is_plain(*operands) and have_memory(*operands) and not requires_grad(*operands):
        o, state = run(*operands, scale, output_final_state)
    else:
        o, state = call(NAME, *operands, scale, output_final_state)
    return (o, state) if output_final_state else o
