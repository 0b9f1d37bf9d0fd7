"""The gated delta rule for PyTorch tensors: `gated_delta_rule`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
from tritonkittens.kernels._tensors import check_rising
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
    debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the gated delta rule: S ← exp(g) · S, then S ← S + beta · k (v - Sᵀk)ᵀ for each row; and o = scale · Sᵀq.

    It is the attention of Gated DeltaNet and Qwen3-Next. Arguments are those of fla's `chunk_gated_delta_rule`, without
    `use_qk_l2norm_in_kernel`, and with options by name. Without output_final_state, o is returned alone.

    Args:
        q, k: (B, T, H, K) in bf16 or fp16, B up to 1,024, K from 1 to 128, any strides. Models make them unit vectors
            before the call. With longer keys S may grow without bound.
        v: (B, T, HV, V) in the dtype of q, any strides. HV is a multiple of H: head h of v uses head ⌊h · H / HV⌋ of q.
        g: (B, T, HV) in fp32, bf16 or fp16, at most 0 (not checked).
        beta: (B, T, HV) in fp32, bf16 or fp16, usually from 0 to 1.
        scale: None: K^-0.5.
        initial_state: (B, HV, K, V) fp32, S before the first row; None: zeros.
        output_final_state: also return S after the last row.
        cu_seqlens: (N + 1,) int32: where N ≤ 1,024 sequences packed along T begin, and the end of the last. B is 1.
            States are (N, HV, K, V).
        debug: check what cu_seqlens holds, for which the host waits for the device.

    Returns (B, T, HV, V) in the dtype of v; with output_final_state also the state, (B, HV, K, V) fp32. Differentiable
    once, in all operands; not in forward mode.

    Raises TypeError or ValueError for other operands; ArchitectureError on a GPU without TMA, but
    for results of up to 8 rows that are not packed.

    Example::

        o, state = gated_delta_rule(q, k, v, g, beta, output_final_state=True)

    Packed sequences, precision: docs/sequences.md. Source: Yang et al., Gated Delta Networks (2024).
    """
    given = Operands(q, k, v, g, beta, initial_state, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given)
    if debug:
        check_rising(NAME, "cu_seqlens", cu_seqlens, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state = run(given, scale, output_final_state)
    else:
        o, state = call(NAME, *given, scale, output_final_state)
    return (o, state) if output_final_state else o
