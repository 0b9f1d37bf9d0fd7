"""Tunes the GEMMs of the benchmarks on this GPU, and prunes the table that ships with the package.

    python -m bench.tune_table [--only TEXT …] [--tries N] [--workers N] [--output FILE]
    python -m bench.tune_table --prune [--workers N] [--output FILE]

Tuning keeps its results on disk, and with --output also writes them as a table.
--prune measures the configuration of every entry of this GPU's table beside the choice that would be made without the
entry. The entry stays where it is more than 2 % faster. Without --output, the shipped table is replaced.
Kernels are compiled first, by several processes at once; measuring is left to one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import torch

from bench.gemm import EPILOGUES, HEADS, LAYOUTS, RAGGED, SIDE, TOKENS, WEIGHTS, bf16, fp8, randn, sweep
from bench.harness import in_parts, interleaved, ratio, require_context
from bench.peers import SCALE_BLOCK, Product
from tritonkittens import tune
from tritonkittens.kernels.gemm import Config, Problem, family, tune_gemm
from tritonkittens.kernels.gemm.call_plan import described
from tritonkittens.kernels.gemm.checks import result_dtype
from tritonkittens.kernels.gemm.device.unaligned import takes
from tritonkittens.tune import shipped

TRIES = 16
LEAST_GAIN = 1.02  # an entry's configuration is so many times as fast as the choice without the entry
ROUNDS = 4  # even: each configuration runs first as often as last

Pairs: TypeAlias = Mapping[Problem, tuple[Config, Config]]  # of an entry, and the choice without it


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
    for n, k in (shape for weights in HEADS.values() for shape in weights.values()):  # forward and backward
        for shape, layout in (((TOKENS[-1], n, k), "NT"), ((TOKENS[-1], k, n), "NN"), ((n, k, TOKENS[-1]), "TN")):
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


def problems(only: Sequence[str] = ()) -> dict[Problem, tuple[str, Callable[[], Product]]]:
    """Return the problems of products whose names contain one of `only`: (name, operands) of each."""
    found = {}
    for name, make in products():
        if not only or any(text in name for text in only):
            p = make()
            if has_configuration(p):
                found[described(p.a, p.b, **p.options()).problem] = name, make
    return found


def compile_in_parts(wanted: Mapping[str, Sequence[Config]], workers: int) -> None:
    """Compile configurations of products, by name, in several processes."""
    began = time.perf_counter()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({name: [config.to_text() for config in configs] for name, configs in wanted.items()}, file)
        file.flush()
        in_parts([sys.executable, "-m", "bench.tune_table", "--wanted", file.name], workers)
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)


def compile_some(wanted: Mapping[str, Sequence[str]], part: int, parts: int) -> None:
    """Compile one of `parts` shares of the configurations of products, by name."""
    number, seen = 0, set()
    for name, make in products():
        if name not in wanted:
            continue
        p = make()
        product = described(p.a, p.b, **p.options())
        for text in wanted[name]:
            call = product.compilation(Config.from_text(text), p.a, p.b, **p.options())
            if call is None or call[0].cache_key in seen:
                continue
            seen.add(call[0].cache_key)
            number += 1
            if number % parts == part:
                try:
                    call[0].compile(*call[1])
                except Exception as error:
                    print(f"{name} {text}: {str(error).strip().splitlines()[0][:150]}", flush=True)
        del p


def tune_all(only: Sequence[str], tries: int, workers: int) -> None:
    """Tune products and keep the results on disk."""
    found = problems(only)
    wanted = {}
    for problem, (name, _) in found.items():
        rows = sorted(family.explain(problem).rows, key=lambda row: row.predicted)[:tries]
        wanted[name] = [Config(**row.config) for row in rows]
    compile_in_parts(wanted, workers)
    for name, make in found.values():
        p = make()
        try:
            print(f"{name}: {tune_gemm(p.a, p.b, **p.options(), tries=tries)}", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        del p
        torch.cuda.empty_cache()


def gains(
    pairs: Pairs, found: Mapping[Problem, tuple[str, Callable[[], Product]]], workers: int
) -> Iterator[tuple[Problem, float]]:
    """Yield how many times as fast the first configuration of each pair is, by the median of interleaved rounds."""
    compile_in_parts({found[problem][0]: pair for problem, pair in pairs.items()}, workers)
    for problem, (first, second) in pairs.items():
        p = found[problem][1]()
        operands = (p.bias, p.gate, p.residual, p.scale_a, p.scale_b)
        seconds = described(p.a, p.b, **p.options()).measurement(p.a, p.b, operands)
        try:
            times = interleaved({config: functools.partial(seconds, config) for config in (first, second)}, ROUNDS)
            yield problem, ratio(times[first], times[second])
        except Exception as error:
            require_context()
            print(f"{label(problem)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        del p, seconds
        torch.cuda.empty_cache()


def label(problem: Problem) -> str:
    """Return what tells a problem from others, in one line."""
    return " ".join(str(value) for value in problem if value != "")


def pruned(
    table: shipped.Table,
    folder: pathlib.Path,
    measure: Callable[[Pairs], Iterable[tuple[Problem, float]]],
    device: tune.Device | None = None,
) -> pathlib.Path:
    """Write the entries of a table that are worth their place into `folder`, and return the path.

    An entry also decides for problems that are near it, or computed alike, and tables of similar devices decide where
    this one does not. So each entry is compared with what `family.choose` returns without it. This is repeated with
    the entries that stay, where they change the choice of others.

    Args:
        folder: an empty folder; the package's tables are those in it from now on.
        measure: returns how many times as fast the first configuration of each pair is, by problem.
        device: the GPU of the choices; None is the current one.
    """
    entries = {Problem(**entry.problem): entry for entry in table.entries.values() if entry.family == family.name}
    winners = {problem: family.choose(problem, device=device) for problem in entries}
    for other in shipped.tables():
        if other.path != table.path:
            shutil.copy(other.path, folder)
    shipped.TABLES, path = folder, folder / table.path.name
    kept = [entry for entry in table.entries.values() if entry.family != family.name]
    compared: set[tuple[Problem, Config]] = set()
    while True:
        shipped.write(path, table.device, kept)
        family.forget()
        pairs = {problem: (winners[problem], family.choose(problem, device=device)) for problem in entries}
        pairs = {
            problem: (winner, choice)
            for problem, (winner, choice) in pairs.items()
            if winner != choice and (problem, choice) not in compared
        }
        print(f"{len(pairs)} of {len(entries)} entries change a choice that was not measured", flush=True)
        if not pairs:
            return path
        compared |= {(problem, choice) for problem, (_, choice) in pairs.items()}
        for problem, gain in measure(pairs):
            stays = gain > LEAST_GAIN
            if stays:
                kept.append(replace(entries[problem], config=asdict(winners[problem])))
            print(f"{label(problem)}: {'kept' if stays else 'dropped'}, {gain:.3f}", flush=True)


def prune(output: pathlib.Path | None, workers: int) -> None:
    """Prune the table of this GPU."""
    gpu = tune.Device.of()
    table = next(
        table
        for table in shipped.tables()
        if (table.device.name, table.device.multiprocessors) == (gpu.name, gpu.multiprocessors)
    )
    found = problems()
    known = {key: entry for key, entry in table.entries.items() if Problem(**entry.problem) in found}
    for entry in table.entries.values():
        if entry.key not in known:
            print(f"{label(Problem(**entry.problem))}: dropped, no product of the benchmarks has this configuration")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as nothing:
        os.environ["TK_CACHE_DIR"] = nothing  # results on disk would decide before tables
        path = pruned(
            replace(table, entries=known), pathlib.Path(folder), functools.partial(gains, found=found, workers=workers)
        )
        print(f"{len(shipped.read(path).entries)} of {len(table.entries)} entries stay")
        shutil.copy(path, output or table.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TEXT", help="problems whose name contains one of these"
    )
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--prune", action="store_true", help="drop entries that are not worth their place")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--output", type=pathlib.Path, help="the table's file")
    parser.add_argument("--wanted", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_some(json.loads(options.wanted.read_text()), *options.compile)
        return
    began = time.perf_counter()
    if options.prune:
        prune(options.output, options.workers)
        print(f"pruned in {time.perf_counter() - began:.0f} s")
        return
    tune_all(options.only, options.tries, options.workers)
    print(f"tuned in {time.perf_counter() - began:.0f} s, kept in {tune.folder()}")
    if options.output:
        subprocess.run(
            [sys.executable, "-m", "tritonkittens", "tuned", "--export", "gemm", "--output", str(options.output)],
            check=True,
        )


if __name__ == "__main__":
    main()
