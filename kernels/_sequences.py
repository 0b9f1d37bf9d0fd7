"""What kernels of sequence models share: operands (B, T, H, columns) as rows of all sequences, and their states."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import check_tensors

MOST_SEQUENCES = 1024  # that are packed


def packed(x: Tensor) -> Tensor:
    """(H, rows of all sequences, columns) of a tensor (B, T, H, columns), as TMA reads it."""
    return as_addressable(x.flatten(0, 1).transpose(0, 1))


def sequences_of(x: Tensor, starts: Tensor | None) -> int:
    """The number of sequences: the batch, or those that are packed."""
    return x.shape[0] if starts is None else starts.shape[0] - 1


def ends_of(x: Tensor, starts: Tensor | None) -> Tensor:
    """(sequences,) int32: how many rows of all sequences come before the end of each."""
    if starts is not None:
        return starts[1:].contiguous()
    return torch.arange(1, x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def starts_of(name: str, seq_idx: Tensor, rows: tuple[int, int]) -> Tensor:
    """The rows where sequences begin, and the number of all rows in the places after the last, as `cu_seqlens` of
    `MOST_SEQUENCES`. The host does not read them.

    seq_idx: (B, L) int32. A sequence begins with each row of the batch, and where the number changes. rows: B and L.
    """
    check_tensors(name, seq_idx=seq_idx)
    if tuple(seq_idx.shape) != rows:
        raise ValueError(f"{name}: seq_idx is {tuple(seq_idx.shape)}; it must be {rows}")
    if seq_idx.dtype != torch.int32:
        raise TypeError(f"{name}: seq_idx has dtype {seq_idx.dtype}; it must be torch.int32")
    total = rows[0] * rows[1]
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]
    begins = torch.cat([torch.ones_like(seq_idx[:, :1], dtype=torch.bool), changes], 1).flatten()
    none = MOST_SEQUENCES + 1  # a place that is cut off
    place = torch.where(begins, begins.cumsum(0) - 1, none).clamp(max=none)
    starts = seq_idx.new_full((none + 1,), total)
    return starts.scatter(0, place, torch.arange(total, dtype=torch.int32, device=seq_idx.device))[:none]


def check_sequences(
    name: str,
    x: Tensor,
    starts: Tensor | None,
    state: Tensor | None,
    shape: tuple[int, ...],
    names: tuple[str, str] = ("q", "initial_state"),
) -> None:
    """Raise TypeError or ValueError for too many sequences, offsets that do not fit the first operand, or a state that
    is not of the sequences and this shape. `names`: of the first operand, and the state."""
    first, of_state = names
    if x.shape[0] > MOST_SEQUENCES:
        raise ValueError(f"{name}: {first} is {tuple(x.shape)}; there may be {MOST_SEQUENCES} sequences")
    if starts is not None:
        if x.shape[0] != 1 or starts.ndim != 1 or not 1 <= starts.shape[0] <= MOST_SEQUENCES + 1:
            raise ValueError(
                f"{name}: {first} is {tuple(x.shape)}, cu_seqlens {tuple(starts.shape)}; packed sequences have a batch "
                f"of 1, and cu_seqlens 1 to {MOST_SEQUENCES + 1} elements"
            )
        if starts.dtype != torch.int32:
            raise TypeError(f"{name}: cu_seqlens has dtype {starts.dtype}; it must be torch.int32")
    if state is not None:
        wanted = (sequences_of(x, starts), *shape)
        if tuple(state.shape) != wanted:
            raise ValueError(f"{name}: {of_state} is {tuple(state.shape)}; it must be {wanted}")
        if state.dtype != torch.float32:
            raise TypeError(f"{name}: {of_state} has dtype {state.dtype}; it must be torch.float32")


def check_beside(name: str, x: Tensor, first: str = "q", /, **tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor on another device than `x`, the operand `first`."""
    for argument, other in tensors.items():
        if other is not None and other.device != x.device:
            raise ValueError(
                f"{name}: {argument} is on {other.device}, {first} on {x.device}; all tensors must be on one device"
            )
