"""How the attention kernels are configured: from the head dimensions, the masks and how many tasks there are."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tritonkittens.lang as tk

C = TypeVar("C")
SMALLEST_FUSED = 48  # dimension: padded to 64, 5 products are fewer than 7 of it
MAX_SUMS = 256  # columns of dK and dV together of one consumer's keys


@dataclass(frozen=True)
class Config:
    """Knobs of `AttentionForward`: keys of a block, consumer warpgroups (64 queries each), whether they take turns, slots of the rings (None: as many as
    fit), whether causal tasks come in pairs of a long and a short one, the order of tasks where it is not to follow from that, the power of two
    up to which weights may grow before sums are rescaled (not for fp8)."""

    cols: int = 128
    consumers: int = 2
    ordered: bool = False
    stages: int | None = None
    paired: bool = True
    order: tk.Order | None = None
    lazy: float = 0.0

    def knobs(self, causal: bool) -> dict[str, Any]:
        """What the template takes."""
        order = self.order or (tk.LongAndShort() if causal and self.paired else tk.LongestFirst() if causal else tk.ColumnMajor())
        return dict(cols=self.cols, consumers=self.consumers, ordered=self.ordered, stages=self.stages, order=order, lazy=self.lazy)


def choose(make: Callable[[Config], tk.lcf], head_dim: int, value_dim: int, tasks: int, slots: int) -> tk.lcf:
    """The forward template for `tasks` tiles of 128 queries on a device that runs `slots` blocks at once."""
    cols = 128 if max(head_dim, value_dim) <= 128 else 64
    # Pairs make rounds of equal length; where every block has one task at most there is nothing to even out
    return fitting(make, [Config(cols=c, paired=tasks > slots) for c in (cols, cols // 2)])


def choose_backward(
    make_queries: Callable[[int], tk.lcf], make_keys: Callable[[int, bool, bool], tk.lcf], head_dim: int, value_dim: int,
) -> tuple[tk.lcf, tuple[tk.lcf, ...]]:  # fmt: skip
    """(the pass for dQ, the passes for dK and dV), of templates made for a number of consumers and which of dK and dV: both where the sums of 64 keys by both
    dimensions, half of that in registers of a thread, leave room for the scores."""
    parts = ((True, True),) if head_dim + value_dim <= MAX_SUMS else ((True, False), (False, True))

    def of_part(part: tuple[bool, bool]) -> tk.lcf:
        return fitting(lambda consumers: make_keys(consumers, *part), (2, 1))

    return fitting(make_queries, (2, 1)), tuple(of_part(part) for part in parts)


def choose_fused(make: Callable[[int, int], tk.lcf], head_dim: int, value_dim: int) -> tk.lcf | None:
    """The single pass for dQ, dK and dV, of templates made for a padded dimension and the queries of a block; None where two passes do less: for dimensions
    that differ, are far below 64, or whose sums do not fit into registers."""
    if head_dim != value_dim or not SMALLEST_FUSED <= head_dim <= 128:
        return None
    return make(64, 128) if head_dim <= 64 else make(128, 64)


def fitting(make: Callable[[C], tk.lcf], options: Sequence[C]) -> tk.lcf:
    """The template of the first option whose tiles fit into shared memory, or of the last."""
    for option in options[:-1]:
        template = make(option)
        try:
            template.placement(90)
        except tk.TileError:
            continue
        return template
    return make(options[-1])
