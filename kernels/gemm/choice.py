"""The choice of a GEMM's configuration: tables, measurements, problems that are computed alike, and the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tritonkittens import tune
from tritonkittens.kernels.gemm.candidates import candidates, fits
from tritonkittens.kernels.gemm.config import Config, Problem
from tritonkittens.kernels.gemm.cost_model import cost

# dtypes of as many bytes, multiplied at the same rate
TWINS = {"bf16": "fp16", "fp16": "bf16", "fp8e4nv": "fp8e5", "fp8e5": "fp8e4nv"}


def alike(problem: Problem) -> Iterator[Problem]:
    """Yield problems of equal extents that are computed alike, the most similar first: other dtypes of equal size,
    other layouts of the operands, no epilogue.

    Their measured winners are mostly the same, more often than the model's first choice (measured:
    docs/notes/gemm.md).
    """
    dtypes = itertools.product(*((dtype, TWINS.get(dtype, dtype)) for dtype in (problem.dtype, problem.out)))
    layouts = ((problem.a, problem.b), *itertools.product(("mk", "km"), ("nk", "kn")))
    found = (
        problem._replace(dtype=dtype, out=out, a=a, b=b, epilogue=epilogue)
        for epilogue, (a, b), (dtype, out) in itertools.product((problem.epilogue, ""), layouts, dtypes)
    )
    return (other for other in dict.fromkeys(found) if other != problem)


family: tune.Family[Problem, Config] = tune.register(
    tune.Family(
        "gemm",
        Config,
        candidates,
        cost,
        problem_type=Problem,
        match=("dtype", "out", "a", "b", "epilogue", "scales"),
        alike=alike,
        fits=fits,
    )
)
