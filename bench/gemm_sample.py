"""Times of many configurations at random GEMMs, which the cost model is fitted to: `python -m bench.gemm_sample
[--seed N] [--count N] [--shapes TEXT] [--best N] [--share N] [--workers N] [--out FILE]`.

A shape measures the configurations that the cost model ranks first, and a share of a fixed pool, whose kernels many
shapes have in common. Results are added to the file. `bench.gemm_fit` reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.gemm import bf16, ours
from bench.gemm_random import Shape, shapes
from bench.harness import RESULTS, require_context
from bench.machine import machine
from bench.peers import Product, peers
from tritonkittens import tune
from tritonkittens.kernels.gemm import Config, Problem
from tritonkittens.kernels.gemm.candidates import candidates, fits
from tritonkittens.kernels.gemm.config import SPLIT
from tritonkittens.kernels.gemm.cost_model import cost
from tritonkittens.tune.timing import burst, flush_buffer

SAMPLE = RESULTS / "gemm_sample.json"
STORED = {"NN": ("mk", "kn"), "NT": ("mk", "nk"), "TN": ("km", "kn")}
SLOWER = 2.5  # times the first prediction: configurations of the pool that are not measured
CALLS, LONG_CALLS, LONG = 7, 3, 2e-3  # of a burst; seconds from which calls are long
PASSES = 2
LEAD = 400_000  # cycles that the GPU waits for the host to queue a call
COMPILING = 300  # seconds, at most


def unsplit() -> Iterator[Config]:
    """Configurations whose tasks stay whole."""
    for cols in (64, 96, 128, 160, 192, 224, 256):
        yield Config(tile_n=cols)
    for cols in (32, 64, 96, 128, 160, 192, 256):
        yield Config(consumers=1, tile_n=cols)
    yield from (Config(consumers=1, tile_n=cols, tile_k=128) for cols in (32, 64, 128))
    yield from (Config(consumers=3, tile_n=cols, epilogue_n=panel) for cols, panel in ((176, 16), (192, 32)))
    yield from (Config(tile_n=256, epilogue_n=64, cluster=cluster, deferred_epilogue=True) for cluster in (1, 2))
    yield Config(tile_m=128, tile_n=128, pingpong=True, epilogue_n=32)
    yield from (Config(tile_n=cols, cluster=2) for cols in (128, 192))
    yield from (Config(consumers=1, tile_n=cols, cluster=2) for cols in (96, 128, 192, 256))
    yield from (Config(consumers=1, tile_n=cols, cluster=4) for cols in (128, 160, 224))


def shared_tasks() -> Iterator[Config]:
    """Configurations in which CTAs share the iterations of a task."""
    few = [Config(consumers=1, tile_n=cols) for cols in (64, 128, 256)] + [
        Config(tile_n=cols) for cols in (128, 192, 256)
    ]
    yield from (replace(c, schedule=schedule) for c in few for schedule in ("split_tail",))
    yield Config(tile_m=128, tile_n=128, pingpong=True, epilogue_n=32, schedule="split_tail")
    yield Config(tile_n=256, epilogue_n=64, cluster=2, deferred_epilogue=True, schedule="split_tail")
    yield from (replace(c, schedule="split_k", splits=n) for c in few for n in (2, 3, 4, 6, 8, 16))
    for cols in (32, 64, 128, 256):
        for consumers in (1, 2):
            c = Config(consumers=consumers, tile_n=cols, schedule="cluster_split_k", splits=2)
            yield from (replace(c, splits=n) for n in (2, 4, 8) if cols % (16 * n) == 0)


def few_rows() -> Iterator[Config]:
    """Configurations for a few rows of A, which become the columns of the product."""
    for cols in (16, 32, 64):
        for consumers in (1, 2):
            c = Config(swap_ab=True, tile_n=cols, tile_k=128, consumers=consumers)
            yield from (c, replace(c, blocks_per_sm=2))
            yield from (replace(c, schedule="split_k", splits=n) for n in (2, 4, 8))
            yield from (replace(c, schedule="cluster_split_k", splits=n) for n in (2, 4) if cols % (16 * n) == 0)
            yield replace(c, schedule="split_tail")


def pool() -> list[Config]:
    """Every configuration that is measured anywhere."""
    found = [*unsplit(), *shared_tasks()]
    found += [replace(c, swap_ab=True) for c in found if not c.pingpong and c.tile_n >= 64]
    return [*found, *(c for c in few_rows() if c not in found)]


def problem_of(shape: Shape) -> Problem:
    """Return the problem of a bf16 product without an epilogue."""
    return Problem("bf16", "bf16", *STORED[shape.layout], "", "", 1, shape.m, shape.n, shape.k)


def tried(shape: Shape, best: int, share: int) -> list[Config]:
    """Return the `best` configurations of the model, and each `share`-th of those of the pool that it does not predict
    to be SLOWER times slower than the first."""
    problem, device = problem_of(shape), tune.Device.of()

    def seconds(config: Config) -> float:
        return cost(problem, config, device).total

    ranked = sorted(candidates(problem, device), key=seconds)
    found, least = ranked[:best], seconds(ranked[0])
    for config in pool() if share else ():
        parts = config.splits if config.schedule in SPLIT else 1
        possible = parts * config.k_of(2) <= shape.k and fits(problem, config)
        # a tail that is all tasks is split faster by "split_k"
        possible &= config.schedule != "split_tail" or math.prod(config.tiles(problem)) >= device.multiprocessors
        if possible and kernel_of(shape, config) % share == 0 and seconds(config) <= SLOWER * least:
            found.append(config)
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=1)
def product(shape: Shape) -> Product:
    return bf16(*shape)


def kernel_of(shape: Shape, config: Config) -> int:
    """Return a number that problems with the same kernel share, whatever its raster order."""
    return zlib.crc32(f"{shape.layout} {config.to_text()}".encode())


def times_of(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median microseconds of every call after a flush of L2, over PASSES rounds in alternating order."""
    flush = flush_buffer(torch.cuda.current_device()).zero_
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(PASSES):
        for name in list(calls)[:: 1 if number % 2 == 0 else -1]:
            first = burst(calls[name], 1, flush).calls[0] * 1e-3
            count = LONG_CALLS if first > LONG else CALLS
            taken[name] += burst(calls[name], count, flush, LEAD * count).calls
    return {name: float(f"{statistics.median(ms) * 1e3:.4g}") for name, ms in taken.items()}


def measured(shape: Shape, configs: Sequence[Config], lock: Any) -> dict[str, Any]:
    """Return the shape and the microseconds of cuBLAS and of every configuration, by its text."""
    p = product(shape)
    calls: dict[str, Callable[[], object]] = {"cublas": peers("gemm", p)["cublas"]()}
    for config in configs:
        try:
            call = ours(p, **config.__dict__)
            call()
            calls[text_of(config)] = call
        except Exception as error:
            require_context()
            print(f"{shape}: {config}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    fcntl.flock(lock, fcntl.LOCK_EX)  # one process measures at a time
    try:
        return {"shape": [*shape], "us": times_of(calls)}
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


DEFAULTS = Config().__dict__


def text_of(config: Config) -> str:
    """Return the fields that are not defaults, as JSON; `Config.from_text` reads them."""
    return json.dumps({name: value for name, value in config.__dict__.items() if value != DEFAULTS[name]})


@dataclasses.dataclass
class Sample:
    """Shapes, and microseconds by configuration (or "cublas")."""

    info: dict[str, Any]
    rows: dict[Shape, dict[str, float]]

    @staticmethod
    def read(path: pathlib.Path) -> Sample:
        if not path.exists():
            return Sample({}, {})
        report = json.loads(path.read_text())
        names = ["cublas", *report["pool"]]
        rows = {
            Shape(*row["shape"]): {names[int(number)]: us for number, us in row["us"].items()} for row in report["rows"]
        }
        return Sample(report["info"], rows)

    def write(self, path: pathlib.Path) -> None:
        """Write one line for each shape; configurations are numbered, from 1 on."""
        names = ["cublas", *sorted({name for us in self.rows.values() for name in us} - {"cublas"})]
        number = {name: str(i) for i, name in enumerate(names)}
        rows = [
            json.dumps(
                {"shape": [*shape], "us": {number[name]: us for name, us in times.items()}}, separators=(",", ":")
            )
            for shape, times in self.rows.items()
        ]
        pool = ",\n".join(json.dumps(name) for name in names[1:])
        body = ",\n".join(rows)
        path.write_text(f'{{"info": {json.dumps(self.info)},\n"pool": [\n{pool}],\n"rows": [\n{body}]}}\n')


def part_of(options: argparse.Namespace, problems: Sequence[Shape]) -> None:
    """Compile or measure a part of the work: what a worker does."""
    kind, part, parts = options.worker[0], *map(int, options.worker[1:3])
    if kind == "compile":
        for shape in problems:
            for config in tried(shape, options.best, options.share):
                if kernel_of(shape, config) % parts == part:
                    with contextlib.suppress(Exception):
                        ours(product(shape), **config.__dict__)()
            require_context()
        return
    folder = pathlib.Path(options.worker[3])
    with open(folder / "lock", "w") as lock, open(folder / f"{part}.jsonl", "a") as lines:
        for shape in problems[part::parts]:
            lines.write(json.dumps(measured(shape, tried(shape, options.best, options.share), lock)) + "\n")
            lines.flush()


def in_workers(options: argparse.Namespace, kind: str, folder: str, limit: float) -> None:
    """Run `part_of` in all workers, for at most `limit` seconds."""
    arguments = [f"--{name}={getattr(options, name)}" for name in ("seed", "count", "shapes", "best", "share")]
    command = [sys.executable, "-m", "bench.gemm_sample", *arguments]
    workers = [
        subprocess.Popen([*command, "--worker", kind, str(part), str(options.workers), folder])
        for part in range(options.workers)
    ]
    end = time.monotonic() + limit
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(max(0.0, end - time.monotonic()))
    for worker in workers:
        worker.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=100, help="what the shapes are drawn with")
    parser.add_argument("--count", type=int, default=60, help="random shapes")
    parser.add_argument("--shapes", default="", metavar="MxNxK TN,…", help="also these shapes")
    parser.add_argument("--best", type=int, default=12, help="configurations that the model ranks first")
    parser.add_argument("--share", type=int, default=0, help="each so manieth of the pool; 0: none")
    parser.add_argument("--workers", type=int, default=4, help="processes that compile and load kernels")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for measuring, at most")
    parser.add_argument("--out", type=pathlib.Path, default=SAMPLE)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    problems = [*map(Shape.of, filter(None, options.shapes.split(","))), *shapes(options.seed, options.count)]
    if options.worker:
        part_of(options, problems)
        return 0
    sample, began = Sample.read(options.out), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        in_workers(options, "compile", folder, COMPILING)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
        in_workers(options, "measure", folder, options.limit)
        rows = [json.loads(line) for path in pathlib.Path(folder).glob("*.jsonl") for line in path.open()]
    sample.info = machine()
    for row in rows:
        sample.rows.setdefault(Shape(*row["shape"]), {}).update(row["us"])
    sample.write(options.out)
    print(f"{len(rows)} of {len(problems)} shapes in {time.monotonic() - began:.0f} s: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
