"""Measuring ours beside its peers: a suite is a list of cases, a case becomes one row of a table and of a JSON file.

A file holds medians, ranges and ratios. The single rounds stay in the process that measured them.

Every contender runs once a round, forwards in one round and backwards in the next, so that drifting clocks and the heat
that a neighbour leaves behind hit all of them; what is compared is what they took in the same round (`ratio`). A
contender that cannot run is shown as missing with its reason. One whose result is wrong is not timed, and makes the run
fail, as does one of ours that cannot run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import math
import pathlib
import random
import statistics
import subprocess
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from bench.machine import clocks, machine
from bench.plots import draw
from bench.timing import KINDS, SHARING_A_CLOCK, Call, Round, rounds_of, settle

RESULTS = pathlib.Path(__file__).parent / "results"
ROUNDS, QUICK_ROUNDS = 20, 10  # even: each contender runs first as often as last
UNITS: dict[str, Callable[[float, float], float]] = {
    "TFLOP/s": lambda work, ms: work / ms / 1e9,
    "TB/s": lambda work, ms: work / ms / 1e9,
    "µs": lambda work, ms: ms * 1e3,
    "ms": lambda work, ms: ms,
    "MiB": lambda work, mib: mib,
}
SHOWN_REASON = 150  # characters of a reason in the table; the file has all of it
DIGITS = 5  # significant ones of what is written: contenders are never told apart by less than 1e-3

Factory = Callable[[], Callable[[], torch.Tensor]]  # makes what is timed: a call that returns its result


@dataclass(frozen=True)
class Contender:
    """What is timed, the relative error of its result, and how it is timed where that is not as the case says."""

    factory: Factory
    error: Callable[[torch.Tensor], float]
    kind: str | None = None


@dataclass(frozen=True)
class Trial:
    """A case with its operands in memory. `error` is the relative error of a result; beyond `bound` it is wrong.
    `baselines` are timed beside the others
    and compared with none: they calculate something else, and so each has an error function of its own."""

    ours: Mapping[str, Factory]
    peers: Mapping[str, Factory]
    error: Callable[[torch.Tensor], float]
    bound: float
    note: str = ""
    baselines: Mapping[str, Contender] = field(default_factory=dict)

    def contenders(self) -> dict[str, Contender]:
        return {
            **{name: Contender(factory, self.error) for name, factory in {**self.peers, **self.ours}.items()},
            **self.baselines,
        }


@dataclass(frozen=True)
class Case:
    """`work` is a call's FLOP (bytes for a suite in TB/s), `facts` are what plots and readers select rows by. `rounds`
    times a run's rounds are measured, an even number: more than one where contenders that differ by a few per cent are
    to be told apart, less where a round is long."""

    name: str
    work: float
    facts: Mapping[str, Any]
    prepare: Callable[[], Trial]
    kind: str = "device"
    rounds: float = 1


@dataclass(frozen=True)
class Suite:
    """`plot` is a specification for `bench.plots`; `extend` adds figures of its own to the cells of a row."""

    name: str
    title: str
    cases: Callable[[argparse.Namespace], Sequence[Case]]
    unit: str = "TFLOP/s"
    plot: Mapping[str, Any] = field(default_factory=dict)
    extend: Callable[[dict[str, Any]], None] | None = None


P = ParamSpec("P")
Name = TypeVar("Name", bound=Hashable)


def both_ways(shapes: Iterable[Any], prepare: Callable[[Any, bool], Trial], backward: bool) -> list[Case]:
    """A case of the forward, or of the `backward`, for each shape: a NamedTuple with the bytes that are `moved`."""
    return [
        Case(
            f"{'backward, ' * backward}{shape}",
            shape.moved(backward),
            shape._asdict() | {"backward": backward},
            functools.partial(prepare, shape, backward),
            kind="device" if backward else "graph",
        )
        for shape in shapes
    ]


def call_of(
    function: Callable[..., Any], given: Sequence[torch.Tensor], grad: torch.Tensor | None
) -> Callable[[], Any]:
    """A call of a function; with `grad`, that of its result, a call of the gradients of all operands."""
    if grad is None:
        return functools.partial(function, *given)
    leaves = [x.clone().requires_grad_() for x in given]
    found = function(*leaves)
    return lambda: torch.autograd.grad(found, leaves, grad, retain_graph=True)


def deferred(prepare: Callable[P, Callable[[Any], float]]) -> Callable[P, Callable[[Any], float]]:
    """The error function that `prepare` makes of a reference, which is computed when the first result is compared, and
    not where kernels are only compiled."""

    @functools.wraps(prepare)
    def made_later(*args: P.args, **kwargs: P.kwargs) -> Callable[[Any], float]:
        made = functools.cache(lambda: prepare(*args, **kwargs))
        return lambda found: made()(found)

    return made_later


def frobenius_error(expected: torch.Tensor, rows: torch.Tensor | None = None) -> Callable[[torch.Tensor], float]:
    """Relative Frobenius norm of a result's difference to `expected` (float64); of `rows` of the result only, where
    given (leading dimensions flattened)."""

    def error(result: torch.Tensor) -> float:
        flat = result.reshape(-1, result.shape[-1])
        got = (flat if rows is None else flat[rows]).double()
        if got.shape != expected.shape:
            raise ValueError(f"the result has shape {tuple(got.shape)}; {tuple(expected.shape)} was expected")
        return ((got - expected).norm() / expected.norm()).item()

    return error


def interleaved(contenders: Mapping[Name, Round], rounds: int) -> dict[Name, list[float]]:
    """Milliseconds of every contender in every round. Two rounds are an order and its reverse, the next two another
    order, the same in every run.

    A card at its power limit is slower behind a burst that has drawn much (H200: 4 % of a GEMM of 4096³): nobody should
    always follow the same contender.
    """
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    for i in range(rounds):
        if i % 2 == 0:
            shuffle(order)
        for name in order[:: -1 if i % 2 else 1]:
            times[name].append(contenders[name]())
    return times


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """A number between `low` and `high` whose logarithm is uniformly distributed."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def require_context() -> None:
    """Raises where an error has taken the GPU's context with it: every later call would fail for the same reason."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _start(contender: Contender, bound: float, timer: Callable[[Call], Round]) -> tuple[dict[str, Any], Round | None]:
    """A contender's cell, and what times it where its result is right."""
    try:
        call = contender.factory()
        error = contender.error(call())
        if not error <= bound:  # NaN is wrong too
            return {
                "wrong": f"relative error {error:.2e}, at most {bound:.0e} is right",
                "error": error if math.isfinite(error) else None,
            }, None
        return {"error": error}, timer(call)
    except Exception as error:
        require_context()
        return {"missing": _reason(error)}, None


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """How many times as fast as a peer: the median, over the rounds, of what both took in the same one.

    The clock of a card at its power limit drifts from round to round (H100, e4m3 16384³: by up to a third), by more
    than contenders differ: of their medians each is that of another clock. The ratio of those varies by 6 % between
    runs, this one by 1 %.
    """
    return statistics.median(theirs / mine for mine, theirs in zip(ours, peer, strict=True))


def measure(case: Case, unit: str, rounds: int, kinds: Mapping[str, Callable[[Call], Round]] = KINDS) -> dict[str, Any]:
    """One row: for every contender its error and either median, range, `ratio` to the best peer and the milliseconds of
    every round, or why it has none."""
    trial = case.prepare()
    cells, timed = {}, {}
    for name, contender in trial.contenders().items():
        cell, timer = _start(contender, trial.bound, kinds[contender.kind or case.kind])
        cells[name] = {"ours": name in trial.ours, **({"kind": contender.kind} if contender.kind else {}), **cell}
        if timer is not None:
            timed[name] = timer
    rounds = max(2, 2 * round(rounds * case.rounds / 2)) if case.rounds != 1 else rounds
    if kinds[case.kind] in SHARING_A_CLOCK:
        rounds = rounds_of(rounds, settle(timed.values()))
    for name, ms in interleaved(timed, rounds).items():
        value = UNITS[unit]
        cells[name] |= {
            "value": value(case.work, statistics.median(ms)),
            "low": value(case.work, max(ms)),
            "high": value(case.work, min(ms)),
            "ms": ms,
        }
    medians = {name: statistics.median(cell["ms"]) for name, cell in cells.items() if "ms" in cell}
    best = min((name for name in medians if name in trial.peers), key=medians.__getitem__, default=None)
    for name in medians:
        if best is not None and name in trial.ours:
            cells[name]["ratio"] = ratio(cells[name]["ms"], cells[best]["ms"])
    return {
        "case": case.name,
        "kind": case.kind,
        "rounds": rounds,
        "facts": dict(case.facts),
        "note": trial.note,
        "bound": trial.bound,
        "best_peer": best,
        "contenders": cells,
    }


def without_rounds(row: dict[str, Any]) -> dict[str, Any]:
    """The row as it is printed and written: medians, ranges, ratios and errors to `DIGITS` digits, without the
    milliseconds of each round."""
    cells = {
        name: {key: _rounded(x) for key, x in cell.items() if key != "ms"} for name, cell in row["contenders"].items()
    }
    return {**row, "contenders": cells}


def _rounded(x: Any) -> Any:
    return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why this run has failed: results that are wrong, and ours that did not run."""
    return [
        f"{row['case']}: {name}: {cell.get('wrong') or cell['missing']}"
        for row in rows
        for name, cell in row["contenders"].items()
        if "wrong" in cell or (cell["ours"] and "missing" in cell)
    ]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Geometric mean of the ratios of each of ours to its best peer, the lowest and its case."""
    found: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        for name, cell in row["contenders"].items():
            if "ratio" in cell:
                found.setdefault(name, []).append((cell["ratio"], row["case"]))
    return {
        name: {
            "geometric_mean": math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios)),
            "rows": len(ratios), "lowest": min(ratios)[0], "lowest_case": min(ratios)[1],
        }
        for name, ratios in found.items()
    }  # fmt: skip


def format_row(row: dict[str, Any], unit: str) -> str:
    """A row of the table: one line for every contender."""
    lines = [f"{row['case']}   [{row['kind']}]" + (f"   {row['note']}" if row["note"] else "")]
    for name, cell in row["contenders"].items():
        if "value" not in cell:
            state = "wrong" if "wrong" in cell else "missing"
            lines.append(f"  {name:<28} {state}: {' '.join(cell[state].split())[:SHOWN_REASON]}")
            continue
        low, high = sorted((cell["low"], cell["high"]))
        spread = f"({low:.4g} to {high:.4g})"
        compared = f"ratio {cell['ratio']:.3f}" if "ratio" in cell else "best peer" if name == row["best_peer"] else ""
        extra = "   ".join(f"{key} {value}" for key, value in cell.get("extra", {}).items())
        lines.append(
            f"  {name:<28} {cell['value']:8.4g} {unit:<8} {spread:<22} error {cell['error']:.1e}   {compared:<12} "
            f"{extra}".rstrip()
        )
    return "\n".join(lines)


def format_summary(rows: Sequence[dict[str, Any]]) -> str:
    """The last lines: a geometric mean for each of ours."""
    return "\n".join(
        f"{name}: geometric mean of the ratios to the best peer {s['geometric_mean']:.3f} over {s['rows']} rows, "
        f"lowest {s['lowest']:.3f} ({s['lowest_case']})"
        for name, s in summary(rows).items()
    )


def save(suite: Suite, report: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Write a suite's result file."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{suite.name}.json"
    target.write_text(as_json(report))
    return target


def as_json(report: dict[str, Any]) -> str:
    """A report as JSON in which each contender of a row has a line of its own."""
    dumps = functools.partial(json.dumps, ensure_ascii=False)
    head = dumps({key: value for key, value in report.items() if key != "rows"}, indent=1).removesuffix("\n}")
    rows = []
    for row in report["rows"]:
        facts = dumps({key: value for key, value in row.items() if key != "contenders"}).removesuffix("}")
        cells = ",\n".join(f"   {dumps(name)}: {dumps(cell)}" for name, cell in row["contenders"].items())
        rows.append(f'  {facts}, "contenders": {{\n{cells}}}}}')
    return head + ',\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n"


def with_knobs(name: str, texts: Sequence[str], make: Callable[[dict[str, Any]], Factory]) -> dict[str, Factory]:
    """One more contender for each text of `--knobs`, such as "stages=2;schedule=split_tail"; `make` takes
    the values by name."""
    return {
        f"{name}, {text}": make({knob: _value(value) for knob, value in (pair.split("=") for pair in text.split(";"))})
        for text in texts
    }


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text  # a word


def chosen(suite: Suite, options: argparse.Namespace) -> list[Case]:
    """The cases of a run."""
    return [case for case in suite.cases(options) if options.only in case.name]


def compile_part(suite: Suite, options: argparse.Namespace, part: int, parts: int) -> None:
    """Call once what is ours in every `parts`-th case, from case `part` on: its kernels are then in Triton's cache.
    What fails is shown when it is measured."""
    for case in chosen(suite, options)[part::parts]:
        trial = case.prepare()
        for factory in (*trial.ours.values(), *(baseline.factory for baseline in trial.baselines.values())):
            with contextlib.suppress(Exception):
                factory()()
        require_context()


def in_parts(command: Sequence[str], parts: int) -> None:
    """Run a command that compiles a part of something, given behind its `--compile`, for all parts at once."""
    workers = [subprocess.Popen([*command, "--compile", str(part), str(parts)]) for part in range(parts)]
    for worker in workers:
        worker.wait()


def run(suite: Suite, options: argparse.Namespace, kinds: Mapping[str, Callable[[Call], Round]] = KINDS) -> int:
    """Measure a suite, print its table, write JSON and plot; returns the process's exit status. The file is written
    after every case, so that an interrupted run keeps what it has."""
    folder = pathlib.Path(options.out) if options.out else RESULTS
    rows: list[dict[str, Any]] = []
    report = {
        "suite": suite.name,
        "title": suite.title,
        "unit": suite.unit,
        "plot": dict(suite.plot),
        "info": machine(),
        "clocks_before": clocks(),
        "clocks_after": None,
        "summary": {},
        "rows": rows,
    }
    print(f"{suite.name}: {suite.title}\n{report['clocks_before']}", flush=True)
    for case in chosen(suite, options):
        row = measure(case, suite.unit, QUICK_ROUNDS if options.quick else ROUNDS, kinds)
        if suite.extend is not None:
            suite.extend(row)
        rows.append(without_rounds(row))
        print(format_row(rows[-1], suite.unit), flush=True)
        report["summary"] = summary(rows)
        save(suite, report, folder)
    report["clocks_after"] = clocks()
    target = save(suite, report, folder)
    print(f"{report['clocks_after']}\n{format_summary(rows)}\n{target}")
    print(draw(target))
    for fault in faults(rows):
        print(f"FAILED {fault}")
    return 1 if faults(rows) else 0
