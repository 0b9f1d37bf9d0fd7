"""The scan of Mamba-2 for PyTorch tensors: `mamba_chunk_scan`."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, have_memory, is_plain, requires_grad
from tritonkittens.kernels._sequences import check_kinds, starts_of
from tritonkittens.kernels._tensors import check_rising
from tritonkittens.kernels.mamba2.call_plan import run
from tritonkittens.kernels.mamba2.checks import NAME, Operands, check_shapes


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    *,
    debug: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Return the scan of Mamba-2: S ← exp(A · dt) · S + dt · x Bᵀ for each row, and y = (S C + D · x) · silu(z).

    Arguments and their order are those of mamba_ssm's `mamba_chunk_scan_combined`.

    Args:
        x: (B, L, H, P) in bf16 or fp16, B up to 1,024, any strides, as of B, C and z.
        dt: (B, L, H) in fp32, bf16 or fp16. The scan takes clamp(dt + dt_bias, *dt_limit).
        A: (H,) fp32, negative (not checked).
        B, C: (B, L, G, N) in the dtype of x, N from 1 to 256, G a divisor of H: head h of x uses group ⌊h · G / H⌋.
        chunk_size: changes nothing; chunks have 64 rows.
        D: (H,) or (H, P) in fp32, bf16 or fp16; None: 0.
        z: as x; None: y is not multiplied by silu(z).
        dt_bias: (H,) in fp32, bf16 or fp16; None: 0.
        initial_states: (B, H, P, N) fp32, S before the first row; None: zeros.
        seq_idx: (B, L) int32, in place of cu_seqlens, and slower: a sequence begins where the number changes. Initial
            states are those of the first sequence of each batch, final states those of the last. With states, the
            host waits for the device; without, rows from the 1,025th sequence on are undefined. Not read with
            cu_seqlens.
        cu_seqlens: (M + 1,) int32: where M ≤ 1,024 sequences packed along L begin, and the end of the last. B is 1.
            Initial and final states are (M, H, P, N); mamba_ssm has (1, H, P, N).
        dt_softplus: softplus(dt + dt_bias) is clamped instead.
        dt_limit: (least, most), 0 ≤ least ≤ most. By default negative dt become 0.
        return_final_states: also return S after the last row.
        return_varlen_states: with cu_seqlens, the last result is the states (M, H, P, N) after all sequences. Final
            states are then those of the last one, (1, H, P, N).
        debug: check what cu_seqlens holds, for which the host waits for the device.

    Returns (B, L, H, P) in the dtype of x, and the states that are wanted, in fp32. Differentiable once, in all
    operands; not in forward mode.

    Raises TypeError or ValueError for other operands; ArchitectureError on a GPU without TMA, but
    for results of up to 8 rows that are not packed.

    Example::

        y, states = mamba_chunk_scan(x, dt, A, B, C, D=D, dt_softplus=True, return_final_states=True)

    Packed sequences, precision: docs/sequences.md. Source: Dao and Gu, Transformers are SSMs (2024).
    """
    if not isinstance(chunk_size, (int, NoneType)):
        raise TypeError(f"{NAME}: chunk_size is {type(chunk_size).__name__}; it must be an int or None")
    if return_varlen_states:
        if cu_seqlens is None:
            raise ValueError(f"{NAME}: return_varlen_states without cu_seqlens; return_final_states has the states")
        operands = (x, dt, A, B, C, None, D, z, dt_bias, initial_states, None, cu_seqlens)
        y, states = mamba_chunk_scan(*operands, dt_softplus, dt_limit, True, debug=debug)
        return (y, states[-1:], states) if return_final_states else (y, states)
    given = Operands(x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens)
    check_kinds(NAME, given)
    least, most = (float(limit) for limit in dt_limit)
    check_shapes(given, (least, most))
    if debug:
        check_rising(NAME, "cu_seqlens", cu_seqlens, x.shape[1])
    if seq_idx is not None and cu_seqlens is None:
        return _with_sequences(given, seq_idx, dt_softplus, (least, most), return_final_states)
    if is_plain(*given) and have_memory(*given) and not requires_grad(*given):
        y, states = run(given, dt_softplus, (least, most), return_final_states)
    else:
        y, states = call(NAME, *given, dt_softplus, least, most, return_final_states)
    return (y, states) if return_final_states else y


def _with_sequences(
    given: Operands, seq_idx: Tensor, dt_softplus: bool, dt_limit: tuple[float, float], final_states: bool
) -> Tensor | tuple[Tensor, ...]:
    """The scan of all batches as packed sequences."""
    x, states = given.x, given.initial_states
    starts = starts_of(NAME, seq_idx, (x.shape[0], x.shape[1]))
    of_heads: dict[str, Any] = dict(A=given.A, D=given.D, dt_bias=given.dt_bias)
    options: dict[str, Any] = dict(dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=final_states)
    if not x.numel():  # no row begins a sequence
        return mamba_chunk_scan(**given._asdict(), **options)
    first = None
    if states is not None or final_states:
        # Of each batch, the number of its first sequence, and behind the last batch, that of all sequences.
        begins = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]
        first = torch.searchsorted(starts, begins)
        count = int(first[-1])
        if count >= len(starts):
            raise ValueError(f"{NAME}: seq_idx has more than {len(starts) - 1} sequences, the most that have states")
        starts = starts[: count + 1]
        if states is not None:
            states = states.new_zeros(count, *states.shape[1:]).index_copy(0, first[:-1], states)
    of_rows = {n: t.flatten(0, 1)[None] for n in ("x", "dt", "B", "C", "z") if (t := getattr(given, n)) is not None}
    found = mamba_chunk_scan(**of_rows, **of_heads, initial_states=states, cu_seqlens=starts, **options)
    if first is None or not final_states:
        return found.view(x.shape)  # type: ignore[union-attr]
    return found[0].view(x.shape), found[1][first[1:] - 1]
