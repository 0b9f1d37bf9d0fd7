"""Milliseconds of one call, in several kinds. A kind takes a call that has run before and returns a function that
measures one round.

- device: GPU time between events around each call, with a cold L2; the round is a burst (`tritonkittens.tune.timing`).
  All contenders have one clock, which under the card's power limit comes from what all of them draw: long calls take
  turns untimed (`settle`) until it is steady.
- reading: the same where L2 is full of what was read, not of zeros that were written. A call that writes little would
  have to write those back, and that counts: 9 of the 48 µs in which 8 sequences of 4,096 keys are read
  (docs/notes/attention_decode.md).
- sustained: calls behind one another for as long as a card at its power limit takes to settle, with nothing between
  them: each contender at the clock that its own draw leaves it. Behind a single call of another one it has the other's
  (docs/notes/gemm.md).
- graph: a CUDA graph of many calls, replayed: GPU time without a host, warm L2.
- eager: back-to-back calls from Python, GPU and host together.
- host: time in which the host is back from a call, while the GPU keeps up.
- own: what the call measures itself, such as a part of what it does.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from tritonkittens.tune.timing import LONG, burst, flush_buffer

Call = Callable[[], object]
Round = Callable[[], float]  # one round: milliseconds of a call

BURST_MS = 10.0  # long enough for a stable median, short enough for the clocks to be those of the neighbours
# calls of a burst, where it is to say how long one takes and at most; with events and flushes 200 fit into the driver's
# queue of 1024
FEWEST, MOST = 3, 200
CALLS = 10  # of a round, over all rounds
# until the clock of contenders that take turns is steady (behind 600 an H200 still rose by 5 %: e4m3 16384³ 7.26 to
# 6.82 ms)
TURNS_MS = 2000.0
SETTLING_MS, SUSTAINED_MS = 50.0, 100.0  # untimed, until the clock is that of this contender's draw, and timed
GRAPH_CALLS = 20
HOST_CALLS = 200
# share of a burst's time that the host takes to queue it, from which the GPU may have waited for the host
HOST_BOUND = 0.7

_flush_buffer = functools.cache(flush_buffer)


def _zeroed(index: int) -> Call:
    return _flush_buffer(index).zero_


def _read(index: int) -> Call:
    read = _flush_buffer(index).view(torch.float32)
    return functools.partial(torch.amax, read, 0, out=torch.empty((), dtype=torch.float32, device=read.device))


@functools.cache
def _cycles_per_ms(device: int) -> float:
    """Speed of the counter that `torch.cuda._sleep` waits for."""
    cycles = 10_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end)


def burst_length(call_ms: float, fewest: int = FEWEST, most: float = MOST, burst_ms: float = BURST_MS) -> int:
    """Calls that take about `burst_ms`."""
    return int(max(fewest, min(most, round(burst_ms / max(call_ms, 1e-6)))))


def back_to_back(run: Call, calls: int) -> float:
    """GPU milliseconds of each of so many calls with nothing between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def device(run: Call, flushing: Callable[[int], Call] = _zeroed) -> Round:
    index = torch.cuda.current_device()
    flush = flushing(index)
    burst(run, FEWEST, flush)
    first = burst(run, FEWEST, flush)
    calls = burst_length(first.done, fewest=1)
    # Where the host is the slower one, the GPU sleeps until everything is queued: otherwise it would wait for the host
    # between the two events.
    lead = int(calls * first.queued * _cycles_per_ms(index)) if first.queued > HOST_BOUND * first.done else 0
    return lambda: burst(run, calls, flush, lead).typical


def sustained(run: Call) -> Round:
    back_to_back(run, 1)
    call_ms = back_to_back(run, FEWEST)
    settling, timed = (burst_length(call_ms, most=math.inf, burst_ms=ms) for ms in (SETTLING_MS, SUSTAINED_MS))

    def settled() -> float:
        back_to_back(run, settling)
        return back_to_back(run, timed)

    return settled


def reading(run: Call) -> Round:
    return device(run, _read)


def graph(run: Call) -> Round:
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):  # what the first call on a stream allocates cannot be allocated during the capture
        for _ in range(FEWEST):
            run()
    current.wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(GRAPH_CALLS):
            run()
    back_to_back(captured.replay, 1)
    times = burst_length(back_to_back(captured.replay, 1), fewest=1)
    return functools.partial(_replayed, captured, times, run)


def _replayed(captured: torch.cuda.CUDAGraph, times: int, run: Call) -> float:
    """Milliseconds of a call in a graph. `run` keeps the operands that the graph reads alive."""
    return back_to_back(captured.replay, times) / GRAPH_CALLS


def eager(run: Call) -> Round:
    def burst(calls: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / calls

    burst(FEWEST)
    calls = burst_length(burst(FEWEST), most=10 * MOST)
    return lambda: burst(calls)


def host(run: Call) -> Round:
    def burst() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(HOST_CALLS):
            run()
        taken = time.perf_counter() - began
        torch.cuda.synchronize()
        return taken * 1e3 / HOST_CALLS

    burst()
    return burst


def own(run: Any) -> Round:
    """`run.milliseconds()` of every call."""

    def once() -> float:
        torch.cuda.synchronize()
        run()
        return run.milliseconds()

    return once


def memory(run: Call) -> Round:
    """No time: MiB that a call allocates at most at the same time, its results among them."""

    def most() -> float:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    most()  # what libraries allocate once
    return most


def rounds_of(rounds: int, call_ms: float) -> int:
    """How many rounds of bursts, so that there are ten calls for each of `rounds`, also where a burst has few. At the
    power limit a burst varies by 2 to 3 %: ten of three calls of e4m3 16384³ by rows gave 0.981 to 0.999 of torch from
    run to run on an H200, 156 of one call 1.006 (docs/notes/gemm.md)."""
    return rounds * max(1, math.ceil(CALLS / burst_length(call_ms, fewest=1)))


def settle(rounds: Collection[Round]) -> float:
    """Contenders in turn, until their common clock is steady, where their calls are long enough to reach the power
    limit. A card that was idle has a higher clock for a quarter of a second, then a lower one than it settles to (e4m3
    16384³ on an H100: 6.1 ms a call, then 8.1, then 6.7): a median of ten rounds says whose bursts were when. Returns
    the milliseconds of the longest call."""
    end = time.perf_counter() + TURNS_MS * 1e-3
    longest = 0.0
    while time.perf_counter() < end:
        longest = max((measure() for measure in rounds), default=0.0)
        if longest < LONG * 1e3:
            break
    return longest


SHARING_A_CLOCK = (device, reading)
KINDS: dict[str, Callable[[Call], Round]] = {
    kind.__name__: kind for kind in (device, reading, sustained, graph, eager, host, own, memory)
}
