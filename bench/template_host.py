"""Host time of constructing a template with equal knobs again, against a kept one: `python -m bench template_host
[--out FOLDER]`.

Without a GPU the construction alone is measured; with one also the launch: `Template()(x, y)`, as call sites write it,
against `kept(x, y)`. Every contender runs in each round, in rotating order; the launched kernel moves one small tile,
so that the GPU keeps up and only the host is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
import triton

import tritonkittens.lang as tk

RESULTS = pathlib.Path(__file__).parent / "results"
LIMIT = 2.0  # microseconds that a constructed template may cost more than a kept one


class Doubled(tk.lcsf):
    """Y = 2·X for one tile."""

    def layout(self) -> tk.layout:
        tile = tk.st(tk.bf16, 128, 64)
        return tk.layout(globals=dict(X=tile, Y=tile), input=dict(X=tile), output=dict(Y=tile))

    @triton.jit
    def setup(ctx):
        return tk.task(1, when=ctx.task_id < 1)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.full)

    @triton.jit
    def compute(ctx, state, input, output):
        x = tk.load(tk.subtile(input.X, 64, 64, ctx.consumer, 0), layout="memory")
        tk.store(tk.subtile(output.Y, 64, 64, ctx.consumer, 0), tk.add(x, x))
        return state

    @triton.jit
    def store(ctx, output):
        tk.store_async(ctx.globals.Y, output.Y, (0, 0))


def constructions() -> dict[str, Callable[[], object]]:
    """Ways of getting a template; the first is a kept one."""
    kept, schedule, order = Doubled(), tk.Persistent(), tk.Supergroup(8)
    return {
        "kept": lambda: kept,
        "no knobs": lambda: Doubled(),
        "three numbers": lambda: Doubled(stages=4, consumers=2, blocks_per_sm=1),
        "schedule and order": lambda: Doubled(schedule=schedule, order=order),
    }


def launches() -> dict[str, Callable[[], object]]:
    """Launches of a kept template and of one constructed at each call."""
    x = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
    y, kept = torch.empty_like(x), Doubled()
    kept(x, y)
    torch.cuda.synchronize()
    assert torch.equal(y, x + x)
    return {
        "launch, kept": lambda: kept(x, y),
        "launch, no knobs": lambda: Doubled()(x, y),
        "launch, three numbers": lambda: Doubled(stages=4, consumers=2, blocks_per_sm=1)(x, y),
    }


def measure(functions: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds a call of every function, one figure a round."""
    names, times = list(functions), {name: list[float]() for name in functions}
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for step in range(rounds):
        for name in names[step % len(names) :] + names[: step % len(names)]:
            function = functions[name]
            function()
            synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter_ns() - start) / calls / 1000)
    return times


def first_construction(rounds: int) -> list[float]:
    """Microseconds of making a template whose knobs are new."""
    times = []
    for _ in range(rounds):
        Doubled._forget()
        start = time.perf_counter_ns()
        Doubled()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder for template_host.json")
    options = parser.parse_args()
    if options.rounds < 1 or options.calls < 1:
        parser.error(f"--rounds {options.rounds} --calls {options.calls}: both must be at least 1")
    times = {
        "first construction": first_construction(options.rounds),
        **measure(constructions(), options.rounds, options.calls),
    }
    if torch.cuda.is_available():
        times |= measure(launches(), options.rounds, options.calls)
    rows = {}
    for name, t in times.items():
        more = statistics.median(t) - statistics.median(times["launch, kept" if name.startswith("launch") else "kept"])
        rows[name] = dict(median_us=statistics.median(t), min_us=min(t), max_us=max(t), more_than_kept_us=more)
        print(
            f"{name:24} {statistics.median(t):8.2f} us   {min(t):7.2f} to {max(t):7.2f}   {more:+7.2f} against a kept "
            f"one (limit {LIMIT:.0f})"
        )
    info = {
        "what": "host microseconds of constructing a template",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "limit_us": LIMIT,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "template_host.json").write_text(json.dumps({"info": info, "results": rows}, indent=1) + "\n")
    print(options.out / "template_host.json")


if __name__ == "__main__":
    main()
