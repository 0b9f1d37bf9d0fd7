"""Hedgehog attention for PyTorch tensors: `hedgehog_attention`."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds
from tritonkittens.kernels._tensors import check_rising
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
    debug: bool = False,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the attention of Hedgehog: softmax attention in a window, and linear attention to all rows before it.

    Rows are in blocks of 64. The window of a row is its own block, up to the row, and the block before. Weights in it
    are β · exp((s - m) / √128), with s = q·k and m the largest s of the window. Weights of earlier rows are α ·
    φ(q)·φ(k), with φ(x) = [softmax(x M), softmax(-x M)]. The result is Σ weights · v / Σ weights.

    Args:
        q, k, v: (B, T, H, 128) in bf16, B up to 1,024, any strides.
        map_q, map_k: (H, 128, 64) in bf16, M of queries and of keys.
        alpha, beta: (H,) fp32.
        initial_state: (kv, z) fp32 of all rows before the first block: kv = Σ φ(k) vᵀ (B, H, 128, 128), z = Σ φ(k) (B,
            H, 128); None: zeros.
        output_final_state: also return (kv, z) of all blocks but the last. If T is a multiple of 64, a call continues
            with this state and the last 64 rows before the new ones: drop its first 64 results, as in the example.
        cu_seqlens: (N + 1,) int32: where N ≤ 1,024 sequences packed along T begin, and the end of the last. B is 1.
            States are of N sequences.
        debug: check what cu_seqlens holds, for which the host waits for the device.

    Returns (B, T, H, 128) in bf16; with output_final_state also the state. Differentiable once in all operands; not in
    forward mode. The gradient of m goes to one key with the largest s.

    Raises TypeError or ValueError for other operands; ArchitectureError on a GPU without TMA.

    Example::

        o, state = hedgehog_attention(q, k, v, *maps, output_final_state=True)  # T is a multiple of 64
        q, k, v = (torch.cat([x[:, -64:], x_next], 1) for x, x_next in ((q, q_next), (k, k_next), (v, v_next)))
        o_next = hedgehog_attention(q, k, v, *maps, initial_state=state)[:, 64:]

    Packed sequences, precision: docs/sequences.md. Source: Zhang et al., The Hedgehog & the Porcupine (2024); Zhang et
    al., LoLCATs (2024).
    """
    kv, z = (None, None) if initial_state is None else initial_state
    given = Operands(q, k, v, map_q, map_k, alpha, beta, kv, z, cu_seqlens)
    check_kinds(NAME, given)
    check_shapes(given)
    if debug:
        check_rising(NAME, "cu_seqlens", cu_seqlens, q.shape[1])
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        o, state, _ = run(given, output_final_state)
    else:
        o, *found = call(NAME, *given, output_final_state)
        state = found[0], found[1]
    return (o, state) if output_final_state and state is not None else o
