"""Choice of a kernel's configuration: a cost model ranks, measurements decide where enabled, results persist on disk,
tables ship with the package.

A kernel family declares its configurations and their costs, and requests one at every launch:

    FAMILY = tune.register(tune.Family("gemm", Config, candidates, cost, problem_type=Problem, match=("dtype",)))
    config = FAMILY.choose(problem, measure, device=tensor.device.index)

TK_TUNE=1 measures unknown problems (TK_TUNE_TRIES candidates, 12). Results lie in $TK_CACHE_DIR or
~/.cache/tritonkittens.
`print(FAMILY.explain(problem))` or `python -m tritonkittens tuned gemm m=4096 …` shows the tried configurations and
the reason for the winner.
"""

from typing import TypeVar

from .cost import Cost, Device
from .report import Report, Row
from .store import folder
from .tuner import AnyFamily, Family, distance

__all__ = ["Cost", "Device", "Family", "Report", "Row", "distance", "families", "folder", "register"]

families: dict[str, AnyFamily] = {}

F = TypeVar("F", bound=AnyFamily)


def register(family: F) -> F:
    """Register `family` with `python -m tritonkittens tuned`, and return it. A second import of a module replaces its
    family.
    """
    families[family.name] = family
    return family
