"""Based attention for PyTorch tensors: `based_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
from tritonkittens.kernels.based.call_plan import run
from tritonkittens.kernels.based.checks import NAME, Operands, check_shapes


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

    fla's `parallel_based` and `fused_chunk_based` are this function. Their `use_norm`, by default True, is `normalize`.

    Args:
        q, k: (B, T, H, 16) in bf16, B up to 1,024, of any strides.
        v: (B, T, H, V) in bf16, V at least 1, usually 64, of any strides.
        scale: None: 1/4, which is 16^-0.5.
        normalize: divide each row by the sum of its weights plus 1e-6. States then have V + 1 columns: the last is that
            of a column of ones beside v.
        initial_state: (B, H, 273, V) fp32, S before the first row; None: zeros.
        output_final_state: also return S after the last row: S = Σⱼ [1, kⱼ, kⱼ ⊗ kⱼ] vⱼᵀ, 1 + 16 + 256 rows a head.
        cu_seqlens: (N + 1,) int32, the N sequences, up to 1,024, packed along T with B = 1: sequence n has the rows
            from cu_seqlens[n] up to cu_seqlens[n + 1]. The first is 0, and none is less than the one before, which is
            not checked. States are then (N, H, 273, V).

    Returns (B, T, H, V) in bf16, and with output_final_state the state (B, H, 273, V) in fp32. Rows after the last
    packed sequence are not defined, nor are their gradients. S is summed in fp32, and rounded to bf16 where it is
    multiplied. Differentiable once, in q, k, v and initial_state; not in forward mode.

    Raises TypeError or ValueError for operands that do not fit together, or on a CPU outside of the simulator;
    ArchitectureError on a GPU without TMA.

    Example::

        o, state = based_attention(q, k, v, output_final_state=True)
        o, state = based_attention(*next_step, initial_state=state, output_final_state=True)

    Source: Arora et al., Simple linear attention language models balance the recall-throughput tradeoff (2024).
    """
    given = Operands(q, k, v, initial_state, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given, normalize)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state = run(given, scale, normalize, output_final_state)
    else:
        o, state = call(NAME, *given, scale, normalize, output_final_state, False)
    return (o, state) if output_final_state else o
