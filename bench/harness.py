"""Interleaved measurement: every contender runs once a round, forwards in one round and backwards in the next, so that drifting clocks and the heat that a
neighbour leaves behind hit all of them; medians over the rounds are compared."""
from __future__ import annotations

import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import triton
from triton.testing import do_bench

RESULTS = pathlib.Path(__file__).parent / "results"
ROUNDS = 20  # even: each contender runs first as often as last


def device_time(run: Callable[[], object]) -> float:
    """Median milliseconds of a call on the device, L2 flushed between calls."""
    return do_bench(run, warmup=10, rep=30, return_mode="median")


def call_time(run: Callable[[], object], calls: int = 300) -> float:
    """Milliseconds a call, launched back to back from Python: what a program sees, host time counted."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls * 1e3


def interleaved(contenders: dict[str, Callable[[], object]], measure: Callable[[Callable[[], object]], float], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of every contender in every round."""
    for run in contenders.values():
        run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name, run in list(contenders.items())[:: -1 if i % 2 else 1]:
            times[name].append(measure(run))
    return times


def row(case: str, flops: float, times: dict[str, list[float]], peer: str, mine: str, how: str) -> dict:
    """One line of the results: TFLOP/s (median, lowest, highest) of each, and the ratio of the medians to the peer's."""
    rates = {
        name: {"median": flops / statistics.median(t) / 1e9, "low": flops / max(t) / 1e9, "high": flops / min(t) / 1e9, "ms": t} for name, t in times.items()
    }
    return {"case": case, "how": how, "tflops": rates, "peer": peer, "ratio": rates[mine]["median"] / rates[peer]["median"]}


def show(rows: Sequence[dict]) -> None:
    """Print the results as a table."""
    for r in rows:
        cells = "   ".join(f"{name} {v['median']:.0f} ({v['low']:.0f}–{v['high']:.0f})" for name, v in r["tflops"].items())
        print(f"{r['case']:<44} {r['how']:<12} {cells}   ratio {r['ratio']:.3f}", flush=True)


def save(name: str, rows: Sequence[dict], folder: str | None = None) -> pathlib.Path:
    """Write a result file with the machine, the versions, the date and the command."""
    path = pathlib.Path(folder) if folder else RESULTS
    path.mkdir(parents=True, exist_ok=True)
    target = path / f"{name}.json"
    info = {
        "gpu": torch.cuda.get_device_name(), "triton": triton.__version__,
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "command": " ".join(["python", *sys.orig_argv[1:]]),
    }
    target.write_text(json.dumps({"info": info, "rows": list(rows)}, indent=1) + "\n")
    return target
