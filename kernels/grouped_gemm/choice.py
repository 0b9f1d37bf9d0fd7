"""The choice of a grouped product's configuration: those of `gemm` whose tasks stay whole, by the model of `gemm` for a
batch of products of about the mean size. The host knows how many rows and groups there are, not where groups end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace

import tritonkittens.lang as tk
from tritonkittens import tune
from tritonkittens.kernels.gemm import candidates as of_gemm
from tritonkittens.kernels.gemm.config import Config, Problem, itemsize_of
from tritonkittens.kernels.gemm.cost_model import cost as cost_of_gemm
from tritonkittens.lang.template.call import cluster_slots
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

ROWS, GATED = "row", "gated"  # `Problem.scales` of a product with values for each row, and of a gated one
GATED_COLS = 128  # of a tile, half of which gate the others, that 255 registers hold
SHARES = (0.45, 0.7, 0.9, 1.15, 1.8)  # sizes of groups over their mean, as those of a router differ
MANY_ROWS = 256  # of a group from which on their tiles are the kernel's rows: consumers without any of them then skip
MORE_TASKS = 1.03  # than their mean number, for groups of other sizes
SHORT_PIECES = 1.08  # time of weights that are read 128 bytes of a row at a time (measured: docs/notes/grouped_gemm.md)
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
    return problem._replace(scales="", **{field: max(1, round(share * getattr(problem, field)))})


def suits(problem: Problem, config: Config) -> bool:
    """Return whether the kernels have a configuration. CTAs of a cluster load a tile of B together: it is no part of a
    packed matrix. Values for rows, which begin anywhere, are read by threads: they belong to the kernel's rows."""
    shares = config.cluster == 1 or not (by_depth(problem) or config.swap_ab)
    fits = gates(config) if problem.scales == GATED else not (config.swap_ab and problem.scales == ROWS)
    return config.schedule == "persistent" and shares and fits


def gates(config: Config) -> bool:
    """Return whether half of a tile's columns may gate the others."""
    half = config.tile_n // 2
    staged = config.epilogue_n is None or half % (2 * config.epilogue_n) == 0
    return half in (64, 128) and staged and not config.swap_ab and config.cluster == 1 and config.team != 3


def skips(config: Config, device: tune.Device) -> bool:
    """Return whether consumers without rows of a group multiply nothing: the tensor cores then are the others'."""
    return config.team > 1 and not config.swap_ab and not device.chip.tcgen05


def _streaming(problem: Problem) -> Iterator[Config]:
    """Yield configurations that read weights in long pieces of their rows, for groups of few rows."""
    line = SWIZZLE_LINE // itemsize_of(problem.dtype)
    for cols, consumers in itertools.product((16, 32, 48, 64, 96, 128), (1, 2)):
        config = Config(swap_ab=True, tile_n=cols, tile_k=2 * line, consumers=consumers)
        if problem.b == "nk" and of_gemm.fits(problem, config):
            yield config


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
    if not by_depth(problem) and not device.chip.tcgen05:
        found += _streaming(products[0])
    if problem.scales:
        found += _upright(products[0], device.chip.tcgen05)
    few = by_depth(problem) or problem.m <= MANY_ROWS
    # both sums of a row's results are in registers of one thread where they come from tensor memory
    widest = GATED_COLS if problem.scales == GATED and device.chip.tcgen05 else math.inf
    wanted = (c for c in dict.fromkeys(found) if (few or not c.swap_ab) and c.tile_n <= widest)
    return tuple(config for config in wanted if suits(problem, config))


def _rounds(tasks: float, config: Config, device: tune.Device) -> int:
    slots = max(1, cluster_slots(device.multiprocessors, config.cluster) * config.blocks_per_sm)
    return max(1, math.ceil(tasks / slots))


def _cost_of(product: Problem, config: Config, device: tune.Device) -> tune.Cost:
    """Return the cost of groups of one size, with the gains and losses that products of one matrix do not have."""
    found = cost_of_gemm(product, config, device)
    if by_depth(product):
        return found
    size = itemsize_of(product.dtype)
    if config.k_of(size) * size == SWIZZLE_LINE:
        found = replace(found, hbm=found.hbm * SHORT_PIECES)
    if not skips(config, device):
        return found
    consumers = -(-product.m // config.tile_m)
    return replace(found, tensor=found.tensor * consumers / (config.team * -(-consumers // config.team)))


def cost(problem: Problem, config: Config, device: tune.Device) -> tune.Cost:
    """Return the mean of what the model says for groups of several sizes. They are tasks of one launch: its rounds are
    those of their mean number."""
    products = [_of_size(problem, share) for share in SHARES]
    costs = [_cost_of(product, config, device) for product in products]
    tasks = [problem.batch * math.prod(config.tiles(product)) for product in products]
    rounds = _rounds(MORE_TASKS * sum(tasks) / len(tasks), config, device)
    late = rounds * len(tasks) / sum(_rounds(n, config, device) for n in tasks)
    mean = {
        field.name: sum(getattr(found, field.name) for found in costs) / len(costs)
        * (1 if field.name in ("hbm", "setup") else late)
        for field in fields(tune.Cost)
        if field.name != "overlap"
    }  # fmt: skip
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
