"""Table 2 of the paper: persistent blocks against one tile a block, for products too short to hide a block's start and
end."""

from __future__ import annotations

import argparse
import functools

from bench.gemm import bf16, case, ours, trial
from bench.harness import Case, Suite, Trial

SIDE = 4096
DEPTHS = (64, 128, 256, 512, 1024)

SCHEDULES = {"persistent": "persistent", "one tile a block": "one_per_block"}


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(k: int) -> Trial:
        p = bf16(SIDE, SIDE, k)
        return trial(p, {name: functools.partial(ours, p, schedule=schedule) for name, schedule in SCHEDULES.items()})

    return [case(f"bf16 {SIDE}x{SIDE}x{k}", (SIDE, SIDE, k), functools.partial(prepare, k)) for k in DEPTHS]


SUITES = (Suite("persistence", "persistent blocks against one tile a block (Table 2)", cases, plot={"x": "K"}),)
