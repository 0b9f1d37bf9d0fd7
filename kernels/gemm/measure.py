"""Measuring a configuration for the tuner."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from tritonkittens.launch import l2_bytes

BURST = 3e-3  # seconds: the tuner takes turns, and within a round the clock of a card at its power limit should stay what it is
FEWEST, MOST = 3, 40
CLOCK = 2e9  # cycles a second, at most, of the counter that a waiting GPU looks at


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call on the device, with a cold L2, in a burst of calls, after one to compile and a few to see how many.

    The GPU sleeps until a burst is queued: it would otherwise wait for a slow host between the events around a short call.
    """
    flush = torch.empty(2 * l2_bytes(device.index), dtype=torch.int8, device=device)

    def burst(calls: int, queueing: float) -> tuple[float, float]:
        """Median seconds of a call, and the host's for queueing one."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(calls * queueing * CLOCK))
        began = time.perf_counter()
        for start, end in events:
            flush.zero_()
            start.record()
            run()
            end.record()
        queued = time.perf_counter() - began
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3, queued / calls

    with torch.cuda.device(device):
        run()
        once, queueing = burst(FEWEST, 0.0)
        return burst(max(FEWEST, min(MOST, round(BURST / max(once, 1e-6)))), queueing)[0]
