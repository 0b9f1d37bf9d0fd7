"""The configurations that are worth a prediction for a GEMM: tiles, clusters and schedules, combined as far as they
fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import tritonkittens.lang as tk
from tritonkittens import tune
from tritonkittens.arch import CHIPS, GPUS
from tritonkittens.kernels.gemm.config import MAX_SPLITS, UNSPLIT, Config, Problem, itemsize_of
from tritonkittens.kernels.gemm.device.epilogue import transposed_bytes
from tritonkittens.kernels.gemm.device.gemm import is_one_product
from tritonkittens.kernels.gemm.reference import BLOCK
from tritonkittens.lang.template.call import cluster_slots
from tritonkittens.lang.template.smem_plan import ALIGNMENT, MANY_STAGES, RESERVE
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

HOPPER = CHIPS[90]  # whose shared memory data centre Blackwell has, too
MULTIPROCESSORS = GPUS["H200"].multiprocessors  # what the number of parts of a task is chosen for
SUB_TILE = 128  # bytes of a row of results that are staged in sub-tiles: a swizzled line
WIDTHS = tuple(range(64, 257, 16))  # columns of tiles
SINGLE = tuple(range(32, 257, 16))  # those of tiles of one consumer
TALL = tuple(range(96, 193, 16))  # those of tiles of three consumers
TALLEST = tuple(range(112, 209, 16))  # and of two with 128 rows each
# bytes of K for each scale that tensor cores apply, by the dtypes of operands and scales
BYTES_PER_SCALE = {
    **{(dtype, "float8_e8m0fnu"): 32 for dtype in ("fp8e4nv", "fp8e5")},
    ("uint8", "float8_e8m0fnu"): 16,
    ("uint8", "float8_e4m3fn"): 8,
}
FEW_ROWS = 64  # of A: its columns become those of the tile
LEAST_PART = 4  # iterations of a part of a task
SUMMED_COLS = 128  # columns of parts of tasks whose sums a thread adds in registers, one row each
FEWEST_STAGES = 3  # with which half of the columns of results are staged at a time
WASTE = 1.6  # padding of C beside the least of any tile


# ---------------------------------------------------------------- shared memory


def fits(problem: Problem, config: Config) -> bool:
    """Whether a CTA's shared memory holds the configuration.

    An activation may come with a residual, which the problem does not tell. With one, results whose sub-tiles are an
    odd number are staged whole; they then must fit whole.
    """
    return _fits(problem.kind, config)


@functools.lru_cache(maxsize=1 << 14)
def _fits(kind: Problem, config: Config) -> bool:
    known = kind.epilogue in ("", "vector") or config.epilogue_n is None or config.stages_sub_tiles(residual=True)
    placed = config if known else replace(config, epilogue_n=None, deferred_epilogue=False)
    return shared_bytes(kind, placed) <= limit(config)


def limit(config: Config) -> int:
    """Return the bytes of shared memory that a CTA may use for tiles."""
    return HOPPER.shared_for(config.blocks_per_sm) - RESERVE


def _padded(rows: int, cols: int, itemsize: int) -> int:
    return -(-rows * cols * itemsize // ALIGNMENT) * ALIGNMENT


def stage_bytes(problem: Problem, config: Config) -> int:
    """Return the bytes of a stage: the tiles of A and B of an iteration."""
    size, tile_k = itemsize_of(problem.dtype), config.k_of(itemsize_of(problem.dtype))
    rows = config.team * config.tile_m
    scales = int(scale_bytes(problem, rows + config.tile_n) * tile_k)
    return _padded(rows, tile_k, size) + _padded(config.tile_n, tile_k, size) + scales


def scale_bytes(problem: Problem, lines: int) -> float:
    """Return the bytes of scales that tensor cores apply to so many rows of A and columns of B, for a byte of K."""
    return lines / BYTES_PER_SCALE.get((problem.dtype, problem.scales), math.inf)


def epilogue_bytes(problem: Problem, config: Config) -> int:
    """Return the bytes of staged results and of the epilogue's vectors."""
    vectors = 0 if not problem.epilogue else 4 * ALIGNMENT
    # whether there is a residual is not known here
    transposed = transposed_bytes(config.tile_m) if config.swap_ab and problem.epilogue else 0
    staged = _padded(config.tile_m, config.staged, itemsize_of(problem.out))
    return config.consumers * (staged + vectors + transposed)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Return the bytes of shared memory that a CTA needs at least: two stages and the results beside them, or three
    stages where the template places the results over them."""
    stage, epilogue = stage_bytes(problem, config), epilogue_bytes(problem, config)
    received = config.consumers * config.tile_m * (config.tile_n - config.result_cols) * 4
    beside = problem.epilogue or config.epilogue_n or config.pingpong or config.cluster > 1
    if not beside and config.schedule in UNSPLIT and config.tile_n & (config.tile_n - 1) == 0:
        line = config.k_of(itemsize_of(problem.dtype)) * itemsize_of(problem.dtype)
        largest = max(config.consumers * config.tile_m, config.tile_n) * line
        if config.tile_m * config.staged * itemsize_of(problem.out) <= largest:
            return 3 * stage
    return 2 * stage + epilogue + received


def stages(problem: Problem, config: Config) -> int:
    """Return the number of pipeline stages that fit beside the staged results."""
    room = limit(config) - epilogue_bytes(problem, config)
    return min(config.stages or MANY_STAGES, max(2, room // stage_bytes(problem, config)))


# ---------------------------------------------------------------- tiles


def is_one_wgmma(problem: Problem, config: Config) -> bool:
    """Whether one wgmma multiplies 64 rows with all columns of the tile: a power of two, or where B's lines allow."""
    size = itemsize_of(problem.dtype)
    b_stored_nk = problem.a == "mk" if config.swap_ab else problem.b == "nk"
    whole = is_one_product(config.tile_m, config.tile_n, config.k_of(size), size, config.consumers, b_stored_nk)
    return config.tile_n & (config.tile_n - 1) == 0 or whole


def _can_store(problem: Problem, config: Config) -> bool:
    """Whether rows of what is stored at a time are whole swizzle atoms, for TMA to store."""
    return config.swap_ab or (config.epilogue_n or config.result_cols) * itemsize_of(problem.out) % 32 == 0


@functools.lru_cache(maxsize=256)
def _tiles(kind: Problem, few_rows: bool) -> tuple[Config, ...]:
    """Return a configuration for every size of tile that fits problems of this kind (`Problem.kind`)."""
    line = SWIZZLE_LINE // itemsize_of(kind.dtype)
    found = [Config(tile_m=128, tile_n=128, pingpong=True)]
    for swap in (False, True):
        found += [Config(consumers=1, tile_n=cols, swap_ab=swap) for cols in SINGLE]
        found += [Config(consumers=1, tile_n=cols, tile_k=2 * line, swap_ab=swap) for cols in (32, 64, 128)]
        found += [Config(tile_n=cols, swap_ab=swap) for cols in WIDTHS]
        found += [Config(consumers=3, tile_n=cols, swap_ab=swap) for cols in TALL]
        found += [Config(tile_m=128, tile_n=cols, swap_ab=swap) for cols in TALLEST]
    for cols in (16, 32, 64) if few_rows else ():
        for consumers in (1, 2) if cols * itemsize_of(kind.dtype) >= 32 else ():
            c = Config(swap_ab=True, tile_n=cols, tile_k=2 * line, consumers=consumers)
            found += [c, replace(c, blocks_per_sm=2), replace(c, tile_k=4 * line)]
    return tuple(c for c in (_staged(kind, config) for config in found) if c is not None)


def _staged(kind: Problem, config: Config) -> Config | None:
    """Return the configuration with results staged in sub-tiles where that leaves the ring another stage; None where
    it does not fit."""
    sub_tile = math.gcd(config.tile_n, SUB_TILE // itemsize_of(kind.out) // (2 if config.pingpong else 1))
    split = None
    if 2 * sub_tile < config.tile_n and sub_tile * itemsize_of(kind.out) >= 32:
        split = replace(config, epilogue_n=sub_tile)
        if kind.epilogue == "tile" and not split.stages_sub_tiles(residual=True):
            split = None
    fitting = [c for c in (config, split) if c is not None and fits(kind, c) and _can_store(kind, c)]
    return max(fitting, key=lambda c: stages(kind, c), default=None)


def _least_padding(problem: Problem, configs: Iterable[Config]) -> list[Config]:
    """Return those whose tiles cover little more than C."""

    def covered(config: Config) -> int:
        return math.prod(config.tiles(problem)) * math.prod(config.tile)

    found = [(covered(config), config) for config in configs]
    least = min((area for area, _ in found), default=0)
    return [config for area, config in found if area <= WASTE * least]


# ---------------------------------------------------------------- clusters and schedules


@functools.lru_cache(maxsize=1 << 14)
def _with(config: Config, schedule: str = "persistent", splits: int = 1, cluster: int = 1) -> Config:
    """Return a copy with another schedule and cluster; copies are slow to make."""
    return replace(config, schedule=schedule, splits=splits, cluster=cluster)


def _clusters(problem: Problem, config: Config) -> Iterator[int]:
    """Yield sizes of clusters whose CTAs share B, as far as C has rows for them."""
    down = config.tiles(problem)[0]
    if config.blocks_per_sm > 1 or config.tile_n < 96 or config.pingpong or config.tile_m > 64:
        return
    if down >= 2:
        yield 2
    if down >= 4 and config.consumers == 1:
        yield 4


def _split(problem: Problem, config: Config, cluster: int) -> Iterator[Config]:
    """Yield the configuration with tasks whose iterations several CTAs share: the tasks of an incomplete last wave, or
    all of the few that there are."""
    tasks = problem.batch * -(-math.prod(config.tiles(problem)) // cluster)
    slots = cluster_slots(MULTIPROCESSORS, cluster) * config.blocks_per_sm
    iterations = -(-problem.k // config.k_of(itemsize_of(problem.dtype)))
    most = min(MAX_SPLITS, iterations // LEAST_PART)
    if most < 2:
        return
    if tasks >= slots or cluster > 1:
        whole, parts = tk.SplitTail().split(tasks, slots)
        if tasks > whole and 1 < parts <= most:
            yield _with(config, "split_tail", 1, cluster)
    if cluster > 1 or config.pingpong or config.deferred_epilogue:
        return
    fullest = min(slots // max(1, tasks), most)  # parts that run at once
    filling = {n for n in (2, 3, 4, 6, 8, 12, 16) if slots < 3 * tasks * n <= 4 * slots and n <= most}
    yield from (_with(config, "split_k", n) for n in sorted({*filling, fullest, fullest // 2}) if n > 1)
    for n in sorted({n for n in {*filling, min(fullest, 8)} if n in (2, 4, 8)}):
        yield from _shared_by_cluster(problem.kind, config, n)


@functools.lru_cache(maxsize=4096)
def _shared_by_cluster(kind: Problem, config: Config, parts: int) -> tuple[Config, ...]:
    """Return the configuration with a cluster's CTAs sharing each task, if they can share its columns too."""
    if config.tile_n % (16 * parts) or config.tile_n & (config.tile_n - 1):
        return ()
    shared = replace(config, schedule="cluster_split_k", splits=parts, epilogue_n=None)
    return (shared,) if fits(kind, shared) and _can_store(kind, shared) else ()


@functools.lru_cache(maxsize=4096)
def _deferred(kind: Problem, config: Config) -> Config:
    """Return the configuration with results that leave under the products of the next task, if it can have them."""
    if config.tile_m == 64 and config.consumers == 2 and config.tile_n >= 192 and config.epilogue_n:
        deferred = replace(config, deferred_epilogue=True)
        if deferred.defers(kind.epilogue == "tile", itemsize_of(kind.out)):
            return deferred
    return config


@functools.lru_cache(maxsize=256)
def _large(kind: Problem) -> tuple[Config, ...]:
    """Return configurations of large products with other raster orders and cache hints: they read less of HBM, and so
    draw less power."""
    sub_tile = SUB_TILE // itemsize_of(kind.out)
    found = [_deferred(kind, Config(epilogue_n=sub_tile, cluster=n, group=group)) for group in (4, 16) for n in (1, 2)]
    turns = Config(tile_m=128, tile_n=128, pingpong=True, epilogue_n=sub_tile // 2)
    found += [replace(turns, group=group) for group in (2, 4)]
    found += [replace(turns, schedule="split_tail", group=group) for group in (4, 8)]
    found += [replace(turns, schedule="split_tail", group=12, swap_ab=swap, streamed=True) for swap in (False, True)]
    return tuple(c for c in found if fits(kind, c) and (kind.epilogue != "tile" or c.stages_sub_tiles(residual=True)))


def candidates(problem: Problem, device: tune.Device) -> tuple[Config, ...]:
    """Return the configurations that are worth a prediction for a problem on a device."""
    return _candidates(problem, device.chip.tcgen05)


@functools.lru_cache(maxsize=4096)
def _candidates(problem: Problem, tensor_memory: bool) -> tuple[Config, ...]:
    if problem.scales == "block":
        return tuple(_block_scaled(problem))
    if problem.scales:
        return tuple(_microscaled(problem))
    if tensor_memory:
        return tuple(_in_tensor_memory(problem))
    found, kind = [], problem.kind
    for config in _least_padding(problem, _tiles(kind, problem.m <= FEW_ROWS)):
        if problem.batch * math.prod(config.tiles(problem)) > MULTIPROCESSORS:
            config = _deferred(kind, config)
        for cluster in (1, *_clusters(problem, config)):
            found += [_with(config, cluster=cluster), *_split(problem, config, cluster)]
    if problem.batch * problem.m * problem.n >= MULTIPROCESSORS * 128 * 256:
        found += _large(kind)
    return tuple(c for c in dict.fromkeys(found) if _fits(kind, c))


def _in_tensor_memory(problem: Problem) -> Iterator[Config]:
    """Yield the configurations whose sums lie in tensor memory. One MMA takes 128 rows and a power of two of columns;
    the sums of a task are stored while the next task's products run."""
    for config in _least_padding(problem, _tensor_memory_tiles(problem.kind)):
        yield config
        if config.consumers == 1 and config.tile_n >= 128 and config.tiles(problem)[0] >= 2:
            yield _with(config, cluster=2)  # a pair of CTAs
        iterations = -(-problem.k // config.k_of(itemsize_of(problem.dtype)))
        if config.tile_n <= SUMMED_COLS and iterations >= 2 * LEAST_PART:  # whose parts are summed in registers
            yield from _split(problem, config, 1)


@functools.lru_cache(maxsize=256)
def _tensor_memory_tiles(kind: Problem) -> tuple[Config, ...]:
    """Return a configuration for every size of tile with sums in tensor memory."""
    line, sub_tile = SWIZZLE_LINE // itemsize_of(kind.dtype), SUB_TILE // itemsize_of(kind.out)
    found = []
    for swap in (False, True):
        for consumers, most in ((1, 256), (2, 128)):
            for cols in (n for n in (32, 64, 128, 192, 256) if n <= most):
                c = Config(tile_m=128, tile_n=cols, consumers=consumers, swap_ab=swap)
                staged = replace(c, epilogue_n=sub_tile) if cols % (2 * sub_tile) == 0 and cols > 2 * sub_tile else c
                found += [staged, replace(staged, tile_k=2 * line)] if cols <= 64 else [staged]
    return tuple(
        c for c in found if _can_store(kind, c) and 2 * stage_bytes(kind, c) + epilogue_bytes(kind, c) <= limit(c)
    )


def _microscaled(problem: Problem) -> Iterator[Config]:
    """Yield the configurations of products whose scales the tensor cores apply: of 128 rows, and whole blocks of scales
    of columns."""
    for config in _tensor_memory_tiles(problem.kind):
        if config.consumers == 1 and config.tile_n % BLOCK == 0 and not config.swap_ab and fits(problem, config):
            config = _by_halves(problem, config)
            yield config
            if config.tiles(problem)[0] >= 2:
                yield _with(config, cluster=2)  # a pair of CTAs
            if config.tile_n <= SUMMED_COLS:  # whose parts are summed in registers
                yield from (c for c in _split(problem, config, 1) if fits(problem, c))


def _by_halves(problem: Problem, config: Config) -> Config:
    """Return the configuration with half of its columns staged at a time, where that leaves `FEWEST_STAGES`.

    Scales leave no room in tensor memory for two sets of sums of 256 columns: the next products wait until the sums are
    read. Between smaller sub-tiles, consumers would wait for stores.
    """
    halves = replace(config, epilogue_n=config.tile_n // 2)
    long = config.tile_n > SUMMED_COLS and config.epilogue_n
    return halves if long and fits(problem, halves) and stages(problem, halves) >= FEWEST_STAGES else config


def _block_scaled(problem: Problem) -> Iterator[Config]:
    """Yield the configurations of e4m3 operands with block scales."""
    for consumers, cols in ((1, BLOCK), (2, BLOCK), (2, 2 * BLOCK), (1, 2 * BLOCK)):
        for cluster in (1, 2):
            for group in (None, 16):
                c = Config(tile_n=cols, tile_k=BLOCK, consumers=consumers, cluster=cluster, group=group)
                sub_tiles = replace(c, epilogue_n=SUB_TILE // itemsize_of(problem.out))
                found = [c, sub_tiles] if cols > BLOCK and problem.epilogue != "tile" else [c]
                yield from (c for c in found if fits(problem, c))
    small = Config(tile_n=64, tile_k=BLOCK, consumers=1)
    if fits(problem, small):
        yield small
