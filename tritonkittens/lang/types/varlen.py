"""Ragged tensors: sequences of different lengths, packed end to end along the rows.

A sequence is the first coordinate of a copy. The copy ends where the sequence ends.
"""

from __future__ import annotations

import triton.language as tl

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.types.global_layout import check_global, is_ragged, rank_of
from tritonkittens.launch.tensormap import SPAN


@op
def sequence(t: Trace, begin: Traced, rows: Traced) -> Traced:
    """Name one sequence of a packed tensor, as the first coordinate of a load or store.

    One tile coordinate per dimension follows. Tiles are counted from `begin`, along the rows (of vectors: along the
    last dimension). Rows past the sequence are outside: loads fill them, stores skip them.
    TMA needs a layout made for sequences, `tk.gl(x, tile, ragged=True)` or `tk.layout(ragged=…)`, and moves tiles
    only.

    Args:
        begin: the sequence's first row, an int32 scalar.
        rows: the number of its rows, an int32 scalar. All rows must lie inside the tensor.

    Example::

        tk.load_async(tile, g, (tk.sequence(begin, rows), head, block, 0), full)
    """
    return struct(begin=t.scalar(begin), rows=t.scalar(rows))


def split_sequence(coord: list[Traced]) -> tuple[Traced, list[Traced]]:
    """Return (the sequence or None, the other coordinates)."""
    return (coord[0], coord[1:]) if coord and isinstance(unwrap(coord[0]), struct) else (None, coord)


def dimensions(g: Traced) -> int:
    """Return the number of dimensions of the tensor of a global layout inside a kernel. A ragged map has two more."""
    return rank_of(g) - (2 if is_ragged(g) else 0)


def end_of(t: Trace, sequence: Traced) -> Traced:
    """Return the first row after a sequence."""
    return t.method(sequence.begin, "__add__", sequence.rows)


def ragged_place(t: Trace, sequence: Traced, place: list[Traced]) -> list[Traced]:
    """Convert element coordinates of a sequence's tile to coordinates in a ragged map (`launch.tensormap.ragged`)."""
    row = t.method(t.method(t.scalar(place[-2]), "__sub__", sequence.rows), "__add__", SPAN)
    return [SPAN, end_of(t, sequence), *place[:-2], row, place[-1]]


def check_sequence(g: Traced, sequence: Traced, of_tile: bool, what: str) -> None:
    """Refuse a TMA copy of a sequence that the tensor's map does not bound."""
    if sequence is not None and not of_tile:
        raise TileError(
            f"{what} of a sequence: TMA moves tiles of it, not vectors, which begin at multiples of 16 bytes only"
        )
    if sequence is not None and not is_ragged(g):
        raise TileError(
            f"{what} of a sequence: the tensor's map ends with the tensor; pass tk.gl(tensor, tile types, ragged=True)"
        )


@op
def has_sequences(t: Trace, g: Traced) -> Traced:
    """Return whether copies of the global layout `g` take a `sequence` as their first coordinate, a constant."""
    check_global(g, "has_sequences")
    return tl.constexpr(is_ragged(g))


__all__ = ["has_sequences", "sequence"]
