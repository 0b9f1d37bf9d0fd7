"""Comparison of a few configurations: interleaved rounds, and the slower half drops out after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

FEW = 5  # from here on, contenders often differ by less than the noise of one measurement
ROUNDS, FINAL_ROUNDS = 3, 8  # rounds of few, and of the last two: short turns, so that a warming card affects all alike
_ERROR_LENGTH = 300  # characters; a compiler's message may fill pages


@dataclass
class Race(Generic[C]):
    """The measurements: seconds of each round of each configuration, the errors of failed ones, and the fastest
    (None: all failed).
    """

    winner: C | None = None
    times: dict[C, list[float]] = field(default_factory=dict)
    errors: dict[C, str] = field(default_factory=dict)

    def seconds(self, config: C) -> float | None:
        """Return the median seconds; None for a configuration that failed."""
        return median(self.times[config]) if config not in self.errors else None


def race(contenders: Sequence[C], measure: Callable[[C], float]) -> Race[C]:
    """Race configurations by successive halving (Jamieson and Talwalkar, arXiv:1502.07943).

    Every survivor runs once a round, in reverse order every second round, so that clock drift and heat affect all
    alike. Medians are compared only among configurations of the same rounds. Many contenders run one round before the
    slower half drops out, few run ROUNDS, the last two FINAL_ROUNDS.
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
