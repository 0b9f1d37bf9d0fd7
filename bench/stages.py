"""Table 1 of the paper: TFLOP/s against pipeline stages."""
from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from bench.gemm import OURS, bf16, case, ours, trial
from bench.harness import Case, Suite, Trial, require_context
from bench.peers import Product

SIDE = 4096
STAGES = (2, 3, 4)  # one stage cannot be: the products of an iteration are under way while the next slot is waited for
TILES = ({}, {"cols": 192}, {"cols": 128}, {"cols": 128, "consumers": 1})  # from the default down: what a stage count refuses or has no shared memory for


def accepted(p: Product, configs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The first configuration that the GEMM runs, and what it says of those before. Without one, the first: the row then shows its error."""
    refused = []
    for config in configs:
        try:
            ours(p, **config)()
            return config, "".join(f"{spelled(other)} is refused ({why}); " for other, why in refused) + f"measured with {spelled(config)}"
        except Exception as error:
            require_context()
            refused.append((config, str(error).split("\n")[0]))
    return configs[0], ""


def spelled(config: dict[str, Any]) -> str:
    return f"Config({', '.join(f'{name}={value!r}' for name, value in config.items())})"


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(stages: int) -> Trial:
        p = bf16(SIDE, SIDE, SIDE)
        config, note = accepted(p, [{"stages": stages, **tile} for tile in TILES])
        return trial(p, {OURS: functools.partial(ours, p, **config)}, note=note)

    return [case(f"bf16 {SIDE}³, stages {stages}", (SIDE, SIDE, SIDE), functools.partial(prepare, stages), stages=stages) for stages in STAGES]


SUITES = (Suite("stages", "TFLOP/s against pipeline stages (Table 1)", cases, plot={"x": "stages"}),)
