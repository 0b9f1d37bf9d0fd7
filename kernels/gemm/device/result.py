"""How the tiles of C leave: through the epilogue, and staged whole or in panels of columns."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.epilogue import finish_tile


def result_tiles(template: Any) -> tuple[tk.st, tk.st]:
    """(what TMA stores at a time, what a consumer stages) of the results of a template: two panels of columns, or all.
    Raises `TileError` for panels that there cannot be."""
    cols, panel = template.result_cols, template.epilogue_n
    if panel is not None and (panel <= 0 or cols % panel):
        raise tk.TileError(f"{type(template).__name__}(epilogue_n={panel!r}): must divide its {cols} columns")
    if panel is not None and template.epilogue.residual and cols // panel % 2:
        raise tk.TileError(
            f"{type(template).__name__}(epilogue_n={panel!r}): a residual comes in an even number of panels; {cols} "
            f"columns have {cols // panel}"
        )
    shape = (panel or cols, template.tile_m) if template.c_stored_nm else (template.tile_m, panel or cols)
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
def load_residual(ctx, epilogue, row):
    """The copies of a `load_epilogue` hook for the residual of a consumer's results: all of it, or of its panels the
    two that have room. `row`: of C, in tiles of a consumer's rows."""
    if ctx.config.epilogue_n is None:
        where = place(ctx, ctx.globals.residual, row, ctx.result_col, ctx.config.c_stored_nm)
        tk.load_async(epilogue.C, ctx.globals.residual, where, epilogue.full)
    else:
        for panel in tl.static_range(2):
            _load_panel(ctx, epilogue, row, panel, _panel_home(epilogue, panel), epilogue.full)


@triton.jit
def store_result(ctx, sums, epilogue, row):
    """Store a consumer's results, whose sums (fp32) are a tuple of tiles side by side. `row`: of C, in tiles of a
    consumer's rows."""
    if ctx.config.epilogue_n is None:
        _store_whole(ctx, sums, epilogue, row)
    else:
        _store_panels(ctx, sums, epilogue, row)


@triton.jit
def _store_whole(ctx, sums, epilogue, row):
    PARTS: tl.constexpr = len(sums)
    for part in tl.static_range(PARTS):
        home = (
            epilogue.C
            if PARTS == 1
            else tk.subtile(epilogue.C, ctx.config.tile_m, ctx.config.result_cols // PARTS, 0, part)
        )
        tile = finish_tile(ctx, sums[part], ctx.config.epilogue, epilogue, home, row, ctx.result_col, part, PARTS)
        tk.store(home, tk.transpose(tile) if ctx.config.c_stored_nm else tile)
    tk.fence_async()
    tk.store_async(
        ctx.globals.C,
        epilogue.C,
        place(ctx, ctx.globals.C, row, ctx.result_col, ctx.config.c_stored_nm),
        ctx.config.cache_hint,
    )


@triton.jit
def _store_panels(ctx, sums, epilogue, row):
    """Two panels take turns: one leaves while the next is computed. A residual's first two panels have come already,
    each later one comes to where its results
    will be once those before have left: where consumers take turns, the other's products hide that (measured:
    docs/notes/gemm.md)."""
    RESIDUAL: tl.constexpr = ctx.config.epilogue.residual
    PANEL: tl.constexpr = ctx.config.epilogue_n
    PANELS: tl.constexpr = ctx.config.result_cols // PANEL
    PARTS: tl.constexpr = len(sums)
    panels = ()
    for part in tl.static_range(PARTS):
        panels = panels + tk.split_cols(sums[part], PANEL)
    for panel in tl.static_range(PANELS):
        home = _panel_home(epilogue, panel)
        if RESIDUAL and panel > 1:
            tk.wait(epilogue.reload_full, panel % 2)
        tile = finish_tile(ctx, panels[panel], ctx.config.epilogue, epilogue, home, row, ctx.result_col, panel, PANELS)
        if RESIDUAL:
            if panel > 0 and panel + 1 < PANELS:
                ask_residual(ctx, epilogue, row, panel + 1, 1)
        elif panel > 1:
            tk.store_read_wait(1)
        _stage(ctx, tile, home)
        _send(ctx, home, row, panel)


@triton.jit
def _second(x, y):
    """`y`, which comes in the register layout of `x`."""
    return y


@triton.jit
def pack_result(ctx, sums, epilogue, row):
    """A consumer's results in the type in which they are stored, a tile for each panel, for `store_packed_panel`, but
    for the late steps of the epilogue."""
    NAMES: tl.constexpr = ctx.config.panel_names
    panels = tk.split_cols(sums, ctx.config.epilogue_n)
    packed = tk.struct()
    for panel in tl.static_range(len(NAMES)):
        tile = finish_tile(ctx, panels[panel], ctx.config.early, epilogue, None, row, ctx.result_col, panel, len(NAMES))
        # sums of tensor memory have another register layout
        like = tk.zero(tk.rt(ctx.config.out_dtype, ctx.config.tile_m, ctx.config.epilogue_n))
        packed = tk.with_field(
            packed, NAMES[panel], tk.map(like, _second, tk.struct(y=tk.cast(tile, ctx.config.out_dtype)))
        )
    return packed


@triton.jit
def ask_residual(ctx, epilogue, row, panel, ASKED: tl.constexpr, GATE: tl.constexpr = None):
    """Ask for the residual of one or two panels, from this one on, where results were, once they have left; and for the
    gate of this name. Of two panels the number may be one of the run time."""
    home = _panel_home(epilogue, panel) if ASKED == 1 else epilogue.C
    tk.store_read_wait(0)
    tk.expect(epilogue.reload_full, home if GATE is None else (home, tk.field(epilogue, GATE)))
    if GATE is not None:
        tk.load_async(tk.field(epilogue, GATE), tk.field(ctx.globals, GATE), (ctx.result_col,), epilogue.reload_full)
    if ASKED == 1:
        _load_panel(ctx, epilogue, row, panel, home, epilogue.reload_full)
    else:
        for i in tl.static_range(2):
            _load_panel(ctx, epilogue, row, panel + i, _panel_home(epilogue, i), epilogue.reload_full)


@triton.jit
def store_packed_panel(ctx, tile, epilogue, row, PANEL: tl.constexpr):
    """Store a panel that `pack_result` made, where the one before the last was, which has left; the first where any of
    the task before may have been. A residual has come there; with an activation it is only staged."""
    home = _panel_home(epilogue, PANEL)
    if ctx.config.epilogue.residual:
        ASKED: tl.constexpr = ctx.config.asked_panels
        PANELS: tl.constexpr = ctx.config.result_cols // ctx.config.epilogue_n
        if PANEL % ASKED == 0:
            tk.wait(epilogue.reload_full, PANEL // ASKED % 2)
        if ASKED == 1 and PANEL + 1 < PANELS:
            ask_residual(ctx, epilogue, row, PANEL + 1, ASKED)
        tile = finish_tile(ctx, tile, ctx.config.late, epilogue, home, row, ctx.result_col, PANEL, PANELS)
    else:
        tk.store_read_wait(1 if PANEL > 0 else 0)
    _stage(ctx, tile, home)
    if ctx.config.activation_steps == 0:
        _send(ctx, home, row, PANEL)


@triton.jit
def finish_packed_panel(ctx, epilogue, row, panel, step, STEPS: tl.constexpr):
    """Apply the activation to one part of a panel where it is staged, and store the panel behind the last. Or ask for
    more of the residual."""
    if ctx.config.activation_steps > 0:
        home = tk.subtile(epilogue.C, tk.shape(epilogue.C, 0) // 2, tk.shape(epilogue.C, 1), panel % 2)
        part = tk.cast(tk.load_elements(home, step, STEPS), tk.fp32)
        tk.store_elements(
            home, finish_tile(ctx, part, ctx.config.late, epilogue, home, row, ctx.result_col), step, STEPS
        )
        if step == STEPS - 1:
            _send(ctx, home, row, panel)
    elif ctx.config.asked_panels == 2:
        if (step == 0) & (panel % 2 == 1) & (panel + 1 < ctx.config.result_cols // ctx.config.epilogue_n):
            ask_residual(ctx, epilogue, row, panel + 1, 2)


@triton.jit
def _stage(ctx, tile, home):
    tk.store(home, tk.transpose(tile) if ctx.config.c_stored_nm else tile)


@triton.jit
def _send(ctx, home, row, panel):
    """Store a panel that is staged."""
    PANELS: tl.constexpr = ctx.config.result_cols // ctx.config.epilogue_n
    tk.fence_async()
    tk.store_async(
        ctx.globals.C,
        home,
        place(ctx, ctx.globals.C, row, ctx.result_col * PANELS + panel, ctx.config.c_stored_nm),
        ctx.config.cache_hint,
    )


@triton.jit
def _panel_home(epilogue, PANEL: tl.constexpr):
    return tk.subtile(epilogue.C, tk.shape(epilogue.C, 0) // 2, tk.shape(epilogue.C, 1), PANEL % 2, 0)


@triton.jit
def _load_panel(ctx, epilogue, row, panel, home, arrived):
    """Ask for a panel of the residual."""
    PANELS: tl.constexpr = ctx.config.result_cols // ctx.config.epilogue_n
    tk.load_async(
        home,
        ctx.globals.residual,
        place(ctx, ctx.globals.residual, row, ctx.result_col * PANELS + panel, ctx.config.c_stored_nm),
        arrived,
    )
