"""Which tile a block works on: supergroup order for L2, task ↔ coordinate helpers."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tritonkittens.lang._backend import Trace, op


@triton.jit
def _supergroup(task, rows, cols, GROUP: tl.constexpr):
    per_group = GROUP * cols
    first = (task // per_group) * GROUP
    size = tl.minimum(rows - first, GROUP)
    size = tl.maximum(size, 1)  # past the last task
    inside = task % per_group
    return first + inside % size, inside // size


@op
def supergroup(t: Trace, task: Any, rows: Any, cols: Any, group: Any) -> Any:
    """(row, col) of tile number `task` of a `rows` × `cols` grid, walked in bands of `group` rows, column by column within a band.

    Blocks that run at the same time then share rows of A and columns of B in L2. Source: Triton matmul tutorial, "L2 cache optimizations".
    """
    return t.call(_supergroup, task, rows, cols, group)


@triton.jit
def _ceil_div(a, b):
    return (a + b - 1) // b


@op
def ceil_div(t: Trace, a: Any, b: Any) -> Any:
    """⌈a / b⌉ for non-negative integers."""
    return t.call(_ceil_div, a, b)


@op
def block_index(t: Trace, axis: Any = 0) -> Any:
    """Index of this block in the launch grid."""
    return t.call("program_id", axis)


@op
def block_count(t: Trace, axis: Any = 0) -> Any:
    """Blocks in the launch grid."""
    return t.call("num_programs", axis)


@triton.jit
def _unravel(index, extent):
    return index // extent, index % extent


@op
def unravel(t: Trace, index: Any, extent: Any) -> Any:
    """(index // extent, index % extent)."""
    return t.call(_unravel, index, extent)
