"""Linear attention for PyTorch tensors: `linear_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, has_tangent, have_memory, is_plain, requires_grad
from tritonkittens.kernels.linear_attention.call_plan import run
from tritonkittens.kernels.linear_attention.checks import NAME, check_kinds, check_shapes


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return causal linear attention, whose past fades: oᵢ = scale · Σ_{j ≤ i} exp(-decay · (i - j)) (qᵢ·kⱼ) vⱼ.

    As a recurrence, S ← exp(g) · S + k vᵀ and o = scale · Sᵀ q, where g is -decay, or differs from step to step. RetNet
    and lightning attention have decays, GLA with a gate a head and Mamba-2 have g. fla's `chunk_simple_gla` is this
    function (with g_gamma = -decay), and `chunk_linear_attn(normalize=False)` without gates. Source: Sun et al.,
    Retentive Network (2023).

    Args:
        q, k: (B, T, H, K) in bf16 or fp16, K from 1 to 256, of any strides.
        v: (B, T, H, V) in the dtype of q, V at least 1.
        decay: (H,) fp32, at least 0, for each head; None: 0.
        g: (B, T, H) in fp32, bf16 or fp16, at most 0: the logarithm of what is kept, in place of a decay.
        scale: None: K^-0.5.
        initial_state: (B, H, K, V) fp32, S before the first step; None: zeros.
        output_final_state: also return S after the last step.
        cu_seqlens: (N + 1,) int32 for N sequences, up to 1,024, packed along T, B = 1: sequence n has the rows from
            element n up to element n + 1. They begin with 0 and never decrease. States are then (N, H, K, V).

    Returns (B, T, H, V) in the dtype of v, and with output_final_state the state (B, H, K, V) in fp32. Rows after the
    last packed sequence are not defined, nor are their gradients. States are carried in fp32 and multiplied in it
    or in the dtype of q. Differentiable in q, k, v, the gates and the state, any number of times where gates require no
    gradient, but not in forward mode.

    Raises TypeError or ValueError for what does not fit together; ArchitectureError on a GPU without TMA.

    Example::

        o, state = linear_attention(q, k, v, decay, output_final_state=True)
        o, state = linear_attention(q_next, k_next, v_next, decay, initial_state=state, output_final_state=True)
    """
    check_kinds(q, k, v, decay, g, initial_state, cu_seqlens)
    if has_tangent(q, k, v, decay, g, initial_state):
        raise ValueError(f"{NAME}: it has no forward-mode derivative; use linear_attention_torch")
    check_shapes(q, k, v, decay, g, initial_state, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    operands = (q, k, v, decay, g, initial_state, cu_seqlens)
    if is_plain(*operands) and have_memory(*operands) and not requires_grad(*operands):
        o, state = run(*operands, scale, output_final_state, False)
    else:
        o, state = call(NAME, *operands, scale, output_final_state, False)
    return (o, state) if output_final_state else o
