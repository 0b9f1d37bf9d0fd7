"""Hedgehog attention for PyTorch tensors: `hedgehog_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
from tritonkittens.kernels.hedgehog.call_plan import run
from tritonkittens.kernels.hedgehog.checks import NAME, Operands, check_shapes


def hedgehog_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map_q: Tensor,
    map_k: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the attention of Hedgehog: softmax attention in a window, and linear attention to all rows before it.

    Rows are in blocks of 64. The window of a row is its own block, up to the row, and the block before: weights are
    β · exp((s - m) / √128) with s = q·k, and m the largest s of the window. Rows of earlier blocks have weights
    α · φ(q)·φ(k) with φ(x) = [softmax(x M), softmax(-x M)]. The result is Σ weights · v / Σ weights.

    Args:
        q, k, v: (B, T, H, 128) in bf16, B up to 1,024, of any strides.
        map_q, map_k: (H, 128, 64) in bf16, M of queries and of keys.
        alpha, beta: (H,) fp32.
        initial_state: (kv, z) of what precedes the first block: kv = Σ φ(k) vᵀ (B, H, 128, 128) and z = Σ φ(k)
            (B, H, 128), both fp32; None: zeros.
        output_final_state: also return kv and z of all blocks but the last, which the next window needs. To continue,
            T must be a multiple of 64. The next call takes this state, and the last 64 rows before the new ones: drop
            its first 64 results. Until there is a whole block, give the same state and all rows after it again.
        cu_seqlens: (N + 1,) int32, the N sequences, up to 1,024, packed along T with B = 1: sequence n has the rows
            from cu_seqlens[n] up to cu_seqlens[n + 1]. The first is 0, and none is less than the one before, which is
            not checked. States are then of N sequences.

    Returns (B, T, H, 128) in bf16, and with output_final_state the state (kv, z). Rows after the last packed sequence
    are not defined, nor are their gradients. States are carried in fp32 and multiplied in bf16. Differentiable once in
    all operands; not in forward mode. The gradient of m goes to the key of the largest s, of equal ones to one.

    Raises TypeError or ValueError for operands that do not fit together, or on a CPU outside of the simulator;
    ArchitectureError on a GPU without TMA.

    Example::

        o, state = hedgehog_attention(q, k, v, *of_heads, output_final_state=True)  # T is a multiple of 64
        q, k, v = (torch.cat([x[:, -64:], x_next], 1) for x, x_next in ((q, q_next), (k, k_next), (v, v_next)))
        o_next = hedgehog_attention(q, k, v, *of_heads, initial_state=state)[:, 64:]

    Source: Zhang et al., The Hedgehog & the Porcupine (2024); Zhang et al., LoLCATs (2024).
    """
    kv, z = (None, None) if initial_state is None else initial_state
    given = Operands(q, k, v, map_q, map_k, alpha, beta, kv, z, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state, _ = run(given, output_final_state)
    else:
        o, *found = call(NAME, *given, output_final_state)
        state = found[0], found[1]
    return (o, state) if output_final_state and state is not None else o
