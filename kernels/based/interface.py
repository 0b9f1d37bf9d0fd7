"""Based attention for PyTorch tensors: `based_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
from tritonkittens.kernels._tensors import check_rising
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
    debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention of Based: oᵢ = Σ_{j ≤ i} (1 + x + x²/2) vⱼ with x = scale · qᵢ·kⱼ.

    The weights are the second-order Taylor series of the exponential. fla's `parallel_based` and `fused_chunk_based`
    are this function; their `use_norm`, by default True, is `normalize`.

    Args:
        q, k: (B, T, H, 16) in bf16, B up to 1,024, any strides.
        v: (B, T, H, V) in bf16, V usually 64, any strides.
        scale: None: 1/4, which is 16^-0.5.
        normalize: divide each row by the sum of its weights plus 1e-6. States then have V + 1 columns: the last is that
            of a column of ones beside v.
        initial_state: (B, H, 273, V) fp32, S before the first row; None: zeros.
        output_final_state: also return S = Σⱼ [1, kⱼ, kⱼ ⊗ kⱼ] vⱼᵀ after the last row: 1 + 16 + 256 rows a head.
        cu_seqlens: (N + 1,) int32: where N ≤ 1,024 sequences packed along T begin, and the end of the last. B is 1.
            States are (N, H, 273, V).
        debug: check what cu_seqlens holds, for which the host waits for the device.

    Returns (B, T, H, V) in bf16; with output_final_state also the state, (B, H, 273, V) fp32. Differentiable once, in
    q, k, v and initial_state; not in forward mode.

    Raises TypeError or ValueError for other operands; ArchitectureError on a GPU without TMA.

    Example::

        o, state = based_attention(q, k, v, output_final_state=True)

    Packed sequences, precision: docs/sequences.md. Source: Arora et al., Simple linear attention language models
    balance the recall-throughput tradeoff (2024).
    """
    given = Operands(q, k, v, initial_state, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given, normalize)
    if debug:
        check_rising(NAME, "cu_seqlens", cu_seqlens, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state = run(given, scale, normalize, output_final_state)
    else:
        o, state = call(NAME, *given, scale, normalize, output_final_state, False)
    return (o, state) if output_final_state else o
