"""Bytes of HBM that the contenders of a case read and write, as `ncu` counts them: every one is launched once more, in
a process of its own, with a cold L2."""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
COLUMN = "HBM GB"
NCU_SECONDS = 180


def launch_once(module: str, suite: str, case: str, contenders: list[str]) -> None:
    """One launch of each, the only ones that a profiler sees: operands are made and results are filled outside the
    profiled range."""
    (chosen,) = (s for s in importlib.import_module(module).SUITES if s.name == suite)
    (found,) = (c for c in chosen.cases(argparse.Namespace(slow=True)) if c.name == case)
    trial = found.prepare().contenders()
    for name in contenders:
        call = trial[name].factory()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def hbm_bytes(module: str, suite: str, case: str, contenders: list[str]) -> list[int] | str:
    """Bytes of every launch, or why they are not known."""
    if shutil.which("ncu") is None:
        return "unknown: ncu is not installed"
    counted = [
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(METRICS),
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
    ]
    command = ["ncu", *counted, sys.executable, "-m", "bench.hbm", module, suite, case, *contenders]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS)
    except subprocess.TimeoutExpired:
        return f"unknown: ncu took more than {NCU_SECONDS} s"
    return read_bytes(done.stdout, done.stderr)


def read_bytes(text: str, errors: str) -> list[int] | str:
    """The sum of `METRICS` for every launch in ncu's raw CSV."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [line.strip() for line in [*lines, *errors.splitlines()] if line.strip()] or ["nothing"]
        return (
            "unknown: ncu says "
            f"{next((line for mark in ('Error: ', '==ERROR==') for line in said if mark in line), said[-1])}"
        )
    # not the units below the header
    launches = [row for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))) if (row["ID"] or "").isdigit()]
    try:
        return [sum(round(float(row[name].replace(",", ""))) for name in METRICS) for row in launches]
    except (ValueError, KeyError) as error:
        return f"unknown: ncu did not count {' and '.join(METRICS)} ({error})"


def add_bytes(module: str, suite: str, row: dict[str, Any]) -> None:
    """Bytes of HBM, or why they are not known, for every contender that ran."""
    ran = [name for name, cell in row["contenders"].items() if "ms" in cell]
    together = hbm_bytes(module, suite, row["case"], ran) if ran else []
    if isinstance(together, str):
        found: list[Any] = [together] * len(ran)
    elif len(together) == len(ran):
        found = together
    else:  # one of them takes several launches
        apart = [hbm_bytes(module, suite, row["case"], [name]) for name in ran]
        found = [launches if isinstance(launches, str) else sum(launches) for launches in apart]
    for name, figure in zip(ran, found):
        row["contenders"][name]["extra"] = {COLUMN: figure if isinstance(figure, str) else round(figure / 1e9, 4)}


def adding_bytes(module: str, suite: str) -> Callable[[dict[str, Any]], None]:
    """What a suite of a module takes as `extend`."""
    return functools.partial(add_bytes, module, suite)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="One launch of each contender for a profiler; suites run it themselves."
    )
    for argument, what in (("module", "bench.block_order, for instance"), ("suite", "its name"), ("case", "its name")):
        parser.add_argument(argument, help=what)
    parser.add_argument("contenders", nargs="+", help="their names")
    options = parser.parse_args()
    launch_once(options.module, options.suite, options.case, options.contenders)


if __name__ == "__main__":
    main()
