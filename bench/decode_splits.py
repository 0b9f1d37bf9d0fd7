"""Times of decode splits, to which the costs of `kernels/attention/num_splits.py` are fitted.

    python -m bench.decode_splits [--seconds N] [--workers N] [--output FILE]

Measures several splits of many shapes on this GPU, beside cuDNN and FlashAttention-2, which read contiguous keys. The
rows of other GPUs in FILE stay. Prints for each GPU how much longer the chosen split takes than the fastest measured
one. Several processes compile the kernels first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import timing
from bench.decode import Shape, in_pages
from bench.gemm import randn
from bench.harness import in_parts, interleaved
from bench.machine import machine
from bench.timing import Round
from tritonkittens.kernels.attention import attention_decode, decode_plan
from tritonkittens.kernels.attention.num_splits import (
    DecodeSplit,
    Ring,
    candidate_splits,
    kernel_for,
    predicted_time,
    rings_of,
)
from tritonkittens.tune import Device

SPLITS = pathlib.Path(__file__).with_suffix(".json")  # the costs are fitted to these, and a test compares them
GPUS = {name: Device.named(name) for name in ("H200", "H100")}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-attention 2": SDPBackend.FLASH_ATTENTION}
ROUNDS, CALLS = 5, 40
FILLED = (0.25, 0.33, 0.5, 0.66, 0.8, 0.97, 1.3, 1.6, 1.9, 3.0)  # times that thread blocks fill the multiprocessors
SIZES = (
    (1, 1024),
    (1, 4096),
    (1, 16384),
    (1, 65536),
    (2, 1024),
    (2, 4096),
    (2, 32768),
    (4, 512),
    (4, 4096),
    (4, 16384),
    (8, 512),
    (8, 1024),
    (8, 4096),
    (16, 512),
    (16, 1024),
    (16, 4096),
    (32, 512),
    (32, 2048),
    (64, 256),
    (64, 1024),
    (3, 5000),
    (5, 9000),
    (25, 3000),
    (34, 1024),
    (36, 3000),
    (40, 137),
    (48, 4096),
    (67, 1024),
    (100, 700),
    (128, 137),
    (128, 256),
)
FEW_HEADS = ((4, 4096, 2), (16, 209, 2), (12, 1500, 4), (9, 4096, 4), (1, 8192, 1), (30, 4096, 1))
KINDS = ((64, None), (128, None), (64, 16), (128, 16), (64, 128), (128, 64), (96, None), (32, None), (256, None))
SHAPES = [Shape(*kind, *size) for size in (*SIZES, *FEW_HEADS) for kind in KINDS]


def rings_of_splits(shape: Shape, gpu: Device) -> dict[DecodeSplit, Ring]:
    return {
        split: ring
        for ring, split in candidate_splits(shape.tasks, shape.keys, gpu.multiprocessors, rings_of(shape.kind))
    }


def splits_of(shape: Shape, gpu: Device) -> list[DecodeSplit]:
    """The splits to measure."""
    num_splits = [max(1, int(filled * gpu.multiprocessors / shape.tasks)) for filled in FILLED]
    return [
        split
        for split in rings_of_splits(shape, gpu)
        if split.num_splits in num_splits or split.cluster > 1 or split.blocks_per_sm > 1 or split.split_rest
    ]


def calls_of(shape: Shape) -> tuple[Callable[[DecodeSplit], Callable[[], object]], dict[str, Callable[[], object]]]:
    """(the call of a split, the calls of peers)."""
    q = randn(shape.batch, shape.group * shape.kv_heads, shape.queries, shape.dim)
    k, v = (randn(shape.batch, shape.kv_heads, shape.keys, shape.dim) for _ in range(2))
    out, cache, given = torch.empty_like(q), (k, v), {}
    if shape.page_size is not None:
        table = (
            torch.randperm(shape.batch * -(-shape.keys // shape.page_size), device="cuda")
            .int()
            .reshape(shape.batch, -1)
        )
        given = dict(pages=table, lengths=torch.full((shape.batch,), shape.keys, dtype=torch.int32, device="cuda"))
        cache = tuple(in_pages(x, table, shape.page_size) for x in (k, v))

    def ours(split: DecodeSplit) -> Callable[[], object]:
        plans: dict[str, Any] = {}

        def call() -> object:
            with unittest.mock.patch.multiple(decode_plan, choose_split=lambda *_: split, _plans=plans):
                return attention_decode(q, *cache, causal=False, out=out, **given)

        return call

    def peer(backend: SDPBackend) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return call

    return ours, {name: peer(backend) for name, backend in PEERS.items()}


def measure(shape: Shape, gpu: Device) -> dict[str, Any]:
    ours, peers = calls_of(shape)
    rounds: dict[str | DecodeSplit, Round] = {split: timing.reading(ours(split)) for split in splits_of(shape, gpu)}
    for name, call in peers.items():
        with contextlib.suppress(RuntimeError):  # it does not take the shape
            rounds[name] = timing.reading(call)
    taken = {
        contender: round(statistics.median(times) * 1e3, 2) for contender, times in interleaved(rounds, ROUNDS).items()
    }
    splits = [[*contender, taken[contender]] for contender in taken if isinstance(contender, DecodeSplit)]
    return dict(shape=list(shape), peers={name: taken[name] for name in peers if name in taken}, splits=splits)


def regrets(rows: Sequence[dict[str, Any]], gpu: str) -> Iterator[tuple[Shape, DecodeSplit, float]]:
    """For each row of this GPU: (shape, the split chosen among the measured ones, its time over that of the fastest,
    less one)."""
    device = GPUS[gpu]
    for row in rows:
        shape, taken = Shape(*row["shape"]), {DecodeSplit(*split): time for *split, time in row["splits"]}
        rings = rings_of_splits(shape, device)
        facts = shape.tasks, shape.keys, device.multiprocessors, device.hbm_bytes_per_second
        chosen = min(
            (split for split in taken if split in rings), key=lambda split: predicted_time(*facts, rings[split], split)
        )
        yield shape, chosen, taken[chosen] / min(taken.values()) - 1


def report(results: dict[str, Any]) -> None:
    for gpu, rows in results["rows"].items():
        found = sorted(regrets(rows, gpu), key=lambda regret: regret[2])
        measured = sum(len(row["splits"]) for row in rows)
        print(
            f"{gpu}: {len(found)} shapes, {measured} splits; the chosen take "
            f"{statistics.mean(r[2] for r in found):.2%} longer"
        )
        for shape, chosen, lost in found[:-6:-1]:
            print(f"  {lost:.1%}  {shape}  {tuple(chosen)}")


def compile_part(part: int, parts: int) -> None:
    kernels: dict[Any, tuple[Shape, DecodeSplit]] = {}
    gpu = Device.of()
    for shape in SHAPES:
        for split in splits_of(shape, gpu):
            kernels.setdefault(kernel_for(shape.kind, split, shape.tasks, gpu.multiprocessors), (shape, split))
    for shape, split in list(kernels.values())[part::parts]:
        calls_of(shape)[0](split)()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="end with the shapes measured by then, which come in a random order",
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--output", type=pathlib.Path, default=SPLITS)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_part(*options.compile)
        return
    in_parts([sys.executable, "-m", "bench.decode_splits"], options.workers)
    info = machine()
    gpu = next((name for name in GPUS if name in str(info["gpu"])), None)
    if gpu is None:
        sys.exit(f"decode_splits: the bandwidth of {info['gpu']} is not known here; known are {', '.join(GPUS)}")
    end, rows = time.monotonic() + options.seconds, []
    with unittest.mock.patch.object(timing, "MOST", CALLS):
        for shape in random.sample(SHAPES, len(SHAPES)):
            if time.monotonic() < end:
                rows.append(measure(shape, GPUS[gpu]))
    results = json.loads(options.output.read_text()) if options.output.exists() else {"rows": {}}
    write({"info": {**results.get("info", {}), gpu: info}, "rows": {**results["rows"], gpu: rows}}, options.output)
    report({"rows": {gpu: rows}})


def write(results: dict[str, Any], file: pathlib.Path) -> None:
    """A row a line."""
    lines = {
        gpu: ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) for gpu, rows in results["rows"].items()
    }
    of_gpus = ",\n".join(f'"{gpu}": [\n{text}\n]' for gpu, text in lines.items())
    title = "Decoding: µs of splits (num_splits, cluster, blocks_per_sm, split_rest)"
    file.write_text(f'{{"title": "{title}",\n"info": {json.dumps(results["info"])},\n"rows": {{\n{of_gpus}\n}}}}\n')


if __name__ == "__main__":
    main()
