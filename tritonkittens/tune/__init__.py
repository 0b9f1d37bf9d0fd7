"""Which configuration a kernel runs with: ranked by a cost model, measured where asked, remembered on disk, shipped in tables.

A kernel family says what its configurations are and what they cost, and asks at every launch:

    FAMILY = tune.register(tune.Family("gemm", Config, candidates, cost, problem_type=Problem, match=("dtype",)))
    config = FAMILY.choose(problem, measure, device=tensor.device.index)

TK_TUNE=1 measures problems that are not known yet (TK_TUNE_TRIES candidates, 12); results lie in $TK_CACHE_DIR or ~/.cache/tritonkittens.
`print(FAMILY.explain(problem))` or `python -m tritonkittens tuned gemm m=4096 …` shows what was tried and why the winner won.
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
    """Makes a family known to `python -m tritonkittens tuned`. A module that is imported again registers anew."""
    families[family.name] = family
    return family
