"""What the mask functions of Hugging Face transformers let a query see, read from the functions themselves: a range of keys for every query.

The functions of `transformers.masking_utils` are closures, and `and_masks` and `or_masks` compose them. A closure is known by its code, its parameters are its
cells, and what it lets a query see follows from these: no mask of queries × keys is made. A function that is not known, or whose keys are no range for some
query, has no ranges here (`ranges_of` returns None).
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import masking_utils

FAR = 1 << 40  # beyond every position
MaskFunction = Callable[..., Any]


class Queries(NamedTuple):
    """Positions of queries, (batch or 1, queries) in int64, and how many positions keys may have."""

    at: np.ndarray
    batch: int
    positions: int

    def of(self, x: Any) -> np.ndarray | None:
        """(batch, positions): the integers of a tensor on the host; None for another tensor, and where queries are at other positions."""
        numbers = _integers(x, 2)
        if numbers is None or numbers.shape[0] < self.batch or numbers.shape[1] < self.positions:
            return None
        inside = self.at.min(initial=0) >= 0 and self.at.max(initial=-1) < self.positions
        return numbers[: self.batch, : self.positions] if inside else None

    def pick(self, *numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of (batch, positions) those of the queries."""
        at = np.broadcast_to(self.at, (self.batch, self.at.shape[1]))
        return tuple(np.take_along_axis(x, at, 1) for x in numbers)


class Ranges(NamedTuple):
    """A query sees the keys from position `begin` up to `end` − 1; arrays that broadcast to (batch, queries). Whether it sees keys outside `since` …
    `until` − 1 is not known."""

    begin: Any
    end: Any
    since: Any = -FAR
    until: Any = FAR


def ranges_of(function: MaskFunction, queries: Queries) -> Ranges | None:
    """The ranges of a mask function, which hold for all keys, or None where they are not known."""
    found = _read(function, queries)
    return found if found is not None and _is_whole(found) else None


def _is_whole(ranges: Ranges) -> bool:
    return bool((np.asarray(ranges.since) == -FAR).all() and (np.asarray(ranges.until) == FAR).all())


def _read(function: MaskFunction, queries: Queries) -> Ranges | None:
    code = getattr(function, "__code__", None)
    return _readers()[code](queries, **_cells(function)) if code in _readers() else None


def _cells(function: MaskFunction) -> dict[str, Any]:
    """What a closure holds, by name."""
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}


def _causal(queries: Queries) -> Ranges:
    return Ranges(-FAR, queries.at + 1)


def _bidirectional(queries: Queries) -> Ranges | None:
    return Ranges(-FAR, FAR) if (queries.at >= 0).all() else None


def _sliding(queries: Queries, sliding_window: Any) -> Ranges | None:
    return Ranges(queries.at - sliding_window + 1, FAR) if isinstance(sliding_window, int) else None


def _sliding_bidirectional(queries: Queries, sliding_window: Any) -> Ranges | None:
    return Ranges(queries.at - sliding_window, queries.at + sliding_window + 1) if isinstance(sliding_window, int) else None


def _chunked(queries: Queries, chunk_size: Any, left_padding: Any) -> Ranges | None:
    origin = _integers(left_padding, 1)
    if origin is None or len(origin) < queries.batch or not isinstance(chunk_size, int) or chunk_size < 1:
        return None
    begin = queries.at - (queries.at - origin[: queries.batch, None]) % chunk_size
    return Ranges(begin, begin + chunk_size)


def _packed(queries: Queries, packed_sequence_mask: Any) -> Ranges | None:
    numbers = queries.of(packed_sequence_mask)
    return None if numbers is None else _alike(queries, numbers, np.ones_like(numbers, bool))


def _blockwise(queries: Queries, block_sequence_ids: Any) -> Ranges | None:
    numbers = queries.of(block_sequence_ids)
    return None if numbers is None else _alike(queries, numbers, numbers >= 0)


def _alike(queries: Queries, numbers: np.ndarray, counted: np.ndarray) -> Ranges | None:
    """Queries see the keys with a number like theirs, where `counted`, else none. None where keys with another number lie between."""
    begin, end = _stretches(np.diff(numbers, axis=1) != 0)
    heads = counted & (begin == np.arange(numbers.shape[1]))
    for of_sequence, first in zip(numbers, heads, strict=True):
        if len(np.unique(of_sequence[first])) != first.sum():
            return None
    begin, end, seen = queries.pick(begin, end, counted)
    return Ranges(begin, np.where(seen, end, begin))


def _stretches(split: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begin, end) of the stretch of every position, for whether position i + 1 begins another one, (batch, positions − 1)."""
    place = np.arange(split.shape[1] + 1)
    begin = np.maximum.accumulate(np.where(np.pad(split, ((0, 0), (1, 0)), constant_values=True), place, 0), 1)
    last = np.where(np.pad(split, ((0, 0), (0, 1)), constant_values=True), place + 1, FAR)
    return begin, np.minimum.accumulate(last[:, ::-1], 1)[:, ::-1]


def _remapped(queries: Queries, mask_function: MaskFunction, position_ids: Any) -> Ranges | None:
    """A function of other positions. Among keys whose positions follow each other a range of positions is one of keys; others are not known."""
    numbers = queries.of(position_ids)
    if numbers is None or numbers.min(initial=0) < 0:
        return None
    position, since, until = queries.pick(numbers, *_stretches(np.diff(numbers, axis=1) != 1))
    found = ranges_of(mask_function, Queries(position, queries.batch, int(numbers.max(initial=-1)) + 1))
    if found is None:
        return None
    moved = queries.at - position
    return Ranges(found.begin + moved, found.end + moved, since, until)


def _all_of(queries: Queries, mask_functions: Any) -> Ranges | None:
    """The keys that all functions let a query see. Keys that one does not know are hidden if another one hides them."""
    found = [_read(function, queries) for function in mask_functions]
    if any(x is None for x in found):
        return None
    whole = [x for x in found if x is not None and _is_whole(x)]
    begin, end = _maximum([-FAR, *(x.begin for x in whole)]), _minimum([FAR, *(x.end for x in whole)])
    since, until = _maximum(x.since for x in found if x is not None), _minimum(x.until for x in found if x is not None)
    if ((since <= begin) & (end <= until) | (end <= begin)).all():
        since, until = -FAR, FAR
    return Ranges(_maximum(x.begin for x in found if x is not None), _minimum(x.end for x in found if x is not None), since, until)


def _any_of(queries: Queries, mask_functions: Any) -> Ranges | None:
    """The keys that one of the functions lets a query see. None where they are no range for a query."""
    found = [_read(function, queries) for function in mask_functions]
    if not found or any(x is None for x in found):
        return None
    since, until = _maximum(x.since for x in found if x is not None), _minimum(x.until for x in found if x is not None)
    begin, end = _within(found[0], since, until)
    for other in found[1:]:
        another, other_end = _within(other, since, until)
        empty, other_empty = end <= begin, other_end <= another
        if not (empty | other_empty | (np.maximum(begin, another) <= np.minimum(end, other_end))).all():
            return None
        begin, end = (np.where(empty, b, np.where(other_empty, a, either(a, b)))
                      for a, b, either in ((begin, another, np.minimum), (end, other_end, np.maximum)))  # fmt: skip
    return Ranges(begin, end, since, until)


def _within(ranges: Any, since: Any, until: Any) -> tuple[Any, Any]:
    return np.maximum(ranges.begin, since), np.minimum(ranges.end, until)


def _maximum(arrays: Any) -> Any:
    return functools.reduce(np.maximum, arrays)


def _minimum(arrays: Any) -> Any:
    return functools.reduce(np.minimum, arrays)


def _integers(x: Any, dimensions: int) -> np.ndarray | None:
    """A tensor of integers on the host; None for another."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex() or x.ndim != dimensions:
        return None
    return x.detach().cpu().numpy().astype(np.int64)


Reader = Callable[..., "Ranges | None"]


@functools.cache
def _readers() -> dict[CodeType, Reader]:
    """By the code of a mask function what reads it. A version of transformers in which a function sees other keys does not have that one."""
    samples = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 5, 5]], device="cpu")
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, 1], [2, 2, -1, -1, -1, -1, -1]], device="cpu")
    candidates: dict[str, tuple[tuple[Any, ...], Reader]] = {
        "sliding_window_overlay": ((3,), _sliding), "sliding_window_bidirectional_overlay": ((2,), _sliding_bidirectional),
        "chunked_overlay": ((3, torch.tensor([0, 2], device="cpu")), _chunked), "packed_sequence_mask_function": ((samples,), _packed),
        "blockwise_overlay": ((blocks,), _blockwise),
    }  # fmt: skip
    known = {masking_utils.causal_mask_function: _causal, masking_utils.bidirectional_mask_function: _bidirectional}
    for name, (parameters, reader) in candidates.items():
        known[getattr(masking_utils, name)(*parameters)] = reader
    readers: dict[CodeType, Reader] = {function.__code__: reader for function, reader in known.items() if _agrees(function, reader, samples)}
    causal = masking_utils.causal_mask_function
    readers[masking_utils.and_masks(causal).__code__] = _all_of
    readers[masking_utils.or_masks(causal).__code__] = _any_of
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        readers[masking_utils.remap_positions_for_packed_sequence(causal, samples).__code__] = _remapped
    return readers


def _agrees(function: MaskFunction, reader: Reader, samples: torch.Tensor) -> bool:
    """Does what is read from a function agree with what it says of every query and key of the samples?"""
    batch, length = samples.shape
    place = torch.arange(length, device="cpu")
    sequence, head = torch.arange(batch, device="cpu")[:, None, None], torch.zeros((), dtype=torch.long, device="cpu")
    said = function(sequence, head, place[:, None], place).expand(batch, length, length)
    try:
        read = reader(Queries(place.numpy()[None], batch, length), **_cells(function))
    except TypeError:  # another name of a parameter
        return False
    if read is None:
        return False
    begin, end = (np.broadcast_to(x, (batch, length))[..., None] for x in read[:2])
    return bool(np.array_equal(said.numpy(), (begin <= place.numpy()) & (place.numpy() < end)))
