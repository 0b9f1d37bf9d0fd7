"""Measuring a configuration for the tuner."""
from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from tritonkittens.launch import l2_bytes

BURST = 3e-3  # seconds: the tuner takes turns, and within a round the clock of a card at its power limit should stay what it is
FEWEST, MOST = 3, 40


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call on the device, with a cold L2, in a burst of calls, after one to compile and a few to see how many."""
    flush = torch.empty(2 * l2_bytes(device.index), dtype=torch.int8, device=device)

    def burst(calls: int) -> float:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        for start, end in events:
            flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3

    with torch.cuda.device(device):
        run()
        once = burst(2)
        return burst(max(FEWEST, min(MOST, round(BURST / max(once, 1e-6)))))
