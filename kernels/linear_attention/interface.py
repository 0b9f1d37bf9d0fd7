"""Linear attention for PyTorch tensors: `linear_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Return causal linear attention with a decay: oᵢ = scale · Σ_{j ≤ i} exp(-decay · (i - j)) (qᵢ·kⱼ) vⱼ.

    As a recurrence, each row i updates a state of K × V numbers a head, S ← exp(g) · S + k vᵀ, and o = scale · Sᵀ q.
    g is -decay in all rows, or given for each row. RetNet and lightning attention have a decay; Mamba-2, and GLA with
    one gate a head, have g. fla's names: `chunk_simple_gla` with g or g_gamma = -decay, and without either
    `chunk_linear_attn` with normalize=False. Source: Sun et al., Retentive Network (2023).

    Args:
        q, k: (B, T, H, K) in bf16 or fp16, B up to 1,024, K from 1 to 256, of any strides.
        v: (B, T, H, V) in the dtype of q, V at least 1, of any strides.
        decay: (H,) fp32, at least 0, which is not checked; None: 0.
        g: (B, T, H) in fp32, bf16 or fp16, at most 0, which is not checked; excludes decay.
        scale: None: K^-0.5.
        initial_state: (B, H, K, V) fp32, S before the first row; None: zeros.
        output_final_state: also return S after the last row.
        cu_seqlens: (N + 1,) int32, the N sequences, up to 1,024, packed along T with B = 1: sequence n has the rows
            from cu_seqlens[n] up to cu_seqlens[n + 1]. The first is 0, and none is less than the one before, which is
            not checked. States are then (N, H, K, V).

    Returns (B, T, H, V) in the dtype of v, and with output_final_state the state (B, H, K, V) in fp32. Rows after the
    last packed sequence are not defined, nor are their gradients. S is summed in fp32, and rounded to the dtype of q
    where it is multiplied, but not in calls of up to 8 rows. Differentiable in q, k, v, decay, g and initial_state; any
    number of times if neither decay nor g requires a gradient; not in forward mode.

    Raises TypeError or ValueError for operands that do not fit together, or on a CPU outside of the simulator;
    ArchitectureError on a GPU without TMA, unless the call has at most 8 rows.

    Example::

        o, state = linear_attention(q, k, v, decay, output_final_state=True)
        o, state = linear_attention(q_next, k_next, v_next, decay, initial_state=state, output_final_state=True)
    """
    given = Operands(q, k, v, decay, g, initial_state, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state = run(given, scale, output_final_state, False)
    else:
        o, state = call(NAME, *given, scale, output_final_state, False)
    return (o, state) if output_final_state else o
