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

SCHEDULES = ("persistent", "one_per_block", "launch_control", "split_k", "cluster_split_k", "split_tail", "stream_k")
UNSPLIT = ("persistent", "one_per_block", "launch_control")  # schedules whose tasks stay whole
SPLIT = ("split_k", "cluster_split_k")  # those whose parts `splits` counts
ORDERS = ("supergroup", "row_major", "column_major")
MAX_SPLITS = 16
NEIGHBOURS = 16  # CTAs of a GPC, adjacent in the grid: what several of them read comes from L2 once
AT_ONCE = 128  # tiles that all run at once: a supergroup's divisions would only delay a short kernel's start
LONG = 2048  # K from which a supergroup that reads MUCH_LESS lines is worth its divisions
MUCH_LESS = 0.85
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
    """How a GEMM is computed. A field that is None is chosen for the problem.

    A task is one tile of C: `tile_m` · `consumers` rows (`tile_m` with `pingpong`) and `tile_n` columns. An iteration
    multiplies `tile_k` of K.

    Args:
        tile_m: rows of a consumer, 64 or 128.
        tile_n: columns of a tile, a multiple of 16 up to 256.
        tile_k: K of an iteration; None: one swizzled line of the operands, 128 bytes.
        consumers: warpgroups that multiply, 1 to 4.
        stages: stages of the pipeline; None: as many as fit.
        blocks_per_sm: CTAs of an SM that run at once.
        cluster: CTAs that share a tile of B by multicast, 1, 2 or 4.
        pingpong: each consumer has a tile of its own, and the main loops alternate.
        swap_ab: computes Cᵀ = Bᵀ·Aᵀ, so that `tile_m` runs along N. For few rows of A.
        schedule: one of SCHEDULES ("launch_control": on chips with tensor memory only); splits: the parts of a task of
            "split_k" and "cluster_split_k".
        order: the raster order, one of ORDERS; group: rows of tiles of a supergroup.
        epilogue_n: columns of results that a consumer stages at a time. That leaves more shared memory to the
            pipeline. None, or where a residual would need an odd number of these sub-tiles: all columns.
        streamed: B and C have the cache policy evict_first, which leaves L2 to the rows of A that a supergroup reads
            again.
        deferred_epilogue: results of at most two bytes wait in registers, and leave in sub-tiles under the products of
            the CTA's next task.

    Raises:
        ValueError: fields that exclude each other. Tiles that no kernel has are refused when it is compiled.
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
                f"cluster={self.cluster}, pingpong={self.pingpong}): 2, 4 or 8 blocks of a cluster finish a multiple "
                "of 16 columns each; that needs cluster=1 and pingpong=False"
            )
        if self.epilogue_n is not None and (self.epilogue_n <= 0 or self.result_cols % self.epilogue_n):
            raise ValueError(
                f"Config(epilogue_n={self.epilogue_n!r}, tile_n={self.result_cols}): sub-tiles must divide the columns"
            )
        if self.deferred_epilogue and (self.epilogue_n is None or self.schedule == "cluster_split_k"):
            raise ValueError(
                f"Config(deferred_epilogue=True, epilogue_n={self.epilogue_n!r}, schedule={self.schedule!r}): results "
                "that wait in registers leave in sub-tiles, of tasks that a block finishes alone"
            )
        if not 1 <= self.splits <= MAX_SPLITS or (self.splits > 1) != (self.schedule in SPLIT):
            raise ValueError(
                f"Config(schedule={self.schedule!r}, splits={self.splits}): schedules 'split_k' and 'cluster_split_k' "
                f"take 2 to {MAX_SPLITS} splits, the others 1"
            )

    def to_text(self) -> str:
        """Return all fields as JSON; `from_text` reads them."""
        return json.dumps(self.__dict__)

    @staticmethod
    def from_text(text: str) -> Config:
        return Config(**json.loads(text))

    @property
    def team(self) -> int:
        """Consumers that share a tile."""
        return 1 if self.pingpong else self.consumers

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that the CTAs of a cluster compute together."""
        return self.tile_m * self.cluster * self.team, self.tile_n

    @property
    def sharers(self) -> int:
        """CTAs of a cluster that share the iterations of a task, and then its columns."""
        return self.splits if self.schedule == "cluster_split_k" else 1

    @property
    def result_cols(self) -> int:
        """Columns that a CTA finishes of a task."""
        return self.tile_n // self.sharers

    @property
    def staged(self) -> int:
        """Columns of results that a consumer stages: two sub-tiles, or all."""
        return 2 * self.epilogue_n if self.epilogue_n else self.result_cols

    def stages_sub_tiles(self, residual: bool) -> bool:
        """Whether results are staged in sub-tiles. A residual then needs an even number of them."""
        return self.epilogue_n is not None and (not residual or self.result_cols // self.epilogue_n % 2 == 0)

    def defers(self, residual: bool, itemsize: int) -> bool:
        """Whether results of `itemsize` bytes wait in registers until the next task.

        Results of four bytes would take as many registers as the accumulators. A residual is added to waiting results
        in their dtype: not to single bytes, and not in tasks that CTAs share."""
        added = self.stages_sub_tiles(residual=True) and self.schedule in UNSPLIT and itemsize == 2
        return self.deferred_epilogue and itemsize <= 2 and (added or not residual)

    def k_of(self, itemsize: int) -> int:
        """Return the K of an iteration: `tile_k`, or a swizzled line of operands of `itemsize` bytes."""
        return self.tile_k or SWIZZLE_LINE // itemsize

    def scheduler(self) -> tk.Schedule:
        made = {
            "persistent": tk.Persistent,
            "one_per_block": tk.OnePerBlock,
            "launch_control": tk.ClusterLaunchControl,
            "split_tail": tk.SplitTail,
            "stream_k": tk.StreamK,
        }
        if self.schedule in SPLIT:
            return tk.SplitK(self.splits) if self.schedule == "split_k" else tk.ClusterSplitK(self.splits)
        return made[self.schedule]()

    def ordering(self, problem: Problem, l2_bytes: int) -> tk.Order:
        """Return the raster order.

        A supergroup has as many rows of tiles as stay in L2 with their rows of A while B passes. Tiles that all run at
        once have the order in which neighbours share most lines, and of equal ones the order whose index is faster to
        compute."""
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
        """Return the tiles of C (of Cᵀ with `swap_ab`), down and across."""
        m, n = (problem.n, problem.m) if self.swap_ab else (problem.m, problem.n)
        return -(-m // self.tile[0]), -(-n // self.tile[1])

    def shared_lines(self, problem: Problem, order: tk.Order) -> float:
        """Return the rows of A plus columns of B that the CTAs of a GPC read together in an iteration."""
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
    """Return the bytes of an element, by the dtype's name in a `Problem`."""
    return {"bf16": 2, "fp16": 2, "fp32": 4}.get(dtype, 1)
