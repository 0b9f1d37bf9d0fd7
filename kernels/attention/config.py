"""How the attention kernels are configured: from the head dimensions, the masks and how many tasks there are."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tritonkittens.lang as tk


@dataclass(frozen=True)
class Config:
    """Knobs of `AttentionForward`: keys of a block, consumer warpgroups (64 queries each), whether they take turns, slots of the rings (None: as many as
    fit), whether causal tasks come in pairs of a long and a short one."""

    cols: int = 128
    consumers: int = 2
    ordered: bool = False
    stages: int | None = None
    paired: bool = True

    def knobs(self, causal: bool) -> dict[str, Any]:
        """What the template takes."""
        order = tk.LongAndShort() if causal and self.paired else tk.LongestFirst() if causal else tk.ColumnMajor()
        return dict(cols=self.cols, consumers=self.consumers, ordered=self.ordered, stages=self.stages, order=order)


def choose(head_dim: int, value_dim: int, tasks: int, slots: int) -> Config:
    """The configuration for `tasks` tiles of 128 queries on a device that runs `slots` blocks at once."""
    cols = 128 if max(head_dim, value_dim) <= 128 else 64
    # Pairs make rounds of equal length; where every block has one task at most there is nothing to even out
    return Config(cols=cols, paired=tasks > slots)
