"""The choice of a grouped product's configuration: those of `gemm` whose tasks stay whole, by the model of `gemm` for a
batch of products of about the mean size. The host knows how many rows and groups there are, not where groups end."""

from __future__ import annotations

import math
from dataclasses import fields

import tritonkittens.lang as tk
from tritonkittens import tune
from tritonkittens.kernels.gated_gemm.choice import TENSOR_MEMORY_COLS, gates, upright
from tritonkittens.kernels.gemm import candidates as of_gemm
from tritonkittens.kernels.gemm.config import Config, Problem
from tritonkittens.kernels.gemm.cost_model import cost as cost_of_gemm

# words of `Problem.scales`: a product with values for each row, a gated one, and one whose rows of A or C are selected;
# "block" is that of `gemm`
ROWS, GATED, GATHERED, SCATTERED = "row", "gated", "gathered", "scattered"
MOST_GATHERED = 128  # rows of a tile that are selected by number
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


def candidates(problem: Problem, device: tune.Device) -> tuple[Config, ...]:
    """Return the configurations that are worth a prediction."""
    products = [_of_size(problem, share) for share in SHARES]
    found = [config for product in products for config in of_gemm.candidates(product, device)]
    if problem.scales not in ("", "block"):
        found += upright(products[0], device.chip.tcgen05)
    # both sums of a row's results are in registers of one thread where they come from tensor memory
    widest = TENSOR_MEMORY_COLS if GATED in problem.scales.split() and device.chip.tcgen05 else math.inf
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
