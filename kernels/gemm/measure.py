"""Measuring a configuration for the tuner."""
from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from tritonkittens.launch import l2_bytes

CALLS = 7


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call on the device, with a cold L2, after one to compile and one to warm up."""
    flush = torch.empty(2 * l2_bytes(device.index), dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]
    with torch.cuda.device(device):
        run()
        run()
        for start, end in events:
            flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3
