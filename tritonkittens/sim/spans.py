"""Intervals of modelled time on the lanes of a CTA: what a timeline records, and how much of the time is busy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

NOTE = "modelled, not measured"


@dataclass(eq=False)
class Span:
    """An interval on a lane. For an asynchronous operation, `busy` is the time when its engine worked on it (it is in
    flight from start to end).
    """

    cta: Cta
    lane: str
    kind: str
    name: str
    start: float
    end: float
    args: dict[str, Any]
    busy: tuple[float, float] | None = None
    lines: dict[str, float] = field(default_factory=dict)  # cycles by source line, where several operations were merged


@dataclass(eq=False)
class Cta:
    """A process of the trace. `offset` is the start of its launch."""

    launch: int
    kernel: str
    name: str
    offset: float
    number: int
    roles: list[str] = field(default_factory=list)  # lanes in order
    engines: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    end: float = 0.0

    @property
    def lanes(self) -> list[str]:
        return [*self.roles, *self.engines]

    def on(self, lane: str) -> list[Span]:
        return [s for s in self.spans if s.lane == lane]


@dataclass(frozen=True)
class Share:
    """The shares of a CTA's modelled time in which a lane was busy, waiting, and neither.

    An engine waits while all its operations are in flight and move no data.
    """

    launch: int
    kernel: str
    cta: str
    lane: str
    busy: float
    wait: float
    cycles: float

    @property
    def idle(self) -> float:
        return max(0.0, 1.0 - self.busy - self.wait)

    def __str__(self) -> str:
        parts = f"busy {self.busy:.0%}, waiting {self.wait:.0%}, idle {self.idle:.0%}"
        return f"{self.kernel} {self.cta}, {self.lane}: {parts} of {self.cycles:.0f} cycles ({NOTE})"


def total(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of a union of intervals."""
    length, end = 0.0, float("-inf")
    for a, b in sorted(intervals):
        length += max(0.0, b - max(a, end))
        end = max(end, b)
    return length


def rows_without_overlap(spans: list[Span]) -> list[list[Span]]:
    """Arrange spans in as few rows as possible, so that none overlap in a row. There is at least one row."""
    rows: list[list[Span]] = [[]]
    ends = [float("-inf")]
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        for i, end in enumerate(ends):
            if span.start >= end - 1e-6:
                rows[i].append(span)
                ends[i] = span.end
                break
        else:
            rows.append([span])
            ends.append(span.end)
    return rows
