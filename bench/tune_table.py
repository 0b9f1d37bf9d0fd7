"""Tunes the GEMMs of the benchmarks on this GPU and writes the table that ships with the package.

    python -m bench.tune_table [--only TEXT …] [--tries N] [--workers N] [--output FILE]

Kernels are compiled first, by several processes at once; measuring is left to one.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench.gemm import EPILOGUES, LAYOUTS, RAGGED, SIDE, TOKENS, WEIGHTS, bf16, fp8, randn, sweep
from bench.harness import in_parts
from bench.peers import SCALE_BLOCK, Product
from tritonkittens import tune
from tritonkittens.kernels.gemm import Config, family, tune_gemm
from tritonkittens.kernels.gemm.call_plan import described
from tritonkittens.kernels.gemm.checks import result_dtype
from tritonkittens.kernels.gemm.device.unaligned import takes

TRIES = 16


def products() -> Iterator[tuple[str, Callable[[], Product]]]:
    """(name, operands) of every problem of the table."""
    for layout in LAYOUTS:
        for _, shape, _ in sweep():
            yield f"bf16 {shape} {layout}", functools.partial(bf16, *shape, layout)
    for n, k in dict.fromkeys(shape for weights in WEIGHTS.values() for shape in weights.values()):
        for m in TOKENS:
            yield f"bf16 {(m, n, k)} NT", functools.partial(bf16, m, n, k, "NT")
    for layout in LAYOUTS:
        for shape in RAGGED:
            yield f"bf16 {shape} {layout}", functools.partial(bf16, *shape, layout)
    for scaling in ("tensor", "row", "block"):
        for _, shape, _ in sweep():
            if scaling != "block" or shape[2] % SCALE_BLOCK == 0:
                yield f"e4m3 {shape} {scaling}", functools.partial(fp8, *shape, scaling)
    for name, epilogue in EPILOGUES.items():
        if epilogue:
            yield f"bf16 {SIDE}³ {name}", functools.partial(with_epilogue, epilogue)


def with_epilogue(epilogue: Mapping[str, Any]) -> Product:
    bare, shapes = bf16(SIDE, SIDE, SIDE), {"bias": (SIDE,), "gate": (SIDE,), "residual": (SIDE, SIDE)}
    return Product(
        bare.a,
        bare.b,
        **{name: value if name == "activation" else randn(*shapes[name]) for name, value in epilogue.items()},
    )


def has_configuration(p: Product) -> bool:
    """Is it computed by the kernel that is tuned?"""
    return not takes(p.a, p.b, p.residual, result_dtype(p.a, p.out_dtype), None)


def is_among(name: str, only: list[str]) -> bool:
    return not only or any(text in name for text in only)


def compile_some(only: list[str], tries: int, part: int, parts: int) -> None:
    """Compile the kernels that will be measured, one of `parts` shares of them."""
    number, seen = 0, set()
    for name, make in products():
        if not is_among(name, only):
            continue
        p = make()
        if not has_configuration(p):
            continue
        product = described(p.a, p.b, **p.options())
        rows = sorted(family.explain(product.problem).rows, key=lambda row: row.predicted)[:tries]
        for row in rows:
            call = product.compilation(Config(**row.config), p.a, p.b, **p.options())
            if call is None or call[0].cache_key in seen:
                continue
            seen.add(call[0].cache_key)
            number += 1
            if number % parts == part:
                try:
                    call[0].compile(*call[1])
                except Exception as error:
                    print(f"{name} {row.config}: {str(error).strip().splitlines()[0][:150]}", flush=True)
        del p


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TEXT", help="problems whose name contains one of these"
    )
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--output", type=pathlib.Path, help="the table's file")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_some(options.only, options.tries, *options.compile)
        return
    began = time.perf_counter()
    in_parts(
        [sys.executable, "-m", "bench.tune_table", "--only", *options.only, "--tries", str(options.tries)],
        options.workers,
    )
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for name, make in products():
        if not is_among(name, options.only):
            continue
        p = make()
        if not has_configuration(p):
            continue
        try:
            print(f"{name}: {tune_gemm(p.a, p.b, **p.options(), tries=options.tries)}", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        del p
        torch.cuda.empty_cache()
    print(f"tuned in {time.perf_counter() - began:.0f} s, kept in {tune.folder()}")
    if options.output:
        subprocess.run(
            [sys.executable, "-m", "tritonkittens", "tuned", "--export", "gemm", "--output", str(options.output)],
            check=True,
        )


if __name__ == "__main__":
    main()
