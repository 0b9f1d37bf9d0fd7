"""The report on one choice of a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .cost import Cost


@dataclass(frozen=True)
class Row:
    """One candidate: its predicted cost, its ranking in seconds, and its measured seconds or error.

    The ranking is less than `cost.total` where the winner of a near problem has its bonus.
    """

    config: dict[str, Any]
    cost: Cost
    predicted: float
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Report:
    """The reasons for a problem's configuration.

    Args:
        source: "measured" (in this process), "disk", "table" (shipped), "alike" (the winner of a problem that is
            computed alike), "nearest" (the model, with a bonus for a near problem's winner) or "model".
        in_memory: this process has chosen it before, so a choice costs a look-up.
        rows: every candidate; the chosen one first, then by measured, then by predicted seconds.
    """

    family: str
    problem: dict[str, Any]
    device: str
    source: str
    in_memory: bool
    config: dict[str, Any]
    reason: str
    rows: tuple[Row, ...]

    def table(self, rows: int | None = None) -> str:
        """Return the rows (None: all) as text; times in microseconds."""
        shown = self.rows[:rows]
        varying = [name for name in self.config if len({repr(row.config.get(name)) for row in self.rows}) > 1]
        same = {name: value for name, value in self.config.items() if name not in varying}
        components = list(shown[0].cost.components())
        lines = [[*varying, "measured", "predicted", "bound", *components]]
        for row in shown:
            measured = "failed" if row.error is not None else "" if row.seconds is None else _micro(row.seconds)
            fits = row.cost.total < math.inf
            figures = [_micro(value) for value in row.cost.components().values()] if fits else [""] * len(components)
            lines.append(
                [
                    *(str(row.config.get(n)) for n in varying),
                    measured,
                    _micro(row.predicted),
                    row.cost.bound if fits else "does not fit",
                    *figures,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        if same:
            text.insert(0, f"all: {plain(same)}")
        if len(shown) < len(self.rows):
            text.append(f"… and {len(self.rows) - len(shown)} more")
        text += [
            f"failed: {plain(row.config)}: {' '.join(row.error.split())}" for row in self.rows if row.error is not None
        ]
        return "\n".join(text)

    def __str__(self) -> str:
        remembered = ", in memory" if self.in_memory else ""
        head = (
            f"{self.family} {plain(self.problem)} on {self.device}\nchosen ({self.source}{remembered}): "
            f"{plain(self.config)}\n{self.reason}\n"
        )
        return head + "times in µs\n" + self.table(rows=max(20, sum(row.seconds is not None for row in self.rows)))


def plain(values: dict[str, Any]) -> str:
    """Return `{"m": 64, "dtype": "bf16"}` as `m=64 dtype=bf16`, the form of the command line."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < math.inf else "∞"
