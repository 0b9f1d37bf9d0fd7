"""Grouped matrix products: `Gemm` whose rows, or whose depth, are groups of a packed matrix that end on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.gated_gemm.device.gated import Gated, half_of
from tritonkittens.kernels.gemm.device.blockwise import BlockwiseGemm
from tritonkittens.kernels.gemm.device.epilogue import load_values
from tritonkittens.kernels.gemm.device.gemm import Gemm, load_a


class Grouped(tk.lcf):
    """What replaces a batch of products of one size.

    `ends`: (groups,) int32. `rows`: those of the packed operands. Their tiles are those of a `tk.sequence`: loads fill
    what lies after a group, stores skip it.
    """

    batched: bool = True

    def _packed(self, *names: str) -> tk.layout:
        plan = super().layout()
        return replace(plan, globals={**dict(plan.globals), "ends": None}, args=(*plan.args, "rows"), ragged=names)

    def blocks(self, slots: int, *shapes: Any) -> int:
        """All that run at once: the tasks that `tasks` counts are more than there are."""
        return min(self.tasks(*shapes), slots)


class RowGrouped(Grouped):
    """C[rows of g] = A[rows of g] · B[g]. A: (rows, K), B: (groups, K, N), C: (rows, N). With `c_stored_nm` the
    groups are those of the columns of Cᵀ, and A and B change places.

    The tiles of a group are tasks one after the other: its rows and its B stay in L2.
    Of the epilogue's operands, a residual is packed as C is, values for rows as its rows are; values for columns are
    (groups, N).

    - `most`: a power of two, at least the number of groups.
    - `masked`: group g begins at row g · `rows`, and `ends` are numbers of rows.
    """

    grouped: bool = True
    most: int = 16
    masked: bool = False

    def layout(self: Any) -> tk.layout:
        residual = ("residual",) if self.epilogue.residual else ()
        return self._packed("B" if self.c_stored_nm else "A", "C", *residual)

    @property
    def tile_rows(self: Any) -> int:
        """Rows of the packed matrix that a tile has."""
        return self.tile_n if self.c_stored_nm else self.task_rows

    def tasks(self: Any, A: Any, B: Any, C: Any, *others: Any) -> int:
        ends = others[-1]
        tiles = (C[0] + min(ends[0], C[0]) * (self.tile_rows - 1)) // self.tile_rows
        return tiles * -(-C[1] // (self.task_rows if self.c_stored_nm else self.result_cols))

    @triton.jit
    def setup(ctx):
        across = tk.ceil_div(
            tk.extent(ctx.globals.C, -1), ctx.config.task_rows if ctx.config.c_stored_nm else ctx.config.result_cols
        )
        groups = tk.extent(ctx.globals.ends, 0)
        pitch = ctx.args.rows if ctx.config.masked else None
        total = ctx.args.rows * groups if ctx.config.masked else ctx.args.rows
        group, rows, first = tk.sequence_of_tile(
            ctx.globals.ends, ctx.task_id // across, ctx.config.tile_rows, total, ctx.config.most, pitch
        )
        down = tl.maximum(tk.ceil_div(rows.rows, ctx.config.tile_rows), 1)  # 0 after the last task
        tile = ctx.task_id - first * across
        if ctx.config.c_stored_nm:
            row, col = tk.tile_at(ctx.config.order, tile, across, down)
        else:
            row, col = tk.tile_at(ctx.config.order, tile, down, across)
        return tk.task(
            tk.ceil_div(tk.extent(ctx.globals.A, -2 if ctx.config.a_stored_km else -1), ctx.config.tile_k),
            when=group < groups,
            batch=group,
            rows=rows,
            row=row * ctx.config.cluster + ctx.rank,
            col=col,
            result_col=col,
        )


class RowGroupedGemm(RowGrouped, tk.GatherWarps, Gemm):
    """`Gemm` of groups of rows.

    - `gathered`: row i of A is row a_rows[i] of the tensor, zeros where it has none; `a_rows` is int32 (rows,).
    - `scattered`: row i of C is row c_rows[i] of the tensor, and not stored where that has none.
    """

    gathered: bool = False

    def layout(self) -> tk.layout:
        plan, name = super().layout(), self.gathered_tile
        chosen = (name,) * self.gathered + ("C",) * self.scattered
        tensors = {n: tk.by_rows(t[0]) if n in chosen else t for n, t in plan.globals}
        ends = tensors.pop("ends")  # the last, for `tasks`
        numbers = dict.fromkeys(("a_rows",) * self.gathered + ("c_rows",) * self.scattered)
        ragged = tuple(n for n in plan.ragged if n not in chosen)
        gathered = (name,) if name else ()
        return replace(plan, globals={**tensors, **numbers, "ends": ends}, ragged=ragged, gathered=gathered)

    @property
    def gathered_tile(self) -> str | None:
        """The name of the input tile whose rows are selected by number."""
        return ("B" if self.c_stored_nm else "A") if self.gathered else None

    def tasks(self, A: Any, B: Any, C: Any, *others: Any) -> int:
        rows = others[-2] if self.scattered else C
        return super().tasks(A, B, (rows[0], C[1]), *others)

    @triton.jit
    def load_params(ctx):
        row = ctx.row * ctx.config.team + ctx.consumer
        values = load_values(ctx, row)
        if ctx.config.scattered:
            rows = tk.load(ctx.globals.c_rows, tk.rv(tk.int32, ctx.config.tile_m), (ctx.rows, row), fill=-1)
            values = tk.with_field(values, "c_rows", rows)
        return values

    @triton.jit
    def row_numbers(ctx):
        tile = ctx.col if ctx.config.c_stored_nm else ctx.row
        return tk.load(ctx.globals.a_rows, tk.rv(tk.int32, ctx.config.tile_rows), (ctx.rows, tile), fill=-1)

    @triton.jit
    def load_gathered(ctx, input, rows):
        NAME: tl.constexpr = ctx.config.gathered_tile
        tk.load_rows_async(tk.field(input, NAME), tk.field(ctx.globals, NAME), rows, ctx.iter, input.full)


class BlockwiseGroupedGemm(RowGrouped, BlockwiseGemm):
    """`BlockwiseGemm` of groups of rows. scales_a (⌈K/128⌉ × rows), scales_b (groups × ⌈N/128⌉ × ⌈K/128⌉).

    TMA loads scales from multiples of 16 bytes on, while a group's rows begin anywhere. Two vectors of a tile's length,
    at multiples of it, hold the scales of the tile's rows, which consumers read from their first one on.
    """

    def layout(self) -> tk.layout:
        plan = super().layout()
        scales_a = tk.sv(tk.fp32, 2 * self.consumers * self.tile_m)
        return replace(plan, input={**dict(plan.input), "scales_a": scales_a})

    @triton.jit
    def _load_scales_a(ctx, input):
        ROWS: tl.constexpr = ctx.config.consumers * ctx.config.tile_m
        first = ctx.rows.begin // ROWS + ctx.row
        for half in tl.static_range(2):
            scales = tk.subvector(input.scales_a, ROWS, half)
            tk.load_async(scales, ctx.globals.scales_a, (ctx.iter, first + half), input.full)

    @triton.jit
    def _scales_a(ctx, input):
        first = ctx.rows.begin % (ctx.config.consumers * ctx.config.tile_m) + ctx.consumer * ctx.config.tile_m
        return tk.load(input.scales_a, tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, 128)), first)


class GatedGroupedGemm(Gated, RowGroupedGemm):
    """C[rows of g] = f(A[rows of g] · B[g, 0]) · (A[rows of g] · B[g, 1]). B: (groups, 2, K, N)."""

    def layout(self) -> tk.layout:
        plan = super().layout()
        return replace(plan, globals={**dict(plan.globals), "B": self.half})

    @triton.jit
    def load(ctx, input):
        load_a(ctx, input)
        for n in tl.static_range(2):
            if ctx.config.b_stored_nk:
                where = (ctx.batch, n, ctx.col, ctx.iter)
            else:
                where = (ctx.batch, n, ctx.iter, ctx.col)
            tk.load_async(half_of(ctx, input.B, n), ctx.globals.B, where, input.full, ctx.config.cache_hint)


class DepthGroupedGemm(Grouped, Gemm):
    """C[g] = Aᵀ[rows of g] · B[rows of g]: gradients of weights. A, stored (rows, M), B: (rows, N), C: (groups, M, N).

    Both loads fill what lies after a group with zeros, so that no other group's infinity meets a zero.
    """

    a_stored_km: bool = True

    def layout(self) -> tk.layout:
        return self._packed("A", "B")

    @triton.jit
    def setup(ctx):
        down = tk.ceil_div(tk.extent(ctx.globals.C, -1 if ctx.config.c_stored_nm else -2), ctx.config.task_rows)
        across = tk.ceil_div(tk.extent(ctx.globals.C, -2 if ctx.config.c_stored_nm else -1), ctx.config.tile_n)
        groups = tk.extent(ctx.globals.ends, 0)
        group = ctx.task_id // (down * across)
        row, col = tk.tile_at(ctx.config.order, ctx.task_id - group * down * across, down, across)
        last = tl.minimum(group, groups - 1)
        begin = tl.where(last > 0, tk.load_scalar(ctx.globals.ends, (tl.maximum(last - 1, 0),)), 0)
        begin = tl.minimum(tl.maximum(begin, 0), ctx.args.rows)
        end = tl.minimum(tl.maximum(tk.load_scalar(ctx.globals.ends, (last,)), begin), ctx.args.rows)
        return tk.task(
            tk.ceil_div(end - begin, ctx.config.tile_k),
            when=group < groups,
            batch=group,
            rows=tk.sequence(begin, end - begin),
            row=row * ctx.config.cluster + ctx.rank,
            col=col,
            result_col=col,
        )
