"""Device time of a call: bursts of calls between CUDA events, each after a flush of L2. The tuner and the benchmarks
use it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tritonkittens.launch import l2_bytes

BURST = 3e-3  # seconds; short, so that the card's state stays constant within a round of the tuner
FEWEST, MOST = 3, 40
LONG, SETTLING = 1e-4, 40e-3  # seconds: a call that may reach the power limit; the clock settles
CLOCK = 2e9  # the highest rate, in cycles per second, of the counter that a waiting GPU polls


class Burst(NamedTuple):
    """Milliseconds of every call, and of the host per call until all were queued and until all were done."""

    calls: list[float]
    queued: float
    done: float

    @property
    def typical(self) -> float:
        """Typical milliseconds of a call: the mean of the medians of both halves."""
        return statistics.mean(map(statistics.median, halves(self.calls)))


def halves(calls: Sequence[float]) -> list[Sequence[float]]:
    middle = len(calls) // 2
    return [half for half in (calls[:middle], calls[middle:]) if half]


def flush_buffer(device: int | None) -> torch.Tensor:
    """Return a buffer of twice the L2's bytes. Zeroing it evicts all operands from L2."""
    return torch.empty(2 * l2_bytes(device), dtype=torch.int8, device="cuda" if device is None else f"cuda:{device}")


def burst(run: Callable[[], object], calls: int, flush: Callable[[], object], lead: int = 0) -> Burst:
    """Time `calls` calls on the current device, each after a `flush` of L2. The device waits `lead` cycles until the
    host has queued some.

    Every second launch of a GPU takes longer, whichever kernel it is (measured: docs/notes/launch.md). With a flush
    before each call, all calls are slow launches or none is. One extra launch in the middle makes it half of them, in
    every burst.
    """
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    torch.cuda.synchronize()
    if lead:
        torch.cuda._sleep(lead)
    began = time.perf_counter()
    for number, (start, end) in enumerate(events):
        if number == calls // 2:
            torch.cuda._sleep(1)
        flush()
        start.record()
        run()
        end.record()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return Burst(
        [start.elapsed_time(end) for start, end in events], (queued - began) * 1e3 / calls, (done - began) * 1e3 / calls
    )


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the typical seconds of a call on the device with a cold L2, from a burst of calls.

    One call compiles first, and a few calls determine the burst's length. The GPU sleeps until a burst is queued;
    otherwise it would wait for a slow host between the events of a short call.
    Long calls first run until the clock matches their own power draw. In a burst between other calls, they would have
    the others' clock, and the wrong one could win (measured: docs/notes/launch.md).
    """
    with torch.cuda.device(device):
        flush = flush_buffer(device.index).zero_
        run()
        first = burst(run, FEWEST, flush)
        call = max(first.typical * 1e-3, 1e-6)
        if call >= LONG:
            burst(run, math.ceil(SETTLING / call), flush)
        calls = max(FEWEST, min(MOST, round(BURST / call)))
        return burst(run, calls, flush, int(calls * first.queued * 1e-3 * CLOCK)).typical * 1e-3
