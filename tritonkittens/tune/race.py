"""Comparison of a few configurations: interleaved rounds, and the slower half drops out after each. The first
contender, the incumbent, stays to the end and wins unless another is faster beyond the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

LEAST_GAIN, GAIN_OF_ONE_ROUND = 0.005, 0.05  # shares of the time that a winner must be faster than the incumbent
WON_ROUNDS = 0.8  # share of the rounds in which it must be
FEW = 5  # from here on, contenders often differ by less than the noise of one measurement
ROUNDS, FINAL_ROUNDS = 3, 8  # rounds of few, and of the last two: short turns, so that a warming card affects all alike
_ERROR_LENGTH = 300  # characters; a compiler's message may fill pages


@dataclass
class Race(Generic[C]):
    """The measurements: seconds of each round of each configuration, the errors of failed ones, the winner (None: all
    failed, or nothing was measured), and whether Ctrl-C ended it early.
    """

    winner: C | None = None
    times: dict[C, list[float]] = field(default_factory=dict)
    errors: dict[C, str] = field(default_factory=dict)
    is_interrupted: bool = False

    def seconds(self, config: C) -> float | None:
        """Return the median seconds; None for a configuration that failed or was not measured."""
        return median(self.times[config]) if config not in self.errors and self.times[config] else None


def rounds_of(count: int) -> int:
    """Return the rounds that so many contenders run before the slower half drops out."""
    return 1 if count > FEW else FINAL_ROUNDS if count <= 2 else ROUNDS


def measurements_of(count: int) -> int:
    """Return the measurements of a race of so many contenders, if none fails."""
    total = 0
    while count:
        total += count * rounds_of(count)
        count = 0 if count <= 2 else math.ceil(count / 2)
    return total


def is_faster(times: Sequence[float], incumbent: Sequence[float]) -> bool:
    """Return whether a contender is faster than the incumbent beyond the noise, by the rounds that both ran.

    The ratio within a round has no drift of the clock. The fewer rounds, the larger the gain that counts.
    """
    ratios = [mine / theirs for mine, theirs in zip(times, incumbent, strict=False)]
    gain = max(LEAST_GAIN, GAIN_OF_ONE_ROUND / max(len(ratios), 1))
    return (
        bool(ratios) and median(ratios) <= 1 - gain and sum(ratio < 1 for ratio in ratios) >= WON_ROUNDS * len(ratios)
    )


def race(
    contenders: Sequence[C], measure: Callable[[C], float], measured: Callable[[int, C], None] | None = None
) -> Race[C]:
    """Race configurations by successive halving (Jamieson and Talwalkar, arXiv:1502.07943).

    Every survivor runs once a round, in reverse order every second round, so that clock drift and heat affect all
    alike. Medians are compared only among configurations of the same rounds. Many contenders run one round before the
    slower half drops out, few run ROUNDS, the last two FINAL_ROUNDS.
    A configuration that raises, or whose time is not positive and finite, loses; its error is kept. The first
    contender is the incumbent (see `is_faster`). Ctrl-C ends the race with what was measured. `measured` is called
    after each measurement with their number.
    """
    result: Race[C] = Race(times={config: [] for config in contenders})
    try:
        _run(result, contenders, measure, measured or (lambda count, config: None))
    except KeyboardInterrupt:
        result.is_interrupted = True
    timed = [config for config in contenders if result.seconds(config) is not None]
    most = max((len(result.times[config]) for config in timed), default=0)
    finalists = [config for config in timed if len(result.times[config]) == most or result.is_interrupted]
    result.winner = min(finalists, key=lambda config: median(result.times[config]), default=None)
    if result.winner is not None and timed[0] == contenders[0]:
        if not is_faster(result.times[result.winner], result.times[timed[0]]):
            result.winner = timed[0]
    return result


def _run(
    result: Race[C], contenders: Sequence[C], measure: Callable[[C], float], measured: Callable[[int, C], None]
) -> None:
    def time_of(config: C) -> float:
        return median(result.times[config])

    alive, count = list(contenders), 0
    while alive:
        for _ in range(rounds_of(len(alive))):
            for config in alive:
                count += 1
                try:
                    seconds = float(measure(config))
                    if not 0 < seconds < math.inf:
                        raise ValueError(f"measured {seconds} s; a time is positive and finite")
                    result.times[config].append(seconds)
                except Exception as error:
                    result.errors[config] = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
                measured(count, config)
            alive = [config for config in reversed(alive) if config not in result.errors]
        if len(alive) <= 2:
            break
        survivors = sorted(alive, key=time_of)[: math.ceil(len(alive) / 2)]
        if contenders[0] in alive and contenders[0] not in survivors:
            survivors[-1] = contenders[0]
        alive = [config for config in alive if config in survivors]
