"""Two revisions of the library on one card: `python -m bench.compare TREE SUITE… [--only TEXT] [--rounds N] [--limit
PERCENT] [--out FILE]`.

TREE is a folder with the other revision (`git worktree add`, or the archive of one). Each revision runs in a process of
its own, with its own kernels and `bench`, and times its `gemm`, `attention`, … beside the same peer. The two processes
run in alternating bursts. A row's figure is how much longer this revision takes than the other one in the same round;
the peer, whose code is the same in both, shows what the measurement is worth. A row over the limit, or whose peer is,
is measured three times, and its median counts.

Prints a line per row and a suite's geometric mean. The exit status is 1 where a row or a mean is over its limit, or a
row fails in one revision only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parents[1]
ROW_LIMIT, MEAN_LIMIT = 2.0, 0.5  # percent
REPEATS = 3  # of a row over the limit
ROUNDS = 20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=pathlib.Path, help="folder of the other revision")
    parser.add_argument("suites", nargs="+", metavar="SUITE")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--limit", type=float, default=ROW_LIMIT, metavar="PERCENT", help=f"of a row (default {ROW_LIMIT})"
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the figures")
    parser.add_argument(
        "--part",
        nargs=2,
        type=int,
        default=(0, 1),
        metavar=("PART", "PARTS"),
        help="every PARTS-th case, from case PART on",
    )
    return parser.parse_args(arguments)


# ---------------------------------------------------------------- the process of one revision


def options_of_suites() -> argparse.Namespace:
    return importlib.import_module("bench.__main__").parse([])


class Bench:
    """The cases of this process's revision. A prepared case is timed contender by contender."""

    def __init__(self) -> None:
        self.options = options_of_suites()
        self.timers: dict[str, Any] = {}

    def cases(self, suite: str) -> list[str]:
        self.prepared = {
            case.name: case for case in importlib.import_module("bench.__main__").suites()[suite].cases(self.options)
        }
        return list(self.prepared)

    def prepare(self, name: str, compile_only: bool = False) -> dict[str, Any]:
        """Compile and check ours and the first peer that runs; {contender: its relative error}."""
        import torch

        from bench.timing import KINDS

        self.timers.clear()
        torch.cuda.empty_cache()
        case = self.prepared[name]
        trial = case.prepare()
        found: dict[str, Any] = {}
        for role, factories in (("ours", trial.ours), ("peer", trial.peers)):
            for contender, factory in list(factories.items())[: 1 if role == "ours" else None]:
                try:
                    call = factory()
                    error = trial.error(call())
                except Exception as problem:
                    if role == "ours":
                        raise
                    found.setdefault("skipped", []).append(f"{contender}: {problem}"[:200])
                    continue
                if not error <= trial.bound:
                    raise ValueError(f"{contender}: relative error {error:.2e}, at most {trial.bound:.0e} is right")
                if not compile_only:
                    self.timers[role] = KINDS[case.kind](call)
                found[role] = contender
                break
            if compile_only:
                break
        return found

    def burst(self, role: str) -> float | None:
        """Milliseconds of a call, None without a peer. An untimed burst goes first: this process was idle, and the
        other one had the card."""
        if role not in self.timers:
            return None
        self.timers[role]()
        return self.timers[role]()


def serve() -> None:
    """Answer requests, a JSON line each, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    bench = Bench()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": getattr(bench, method)(*arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


class Revision:
    """The other end of `serve`."""

    def __init__(self, tree: pathlib.Path) -> None:
        behind = [
            path
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path and pathlib.Path(path).resolve() != HERE
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *behind])}
        code = f"import runpy; runpy.run_path({str(pathlib.Path(__file__).resolve())!r}, run_name='serve')"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *request: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self.process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["value"]

    def call(self, *request: Any) -> Any:
        self.ask(*request)
        return self.answer()


# ---------------------------------------------------------------- comparing


def tries(revisions: dict[str, Revision], request: Sequence[Any]) -> dict[str, Any]:
    """What both answer, asked at the same time; an exception where one fails."""
    for revision in revisions.values():
        revision.ask(*request)
    answers: dict[str, Any] = {}
    for name, revision in revisions.items():
        try:
            answers[name] = revision.answer()
        except RuntimeError as error:
            answers[name] = error
    return answers


def measured(revisions: dict[str, Revision], rounds: int) -> dict[str, Any]:
    """Percent that "this" takes longer than "other", the same of the peer in both processes, and median microseconds of
    each."""
    times: dict[tuple[str, str], list[float]] = {(role, name): [] for role in ("ours", "peer") for name in revisions}
    order, shuffle = list(times), random.Random(0).shuffle
    for number in range(rounds):
        if number % 2 == 0:
            shuffle(order)
        for role, name in order[:: -1 if number % 2 else 1]:
            if (ms := revisions[name].call("burst", role)) is not None:
                times[role, name].append(ms)

    def percent(role: str) -> float | None:
        ratios = [this / other for this, other in zip(times[role, "this"], times[role, "other"], strict=True)]
        return round(100 * (statistics.median(ratios) - 1), 2) if ratios else None

    medians = {f"{name} {role}": round(1e3 * statistics.median(ms), 2) for (role, name), ms in times.items() if ms}
    return {"percent": percent("ours"), "peer": percent("peer"), "us": medians}


def is_steady(found: dict[str, Any], limit: float) -> bool:
    """Is a row within the limit, and its peer as fast in both processes?"""
    return found["percent"] <= limit and abs(found["peer"] or 0.0) <= limit


def rows(revisions: dict[str, Revision], suite: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each case that both revisions have."""
    known = {name: revision.call("cases", suite) for name, revision in revisions.items()}
    part, parts = options.part
    for case in [case for case in known["this"] if case in known["other"] and options.only in case][part::parts]:
        answers = tries(revisions, ("prepare", case))
        failed = {name: str(answer) for name, answer in answers.items() if isinstance(answer, Exception)}
        if failed:
            yield {"case": case, "failed": failed}
            continue
        found = [measured(revisions, options.rounds)]
        while len(found) < REPEATS and not is_steady(found[0], options.limit):
            tries(revisions, ("prepare", case))  # operands in other memory
            found.append(measured(revisions, options.rounds))
        middle = sorted(found, key=lambda each: each["percent"])[len(found) // 2]
        yield {
            "case": case,
            "contender": answers["this"].get("peer"),
            **middle,
            "all": [each["percent"] for each in found],
        }


def verdict(suite: str, found: Sequence[dict[str, Any]], limit: float) -> tuple[str, bool]:
    """(a suite's last line, is everything within its limit?)."""
    timed = [row for row in found if "percent" in row]
    mean = 100 * (math.exp(statistics.fmean(math.log1p(row["percent"] / 100) for row in timed)) - 1) if timed else 0.0
    over = [row["case"] for row in timed if row["percent"] > limit]
    alone = [row["case"] for row in found if len(row.get("failed", ())) == 1]
    good = mean <= MEAN_LIMIT and not over and not alone
    text = f"{suite}: {mean:+.2f} % over {len(timed)} rows"
    return "; ".join(
        [text, *(f"over {limit} %: {case}" for case in over), *(f"fails in one revision: {case}" for case in alone)]
    ), good


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    revisions = {"this": Revision(HERE), "other": Revision(options.tree.resolve())}
    report: dict[str, Any] = {}
    good = True
    for suite in options.suites:
        report[suite] = []
        for row in rows(revisions, suite, options):
            report[suite].append(row)
            text = (
                f"{row['percent']:+6.2f} %, peer {row['peer'] or 0:+6.2f} %  {row['us']}"
                if "percent" in row
                else f"failed: {row['failed']}"
            )
            print(f"{suite}  {row['case']:<48} {text}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        line, fits = verdict(suite, report[suite], options.limit)
        good &= fits
        print(line, flush=True)
    return 0 if good else 1


if __name__ == "serve":
    serve()
elif __name__ == "__main__":
    sys.exit(main())
