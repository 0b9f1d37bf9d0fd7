"""The choice of a grouped product's configuration: those of `gemm` whose tasks stay whole, by the model of `gemm` for a
batch of products of about the mean size. The host knows how many rows and groups there are, not where groups end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields

import tritonkittens.lang as tk
from tritonkittens import tune
from tritonkittens.kernels.gemm import candidates as of_gemm
from tritonkittens.kernels.gemm.config import Config, Problem, itemsize_of
from tritonkittens.kernels.gemm.cost_model import cost as cost_of_gemm
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

# words of `Problem.scales`: a product with values for each row, a gated one, and one whose rows of A or C are selected;
# "block" is that of `gemm`
ROWS, GATED, GATHERED, SCATTERED = "row", "gated", "gathered", "scattered"
MOST_GATHERED = 128  # rows of a tile that are selected by number
GATED_COLS = 128  # of a tile, half of which gate the others, that 255 registers hold
SHARES = (0.6, 1.0, 1.4)  # sizes of groups that count, over their mean
STEPS = 4  # sizes from one power of two to the next that have configurations of their own


def about(total: int, groups: int) -> int:
    """Return the mean size of a group, rounded to a size that has a configuration of its own."""
    mean = max(1, -(-total // groups))
    unit = max(1, (1 << (mean.bit_length() - 1)) // STEPS)
    return -(-mean // unit) * unit


def by_depth(problem: Problem) -> bool:
    """Return whether groups are parts of the depth; else they are rows of A."""
    return problem.a == "km"


def _of_size(problem: Problem, share: float) -> Problem:
    field = "k" if by_depth(problem) else "m"
    scales = problem.scales if problem.scales == "block" else ""
    return problem._replace(scales=scales, **{field: max(1, round(share * getattr(problem, field)))})


def suits(problem: Problem, config: Config) -> bool:
    """Return whether the kernels have a configuration. CTAs of a cluster load a tile of B together: it is no part of a
    packed matrix. Values for rows, which begin anywhere, are read by threads: they belong to the kernel's rows."""
    words = problem.scales.split()
    shares = config.cluster == 1 or not (by_depth(problem) or config.swap_ab)
    fits = gates(config) if GATED in words else not (config.swap_ab and ROWS in words)
    chosen = selects(config, GATHERED in words, SCATTERED in words)
    return config.schedule == "persistent" and shares and fits and chosen


def selects(config: Config, rows: bool, out_rows: bool) -> bool:
    """Return whether rows of A, or of C, may be selected by number. A thread has room for the addresses of so many rows
    of A; rows of C leave whole, by the vector of numbers of a consumer."""
    packed = config.tile_n if config.swap_ab else config.tile_m * config.team
    gathers = config.cluster == 1 and packed & (packed - 1) == 0 and 8 <= packed <= MOST_GATHERED
    return (gathers or not rows) and not (out_rows and (config.swap_ab or config.deferred_epilogue))


def gates(config: Config) -> bool:
    """Return whether half of a tile's columns may gate the others."""
    half = config.tile_n // 2
    staged = config.epilogue_n is None or half % (2 * config.epilogue_n) == 0
    return half in (64, 128) and staged and not config.swap_ab and config.cluster == 1 and config.team != 3


def _upright(problem: Problem, tensor_memory: bool) -> Iterator[Config]:
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
    products = [_of_size(problem, share) for share in SHARES]
    found = [config for product in products for config in of_gemm.candidates(product, device)]
    if problem.scales not in ("", "block"):
        found += _upright(products[0], device.chip.tcgen05)
    # both sums of a row's results are in registers of one thread where they come from tensor memory
    widest = GATED_COLS if GATED in problem.scales.split() and device.chip.tcgen05 else math.inf
    return tuple(c for c in dict.fromkeys(found) if c.tile_n <= widest and suits(problem, c))


def cost(problem: Problem, config: Config, device: tune.Device) -> tune.Cost:
    """Return the mean of what the model says for groups of several sizes."""
    costs = [cost_of_gemm(_of_size(problem, share), config, device) for share in SHARES]
    names = [f.name for f in fields(tune.Cost) if f.name != "overlap"]
    mean = {name: sum(getattr(c, name) for c in costs) / len(costs) for name in names}
    return tune.Cost(**mean, overlap=costs[0].overlap)


def order_of(problem: Problem, config: Config, l2_bytes: int) -> tk.Order:
    """Return the raster order within a group. Tiles that read the same columns of B follow each other, also where a
    group of the mean size has one of them."""
    order = config.ordering(_of_size(problem, 1), l2_bytes)
    if isinstance(order, tk.Supergroup) or by_depth(problem):
        return order
    return tk.RowMajor() if config.swap_ab else tk.ColumnMajor()


family: tune.Family[Problem, Config] = tune.register(
    tune.Family(
        "grouped_gemm",
        Config,
        candidates,
        cost,
        problem_type=Problem,
        match=("dtype", "out", "a", "b", "epilogue", "scales"),
        fits=of_gemm.fits,
    )
)
