"""Every benchmark: `python -m bench [SUITE…] [--out FOLDER] [--quick] [--slow] [--only TEXT] [--workers N] [--list]`,
and `python -m bench plot [FOLDER]`.

Each suite prints a table, writes SUITE.json and draws SUITE.svg into the folder (bench/results). Several suites run in
a process each, so that a fault in one leaves the others alone. The exit status is 1 where a result was wrong or one of
our kernels did not run.

`python -m bench.same_code REVISION` compares the machine code of the shipped kernels with that of a git revision; it
needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import subprocess
import sys

import torch

from bench.harness import RESULTS, Suite, compile_part, in_parts, run
from bench.plots import draw

MODULES = (
    "stages",
    "persistence",
    "block_order",
    "workers",
    "gemm",
    "gemm_random",
    "gated_gemm",
    "grouped",
    "experts",
    "attention",
    "attention_random",
    "decode",
    "quantize",
    "norm",
    "norm_tiles",
    "rotary",
    "activation",
    "linear_attention",
    "recurrent_step",
    "hedgehog",
    "fft_conv",
    "loss",
    "mixers",
    "attention_models",
    "blocks",
    "generate",
    "examples",
)
STANDALONE = {
    "launch_overhead": "host time of one kernel launch",
    "template_host": "host time of constructing a template again (launches need a GPU)",
    "simulator": "speed and memory of the simulator (needs no GPU)",
    "cold_start": "seconds to the first results of a fresh process, with empty and full caches",
}


def suites() -> dict[str, Suite]:
    """The suites of the harness, by name, in the order in which they run."""
    return {suite.name: suite for module in MODULES for suite in importlib.import_module(f"bench.{module}").SUITES}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="default: all; `plot [FOLDER]` draws the plots of existing result files",
    )
    parser.add_argument("--out", help=f"folder for results (default {RESULTS})")
    parser.add_argument("--quick", action="store_true", help="10 rounds instead of 20; generate: one prompt")
    parser.add_argument("--slow", action="store_true", help="also peers that take minutes to compile")
    parser.add_argument(
        "--knobs",
        action="append",
        default=[],
        metavar="NAME=VALUE[;NAME=VALUE…]",
        help="gemm, gemm_fp8, gemm_models, gemm_sustained, attention, attention_backward, attention_sustained: also "
        "ours with these fields of "
        "its configuration; may be given several times",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--count", type=int, metavar="N", help="the random suites: so many shapes")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="the random suites: what shapes are drawn with (default 0)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="compile our kernels first, in so many processes"
    )
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="list suites and their cases; measure nothing")
    options = parser.parse_args(arguments)
    if options.suites[:1] == ["plot"]:
        if len(options.suites) > 2:
            parser.error(f"plot {' '.join(options.suites[1:])}: plot takes one folder")
        return options
    known = [*suites(), *STANDALONE]
    for name in options.suites:
        if name not in known:
            parser.error(f"suite {name!r}: must be plot or one of {', '.join(known)}")
    options.suites = options.suites or known
    return options


def plot(folder: pathlib.Path) -> None:
    """Draw every result file of a folder."""
    for source in sorted(folder.glob("*.json")):
        print(draw(source))


def alone(name: str, options: argparse.Namespace) -> int:
    """One suite, in this process."""
    if name in STANDALONE:
        out = ["--out", options.out] if options.out else []
        status = subprocess.run([sys.executable, "-m", f"bench.{name}", *out]).returncode
        if status == 0:
            print(draw(pathlib.Path(options.out or RESULTS) / f"{name}.json"))
        return status
    if not torch.cuda.is_available():
        print(f"{name}: skipped, it needs a CUDA device and there is none")
        return 1
    if options.compile:
        compile_part(suites()[name], options, *options.compile)
        return 0
    if options.workers > 1:
        in_parts([sys.executable, "-m", "bench", name, *flags(options)], options.workers)
    return run(suites()[name], options)


def flags(options: argparse.Namespace) -> list[str]:
    """What processes of single suites are told."""
    return [
        *(["--out", options.out] if options.out else []),
        *(["--quick"] if options.quick else []),
        *(["--slow"] if options.slow else []),
        *(["--only", options.only] if options.only else []),
        *(x for text in options.knobs for x in ("--knobs", text)),
        *(x for name in ("count", "seed") if (n := getattr(options, name)) is not None for x in (f"--{name}", str(n))),
    ]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.suites[:1] == ["plot"]:
        plot(pathlib.Path(options.suites[1]) if len(options.suites) > 1 else pathlib.Path(options.out or RESULTS))
        return 0
    if options.list:
        for name in options.suites:
            print(f"{name}: {STANDALONE.get(name) or suites()[name].title}")
            for case in suites()[name].cases(options) if name not in STANDALONE else ():
                print(f"  {case.name} [{case.kind}]")
        return 0
    if len(options.suites) == 1:
        return alone(options.suites[0], options)
    command = [*flags(options), "--workers", str(options.workers)]
    return max(
        abs(subprocess.run([sys.executable, "-m", "bench", name, *command]).returncode) for name in options.suites
    )


if __name__ == "__main__":
    sys.exit(main())
