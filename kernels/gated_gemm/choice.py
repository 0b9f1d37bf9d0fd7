"""The choice of a gated product's configuration: those of `gemm` for one product of all columns whose tiles can have
the two sums of each result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from tritonkittens import tune
from tritonkittens.kernels.gemm import candidates as of_gemm
from tritonkittens.kernels.gemm.config import UNSPLIT, Config, Problem, itemsize_of
from tritonkittens.kernels.gemm.cost_model import cost as cost_of_gemm
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

TENSOR_MEMORY_COLS = 128  # of a tile whose sums come from tensor memory to 255 registers


def gates(config: Config) -> bool:
    """Return whether half of a tile's columns may gate the others, in tasks that stay whole."""
    half = config.tile_n // 2
    staged = config.epilogue_n is None or half % (2 * config.epilogue_n) == 0
    whole = config.schedule in UNSPLIT and config.cluster == 1 and not config.swap_ab and config.team != 3
    return half in (64, 128) and staged and whole


def upright(problem: Problem, tensor_memory: bool) -> Iterator[Config]:
    """Yield configurations whose rows are those of A, for products that need them: `gemm` has others for few rows."""
    line, sub_tile = SWIZZLE_LINE // itemsize_of(problem.dtype), SWIZZLE_LINE // itemsize_of(problem.out)
    for cols, consumers, lines in itertools.product((64, 128, 256), (1, 2), (1, 2)):
        staged = sub_tile if cols > 2 * sub_tile else None
        rows, depth = 128 if tensor_memory else 64, lines * line
        config = Config(tile_m=rows, tile_n=cols, tile_k=depth, consumers=consumers, epilogue_n=staged)
        if of_gemm.fits(problem, config):
            yield config


def candidates(problem: Problem, device: tune.Device) -> tuple[Config, ...]:
    """Return the configurations that are worth a prediction."""
    found = (*of_gemm.candidates(problem, device), *upright(problem, device.chip.tcgen05))
    widest = TENSOR_MEMORY_COLS if device.chip.tcgen05 else math.inf
    return tuple(c for c in dict.fromkeys(found) if c.tile_n <= widest and gates(c))


def fits(problem: Problem, config: Config) -> bool:
    """Return whether the kernel has a configuration, and shared memory has room for it."""
    return gates(config) and of_gemm.fits(problem, config)


family: tune.Family[Problem, Config] = tune.register(
    tune.Family(
        "gated_gemm",
        Config,
        candidates,
        cost_of_gemm,
        problem_type=Problem,
        match=("dtype", "out", "a", "b", "epilogue", "scales"),
        fits=fits,
    )
)
