"""What ways to deal sequences out take (`kernels/attention/dealing.py`), which its cost model is fitted to.

    python -m bench.decode_deals [--seconds N] [--workers N] [--output FILE]

Measures, on this GPU, several deals of many shapes beside cuDNN and FlashAttention-2, which read keys that lie together. The rows of other GPUs in FILE stay.
Prints for each GPU how much longer what the model chooses among the measured deals takes than the fastest of them. Kernels are compiled first, by several
processes at once.
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
from tritonkittens.kernels.attention import attention_decode, decoding
from tritonkittens.kernels.attention.dealing import Deal, Ring, kernel_of, possible_deals, predicted_time, rings_of
from tritonkittens.tune import Device

DEALS = pathlib.Path(__file__).with_suffix(".json")  # what the model's constants are fitted to, and a test holds them to
GPUS = {name: Device.named(name) for name in ("H200", "H100")}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-attention 2": SDPBackend.FLASH_ATTENTION}
ROUNDS, CALLS = 5, 40
FILLED = (0.25, 0.33, 0.5, 0.66, 0.8, 0.97, 1.3, 1.6, 1.9, 3.0)  # times that thread blocks fill the multiprocessors
SIZES = ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (2, 1024), (2, 4096), (2, 32768), (4, 512), (4, 4096), (4, 16384), (8, 512), (8, 1024), (8, 4096),
         (16, 512), (16, 1024), (16, 4096), (32, 512), (32, 2048), (64, 256), (64, 1024), (3, 5000), (5, 9000), (25, 3000), (34, 1024), (36, 3000), (40, 137),
         (48, 4096), (67, 1024), (100, 700), (128, 137), (128, 256))  # fmt: skip
FEW_HEADS = ((4, 4096, 2), (16, 209, 2), (12, 1500, 4), (9, 4096, 4), (1, 8192, 1), (30, 4096, 1))
KINDS = ((64, None), (128, None), (64, 16), (128, 16), (64, 128), (128, 64), (96, None), (32, None), (256, None))
SHAPES = [Shape(*kind, *size) for size in (*SIZES, *FEW_HEADS) for kind in KINDS]


def rings_of_deals(shape: Shape, gpu: Device) -> dict[Deal, Ring]:
    return {deal: ring for ring, deal in possible_deals(shape.tasks, shape.keys, gpu.multiprocessors, rings_of(shape.kind))}


def deals_of(shape: Shape, gpu: Device) -> list[Deal]:
    """Those to compare."""
    parts = [max(1, int(filled * gpu.multiprocessors / shape.tasks)) for filled in FILLED]
    return [deal for deal in rings_of_deals(shape, gpu) if deal.parts in parts or deal.sharers > 1 or deal.at_once > 1 or deal.even]


def calls_of(shape: Shape) -> tuple[Callable[[Deal], Callable[[], object]], dict[str, Callable[[], object]]]:
    """(the call with a deal, those of peers)."""
    q = randn(shape.batch, shape.group * shape.kv_heads, shape.queries, shape.dim)
    k, v = (randn(shape.batch, shape.kv_heads, shape.keys, shape.dim) for _ in range(2))
    out, cache, given = torch.empty_like(q), (k, v), {}
    if shape.page_size is not None:
        table = torch.randperm(shape.batch * -(-shape.keys // shape.page_size), device="cuda").int().reshape(shape.batch, -1)
        given = dict(pages=table, lengths=torch.full((shape.batch,), shape.keys, dtype=torch.int32, device="cuda"))
        cache = tuple(in_pages(x, table, shape.page_size) for x in (k, v))

    def dealt(deal: Deal) -> Callable[[], object]:
        known: dict[str, Any] = {}

        def call() -> object:
            with unittest.mock.patch.multiple(decoding, deal_of=lambda *_: deal, _launches=known):
                return attention_decode(q, *cache, causal=False, out=out, **given)

        return call

    def peer(backend: SDPBackend) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return call

    return dealt, {name: peer(backend) for name, backend in PEERS.items()}


def measure(shape: Shape, gpu: Device) -> dict[str, Any]:
    dealt, peers = calls_of(shape)
    rounds: dict[str | Deal, Round] = {deal: timing.reading(dealt(deal)) for deal in deals_of(shape, gpu)}
    for name, call in peers.items():
        with contextlib.suppress(RuntimeError):  # it does not take the shape
            rounds[name] = timing.reading(call)
    taken = {contender: round(statistics.median(times) * 1e3, 2) for contender, times in interleaved(rounds, ROUNDS).items()}
    deals = [[*contender, taken[contender]] for contender in taken if isinstance(contender, Deal)]
    return dict(shape=list(shape), peers={name: taken[name] for name in peers if name in taken}, deals=deals)


def regrets(rows: Sequence[dict[str, Any]], gpu: str) -> Iterator[tuple[Shape, Deal, float]]:
    """For each row of this GPU (shape, what the model chooses among the measured deals, how much longer than the fastest it takes)."""
    device = GPUS[gpu]
    for row in rows:
        shape, taken = Shape(*row["shape"]), {Deal(*deal): time for *deal, time in row["deals"]}
        rings = rings_of_deals(shape, device)
        facts = shape.tasks, shape.keys, device.multiprocessors, device.hbm_bytes_per_second
        chosen = min((deal for deal in taken if deal in rings), key=lambda deal: predicted_time(*facts, rings[deal], deal))
        yield shape, chosen, taken[chosen] / min(taken.values()) - 1


def report(results: dict[str, Any]) -> None:
    for gpu, rows in results["rows"].items():
        found = sorted(regrets(rows, gpu), key=lambda regret: regret[2])
        print(f"{gpu}: {len(found)} shapes, {sum(len(row['deals']) for row in rows)} deals; the chosen take {statistics.mean(r[2] for r in found):.2%} longer")
        for shape, chosen, lost in found[:-6:-1]:
            print(f"  {lost:.1%}  {shape}  {tuple(chosen)}")


def compile_part(part: int, parts: int) -> None:
    kernels: dict[Any, tuple[Shape, Deal]] = {}
    gpu = Device.of()
    for shape in SHAPES:
        for deal in deals_of(shape, gpu):
            kernels.setdefault(kernel_of(shape.kind, deal, shape.tasks, gpu.multiprocessors), (shape, deal))
    for shape, deal in list(kernels.values())[part::parts]:
        calls_of(shape)[0](deal)()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end with the shapes measured by then, which come in a random order")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--output", type=pathlib.Path, default=DEALS)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_part(*options.compile)
        return
    in_parts([sys.executable, "-m", "bench.decode_deals"], options.workers)
    info = machine()
    gpu = next((name for name in GPUS if name in str(info["gpu"])), None)
    if gpu is None:
        sys.exit(f"decode_deals: the bandwidth of {info['gpu']} is not known here; known are {', '.join(GPUS)}")
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
    lines = {gpu: ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) for gpu, rows in results["rows"].items()}
    of_gpus = ",\n".join(f'"{gpu}": [\n{text}\n]' for gpu, text in lines.items())
    title = "Decoding: µs of deals (parts, blocks of a cluster, thread blocks a multiprocessor or 0, and of newer rows: is the rest split?)"
    file.write_text(f'{{"title": "{title}",\n"info": {json.dumps(results["info"])},\n"rows": {{\n{of_gpus}\n}}}}\n')


if __name__ == "__main__":
    main()
