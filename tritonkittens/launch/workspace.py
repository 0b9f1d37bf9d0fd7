"""Global memory for thread blocks that share a task: partial sums, and counters that are zero between launches."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from .target import simulator

_buffers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_lock = threading.Lock()


def workspace(device: torch.device, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return workspace memory for a launch on the current stream of `device`.

    Args:
        device: a CUDA device, or the CPU in the simulator.
        floats: the least number of fp32 elements.
        counters: the least number of int32 counters.

    Returns:
        (fp32 tensor, int32 tensor of zeros), both one-dimensional.

    Launches on one stream run one after the other and share a buffer, which grows as needed. A captured graph may run
    concurrently with any launch, so it gets its own memory, and zeroes it in the graph.

    The shared buffer never lies in a memory pool that the caller uses, because it lives longer: torch.compile warms up
    its graphs in their pool, and refuses to capture while other tensors are left there.
    """
    if simulator.get() is not None or device.type != "cuda":
        return torch.full((floats,), float("nan"), dtype=torch.float32, device=device), torch.zeros(
            counters, dtype=torch.int32, device=device
        )
    if torch.cuda.is_current_stream_capturing():
        return _new(device, floats, counters)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    found = _buffers.get(key)
    if found is None or found[0].numel() < floats or found[1].numel() < counters:
        with _lock:
            have = (0, 0) if found is None else (found[0].numel(), found[1].numel())
            room, zeros = (
                old if wanted <= old else max(wanted, 2 * old) for wanted, old in zip((floats, counters), have)
            )
            found = _buffers[key] = _outside_pools(torch.cuda.current_stream(index), room, zeros)
    return found


def _new(device: torch.device, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _outside_pools(stream: torch.cuda.Stream, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a new buffer for launches on `stream`. A thread of its own allocates it, because a memory pool is used by
    one thread."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.stream(stream):
            return _new(stream.device, floats, counters)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
