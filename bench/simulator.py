"""The simulator's own speed and memory on this CPU: `python -m bench.simulator [--out FOLDER]`. Needs no GPU.

Each case runs in a process of its own, so that its peak memory is its own; compile time is reported apart from the
simulation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from tritonkittens import sim
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.gemm import gemm

RESULTS = pathlib.Path(__file__).parent / "results"


def _attention(batch: int, heads: int, length: int, width: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(batch, heads, length, width, dtype=torch.float32, device="cpu").bfloat16() for _ in range(3)
    )


def _square(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, n, dtype=torch.float32, device="cpu").bfloat16(), torch.randn(
        n, n, dtype=torch.float32, device="cpu"
    ).bfloat16()


# name → (operator, its operands, work in multiply-adds, schedules: 0 is one run by modelled time)
CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], tuple[torch.Tensor, ...]], int, int]] = {
    "attention B1 H2 S512 D64": (attention, lambda: _attention(1, 2, 512, 64), 2 * 2 * 512 * 512 * 64, 0),
    "attention B1 H2 S1024 D64": (attention, lambda: _attention(1, 2, 1024, 64), 2 * 2 * 1024 * 1024 * 64, 0),
    "attention B1 H2 S2048 D64": (attention, lambda: _attention(1, 2, 2048, 64), 2 * 2 * 2048 * 2048 * 64, 0),
    "GEMM 256": (gemm, lambda: _square(256), 256**3, 0),
    "GEMM 512": (gemm, lambda: _square(512), 512**3, 0),
    "GEMM 1024": (gemm, lambda: _square(1024), 1024**3, 0),
    "GEMM 256, 50 schedules": (gemm, lambda: _square(256), 50 * 256**3, 50),
    "attention B1 H1 S128 D64, 50 schedules": (
        attention,
        lambda: _attention(1, 1, 128, 64),
        50 * 2 * 128 * 128 * 64,
        50,
    ),
}
LIMITS = {"attention B1 H2 S512 D64": 10.0, "GEMM 512": 5.0, "GEMM 256, 50 schedules": 60.0}  # seconds


def measure(name: str) -> dict[str, Any]:
    """One case, in this process."""
    torch.set_num_threads(2)
    operator, operands, work, schedules = CASES[name]
    tensors = operands()
    started = time.perf_counter()
    if schedules:
        result = sim.explore(lambda: operator(*tensors), schedules=schedules)
        assert result.ok and result.seeds == schedules
        seconds, steps = result.seconds, None
    else:
        with sim.device("sm_90a") as device:
            operator(*tensors)
        (launch,) = device.launches
        assert launch.simulation is not None
        seconds, steps = launch.seconds, launch.simulation.steps
    whole = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return dict(
        case=name,
        seconds=seconds,
        with_compilation=whole,
        steps=steps,
        multiply_adds=work,
        peak_mib=peak,
        limit_seconds=LIMITS.get(name),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder for the result file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    rows = []
    for name in CASES:
        done = subprocess.run(
            [sys.executable, "-m", "bench.simulator", "--case", name], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        r = rows[-1]
        limit = f"   limit {r['limit_seconds']:.0f} s" if r["limit_seconds"] else ""
        print(
            f"{name:<42} {r['seconds']:7.2f} s   with compilation {r['with_compilation']:6.2f} s   peak "
            f"{r['peak_mib']:6.0f} MiB{limit}",
            flush=True,
        )
    info = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }
    folder = pathlib.Path(options.out) if options.out else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "simulator.json").write_text(json.dumps({"info": info, "rows": rows}, indent=1) + "\n")
    print(folder / "simulator.json")


if __name__ == "__main__":
    main()
