"""A GEMM's problem and configuration. `candidates` lists configurations of a problem, `cost_model` predicts their
times, and `choice` chooses."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import tritonkittens.lang as tk
from tritonkittens.lang.schedule.raster import supergroup_rows
from tritonkittens.lang.template.renamed import refuse_old
from tritonkittens.lang.types.tiles import SWIZZLE_LINE

SCHEDULES = ("persistent", "one_per_block", "split_k", "cluster_split_k", "split_tail", "stream_k")
UNSPLIT = ("persistent", "one_per_block")  # schedules whose tasks stay whole
SPLIT = ("split_k", "cluster_split_k")  # those whose parts `splits` counts
ORDERS = ("supergroup", "row_major", "column_major")
MAX_SPLITS = 16
NEIGHBOURS = 16  # CTAs of a GPC, adjacent in the grid: what several of them read comes from L2 once
AT_ONCE = 128  # tiles that all run at once: a supergroup's divisions would only delay a short kernel's start
LONG, MUCH_LESS = 2048, 0.85  # K from which that is little beside reading so many times the lines
GROUP = 8  # tiles of a supergroup at most: more leave the CTAs that run at once with too few columns of B in common


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

    @property
    def kind(self) -> Problem:
        """The problem without its extents: what memory, layouts and arithmetic depend on."""
        return self._replace(batch=0, m=0, n=0, k=0)


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
        rows = supergroup_rows(max(m, 1), max(n, 1), max(problem.k, 1), self.tile, itemsize_of(problem.dtype), l2_bytes)
        return min(GROUP, 1 << (rows.bit_length() - 1))  # few heights, so that problems share kernels


def itemsize_of(dtype: str) -> int:
    return {"bf16": 2, "fp16": 2, "fp32": 4}.get(dtype, 1)
