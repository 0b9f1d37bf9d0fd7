"""How a matrix product is configured: what can be chosen, what is worth trying for a problem, and what the cost model
says of it."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import tritonkittens.lang as tk
from tritonkittens import tune
from tritonkittens.arch import CHIPS, TENSOR_COLUMNS
from tritonkittens.kernels._tensors import CACHE_LINE, addressable_pitch
from tritonkittens.kernels.gemm.device.epilogue import turned_bytes
from tritonkittens.kernels.gemm.device.gemm import is_one_product
from tritonkittens.kernels.gemm.reference import BLOCK
from tritonkittens.lang.schedule.raster import supergroup_rows
from tritonkittens.lang.template.call import cluster_slots
from tritonkittens.lang.template.renamed import refuse_old
from tritonkittens.lang.template.smem_plan import ALIGNMENT, MANY_STAGES, RESERVE
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

SCHEDULES = ("persistent", "one_per_block", "split_k", "cluster_split_k", "split_tail", "stream_k")
UNSPLIT = ("persistent", "one_per_block")  # schedules whose tasks stay whole
SPLIT = ("split_k", "cluster_split_k")  # those whose parts `splits` counts
ORDERS = ("supergroup", "row_major", "column_major")
MAX_SPLITS = 16
HOPPER = CHIPS[90]  # whose shared memory data centre Blackwell has, too
PANEL_BYTES = 128  # of a row of results that are staged in panels: a swizzled line
TALL_COLS = ((176, 16), (192, 32))  # columns, and those of a panel, of tiles of 192 rows: four slots fit
# no powers of two: where a wave of multiprocessors would be left half empty
WHOLE_COLS = (96, 112, 144, 160, 176, 192, 224)

# Fitted to a sweep of configurations (docs/notes/gemm.md): seconds from the launch to the first product and from the
# last to the end, of a kernel that does no more, and what a task costs beside its iterations.
LAUNCH = 4.6e-6
TASK = 1.6e-6
FIX_UP = 3.2e-6  # of a task that parts are summed up for, beside writing a part and reading all
# of a task whose sums the blocks of a cluster exchange, beside their bytes at a quarter of shared memory's rate
SUM_IN_CLUSTER = 0.7e-6
CLUSTER_LAUNCH = 1e-6  # more than LAUNCH where blocks wait for each other
NEIGHBOURS = 16  # blocks of a GPC, next to each other in the grid: what several of them read comes from L2 once
L2_EFFICIENCY = 0.42  # of the rate of L2 with many readers
# of a multiprocessor for each element of C
EPILOGUE_CYCLES = {"": 0.0, "vector": 0.06, "tile": 0.12, "silu": 0.25, "gelu_tanh": 0.3, "gelu": 0.4}
TENSOR_EFFICIENCY = 0.86  # of the rate at the clock under load, of the widest product
PIECES_EFFICIENCY = 0.9  # of columns that are no power of two: several products, each of which reads A
# Cycles in which a multiprocessor receives a swizzled line of an operand whose rows begin cache lines, begin inside one
# (two are read), and inside a sector of one (five sectors are): measured, docs/notes/gemm.md.
ALIGNED, STRADDLING, MISALIGNED = 2.0, 2.9, 4.0
SECTOR = 32  # bytes
# From so many seconds of products on the card's power sets the clock, and consumers that take turns take so much
# longer, since each loads a B of its own: the median of the products of the H200's table of which both kinds were
# measured.
POWER_LIMITED, TURNS_DRAW = 4e-4, 1.05
# as many bytes, multiplied at the same rate
TWINS = {"bf16": "fp16", "fp16": "bf16", "fp8e4nv": "fp8e5", "fp8e5": "fp8e4nv"}
TURNS_STAGES = 6  # slots from which on consumers that take turns find the first of their task filled
LATENCY = 1.4e-6  # from a copy's issue to its arrival while many are in flight


class Problem(NamedTuple):
    """C (M × N) = A (M × K) · B (K × N), `batch` of them. Plain values, as a tuning table keeps them.

    dtype, out: names of element types ("bf16"). a, b: how A and B are stored, "mk" or "km" and "kn" or "nk". epilogue:
    "" for none, "vector" for what is read along rows or columns, "tile" where a matrix is read as well, an activation's
    name with or without them. scales: "block" for block scales, else "".
    """

    dtype: str
    out: str
    a: str
    b: str
    epilogue: str
    scales: str
    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Config:
    """How a product is computed; None is chosen for the problem.

    A task is a tile of C of `tile_m` · consumers rows (`tile_m` with `pingpong`) by `tile_n`, `tile_k` of K an
    iteration. `swap_ab`: Cᵀ = Bᵀ·Aᵀ is
    computed, so that `tile_m` run along N: for few rows of A. `splits`: parts of a task (schedule "split_k").
    `epilogue_n`: columns of its results that a consumer stages at a time, which leaves more shared memory to the ring;
    None: all at once, also where a residual would need an odd number of them. `streamed`: B and the results leave L2
    before the rows of A that a supergroup reads again. `deferred_epilogue`: results wait in registers and leave in
    panels under the products of the block's next task; those of more than two bytes, and of one byte or of split tasks
    where there is a residual, leave at the end of their task all the same.

    Raises ValueError for values that no kernel has.
    """

    tile_m: int = 64
    tile_n: int = 256
    tile_k: int | None = None
    consumers: int = 2
    stages: int | None = None
    blocks_per_sm: int = 1
    cluster: int = 1
    pingpong: bool = False
    swap_ab: bool = False
    schedule: str = "persistent"
    splits: int = 1
    order: str = "supergroup"
    group: int | None = None
    epilogue_n: int | None = None
    streamed: bool = False
    deferred_epilogue: bool = False

    def __new__(cls, *values: object, **fields: object) -> Config:
        refuse_old("Config", "configuration", fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field, known in (("schedule", SCHEDULES), ("order", ORDERS)):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"Config({field}={getattr(self, field)!r}): must be one of {', '.join(map(repr, known))}"
                )
        shared = (
            self.splits in (2, 4, 8)
            and self.tile_n % (16 * self.splits) == 0
            and self.cluster == 1
            and not self.pingpong
        )
        if self.schedule == "cluster_split_k" and not shared:
            raise ValueError(
                f"Config(schedule='cluster_split_k', splits={self.splits}, tile_n={self.tile_n}, "
                f"cluster={self.cluster}, "
                f"pingpong={self.pingpong}): 2, 4 or 8 blocks of a cluster finish a multiple of 16 columns each; that "
                "needs cluster=1 and "
                "pingpong=False"
            )
        if self.epilogue_n is not None and (self.epilogue_n <= 0 or self.result_cols % self.epilogue_n):
            raise ValueError(
                f"Config(epilogue_n={self.epilogue_n!r}, tile_n={self.result_cols}): panels must divide the columns"
            )
        if self.deferred_epilogue and (self.epilogue_n is None or self.schedule == "cluster_split_k"):
            raise ValueError(
                f"Config(deferred_epilogue=True, epilogue_n={self.epilogue_n!r}, schedule={self.schedule!r}): results "
                "that wait in registers leave in panels, of tasks "
                "that a block finishes alone"
            )
        if not 1 <= self.splits <= MAX_SPLITS or (self.splits > 1) != (self.schedule in SPLIT):
            raise ValueError(
                f"Config(schedule={self.schedule!r}, splits={self.splits}): schedules 'split_k' and 'cluster_split_k' "
                f"take 2 to {MAX_SPLITS} "
                "splits, the others 1"
            )

    def to_text(self) -> str:
        """For where only plain values pass; see `from_text`."""
        return json.dumps(self.__dict__)

    @staticmethod
    def from_text(text: str) -> Config:
        return Config(**json.loads(text))

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that the blocks of a cluster compute together."""
        return self.tile_m * self.cluster * (1 if self.pingpong else self.consumers), self.tile_n

    @property
    def sharers(self) -> int:
        """Blocks of a cluster that share a task's iterations, and then its columns."""
        return self.splits if self.schedule == "cluster_split_k" else 1

    @property
    def result_cols(self) -> int:
        """Columns that a block finishes of a task."""
        return self.tile_n // self.sharers

    @property
    def staged(self) -> int:
        """Columns of its results that a consumer has room for where they are staged."""
        return 2 * self.epilogue_n if self.epilogue_n else self.result_cols

    def stages_panels(self, residual: bool) -> bool:
        """Are results staged in panels? A residual then comes panel by panel, and in an even number."""
        return self.epilogue_n is not None and (not residual or self.result_cols // self.epilogue_n % 2 == 0)

    def packs(self, residual: bool, itemsize: int) -> bool:
        """Do results of so many bytes each wait in registers? Those of four bytes take as many as the sums. A residual
        is added to them as they are, so not to single bytes, and of a task that blocks share not by all."""
        added = self.stages_panels(residual=True) and self.schedule in UNSPLIT and itemsize == 2
        return self.deferred_epilogue and itemsize <= 2 and (added or not residual)

    def depth_of(self, itemsize: int) -> int:
        """Depth of an iteration: a swizzled line of the operands unless given."""
        return self.tile_k or SWIZZLE_LINE // itemsize

    def scheduler(self) -> tk.Schedule:
        made = {
            "persistent": tk.Persistent,
            "one_per_block": tk.OnePerBlock,
            "split_tail": tk.SplitTail,
            "stream_k": tk.StreamK,
        }
        if self.schedule in SPLIT:
            return tk.SplitK(self.splits) if self.schedule == "split_k" else tk.ClusterSplitK(self.splits)
        return made[self.schedule]()

    def ordering(self, problem: Problem, l2_bytes: int) -> tk.Order:
        """The order of tasks. A supergroup's height is chosen so that its rows of A stay in L2 while B passes. Tiles
        that run all at once are in the order in which neighbours have most in common, and of such in one that is soon
        computed."""
        if self.order != "supergroup":
            return tk.RowMajor() if self.order == "row_major" else tk.ColumnMajor()
        if self.group is None and math.prod(self.tiles(problem)) <= AT_ONCE:
            simple = min((tk.RowMajor(), tk.ColumnMajor()), key=lambda order: self.shared_lines(problem, order))
            bands = min((tk.Supergroup(2), tk.Supergroup(4)), key=lambda order: self.shared_lines(problem, order))
            return (
                bands
                if problem.k >= LONG
                and self.shared_lines(problem, bands) < MUCH_LESS * self.shared_lines(problem, simple)
                else simple
            )
        return tk.Supergroup(self.group or self._group(problem, l2_bytes))

    def tiles(self, problem: Problem) -> tuple[int, int]:
        """Tiles of C, or of its transpose where that is computed, down and across."""
        m, n = (problem.n, problem.m) if self.swap_ab else (problem.m, problem.n)
        return -(-m // self.tile[0]), -(-n // self.tile[1])

    def shared_lines(self, problem: Problem, order: tk.Order) -> float:
        """Rows of A plus columns of B that the blocks of a GPC read together in an iteration."""
        down, across = self.tiles(problem)
        near = max(1, NEIGHBOURS // (self.cluster * self.sharers))
        if isinstance(order, tk.RowMajor):
            cols: float = min(near, across)
            rows = min(down, near / cols)
        else:
            rows = min(near, down, order.rows if isinstance(order, tk.Supergroup) else near)
            cols = min(across, near / rows)
            rows = min(down, max(rows, near / cols))
        return self.sharers * (rows * self.tile[0] + cols * self.tile[1])

    def _group(self, problem: Problem, l2_bytes: int) -> int:
        m, n = (problem.n, problem.m) if self.swap_ab else (problem.m, problem.n)
        return min(
            GROUP,
            supergroup_rows(max(m, 1), max(n, 1), max(problem.k, 1), self.tile, _itemsize(problem.dtype), l2_bytes),
        )


AT_ONCE = 128  # tiles that all run at once: a supergroup's divisions would only delay a short kernel's start
LONG, MUCH_LESS = 2048, 0.85  # K from which that is little beside reading so many times the lines
GROUP = 8  # tiles of a supergroup at most: more leave the blocks that run at once with too few columns of B in common


def _itemsize(dtype: str) -> int:
    return {"bf16": 2, "fp16": 2, "fp32": 4}.get(dtype, 1)


@functools.lru_cache(maxsize=4096)
def candidates(problem: Problem) -> tuple[Config, ...]:
    """Configurations that are worth measuring for a problem."""
    if problem.scales:
        found = [Config(tile_m=64, tile_n=cols, tile_k=BLOCK, consumers=consumers, cluster=cluster, group=group)
                 for consumers, cols in ((1, BLOCK), (2, BLOCK), (2, 2 * BLOCK), (1, 2 * BLOCK)) for cluster in (1, 2)
                 for group in (None, 16)] + [Config(tile_m=64, tile_n=64, tile_k=BLOCK, consumers=1)]  # fmt: skip
        found += [
            replace(c, epilogue_n=PANEL_BYTES // _itemsize(problem.out))
            for c in found
            if c.tile_n == 2 * BLOCK and problem.epilogue != "tile"
        ]
        return tuple(c for c in found if _fits(problem, c))
    found = [
        Config(),
        Config(group=4),
        Config(group=16),
        Config(cluster=2),
        Config(tile_n=128),
        Config(tile_n=128, cluster=2),
        Config(consumers=1),
        Config(tile_m=128, tile_n=128, pingpong=True),
        Config(pingpong=True),
        Config(schedule="split_tail"),
        Config(tile_n=128, schedule="split_tail"),
        Config(tile_m=128, tile_n=128, pingpong=True, schedule="split_tail"),
        Config(schedule="stream_k"),
        Config(tile_n=128, schedule="stream_k"),
        Config(tile_n=192),
        Config(tile_n=192, schedule="stream_k"),
        Config(tile_n=192, consumers=1),
        Config(tile_n=128, cluster=2, schedule="split_tail"),
    ]
    line = SWIZZLE_LINE // _itemsize(problem.dtype)
    small = [Config(consumers=1, tile_n=cols, tile_k=depth) for cols in (32, 64, 128) for depth in (line, 2 * line)]
    small += [Config(consumers=1, tile_n=128, cluster=2), Config(tile_n=64), Config(tile_n=64, tile_k=2 * line)]
    if problem.m <= 512 or problem.n <= 512 or problem.m * problem.n <= 1 << 21:
        found += small
        wide = _possible(problem, [Config(tile_n=cols) for cols in WHOLE_COLS])
        found += _possible(
            problem,
            [
                Config(consumers=1, tile_n=cols, cluster=cluster, swap_ab=swapped)
                for cols in WHOLE_COLS
                for cluster in (2, 4)
                for swapped in (False, True)
            ],
        )
        found += [Config(consumers=1, tile_n=128, cluster=4), *_in_pieces(problem)]
        found += [
            replace(c, schedule="split_k", splits=parts)
            for c in (*small, Config(tile_n=128), *wide)
            for parts in (2, 4, 8)
            if c.cluster == 1 and parts * c.depth_of(_itemsize(problem.dtype)) <= problem.k
        ]
        found += _shared_by_clusters(problem, [*small, Config(tile_n=128), Config(), Config(consumers=1)])
    if problem.m <= 64:
        found += _decode(problem, line)
    found += _possible(
        problem,
        [
            Config(tile_n=cols, consumers=consumers, swap_ab=swapped)
            for cols in WHOLE_COLS
            for consumers in (2, 1)
            for swapped in (False, True)
        ],
    )
    found += [c for c in _in_panels(problem) if problem.epilogue != "tile" or c.stages_panels(residual=True)]
    found += _possible(
        problem, [Config(tile_n=cols, cluster=2, swap_ab=swapped) for cols in WHOLE_COLS for swapped in (False, True)]
    )
    return tuple(c for c in dict.fromkeys(found) if _fits(problem, c, least=True))


def _in_panels(problem: Problem) -> list[Config]:
    """Large tiles whose results are staged in panels: one more slot where consumers share a tile, and where they take
    turns a ring as deep as hides all of what a consumer does between its products. Consumers that share a tile draw
    less of a card at its power limit, those that take turns lose less time between tasks. Streamed in high supergroups,
    turns read less of HBM, and so draw less. Measured, sustained and between others: docs/notes/gemm.md."""
    panel = PANEL_BYTES // _itemsize(problem.out)
    shared = [Config(epilogue_n=panel, group=group) for group in (None, 4, 16)] + [
        Config(epilogue_n=panel, cluster=2, group=group) for group in (None, 8)
    ]
    shared += [Config(epilogue_n=panel, group=group, schedule="split_tail") for group in (None, 16)]
    shared += [Config(epilogue_n=panel, cluster=2, group=8, schedule="split_tail")]
    if max(_line_cycles(problem)) > ALIGNED:  # the more blocks read B together, the fewer lines each receives
        shared += [Config(epilogue_n=panel, cluster=4, swap_ab=swapped) for swapped in (False, True)]
    shared += [
        c
        for c in (replace(c, deferred_epilogue=True) for c in shared)
        if c.packs(problem.epilogue == "tile", _itemsize(problem.out))
    ]
    turns = Config(tile_m=128, tile_n=128, pingpong=True, epilogue_n=panel // 2)
    found = shared + [replace(turns, group=group) for group in (None, 2, 4)] + [replace(turns, cluster=2)]
    found += [replace(turns, schedule="split_tail", group=group) for group in (None, 4, 8)]
    found += [
        replace(turns, schedule="split_tail", group=12, swap_ab=swapped, streamed=True) for swapped in (False, True)
    ]
    found += _possible(
        problem,
        [
            Config(tile_n=192, epilogue_n=math.gcd(192, panel), cluster=2, group=group, swap_ab=swapped)
            for group in (None, 4)
            for swapped in (False, True)
        ],
    )
    # with a residual, which an activation may come with, there is no room for all their results
    if problem.epilogue in ("", "vector"):
        found += _possible(problem, _tall())
    return [c for c in found if c.staged < c.tile_n]


def _tall() -> list[Config]:
    """Tiles of 192 rows: they read less of L2 for a product, and their number may divide into even rounds where that of
    others does not (GEMM 4104³: 528 of them are four rounds of 132 multiprocessors)."""
    return [Config(consumers=3, tile_n=cols, epilogue_n=panel, swap_ab=swapped, cluster=cluster)
            for cols, panel in TALL_COLS for swapped in (False, True) for cluster in (1, 2)]  # fmt: skip


def _stored_nk(problem: Problem, config: Config) -> bool:
    """Has what becomes B its depth contiguous?"""
    return problem.a == "mk" if config.swap_ab else problem.b == "nk"


def _whole(problem: Problem, config: Config) -> bool:
    size = _itemsize(problem.dtype)
    return is_one_product(
        config.tile_m, config.tile_n, config.depth_of(size), size, config.consumers, _stored_nk(problem, config)
    )


def _is_stored(problem: Problem, cols: int, swapped: bool) -> bool:
    """Has a tile of C with so many columns rows of whole swizzle atoms, for TMA to store?"""
    return swapped or cols * _itemsize(problem.out) % 32 == 0


def _in_pieces(problem: Problem) -> list[Config]:
    """Where what becomes B has lines of columns: small tiles of several products each, whose number may fill the
    multiprocessors all the same. As one product, with the last columns in the memory of a line that is loaded whole,
    fewer slots would fit (measured: docs/notes/gemm.md)."""
    found = (
        Config(consumers=1, tile_n=cols, cluster=4, swap_ab=swapped) for cols in (144, 160) for swapped in (False, True)
    )
    return [c for c in found if not _stored_nk(problem, c) and _is_stored(problem, c.tile_n, c.swap_ab)]


def _possible(problem: Problem, configs: list[Config]) -> list[Config]:
    """Those, of columns that are no power of two, which one wgmma takes, and whose tile of C can be stored."""
    return [c for c in configs if _whole(problem, c) and _is_stored(problem, c.epilogue_n or c.tile_n, c.swap_ab)]


def _line_cycles(problem: Problem) -> tuple[float, float]:
    """Cycles of a multiprocessor for a line of A and one of B, by the bytes from row to row as they are stored. Rows
    that TMA cannot address are copied."""

    def cycles(elements: int) -> float:
        pitch = addressable_pitch(elements * _itemsize(problem.dtype))
        return MISALIGNED if pitch % SECTOR else STRADDLING if pitch % CACHE_LINE else ALIGNED

    return cycles(problem.k if problem.a == "mk" else problem.m), cycles(problem.k if problem.b == "nk" else problem.n)


def _decode(problem: Problem, line: int) -> list[Config]:
    """For few rows of A: B's columns are the rows of the product, and enough blocks read it at once."""
    cols = max(16 if line == 64 else 32, 1 << max(0, problem.m - 1).bit_length())
    wide = [
        Config(swap_ab=True, tile_n=cols, tile_k=depth, consumers=consumers, blocks_per_sm=blocks)
        for depth in (2 * line, 4 * line)
        for consumers in (1, 2)
        for blocks in (1, 2)
        if depth == 2 * line or blocks == 1
    ]
    split = [
        replace(c, schedule="split_k", splits=parts)
        for c in wide
        for parts in (2, 4, 8)
        if parts * (c.tile_k or 1) <= problem.k
    ]
    tails = [replace(c, schedule="split_tail") for c in wide]
    return [
        *wide,
        *split,
        *_shared_by_clusters(
            problem, [replace(c, tile_n=extent) for c in wide for extent in {cols, 32, 64} if extent >= cols]
        ),
        *tails,
    ]


def _shared_by_clusters(problem: Problem, configs: list[Config]) -> list[Config]:
    """Those whose blocks can share the iterations of a task with others of a cluster, so that each has some, and
    columns whose rows TMA stores."""

    def possible(c: Config, parts: int) -> bool:
        cols = c.tile_n // parts
        fit = c.tile_n % (16 * parts) == 0 and _is_stored(problem, cols, c.swap_ab)
        return fit and c.cluster == 1 and parts * c.depth_of(_itemsize(problem.dtype)) <= problem.k

    return [
        replace(c, schedule="cluster_split_k", splits=parts)
        for c in configs
        for parts in (2, 4, 8)
        if possible(c, parts)
    ]


def _fits(problem: Problem, config: Config, least: bool = False) -> bool:
    """Has a block room for it, also with a residual, which may come with an activation and is staged whole where its
    panels are an odd number?"""
    known = problem.epilogue in ("", "vector") or config.epilogue_n is None or config.stages_panels(residual=True)
    return shared_bytes(problem, config if known else replace(config, epilogue_n=None), least) <= _limit(config)


def _limit(config: Config) -> int:
    return HOPPER.shared_for(config.blocks_per_sm) - RESERVE


def _padded(rows: int, cols: int, itemsize: int) -> int:
    return -(-rows * cols * itemsize // ALIGNMENT) * ALIGNMENT


def shared_bytes(problem: Problem, config: Config, least: bool = False) -> int:
    """Shared memory of a block with the stages that it needs at least, results beside the ring (`least`: over it where
    they may be)."""
    size, depth = _itemsize(problem.dtype), config.depth_of(_itemsize(problem.dtype))
    team = 1 if config.pingpong else config.consumers
    slot = _padded(team * config.tile_m, depth, size) + _padded(config.tile_n, depth, size)
    vectors = 0 if not problem.epilogue else 4 * ALIGNMENT
    # whether there is a residual is not known here
    turned = turned_bytes(config.tile_m) if config.swap_ab and problem.epilogue else 0
    epilogue = config.consumers * (_padded(config.tile_m, config.staged, _itemsize(problem.out)) + vectors + turned)
    received = config.consumers * config.tile_m * (config.tile_n - config.result_cols) * 4
    over = (
        least
        and not vectors
        and not (config.epilogue_n or config.pingpong or config.cluster > 1 or config.schedule not in UNSPLIT)
    )
    return max(3 * slot, epilogue) if over else 2 * slot + epilogue + received


def cost(problem: Problem, config: Config, device: tune.Device) -> tune.Cost:
    """What the model says: every unit's time for the busiest multiprocessor, and what nothing hides.

    A multiprocessor's tensor cores and shared memory are used by the rounds of tasks that it works on, L2 and HBM by
    all together. What several blocks of a GPC read at the same time they get from L2 once (measured:
    docs/notes/gemm.md). Infinite where sums lie in tensor memory and it has no room for them.
    """
    if device.chip.tcgen05 and config.consumers * config.tile_n > TENSOR_COLUMNS:
        return tune.Cost(tensor=math.inf)
    size, out = _itemsize(problem.dtype), _itemsize(problem.out)
    depth = config.depth_of(size)
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    rows, cols = config.tile
    tasks = problem.batch * -(-m // rows) * -(-n // cols)
    slots = max(1, cluster_slots(device.multiprocessors, config.cluster * config.sharers) * config.blocks_per_sm)
    iterations = max(1, -(-problem.k // depth))
    # turns: units of work, tasks or parts of them, that a block does one after the other
    parts, turns = 1, -(-tasks // slots)
    rounds: float = turns  # as many tasks' worth of iterations
    if config.sharers > 1:
        rounds = turns / config.sharers
    elif config.schedule == "split_k":
        parts = config.splits
        turns = -(-tasks * parts // slots)
        rounds = turns / parts
    elif config.schedule == "split_tail":
        whole, parts = tk.SplitTail().split(tasks, slots)
        rounds = whole // slots + (1 / parts if tasks > whole else 0)
        parts = parts if tasks > whole else 1
    elif config.schedule == "stream_k":
        rounds = tasks / slots * 1.1  # blocks at different depths share nothing in L2
        parts = 1 + -(-slots // tasks)
    # Blocks of one multiprocessor share its units; where they are not all there, the others have more
    crowd = min(
        config.blocks_per_sm, max(1.0, tasks * parts * config.cluster * config.sharers / device.multiprocessors)
    )
    steps = rounds * iterations * crowd
    block_rows = rows // config.cluster
    mma = 2 * block_rows * cols * depth
    efficiency = TENSOR_EFFICIENCY * (1.0 if cols & (cols - 1) == 0 or _whole(problem, config) else PIECES_EFFICIENCY)
    tensor = steps * mma / (device.tensor_flops(8 * size) / device.multiprocessors * efficiency)
    if config.pingpong and tensor > POWER_LIMITED:
        tensor *= TURNS_DRAW
    per_instruction = depth * size // 32  # wgmma takes 32 bytes of depth; each reads its 64 rows of A and all of B
    shared = (
        steps
        * (block_rows // 64)
        * per_instruction
        * (64 + cols)
        * 32
        / (device.shared_bytes_per_second / device.multiprocessors)
    )
    line_a, line_b = _line_cycles(problem)[:: -1 if config.swap_ab else 1]
    order = (
        tk.Supergroup(config.group or GROUP)
        if config.order == "supergroup"
        else config.ordering(problem, device.l2_bytes)
    )
    lines = tasks * config.cluster * iterations * config.shared_lines(problem, order) / NEIGHBOURS
    l2 = lines * depth * size / (L2_EFFICIENCY * device.l2_bytes_per_second)
    if max(line_a, line_b) > ALIGNED:  # no product waits for aligned lines
        l2 = max(
            l2,
            device.seconds(
                steps * depth * size / SWIZZLE_LINE * (block_rows * line_a + cols / config.cluster * line_b)
            ),
        )
    a_bytes, b_bytes = m * problem.k * size, n * problem.k * size
    hbm = problem.batch * (a_bytes + b_bytes + m * n * out) / device.hbm_bytes_per_second
    # A ring that is too short for the latency of its copies
    slot = (block_rows + cols) * depth * size
    staged = config.consumers * config.tile_m * config.staged * out
    stages = min(config.stages or MANY_STAGES, max(2, (_limit(config) - staged) // slot))
    latency = rounds * iterations * LATENCY / stages
    stalled = max(0.0, latency - max(tensor, shared, l2, hbm))
    # How much of what a task costs beside its iterations nothing hides: of a block's first task, and of the others,
    # which another consumer's products may hide
    alone = 1.0 if config.schedule == "one_per_block" and config.blocks_per_sm == 1 else 0.5
    packs = config.packs(problem.epilogue == "tile", out)
    between = alone if not (config.pingpong or packs) else 0.2 if stages >= TURNS_STAGES else 0.4
    synchronisation = (1 + alone + (turns - 1) * between) * TASK + stalled
    if parts > 1:
        read = 1 if parts == 2 else parts  # of two parts the last has its own
        summed = turns if config.schedule == "split_k" else 1
        synchronisation += summed * (
            FIX_UP + (1 + read) * block_rows * cols * 4 / (device.l2_bytes_per_second / device.multiprocessors)
        )
    if config.sharers > 1:
        sent = block_rows * (cols - config.result_cols) * 4
        synchronisation += turns * (
            SUM_IN_CLUSTER + sent / (device.shared_bytes_per_second / device.multiprocessors / 4)
        )
    # The epilogue, behind the products of another block or consumer where there is one; block scales are applied in
    # every iteration
    per_task = device.seconds(EPILOGUE_CYCLES[problem.epilogue] * block_rows * cols)
    epilogue = rounds * crowd * per_task
    hidden = config.pingpong or packs or crowd > 1.5
    alu = (epilogue if hidden else 0.0) + (
        device.seconds(steps * block_rows * cols * 4 / 128) if problem.scales else 0.0
    )
    synchronisation += per_task if hidden else epilogue
    setup = LAUNCH + (CLUSTER_LAUNCH if config.cluster > 1 else 0)
    return tune.Cost(
        hbm=hbm, l2=l2, shared=shared, tensor=tensor, alu=alu, setup=setup, synchronisation=synchronisation
    )


def alike(problem: Problem) -> Iterator[Problem]:
    """Problems of the same extents that are computed alike, the likest first: of other dtypes of the same size; with
    operands stored otherwise; without the epilogue. Their winners mostly are the same, which the model's first choice
    is less often (measured: docs/notes/gemm.md)."""
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
    )
)
