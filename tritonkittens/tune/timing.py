"""Device time of a call: bursts of calls between CUDA events, each behind a flush of L2. The tuner's measurements, and the benchmarks'."""
from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tritonkittens.launch import l2_bytes

BURST = 3e-3  # seconds: the tuner takes turns, and within a round the card should stay what it is
FEWEST, MOST = 3, 40
LONG, SETTLING = 1e-4, 40e-3  # seconds of a call from which its draw may reach the card's power limit, and until the clock is the one that this leaves
CLOCK = 2e9  # cycles a second, at most, of the counter that a waiting GPU looks at


class Burst(NamedTuple):
    """Milliseconds of every call, and of the host per call until all were queued and until all were done."""

    calls: list[float]
    queued: float
    done: float

    @property
    def typical(self) -> float:
        """Milliseconds of a call: the mean of the medians of both halves."""
        return statistics.mean(map(statistics.median, halves(self.calls)))


def halves(calls: Sequence[float]) -> list[Sequence[float]]:
    middle = len(calls) // 2
    return [half for half in (calls[:middle], calls[middle:]) if half]


def flush_buffer(device: int | None) -> torch.Tensor:
    """Zeroing twice the L2's bytes leaves none of the operands in it."""
    return torch.empty(2 * l2_bytes(device), dtype=torch.int8, device="cuda" if device is None else f"cuda:{device}")


def burst(run: Callable[[], object], calls: int, flush: Callable[[], object], lead: int = 0) -> Burst:
    """Time `calls` calls on the current device, each behind a `flush` of L2; the device waits `lead` cycles until the host has queued some.

    Of a GPU's launches every other one takes longer, whichever kernel it is (measured: docs/notes/launch.md). With a flush before each call all calls are such
    launches or none is; one more launch in the middle makes it half of them, in every burst.
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
    return Burst([start.elapsed_time(end) for start, end in events], (queued - began) * 1e3 / calls, (done - began) * 1e3 / calls)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Typical seconds of a call on the device, with a cold L2, in a burst of calls, after one to compile and a few to see how many.

    The GPU sleeps until a burst is queued: it would otherwise wait for a slow host between the events around a short call. Long calls first run until the clock
    is that of their own draw: in a burst between those of others they have the others', and the faster of two is not the one that is faster in a program that
    runs it again and again (measured: docs/notes/launch.md).
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
