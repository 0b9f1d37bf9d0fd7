"""The gated delta rule for PyTorch tensors: `gated_delta_rule`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
from tritonkittens.kernels.gated_delta_net.call_plan import run
from tritonkittens.kernels.gated_delta_net.checks import NAME, Operands, check_shapes


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
    """Return the gated delta rule of Gated DeltaNet and Qwen3-Next. Each row updates a state of K × V numbers a head:
    S ← exp(g) · S, then S ← S + beta · k (v - Sᵀk)ᵀ; and o = scale · Sᵀq.

    Arguments are those of fla's `chunk_gated_delta_rule`, but without `use_qk_l2norm_in_kernel`, `cu_seqlens` is int32,
    options are given by name, and o is returned alone unless the state is wanted. Source: Yang et al., Gated Delta
    Networks (2024).

    Args:
        q, k: (B, T, H, K) in bf16 or fp16, B up to 1,024, K from 1 to 128, of any strides. Models make them
            unit vectors before the call; with longer keys S may grow without bound.
        v: (B, T, HV, V) in the dtype of q, V at least 1, of any strides. HV is a multiple of H: head h of v uses head
            ⌊h · H / HV⌋ of q and k.
        g: (B, T, HV) in fp32, bf16 or fp16, at most 0, which is not checked.
        beta: (B, T, HV) in fp32, bf16 or fp16, from 0 to 1 usually.
        scale: None: K^-0.5.
        initial_state: (B, HV, K, V) fp32, S before the first row; None: zeros.
        output_final_state: also return S after the last row.
        cu_seqlens: (N + 1,) int32, the N sequences, up to 1,024, packed along T with B = 1: sequence n has the rows
            from cu_seqlens[n] up to cu_seqlens[n + 1]. The first is 0, and none is less than the one before, which is
            not checked. States are then (N, HV, K, V).

    Returns (B, T, HV, V) in the dtype of v, and with output_final_state the state (B, HV, K, V) in fp32. Rows after the
    last packed sequence are not defined, nor are their gradients. S is summed in fp32, and rounded to the dtype of q
    where it is multiplied, but not in calls of up to 8 rows. Differentiable once, in q, k, v, g, beta and
    initial_state; not in forward mode.

    Raises TypeError or ValueError for operands that do not fit together, or on a CPU outside of the simulator;
    ArchitectureError on a GPU without TMA, unless the call has at most 8 rows.

    Example::

        o, state = gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        o, state = gated_delta_rule(*next_step, initial_state=state, output_final_state=True)
    """
    given = Operands(q, k, v, g, beta, initial_state, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state = run(given, scale, output_final_state)
    else:
        o, state = call(NAME, *given, scale, output_final_state)
    return (o, state) if output_final_state else o
