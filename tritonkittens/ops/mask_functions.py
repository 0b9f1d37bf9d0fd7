"""Ranges of visible keys, read from the mask functions of Hugging Face transformers.

The functions of `transformers.masking_utils` are closures, and `and_masks` and `or_masks` compose them. A closure's
code identifies it, and its cells hold its parameters. Both give a range of visible keys for every query, without a
mask of queries × keys.
`ranges_of` returns None for an unknown function, or one whose visible keys are no range for some query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import masking_utils

FAR = 1 << 40  # larger than every position
MaskFunction = Callable[..., Any]


class Queries(NamedTuple):
    """Positions of queries, (batch or 1, queries) in int64, and the number of key positions."""

    at: np.ndarray
    batch: int
    positions: int

    def of(self, x: Any) -> np.ndarray | None:
        """Return (batch, positions): the integers of a tensor on the host. None for another tensor, or queries at
        other positions.
        """
        numbers = _integers(x, 2)
        if numbers is None or numbers.shape[0] < self.batch or numbers.shape[1] < self.positions:
            return None
        inside = self.at.min(initial=0) >= 0 and self.at.max(initial=-1) < self.positions
        return numbers[: self.batch, : self.positions] if inside else None

    def pick(self, *numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Select the queries' elements of (batch, positions)."""
        at = np.broadcast_to(self.at, (self.batch, self.at.shape[1]))
        return tuple(np.take_along_axis(x, at, 1) for x in numbers)


class Ranges(NamedTuple):
    """A query sees the keys from position `begin` up to `end` − 1, arrays that broadcast to (batch, queries).

    Keys outside `since` … `until` − 1 are unknown.
    """

    begin: Any
    end: Any
    since: Any = -FAR
    until: Any = FAR


def ranges_of(function: MaskFunction, queries: Queries) -> Ranges | None:
    """Return the ranges of a mask function for all keys, or None where they are unknown."""
    found = _read(function, queries)
    return found if found is not None and _is_whole(found) else None


def _is_whole(ranges: Ranges) -> bool:
    return bool((np.asarray(ranges.since) == -FAR).all() and (np.asarray(ranges.until) == FAR).all())


def _read(function: MaskFunction, queries: Queries) -> Ranges | None:
    code = getattr(function, "__code__", None)
    return _readers()[code](queries, **_cells(function)) if code in _readers() else None


def _cells(function: MaskFunction) -> dict[str, Any]:
    """Return the cells of a closure, by name."""
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}


def _causal(queries: Queries) -> Ranges:
    return Ranges(-FAR, queries.at + 1)


def _bidirectional(queries: Queries) -> Ranges | None:
    return Ranges(-FAR, FAR) if (queries.at >= 0).all() else None


def _sliding(queries: Queries, sliding_window: Any) -> Ranges | None:
    return Ranges(queries.at - sliding_window + 1, FAR) if isinstance(sliding_window, int) else None


def _sliding_bidirectional(queries: Queries, sliding_window: Any) -> Ranges | None:
    return (
        Ranges(queries.at - sliding_window, queries.at + sliding_window + 1)
        if isinstance(sliding_window, int)
        else None
    )


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
    """Return the ranges where queries see the keys of an equal number, where `counted`, and no others. None where
    keys with another number lie between.
    """
    begin, end = _stretches(np.diff(numbers, axis=1) != 0)
    heads = counted & (begin == np.arange(numbers.shape[1]))
    for of_sequence, first in zip(numbers, heads, strict=True):
        if len(np.unique(of_sequence[first])) != first.sum():
            return None
    begin, end, seen = queries.pick(begin, end, counted)
    return Ranges(begin, np.where(seen, end, begin))


def _stretches(split: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (begin, end) of the run of every position. `split` (batch, positions − 1) marks where position i + 1
    begins another run.
    """
    place = np.arange(split.shape[1] + 1)
    begin = np.maximum.accumulate(np.where(np.pad(split, ((0, 0), (1, 0)), constant_values=True), place, 0), 1)
    last = np.where(np.pad(split, ((0, 0), (0, 1)), constant_values=True), place + 1, FAR)
    return begin, np.minimum.accumulate(last[:, ::-1], 1)[:, ::-1]


def _remapped(queries: Queries, mask_function: MaskFunction, position_ids: Any) -> Ranges | None:
    """Return the ranges of a function of other positions. Only consecutive positions turn a range of positions into
    one of keys.
    """
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
    """Return the keys that all functions show to a query. Keys unknown to one function are hidden if another hides
    them.
    """
    found = [_read(function, queries) for function in mask_functions]
    if any(x is None for x in found):
        return None
    whole = [x for x in found if x is not None and _is_whole(x)]
    begin, end = _maximum([-FAR, *(x.begin for x in whole)]), _minimum([FAR, *(x.end for x in whole)])
    since, until = _maximum(x.since for x in found if x is not None), _minimum(x.until for x in found if x is not None)
    if ((since <= begin) & (end <= until) | (end <= begin)).all():
        since, until = -FAR, FAR
    return Ranges(
        _maximum(x.begin for x in found if x is not None), _minimum(x.end for x in found if x is not None), since, until
    )


def _any_of(queries: Queries, mask_functions: Any) -> Ranges | None:
    """Return the keys that at least one function shows to a query. None where they are no range for a query."""
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
    """Return a tensor of integers on the host; None for another."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex() or x.ndim != dimensions:
        return None
    return x.detach().cpu().numpy().astype(np.int64)


Reader = Callable[..., "Ranges | None"]


@functools.cache
def _readers() -> dict[CodeType, Reader]:
    """Return the readers by the code of their mask function. A function that another version of transformers changed
    has no reader.
    """
    samples = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 5, 5]], device="cpu")
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, 1], [2, 2, -1, -1, -1, -1, -1]], device="cpu")
    candidates: dict[str, tuple[tuple[Any, ...], Reader]] = {
        "sliding_window_overlay": ((3,), _sliding),
        "sliding_window_bidirectional_overlay": ((2,), _sliding_bidirectional),
        "chunked_overlay": ((3, torch.tensor([0, 2], device="cpu")), _chunked),
        "packed_sequence_mask_function": ((samples,), _packed),
        "blockwise_overlay": ((blocks,), _blockwise),
    }
    known = {masking_utils.causal_mask_function: _causal, masking_utils.bidirectional_mask_function: _bidirectional}
    for name, (parameters, reader) in candidates.items():
        known[getattr(masking_utils, name)(*parameters)] = reader
    readers: dict[CodeType, Reader] = {
        function.__code__: reader for function, reader in known.items() if _agrees(function, reader, samples)
    }
    causal = masking_utils.causal_mask_function
    readers[masking_utils.and_masks(causal).__code__] = _all_of
    readers[masking_utils.or_masks(causal).__code__] = _any_of
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        readers[masking_utils.remap_positions_for_packed_sequence(causal, samples).__code__] = _remapped
    return readers


def _agrees(function: MaskFunction, reader: Reader, samples: torch.Tensor) -> bool:
    """Whether a reader's ranges agree with the function for every query and key of the samples."""
    batch, length = samples.shape
    place = torch.arange(length, device="cpu")
    sequence, head = torch.arange(batch, device="cpu")[:, None, None], torch.zeros((), dtype=torch.long, device="cpu")
    said = function(sequence, head, place[:, None], place).expand(batch, length, length)
    try:
        read = reader(Queries(place.numpy()[None], batch, length), **_cells(function))
    except TypeError:  # a parameter has another name
        return False
    if read is None:
        return False
    begin, end = (np.broadcast_to(x, (batch, length))[..., None] for x in read[:2])
    return bool(np.array_equal(said.numpy(), (begin <= place.numpy()) & (place.numpy() < end)))
