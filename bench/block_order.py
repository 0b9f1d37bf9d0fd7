"""Table 3 of the paper: the order in which blocks walk over the tiles of C, with the bytes of HBM that each costs (`ncu` counts them)."""
from __future__ import annotations

import argparse
import csv
import functools
import io
import shutil
import subprocess
import sys
from typing import Any

import torch

from bench.gemm import bf16, case, ours, trial
from bench.harness import Case, Suite, Trial
from bench.peers import torch_mm

ORDERS: dict[str, dict[str, Any]] = {
    "row_major": {"order": "row_major"},
    "column_major": {"order": "column_major"},
    "supergroup_4": {"order": "supergroup", "group": 4},
    "supergroup_8": {"order": "supergroup", "group": 8},
    "supergroup_16": {"order": "supergroup", "group": 16},
}
SIZES = (4096, 8192, 16384)
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
COLUMN = "HBM GB"
NCU_SECONDS = 180


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(size: int) -> Trial:
        p = bf16(size, size, size)
        return trial(p, {name: functools.partial(ours, p, **config) for name, config in ORDERS.items()})

    return [case(f"bf16 {size}³", (size, size, size), functools.partial(prepare, size), size=size) for size in SIZES]


def launch_once(order: str, size: int) -> None:
    """One launch, the only one that a profiler sees: operands are made and results are filled outside the profiled range."""
    p = bf16(size, size, size)
    call = torch_mm(p) if order == "cublas" else ours(p, **ORDERS[order])
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def hbm_bytes(orders: list[str], size: int) -> list[int] | str:
    """Bytes that every launch of one product in each order reads from and writes to HBM with a cold L2, or why they are not known."""
    if shutil.which("ncu") is None:
        return "unknown: ncu is not installed"
    counted = ["--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS), "--csv", "--page", "raw", "--print-units", "base"]
    command = ["ncu", *counted, sys.executable, "-m", "bench.block_order", "--once", ",".join(orders), str(size)]
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
        return f"unknown: ncu says {next((line for mark in ('Error: ', '==ERROR==') for line in said if mark in line), said[-1])}"
    launches = [row for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))) if (row["ID"] or "").isdigit()]  # not the units below the header
    try:
        return [sum(round(float(row[name].replace(",", ""))) for name in METRICS) for row in launches]
    except (ValueError, KeyError) as error:
        return f"unknown: ncu did not count {' and '.join(METRICS)} ({error})"


def add_bytes(row: dict) -> None:
    """Bytes of HBM, or why they are not known, for every contender that ran."""
    ran, size = [name for name, cell in row["contenders"].items() if "ms" in cell], row["facts"]["size"]
    together = hbm_bytes(ran, size) if ran else []
    if isinstance(together, str):
        found: list = [together] * len(ran)
    elif len(together) == len(ran):
        found = together
    else:  # some product takes several launches
        apart = [hbm_bytes([name], size) for name in ran]
        found = [launches if isinstance(launches, str) else sum(launches) for launches in apart]
    for name, figure in zip(ran, found):
        row["contenders"][name]["extra"] = {COLUMN: figure if isinstance(figure, str) else round(figure / 1e9, 4)}


SUITES = (
    Suite("block_order", "block order: TFLOP/s and bytes of HBM (Table 3)", cases, plot={"x": "size", "y": ["value", COLUMN]}, extend=add_bytes),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="One launch of each order for a profiler; `python -m bench block_order` runs the suite.")
    parser.add_argument("--once", nargs=2, metavar=("ORDER[,ORDER…]", "SIZE"), required=True)
    orders, size = parser.parse_args().once
    unknown = [order for order in orders.split(",") if order not in (*ORDERS, "cublas")]
    if unknown or not size.isdigit():
        parser.error(f"--once {orders} {size}: an order is one of {', '.join(ORDERS)} or cublas, SIZE a number")
    for order in orders.split(","):
        launch_once(order, int(size))


if __name__ == "__main__":
    main()
