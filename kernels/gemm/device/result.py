"""How tiles of C are stored: after the epilogue, staged whole or in sub-tiles of `epilogue_n` columns."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.epilogue import finish_tile


def result_tiles(template: Any) -> tuple[tk.st, tk.st]:
    """(the tile that TMA stores at a time, the tile in which a consumer stages it) of a template's results.

    With `epilogue_n` the staging tile holds two sub-tiles, otherwise all columns. Raises `TileError` where `epilogue_n`
    does not divide the columns, or leaves a residual an odd number of sub-tiles.
    """
    cols, epilogue_n = template.result_cols, template.epilogue_n
    if epilogue_n is not None and (epilogue_n <= 0 or cols % epilogue_n):
        raise tk.TileError(f"{type(template).__name__}(epilogue_n={epilogue_n!r}): must divide its {cols} columns")
    if epilogue_n is not None and template.epilogue.residual and cols // epilogue_n % 2:
        raise tk.TileError(
            f"{type(template).__name__}(epilogue_n={epilogue_n!r}): a residual needs an even number of sub-tiles; "
            f"{cols} columns have {cols // epilogue_n}"
        )
    width = epilogue_n or cols
    shape = (width, template.tile_m) if template.c_stored_nm else (template.tile_m, width)
    return tk.st(template.out_dtype, *shape), tk.st(template.out_dtype, shape[0] * (2 if epilogue_n else 1), shape[1])


@triton.jit
def place(ctx, tensor, row, col, TRANSPOSED: tl.constexpr = False):
    """The coordinates of a tile in a matrix, in a batch of matrices, or in the task's rows of a packed matrix. A batch
    of one is broadcast."""
    first, second = (col, row) if TRANSPOSED else (row, col)
    if tk.has_sequences(tensor):
        return ctx.rows, first, second
    elif ctx.config.batched:
        return tl.minimum(ctx.batch, tk.extent(tensor, 0) - 1), first, second
    else:
        return first, second


@triton.jit
def load_residual(ctx, epilogue, row):
    """Load the residual of a consumer's results, for hook `load_epilogue`: all of it, or its first two sub-tiles.

    `row`: of C, in tiles of a consumer's rows.
    """
    if ctx.config.epilogue_n is None:
        where = place(ctx, ctx.globals.residual, row, ctx.result_col, ctx.config.c_stored_nm)
        tk.load_async(epilogue.C, ctx.globals.residual, where, epilogue.full)
    else:
        for subtile in tl.static_range(2):
            _load_subtile(ctx, epilogue, row, subtile, _subtile_home(epilogue, subtile), epilogue.full)


@triton.jit
def store_result(ctx, sums, epilogue, row):
    """Apply the epilogue to a consumer's `sums`, a tuple of tiles side by side, and store the results.

    Tiles in tensor memory are loaded as they are needed.
    `row`: of C, in tiles of a consumer's rows.
    """
    if ctx.config.epilogue_n is None:
        _store_whole(ctx, sums, epilogue, row)
    else:
        _store_subtiles(ctx, sums, epilogue, row)


@triton.jit
def _store_whole(ctx, sums, epilogue, row):
    PARTS: tl.constexpr = len(sums)
    for part in tl.static_range(PARTS):
        home = (
            epilogue.C
            if PARTS == 1
            else tk.subtile(epilogue.C, ctx.config.tile_m, ctx.config.result_cols // PARTS, 0, part)
        )
        tile = tk.cast(tk.load(sums[part]), tk.fp32)
        tile = finish_tile(ctx, tile, ctx.config.epilogue, epilogue, home, row, ctx.result_col, part, PARTS)
        tk.store(home, tk.transpose(tile) if ctx.config.c_stored_nm else tile)
    _store_home(ctx, epilogue.C, row, ctx.result_col)


@triton.jit
def _store_subtiles(ctx, sums, epilogue, row):
    """Stage sub-tiles in two buffers in turn: one is stored while the next is computed.

    The first two sub-tiles of a residual were loaded ahead. Each later one is loaded once its buffer has been stored.
    With `pingpong` the other consumer's products hide that latency (measured: docs/notes/gemm.md).
    """
    RESIDUAL: tl.constexpr = ctx.config.epilogue.residual
    EPILOGUE_N: tl.constexpr = ctx.config.epilogue_n
    SUBTILES: tl.constexpr = ctx.config.result_cols // EPILOGUE_N
    PARTS: tl.constexpr = len(sums)
    subtiles = ()
    for part in tl.static_range(PARTS):
        subtiles = subtiles + tk.split_cols(sums[part], EPILOGUE_N)
    for subtile in tl.static_range(SUBTILES):
        home = _subtile_home(epilogue, subtile)
        if RESIDUAL and subtile > 1:
            tk.wait(epilogue.reload_full, subtile % 2)
        tile = tk.cast(tk.load(subtiles[subtile]), tk.fp32)
        tile = finish_tile(ctx, tile, ctx.config.epilogue, epilogue, home, row, ctx.result_col, subtile, SUBTILES)
        if RESIDUAL:
            if subtile > 0 and subtile + 1 < SUBTILES:
                reload_residual(ctx, epilogue, row, subtile + 1, 1)
        elif subtile > 1:
            tk.store_read_wait(1)
        _stage(ctx, tile, home)
        _store_subtile(ctx, home, row, subtile)


@triton.jit
def _second(x, y):
    """`y`, converted to the register layout of `x`."""
    return y


@triton.jit
def defer_result(ctx, sums, epilogue, row):
    """A consumer's results for `store_deferred_subtile`: the early steps of the epilogue applied, in the dtype of C.

    Returns a struct with a register tile for each sub-tile.
    """
    NAMES: tl.constexpr = ctx.config.subtile_names
    subtiles = tk.split_cols(sums, ctx.config.epilogue_n)
    deferred = tk.struct()
    for subtile in tl.static_range(len(NAMES)):
        tile = finish_tile(
            ctx, subtiles[subtile], ctx.config.early, epilogue, None, row, ctx.result_col, subtile, len(NAMES)
        )
        # sums loaded from tensor memory have another register layout
        like = tk.zero(tk.rt(ctx.config.out_dtype, ctx.config.tile_m, ctx.config.epilogue_n))
        deferred = tk.with_field(
            deferred, NAMES[subtile], tk.map(like, _second, tk.struct(y=tk.cast(tile, ctx.config.out_dtype)))
        )
    return deferred


@triton.jit
def reload_residual(ctx, epilogue, row, subtile, RELOADED: tl.constexpr, GATE: tl.constexpr = None):
    """Load one or two sub-tiles of the residual, from number `subtile` on, once their buffers have been stored.

    Two sub-tiles may begin at a run-time number. `GATE`: the name of a gate vector to load with them.
    """
    home = _subtile_home(epilogue, subtile) if RELOADED == 1 else epilogue.C
    tk.store_read_wait(0)
    tk.expect(epilogue.reload_full, home if GATE is None else (home, tk.field(epilogue, GATE)))
    if GATE is not None:
        tk.load_async(tk.field(epilogue, GATE), tk.field(ctx.globals, GATE), (ctx.result_col,), epilogue.reload_full)
    if RELOADED == 1:
        _load_subtile(ctx, epilogue, row, subtile, home, epilogue.reload_full)
    else:
        for i in tl.static_range(2):
            _load_subtile(ctx, epilogue, row, subtile + i, _subtile_home(epilogue, i), epilogue.reload_full)


@triton.jit
def store_deferred_subtile(ctx, tile, epilogue, row, SUBTILE: tl.constexpr):
    """Stage and store a sub-tile of `defer_result`, once its buffer has been stored; the first, once both have.

    A residual has been loaded to that buffer. With a late activation the sub-tile is only staged.
    """
    home = _subtile_home(epilogue, SUBTILE)
    if ctx.config.epilogue.residual:
        RELOADED: tl.constexpr = ctx.config.reloaded_subtiles
        SUBTILES: tl.constexpr = ctx.config.result_cols // ctx.config.epilogue_n
        if SUBTILE % RELOADED == 0:
            tk.wait(epilogue.reload_full, SUBTILE // RELOADED % 2)
        if RELOADED == 1 and SUBTILE + 1 < SUBTILES:
            reload_residual(ctx, epilogue, row, SUBTILE + 1, RELOADED)
        tile = finish_tile(ctx, tile, ctx.config.late, epilogue, home, row, ctx.result_col, SUBTILE, SUBTILES)
    else:
        tk.store_read_wait(1 if SUBTILE > 0 else 0)
    _stage(ctx, tile, home)
    if ctx.config.activation_steps == 0:
        _store_subtile(ctx, home, row, SUBTILE)


@triton.jit
def finish_deferred_subtile(ctx, epilogue, row, subtile, step, STEPS: tl.constexpr):
    """Apply a late activation to one part of a staged sub-tile, and store it after the last part.

    With a residual that is loaded two sub-tiles at a time, load the next two.
    """
    if ctx.config.activation_steps > 0:
        home = tk.subtile(epilogue.C, tk.shape(epilogue.C, 0) // 2, tk.shape(epilogue.C, 1), subtile % 2)
        part = tk.cast(tk.load_elements(home, step, STEPS), tk.fp32)
        tk.store_elements(
            home, finish_tile(ctx, part, ctx.config.late, epilogue, home, row, ctx.result_col), step, STEPS
        )
        if step == STEPS - 1:
            _store_subtile(ctx, home, row, subtile)
    elif ctx.config.reloaded_subtiles == 2:
        if (step == 0) & (subtile % 2 == 1) & (subtile + 1 < ctx.config.result_cols // ctx.config.epilogue_n):
            reload_residual(ctx, epilogue, row, subtile + 1, 2)


@triton.jit
def _stage(ctx, tile, home):
    tk.store(home, tk.transpose(tile) if ctx.config.c_stored_nm else tile)


@triton.jit
def _store_subtile(ctx, home, row, subtile):
    """Store a sub-tile that is staged."""
    _store_home(ctx, home, row, ctx.result_col * (ctx.config.result_cols // ctx.config.epilogue_n) + subtile)


@triton.jit
def _store_home(ctx, home, row, col):
    """Store staged results as tile (row, col) of C, or to the rows of C that the task's numbers select."""
    tk.fence_async()
    if ctx.config.scattered:
        tk.store_rows_async(ctx.globals.C, home, ctx.params.c_rows, col)
    else:
        where = place(ctx, ctx.globals.C, row, col, ctx.config.c_stored_nm)
        tk.store_async(ctx.globals.C, home, where, ctx.config.cache_hint)


@triton.jit
def _subtile_home(epilogue, SUBTILE: tl.constexpr):
    return tk.subtile(epilogue.C, tk.shape(epilogue.C, 0) // 2, tk.shape(epilogue.C, 1), SUBTILE % 2, 0)


@triton.jit
def _load_subtile(ctx, epilogue, row, subtile, home, full):
    """Load a sub-tile of the residual."""
    SUBTILES: tl.constexpr = ctx.config.result_cols // ctx.config.epilogue_n
    tk.load_async(
        home,
        ctx.globals.residual,
        place(ctx, ctx.globals.residual, row, ctx.result_col * SUBTILES + subtile, ctx.config.c_stored_nm),
        full,
    )
