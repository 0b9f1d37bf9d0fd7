"""Tasks of the kernels that keep tiles of queries and stream blocks of keys."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.device.masks import edges_of, hidden, keys_of


@triton.jit
def task_of_queries(ctx, row, batch, kv_batch, head, queries, keys, heads, kv_heads, when):
    """The task of a tile `row` of queries of a head: the blocks of keys that they see."""
    HEIGHT: tl.constexpr = ctx.config.task_rows
    shift = keys - queries
    last, count = keys_of(ctx, row * HEIGHT, tl.minimum((row + 1) * HEIGHT, queries), shift, keys)
    masked, whole = edges_of(ctx, row * HEIGHT, (row + 1) * HEIGHT, shift, keys, last)
    edges = 1 if ctx.config.one_edge else masked if ctx.config.edge_loop else None
    return tk.task(
        count,
        when=when,
        edges=edges,
        masked=masked,
        whole=whole,
        batch=batch,
        kv_batch=kv_batch,
        head=head,
        kv_head=head // (heads // kv_heads),
        row=row,
        last=last,
        shift=shift,
        keys=keys,
    )


class QueryTiles(tk.lcf):
    """A task is `tile_m` queries of a head for each consumer, and the blocks of `tile_n` keys that they see.

    Blocks come last to first. Fields of its context: `batch` and `kv_batch` (first coordinates of queries and keys),
    `head`, `kv_head`, `row` (the task's tile), `last` (block of keys), `masked` and `whole` (see `edges_of`), `shift`,
    `keys`.
    """

    dtype: tl.dtype = tk.bf16
    tile_m: int = 64
    tile_n: int = 128
    head_dim: int = 128
    value_dim: int = 128
    causal: bool = False
    window: bool = False
    softcap: bool = False
    order: tk.Order = tk.ColumnMajor()
    edges_apart: bool = True  # a loop of their own for the blocks that need a mask

    _hidden = hidden  # a block's scores, −∞ where a query does not see a key

    @triton.jit
    def _descaled(ctx, factor):
        """`factor`, for scores of the tensors that Q and K stand for (fp8)."""
        return factor

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of a call's scalars.

        `scale`: in base 2 (times log₂ e); with a soft-cap it is the cap. `left`, `right`: sides of a window. `squash`:
        factor of scores inside the tanh (times 2 log₂ e).
        """
        return ("scale", *(("left", "right") if self.window else ()), *(("squash",) if self.softcap else ()))

    @property
    def task_rows(self) -> int:
        """Rows of a task's tile: queries, or keys of a kernel that streams queries."""
        return self.tile_m * self.consumers

    def tiles(self, Q: Any, *_: Any) -> tuple[int, int]:
        """(tiles of a head, heads of all batches)."""
        return -(-Q[2] // self.task_rows), Q[0] * Q[1]

    @property
    def one_edge(self) -> bool:
        """Whether the first block alone needs a mask, for the keys after the last."""
        return not (self.causal or self.window)

    @property
    def edge_loop(self) -> bool:
        """Whether the blocks that need a mask, which come first, have a loop of their own."""
        return self.edges_apart and not self.window

    def tasks(self, *shapes: Any) -> int:
        tiles, heads = self.tiles(*shapes)
        return tiles * heads

    @triton.jit
    def setup(ctx):
        heads = tk.extent(ctx.globals.Q, 1)
        queries, keys = tk.extent(ctx.globals.Q, 2), tk.extent(ctx.globals.K, 2)
        HEIGHT: tl.constexpr = ctx.config.task_rows
        tiles = tk.ceil_div(queries, HEIGHT)
        row, batch_head = tk.tile_at(ctx.config.order, ctx.task_id, tiles, tk.extent(ctx.globals.Q, 0) * heads)
        batch, head = tk.unravel(batch_head, heads)
        more = (batch < tk.extent(ctx.globals.Q, 0)) & (row >= 0) & (row < tiles)
        return task_of_queries(ctx, row, batch, batch, head, queries, keys, heads, tk.extent(ctx.globals.K, 1), more)
