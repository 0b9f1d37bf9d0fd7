"""How the tiles of C leave: through the epilogue, and staged whole or in panels of columns."""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.epilogue import finish_tile


def result_tiles(template: Any) -> tuple[tk.st, tk.st]:
    """(what TMA stores at a time, what a consumer stages) of the results of a template: two panels of columns, or all. Raises `TileError` for panels that there
    cannot be."""
    cols, panel = template.cols, template.panel
    if panel is not None and (panel <= 0 or cols % panel):
        raise tk.TileError(f"{type(template).__name__}(panel={panel!r}): must divide its {cols} columns")
    if panel is not None and template.epilogue.residual:
        raise tk.TileError(f"{type(template).__name__}(panel={panel}): a residual is loaded to where results are staged, which then are all")
    shape = (panel or cols, template.rows) if template.c_stored_nm else (template.rows, panel or cols)
    return tk.st(template.out_dtype, *shape), tk.st(template.out_dtype, shape[0] * (2 if panel else 1), shape[1])


@triton.jit
def place(ctx, tensor, row, col, TRANSPOSED: tl.constexpr = False):
    """Where a tile lies in a matrix or in a batch of them; a batch of one serves all."""
    first, second = (col, row) if TRANSPOSED else (row, col)
    if ctx.config.batched:
        return tl.minimum(ctx.batch, tk.extent(tensor, 0) - 1), first, second
    else:
        return first, second


@triton.jit
def store_result(ctx, sums, staging, row):
    """Store a consumer's results, whose sums (fp32) are a tuple of tiles side by side. `row`: of C, in tiles of a consumer's rows."""
    if ctx.config.panel is None:
        _store_whole(ctx, sums, staging, row)
    else:
        _store_panels(ctx, sums, staging, row)


@triton.jit
def _store_whole(ctx, sums, staging, row):
    PARTS: tl.constexpr = len(sums)
    for part in tl.static_range(PARTS):
        tile = finish_tile(ctx, sums[part], staging, row, ctx.col, part, PARTS)
        home = staging.C if PARTS == 1 else tk.subtile(staging.C, ctx.config.rows, ctx.config.cols // PARTS, 0, part)
        tk.store(home, tk.transpose(tile) if ctx.config.c_stored_nm else tile)
    tk.fence_async()
    tk.store_async(ctx.globals.C, staging.C, place(ctx, ctx.globals.C, row, ctx.col, ctx.config.c_stored_nm))


@triton.jit
def _store_panels(ctx, sums, staging, row):
    """Two panels take turns: one leaves while the next is computed."""
    PANEL: tl.constexpr = ctx.config.panel
    PANELS: tl.constexpr = ctx.config.cols // PANEL
    PARTS: tl.constexpr = len(sums)
    panels = ()
    for part in tl.static_range(PARTS):
        panels = panels + tk.split_cols(sums[part], PANEL)
    for panel in tl.static_range(PANELS):
        tile = finish_tile(ctx, panels[panel], staging, row, ctx.col, panel, PANELS)
        if panel > 1:
            tk.store_read_wait(1)
        home = tk.subtile(staging.C, tk.shape(staging.C, 0) // 2, tk.shape(staging.C, 1), panel % 2, 0)
        tk.store(home, tk.transpose(tile) if ctx.config.c_stored_nm else tile)
        tk.fence_async()
        tk.store_async(ctx.globals.C, home, place(ctx, ctx.globals.C, row, ctx.col * PANELS + panel, ctx.config.c_stored_nm))
