"""Based attention for PyTorch tensors: `based_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, has_tangent, have_memory, is_plain, requires_grad
from tritonkittens.kernels.based.call_plan import run
from tritonkittens.kernels.based.checks import NAME, check_kinds, check_shapes


def based_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention of Based, whose weights are the second-order Taylor series of the exponential:
    oᵢ = Σ_{j ≤ i} (1 + x + x²/2) vⱼ with x = scale · qᵢ·kⱼ.

    fla's `parallel_based` and `fused_chunk_based` are this function; `normalize`, False by default, is their
    `use_norm`, which is True.

    Args:
        q, k: (B, T, H, 16) in bf16, of any strides.
        v: (B, T, H, V) in bf16, usually with 64 columns.
        scale: None: 1/4, which is 16^-0.5.
        normalize: divide by the sum of the weights plus 1e-6. States then have V + 1 columns, the last as of a column
            of ones of v.
        initial_state: (B, H, 273, V) fp32, S before the first step; None: zeros.
        output_final_state: also return S after the last step: S = Σⱼ [1, kⱼ, kⱼ ⊗ kⱼ] vⱼᵀ.
        cu_seqlens: (N + 1,) int32 for N sequences, up to 1,024, packed along T, B = 1: sequence n has the rows from
            element n up to element n + 1. They begin with 0 and never decrease. States are then (N, H, 273, V).

    Returns (B, T, H, V) in bf16, and with output_final_state the state (B, H, 273, V) in fp32; its rows of kᵢ kⱼ and
    kⱼ kᵢ are equal. Rows after the last packed sequence are not defined, nor are their gradients. States are carried in
    fp32 and multiplied in bf16. Differentiable once in q, k, v and the state; not in forward mode.

    Raises TypeError or ValueError for what does not fit together; ArchitectureError on a GPU without TMA.

    Example::

        o, state = based_attention(q, k, v, output_final_state=True)
        o, state = based_attention(*next_step, initial_state=state, output_final_state=True)

    Source: Arora et al., Simple linear attention language models balance the recall-throughput tradeoff (2024).
    """
    check_kinds(q, k, v, initial_state, cu_seqlens)
    if has_tangent(q, k, v, initial_state):
        raise ValueError(f"{NAME}: it has no forward-mode derivative; use {NAME}_torch")
    check_shapes(q, k, v, initial_state, cu_seqlens, normalize)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    operands = (q, k, v, initial_state, cu_seqlens)
    if is_plain(*operands) and have_memory(*operands) and not requires_grad(*operands):
        o, state = run(*operands, scale, normalize, output_final_state)
    else:
        o, state = call(NAME, *operands, scale, normalize, output_final_state, False)
    return (o, state) if output_final_state else o
