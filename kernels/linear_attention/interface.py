"""Linear attention for PyTorch tensors: `linear_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
from tritonkittens.kernels._tensors import check_rising
from tritonkittens.kernels.linear_attention.call_plan import run
from tritonkittens.kernels.linear_attention.checks import NAME, Operands, check_shapes


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
    debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return causal linear attention with a decay: oᵢ = scale · Σ_{j ≤ i} exp(-decay · (i - j)) (qᵢ·kⱼ) vⱼ.

    As a recurrence over rows: S ← exp(g) · S + k vᵀ and o = scale · Sᵀ q, with g = -decay. RetNet and lightning
    attention have a decay; Mamba-2, and GLA with one gate a head, have a g for each row. In fla: `chunk_simple_gla`
    with g or g_gamma = -decay; without either, `chunk_linear_attn` with normalize=False.

    Args:
        q, k: (B, T, H, K) in bf16 or fp16, B up to 1,024, K from 1 to 256, any strides.
        v: (B, T, H, V) in the dtype of q, any strides.
        decay: (H,) fp32, at least 0 (not checked); None: 0.
        g: (B, T, H) in fp32, bf16 or fp16, at most 0 (not checked). Excludes decay.
        scale: None: K^-0.5.
        initial_state: (B, H, K, V) fp32, S before the first row; None: zeros.
        output_final_state: also return S after the last row.
        cu_seqlens: (N + 1,) int32: where N ≤ 1,024 sequences packed along T begin, and the end of the last. B is 1.
            States are (N, H, K, V).
        debug: check what cu_seqlens holds, for which the host waits for the device.

    Returns (B, T, H, V) in the dtype of v; with output_final_state also the state, (B, H, K, V) fp32. Differentiable in
    all operands, any number of times if neither decay nor g requires a gradient, else once; not in forward mode.

    Raises TypeError or ValueError for other operands; ArchitectureError on a GPU without TMA, but
    for results of up to 8 rows that are not packed.

    Example::

        o, state = linear_attention(q, k, v, decay, output_final_state=True)
        o = linear_attention(q_next, k_next, v_next, decay, initial_state=state)

    Packed sequences, precision: docs/sequences.md. Source: Sun et al., Retentive Network (2023).
    """
    given = Operands(q, k, v, decay, g, initial_state, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given)
    if debug:
        check_rising(NAME, "cu_seqlens", cu_seqlens, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state = run(given, scale, output_final_state, False)
    else:
        o, state = call(NAME, *given, scale, output_final_state, False)
    return (o, state) if output_final_state else o
