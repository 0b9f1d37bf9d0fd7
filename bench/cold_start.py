"""Seconds to the first results of a fresh process, with empty and with full caches: `python -m bench.cold_start [--out
FOLDER] [--rounds N] [--only TEXT]`.

Every case runs in a process of its own, first with empty folders for Triton's cache and ours, then again with what the
first run left there. The bytecode of all modules is written before, as pip does. The GPU's context exists before the
clock starts. Without a GPU the kernels are compiled for an H200, by the same steps, and none is launched.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
SIDE = 4096  # of the matrices
BATCH, HEADS, LENGTH, DIM = 4, 16, 4096, 128
OTHERS = ("import torch", "import triton", "CUDA context, autograd")  # seconds that are not ours
STAGES = ("trace", "ttgir", "llir", "ptx", "cubin")  # what a kernel's compilation is made of
Step = Callable[[], object]


# ---------------------------------------------------------------- a case, in its own process


def _import() -> Iterator[tuple[str, Step]]:
    """Only what every case imports."""
    yield from ()


def _native() -> Iterator[tuple[str, Step]]:
    from tritonkittens.launch import native

    yield "native launcher", native.load


def _gemm() -> Iterator[tuple[str, Step]]:
    import torch

    from tritonkittens.kernels.gemm import gemm

    a, b = (torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device=_device()) for _ in range(2))
    yield "gemm", lambda: gemm(a, b)


def _attention() -> Iterator[tuple[str, Step]]:
    import torch

    from tritonkittens.kernels.attention import attention

    shape = (BATCH, HEADS, LENGTH, DIM)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=_device(), requires_grad=True) for _ in range(3))
    kept: list[Any] = []
    yield "attention forward", lambda: kept.append(attention(q, k, v, causal=True))
    yield "attention backward", lambda: kept[-1].backward(torch.empty_like(kept[-1]))


def _linear() -> Iterator[tuple[str, Step]]:
    import torch

    from tritonkittens.nn import Linear

    layer = Linear(SIDE, SIDE, device=_device(), dtype=torch.bfloat16)
    x = torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device=_device(), requires_grad=True)
    kept = []
    yield "linear forward", lambda: kept.append(layer(x))
    yield "linear backward", lambda: kept[-1].backward(torch.empty_like(kept[-1]))


def _warm() -> Iterator[tuple[str, Step]]:
    """The kernels of all cases by one call, which runs nothing."""
    import torch

    import tritonkittens
    from tritonkittens.kernels.attention import attention
    from tritonkittens.kernels.gemm import gemm
    from tritonkittens.nn import Linear

    a = torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device="meta")
    x = torch.empty_like(a, requires_grad=True)
    q = torch.empty(BATCH, HEADS, LENGTH, DIM, dtype=torch.bfloat16, device="meta", requires_grad=True)
    layer = Linear(SIDE, SIDE, device="meta", dtype=torch.bfloat16)
    calls = [functools.partial(gemm, a, a), functools.partial(attention, q, q, q, causal=True), lambda: layer(x)]
    yield "warm of all", lambda: tritonkittens.warm(*calls)


CASES: dict[str, Callable[[], Iterator[tuple[str, Step]]]] = {
    "import": _import,
    "native": _native,
    "gemm": _gemm,
    "attention": _attention,
    "linear": _linear,
    "warm": _warm,
}


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _run(step: Step) -> None:
    """One step to its end; without a GPU its kernels are compiled instead."""
    import torch

    if torch.cuda.is_available():
        step()
        torch.cuda.synchronize()
        return
    from tritonkittens.kernels._inspection import h200
    from tritonkittens.launch.recorder import recorded

    for launch in recorded(step, h200()):
        launch.compile("sm_90a")


def child(case: str) -> dict[str, Any]:
    """Seconds of the imports and of every step of a case, and what was compiled, in this process."""
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds[name] = now - began
        began = now

    import torch

    lap("import torch")
    import triton
    import triton.language  # noqa: F401

    lap("import triton")
    if torch.cuda.is_available():
        torch.zeros(1, dtype=torch.float32, device="cuda")
        torch.cuda.synchronize()
    x = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    (2 * x).backward(torch.ones_like(x))  # torch imports sympy here
    lap("CUDA context, autograd")
    import tritonkittens.kernels.attention
    import tritonkittens.kernels.gemm
    import tritonkittens.nn  # noqa: F401

    lap("import tritonkittens")
    compiled: list[dict[str, Any]] = []

    def listen(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        stages = {"trace": times.ir_initialization, **dict(times.lowering_stages)}
        compiled.append(
            {"kernel": metadata["name"], "hit": cache_hit, **{name: us / 1e6 for name, us in stages.items()}}
        )

    triton.knobs.compilation.listener = listen
    for name, step in CASES[case]():
        began = time.perf_counter()
        _run(step)
        lap(name)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": seconds,
        "cpu_seconds": sum(u.ru_utime + u.ru_stime for u in usage),
        "compiled": sum(not kernel["hit"] for kernel in compiled),
        "from_cache": sum(kernel["hit"] for kernel in compiled),
        "stages": {stage: sum(kernel.get(stage, 0.0) for kernel in compiled) for stage in STAGES},
    }


# ---------------------------------------------------------------- all cases


def fresh(case: str, folder: str) -> dict[str, Any]:
    """What `child` returns of a new process with its caches in `folder`. Raises RuntimeError with its last lines where
    it fails."""
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TK_CACHE_DIR": f"{folder}/tritonkittens", "TK_TUNE": "0"}
    environment = {**os.environ, **caches, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "bench.cold_start", "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{case}: {' '.join(done.stderr.strip().splitlines()[-3:])}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(case: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of a case: its steps with empty caches, then with full ones."""
    runs: dict[str, list[dict[str, Any]]] = {"empty cache": [], "full cache": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="cold_start_") as folder:
            for state in runs:
                runs[state].append(fresh(case, folder))
    for state, found in runs.items():
        names = [name for name in found[0]["seconds"] if case == "import" or not name.startswith(("import", "CUDA"))]
        for name in names:
            times = [run["seconds"][name] for run in found]
            yield {
                "case": f"{name}, {state}",
                "seconds": statistics.median(times),
                "low": min(times),
                "high": max(times),
            }
        whole = [sum(s for name, s in run["seconds"].items() if name not in OTHERS) for run in found]
        details = {key: found[-1][key] for key in ("compiled", "from_cache", "cpu_seconds", "stages")}
        yield {"case": f"process of {case}, {state}", "seconds": statistics.median(whole), **details}


def format_row(row: dict[str, Any]) -> str:
    line = f"{row['case']:40} {row['seconds']:7.2f} s"
    if "low" in row:
        return f"{line}   ({row['low']:.2f} to {row['high']:.2f})"
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["stages"].items())
    counted = f"{row['compiled']} kernels compiled ({stages}), {row['from_cache']} from the cache"
    return f"{line}   ours; {counted}; {row['cpu_seconds']:.1f} s of CPU in all"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="fresh processes of each kind (default 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder for cold_start.json")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(child(options.case)))
        return
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    from bench.machine import machine

    with tempfile.TemporaryDirectory(prefix="cold_start_") as folder:
        fresh("import", folder)  # Python writes the bytecode
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "cold_start.json"
    for case in CASES:
        if options.only in case:
            for row in measured(case, options.rounds):
                rows.append(row)
                print(format_row(row), flush=True)
            report = {"info": {**machine(), "cpus": os.cpu_count()}, "title": "seconds to the first result"}
            target.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    print(target)


if __name__ == "__main__":
    main()
