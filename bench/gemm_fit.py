"""Fit the constants of the GEMM's cost model to `bench.gemm_sample`'s measurements: `python -m bench.gemm_fit
[--write]`. Needs no GPU.

The fit minimises the error of predictions, most of all of configurations that are nearly the fastest, by a random
search. It reports the regret: how much slower the model's choice is than the fastest that was measured, of shapes that
the fit has seen and, by cross-validation, of shapes that it has not. --write puts the constants into
`kernels/gemm/cost_model.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.gemm_random import has_aligned_rows
from bench.gemm_sample import SAMPLE, Sample, problem_of
from tritonkittens import tune
from tritonkittens.kernels.gemm import Config, cost_model
from tritonkittens.kernels.gemm.cost_model import CONSTANTS, Constants, Work, predict, work

STEPS, FOLDS = 2500, 4
NEAR, FAR = (1.15, 1.0), (1.5, 0.5)  # times the fastest, and the weight of configurations up to there
REST = 0.15  # the weight of the others
FIELDS = [field.name for field in dataclasses.fields(Constants)]


class Measurements:
    """Every measured time, with what the busiest CTA did."""

    def __init__(self, sample: Sample, device: tune.Device):
        self.device = device
        self.shapes = [shape for shape in sample.rows if has_aligned_rows(shape)]
        works, seconds, groups, self.configs = [], [], [], []
        for group, shape in enumerate(self.shapes):
            for name, us in sample.rows[shape].items():
                if name != "cublas":
                    works.append(work(problem_of(shape), Config.from_text(name), device))
                    seconds.append(us * 1e-6)
                    groups.append(group)
                    self.configs.append(name)
        self.seconds, self.groups = np.array(seconds), np.array(groups)
        self.work = Work(*(np.array(column, dtype=float) for column in zip(*works, strict=True)))
        self.members = [np.flatnonzero(self.groups == group) for group in range(len(self.shapes))]
        self.best = np.array([self.seconds[members].min() for members in self.members])
        relative = self.seconds / self.best[self.groups]
        weight = np.where(relative < NEAR[0], NEAR[1], np.where(relative < FAR[0], FAR[1], REST))
        self.weight = weight / np.bincount(self.groups, weight)[self.groups]

    def predicted(self, constants: Constants) -> Any:
        return predict(self.work, constants, self.device).total

    def error(self, constants: Constants, seen: Any) -> float:
        """Return the weighted mean of |ln(predicted / measured)|^1.5 of the groups that are `seen`."""
        weight = self.weight * seen[self.groups]
        wrong = np.abs(np.log(self.predicted(constants) / self.seconds)) ** 1.5
        return float((weight * wrong).sum() / weight.sum())

    def regret(self, constants: Constants, groups: Sequence[int]) -> Any:
        """Return the time of the model's choice over the fastest, for each group."""
        predicted = self.predicted(constants)
        chosen = [members[np.argmin(predicted[members])] for members in (self.members[g] for g in groups)]
        return self.seconds[chosen] / self.best[list(groups)]


def fitted(data: Measurements, start: Constants, seen: Any, steps: int, seed: int) -> Constants:
    """Return constants near `start` with the least error: a few at a time are changed by a random factor."""
    draw = np.random.default_rng(seed)
    values, spread = np.array(dataclasses.astuple(start)), np.full(len(FIELDS), 0.15)
    least = data.error(start, seen)
    for _ in range(steps):
        changed = draw.choice(len(FIELDS), draw.integers(1, 4), replace=False)
        trial = values.copy()
        trial[changed] *= np.exp(draw.normal(0, spread[changed]))
        error = data.error(Constants(*trial), seen)
        if error < least:
            values, least = trial, error
            spread[changed] = np.minimum(spread[changed] * 1.5, 0.5)
        else:
            spread[changed] = np.maximum(spread[changed] * 0.95, 0.01)
    return Constants(*(float(f"{value:.4g}") for value in values))


def summary(regret: Any) -> str:
    return (
        f"geometric mean {np.exp(np.log(regret).mean()):.4f}, {100 * (regret > 1.05).mean():.0f} % of shapes above "
        f"1.05, largest {regret.max():.3f}"
    )


def held_out(data: Measurements, start: Constants, steps: int) -> Any:
    """Return the regret of every shape by constants that are fitted without it and others."""
    fold = np.random.default_rng(0).permutation(len(data.shapes)) % FOLDS
    found = np.empty(len(data.shapes))
    for number in range(FOLDS):
        groups = np.flatnonzero(fold == number)
        found[groups] = data.regret(fitted(data, start, fold != number, steps, number), groups.tolist())
    return found


def write(constants: Constants) -> None:
    """Put the constants into the cost model's source."""
    path = pathlib.Path(cost_model.__file__)
    text = path.read_text()
    for name, value in dataclasses.asdict(constants).items():
        text, count = re.subn(rf"^(    {name}: float = )[-+.e\d]+", rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert count == 1, name
    path.write_text(text)


def show_worst(data: Measurements, constants: Constants, count: int) -> None:
    regret = data.regret(constants, range(len(data.shapes)))
    predicted = data.predicted(constants)
    for group in np.argsort(-regret)[:count]:
        members = data.members[group]
        best, chosen = members[np.argmin(data.seconds[members])], members[np.argmin(predicted[members])]
        told = [
            f"{data.configs[i]} {data.seconds[i] * 1e6:.1f} (predicted {predicted[i] * 1e6:.1f})"
            for i in (best, chosen)
        ]
        print(f"{str(data.shapes[group]):24} {regret[group]:.3f}: fastest {told[0]}, chosen {told[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=pathlib.Path, default=SAMPLE)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the random search")
    parser.add_argument("--device", default="H200", help="the GPU of the sample")
    parser.add_argument("--write", action="store_true", help="put the constants into the cost model")
    parser.add_argument("--worst", type=int, default=8, metavar="N", help="show so many of the wrong choices")
    options = parser.parse_args()
    data = Measurements(Sample.read(options.sample), tune.Device.named(options.device))
    everything = range(len(data.shapes))
    print(
        f"{len(data.seconds)} times of {len(data.shapes)} shapes; today {summary(data.regret(CONSTANTS, everything))}"
    )
    seen: Any = np.ones(len(data.shapes), dtype=bool)
    constants = CONSTANTS
    for seed in range(2):
        constants = fitted(data, constants, seen, options.steps, seed)
    print(f"fitted: {summary(data.regret(constants, everything))}; error {data.error(constants, seen):.4f}")
    print(f"held out: {summary(held_out(data, CONSTANTS, options.steps))}")
    print(constants)
    show_worst(data, constants, options.worst)
    if options.write:
        write(constants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
