"""The scan of Mamba-2 for PyTorch tensors: `mamba_chunk_scan`."""

from __future__ import annotations

import math

from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds, starts_of
from tritonkittens.kernels.mamba2.call_plan import run
from tritonkittens.kernels.mamba2.checks import NAME, Operands, check_shapes


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the scan of Mamba-2: S ← exp(A · dt) · S + dt · x Bᵀ for each row, and y = (S C + D · x) · silu(z).

    Arguments are those of mamba_ssm's `mamba_chunk_scan_combined`, without `chunk_size` and `return_varlen_states`, and
    with options by name.

    Args:
        x: (B, L, H, P) in bf16 or fp16, B up to 1,024, any strides, as of B, C and z.
        dt: (B, L, H) in fp32, bf16 or fp16. The scan takes clamp(dt + dt_bias, *dt_limit).
        A: (H,) fp32, negative (not checked).
        B, C: (B, L, G, N) in the dtype of x, N from 1 to 256, G a divisor of H: head h of x uses group ⌊h · G / H⌋.
        D: (H,) or (H, P) in fp32, bf16 or fp16; None: 0.
        z: as x; None: y is not multiplied by silu(z).
        dt_bias: (H,) in fp32, bf16 or fp16; None: 0.
        initial_states: (B, H, P, N) fp32, S before the first row; None: zeros.
        cu_seqlens: (M + 1,) int32: where M ≤ 1,024 sequences packed along L begin, and the end of the last. B is 1.
            States are (M, H, P, N).
        seq_idx: (B, L) int32, in place of cu_seqlens, and slower: a sequence begins where the number changes. It has no
            states. Rows from the 1,025th sequence on are undefined.
        dt_softplus: softplus(dt + dt_bias) is clamped instead.
        dt_limit: (least, most), 0 ≤ least ≤ most. By default negative dt become 0.
        return_final_states: also return S after the last row.

    Returns (B, L, H, P) in the dtype of x; with return_final_states also the states, (B, H, P, N) fp32. Differentiable
    once, in all operands; not in forward mode.

    Raises TypeError or ValueError for other operands; for more than 8 rows ArchitectureError on a GPU without TMA.

    Example::

        y, states = mamba_chunk_scan(x, dt, A, B, C, D=D, dt_softplus=True, return_final_states=True)

    Packed sequences, precision: docs/sequences.md. Source: Dao and Gu, Transformers are SSMs (2024).
    """
    given = Operands(x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens)
    if seq_idx is not None:
        return _with_sequences(given, seq_idx, dt_softplus, dt_limit, return_final_states)
    check_kinds(NAME, given)
    least, most = (float(limit) for limit in dt_limit)
    check_shapes(given, (least, most))
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        y, states = run(given, dt_softplus, (least, most), return_final_states)
    else:
        y, states = call(NAME, *given, dt_softplus, least, most, return_final_states)
    return (y, states) if return_final_states else y


def _with_sequences(
    given: Operands, seq_idx: Tensor, dt_softplus: bool, dt_limit: tuple[float, float], final_states: bool
) -> Tensor:
    """The scan of all batches as packed sequences."""
    if final_states or given.initial_states is not None or given.cu_seqlens is not None:
        raise ValueError(
            f"{NAME}: with seq_idx there are no states before and after, and no cu_seqlens; pack by cu_seqlens"
        )
    check_kinds(NAME, given)
    check_shapes(given, dt_limit)
    x = given.x
    starts = starts_of(NAME, seq_idx, (x.shape[0], x.shape[1]))
    of_rows = {n: t.flatten(0, 1)[None] for n in ("x", "dt", "B", "C", "z") if (t := getattr(given, n)) is not None}
    of_heads = dict(A=given.A, D=given.D, dt_bias=given.dt_bias)
    y = mamba_chunk_scan(**of_rows, **of_heads, cu_seqlens=starts, dt_softplus=dt_softplus, dt_limit=dt_limit)
    return y.view(x.shape)  # type: ignore[union-attr]
