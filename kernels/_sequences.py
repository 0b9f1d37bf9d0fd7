"""What kernels of sequence models share: operands (B, T, H, columns) as rows of all sequences, and their states."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable, zero_behind
from tritonkittens.kernels._dispatch import PLAIN, check_tensors, has_tangent
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import FLOATS, check_tensor, padded_empty, power_of_two

MOST_SEQUENCES = 1024  # that are packed
ROWS = 64  # of a chunk
Result = TypeVar("Result")


class SequencePlan:
    """What plans of calls share: extents of operands, and the memory of what kernels write.

    slots: chunks, at most, since each sequence may end with a short one. ends: of sequences of one length. knobs: of
    all templates; numbers: arguments of all their launches.
    """

    def __init__(self, q: Tensor, v: Tensor, starts: Tensor | None):
        batches, self.length, self.key_heads, self.keys = q.shape
        self.heads, self.values = v.shape[2:]
        self.total, self.sequences, self.slots = batches * self.length, sequences_of(q, starts), slots_of(q, starts)
        self.device, self.ends, self.packs = q.device, ends_of(q, None), starts is not None
        self.knobs: dict[str, Any] = dict(dtype=tk.from_torch(q.dtype), most=most_of(self.sequences))
        self.numbers: dict[str, Any] = dict(total=self.total, group=self.heads // max(self.key_heads, 1))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that kernels write."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def rows(self, like: Tensor, ends: Tensor, *columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of a result of all rows, with the dtype of `like` unless given."""
        return self.ended(padded_empty((self.total, *columns), like, dtype), ends)

    def ended(self, x: Tensor, ends: Tensor) -> Tensor:
        """`x`, memory of a result, with zeros behind the last packed sequence: no kernel writes rows there."""
        return zero_behind(x, ends) if self.packs else x

    def ends_of(self, starts: Tensor | None) -> Tensor:
        """Where the sequences of a call end."""
        return self.ends if starts is None else starts[1:].contiguous()


def begin_states(after: list[Tensor], before: list[Tensor]) -> None:
    """Fill states after sequences with those before, or zeros: sequences without rows have no task."""
    for i, x in enumerate(after):
        x.copy_(before[i]) if before else x.zero_()


def present(*tensors: Tensor | None) -> list[Tensor]:
    """The tensors that a call has."""
    return [x for x in tensors if x is not None]


def transposed(state: Tensor | None) -> Tensor | None:
    """States (…, K, V) as (…, V, K), where there are any: a consumer has all columns of K for some of V."""
    return None if state is None else state.mT


def or_empty(state: Tensor | None, like: Tensor) -> Tensor:
    """What an operator returns for states: an empty tensor where there are none."""
    return like.new_empty(0, dtype=torch.float32) if state is None else state


def by_fields(run: Callable[..., Result]) -> Callable[..., Result]:
    """Make a function, whose first parameters are records of tensors, one of their fields, as operators take them."""
    written = inspect.signature(run, eval_str=True)
    parameters = list(written.parameters.values())
    records = [x.annotation for x in parameters if hasattr(x.annotation, "_fields")]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fields = [
        inspect.Parameter(name, kind, annotation=of_field)
        for record in records
        for name, of_field in get_type_hints(record).items()
    ]

    @wraps(run)
    def flat(*args: Any) -> Result:
        given = []
        for record in records:
            count = len(record._fields)
            given.append(record(*args[:count]))
            args = args[count:]
        return run(*given, *args)

    flat.__signature__ = written.replace(parameters=[*fields, *parameters[len(records) :]])  # type: ignore[attr-defined]
    return flat


def packed(x: Tensor) -> Tensor:
    """(H, rows of all sequences, columns) of a tensor (B, T, H, columns), as TMA reads it."""
    return as_addressable(x.flatten(0, 1).transpose(0, 1))


def sequences_of(x: Tensor, starts: Tensor | None) -> int:
    """The number of sequences: the batch, or those that are packed."""
    return x.shape[0] if starts is None else starts.shape[0] - 1


def slots_of(x: Tensor, starts: Tensor | None) -> int:
    """The number of places for chunks: see `linear_attention.device.chunks`."""
    return x.shape[0] * x.shape[1] // ROWS + sequences_of(x, starts)


def most_of(sequences: int) -> int:
    """The bound of the number of sequences for which kernels are compiled."""
    return max(16, power_of_two(sequences))


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


def check_kinds(name: str, given: NamedTuple) -> None:
    """Raise TypeError for operands that are no tensors, or of several devices, and ValueError for tangents.

    given: a record of operands, of which those with a default may be None.
    """
    for argument, x in zip(given._fields, given, strict=True):
        if type(x) in PLAIN or (x is None and argument in given._field_defaults):
            continue
        check_tensors(name, **{argument: x})
        if is_distributed(type(x)):
            raise TypeError(f"{name}: {argument} is a DTensor; give its shard, {argument}.to_local()")
    if has_tangent(*given):
        raise ValueError(f"{name}: it has no forward-mode derivative; use {name}_torch")


def check_alike(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError for k and v that have not the dtype of q, or k that has not its shape."""
    for argument, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: {argument} has dtype {x.dtype}, q {q.dtype}; they must be equal")
    if k.shape != q.shape:
        raise ValueError(f"{name}: k is {tuple(k.shape)}; it must be {tuple(q.shape)}, as q")


def check_gates(name: str, v: Tensor, **gates: Tensor | None) -> None:
    """Raise TypeError or ValueError for gates that are not a number for each row and head of v."""
    for argument, x in gates.items():
        if x is None:
            continue
        if x.shape != v.shape[:3]:
            raise ValueError(
                f"{name}: {argument} is {tuple(x.shape)}; it must be {tuple(v.shape[:3])}, a number a head"
            )
        check_float(name, argument, x)


def check_float(name: str, argument: str, x: Tensor) -> None:
    """Raise TypeError for other dtypes than fp32, bf16 and fp16."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: {argument} has dtype {x.dtype}; it must be {' or '.join(map(str, FLOATS))}")


def check_taken(
    name: str, given: NamedTuple, dtypes: tuple[torch.dtype, ...], of_kernels: tuple[str, ...] = ("q", "k", "v")
) -> None:
    """Raise TypeError or ValueError for operands of other dtypes or devices than kernels take.

    given: a record of operands. of_kernels: those of `dtypes`, with the first of the record.
    """
    first = of_kernels[0]
    for argument in of_kernels:
        check_tensor(name, argument, getattr(given, argument), dtypes, first, given[0])
    check_beside(name, given[0], first, **given._asdict())


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
        raise ValueError(f"{name}: {first} is {tuple(x.shape)}; there may be at most {MOST_SEQUENCES} sequences")
    if starts is not None:
        fewest = 2 if x.numel() else 1  # rows need a sequence
        if x.shape[0] != 1 or starts.ndim != 1 or not fewest <= starts.shape[0] <= MOST_SEQUENCES + 1:
            raise ValueError(
                f"{name}: {first} is {tuple(x.shape)}, cu_seqlens {tuple(starts.shape)}; packed sequences have a batch "
                f"of 1, and cu_seqlens {fewest} to {MOST_SEQUENCES + 1} elements"
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
