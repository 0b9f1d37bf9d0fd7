"""Measuring a few configurations against one another: interleaved rounds, the slower half dropped after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

FEW = 5  # contenders that are often closer together than one measurement tells
ROUNDS, FINAL_ROUNDS = 3, 8  # of few, and of the last two: short turns, so that a card that gets warm is the same for all
_ERROR_LENGTH = 300  # a compiler's message may run to pages


@dataclass
class Race(Generic[C]):
    """What was measured: seconds of each round that a configuration was in, the errors of those that failed, and the fastest (None: all failed)."""

    winner: C | None = None
    times: dict[C, list[float]] = field(default_factory=dict)
    errors: dict[C, str] = field(default_factory=dict)

    def seconds(self, config: C) -> float | None:
        """The median; None for a configuration that failed."""
        return median(self.times[config]) if config not in self.errors else None


def race(contenders: Sequence[C], measure: Callable[[C], float]) -> Race[C]:
    """Successive halving (Jamieson and Talwalkar, arXiv:1502.07943). Every survivor runs once a round, in turned order every other round, so that a clock that
    drifts or heat meets all alike; medians are compared only among configurations that ran in the same rounds. Many run one round before the slower half drops
    out, few ROUNDS, the last two FINAL_ROUNDS.

    A configuration that raises, or whose time is not positive and finite, loses; its error is kept.
    """
    result: Race[C] = Race(times={config: [] for config in contenders})

    def time_of(config: C) -> float:
        return median(result.times[config])

    alive = list(contenders)
    while alive:
        many, final = len(alive) > FEW, len(alive) <= 2
        for _ in range(1 if many else FINAL_ROUNDS if final else ROUNDS):
            for config in alive:
                try:
                    seconds = float(measure(config))
                    if not 0 < seconds < math.inf:
                        raise ValueError(f"measured {seconds} s; a time is positive and finite")
                    result.times[config].append(seconds)
                except Exception as error:
                    result.errors[config] = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
            alive = [config for config in reversed(alive) if config not in result.errors]
        result.winner = min(alive, key=time_of, default=None)
        if final:
            break
        survivors = sorted(alive, key=time_of)[: math.ceil(len(alive) / 2)]
        alive = [config for config in alive if config in survivors]
    return result
