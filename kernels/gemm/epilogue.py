"""What a matrix product does with a tile of sums before it leaves the registers: scale, bias, activation, gate, residual."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
OPERANDS = ("scale_a", "scale_b", "bias", "gate")  # in the order in which a kernel takes them


@dataclass(frozen=True)
class Operand:
    """A tensor of the epilogue: its element type's name, and what its values belong to: "scalar" (one number for all), "row" (one for each row of C), "col"
    (one for each column) or "tile" (one for each element).
    """

    place: str
    dtype: str

    @property
    def element(self) -> tl.dtype:
        return tl.dtype(self.dtype)


@dataclass(frozen=True)
class Epilogue(tk.Knob):
    """y = activation(sum · scale_a · scale_b + bias), then residual + gate · y. `residual`: is a matrix added?"""

    scale_a: Operand | None = None
    scale_b: Operand | None = None
    bias: Operand | None = None
    activation: str | None = None
    gate: Operand | None = None
    residual: bool = False

    def memory(self, result: tk.st, staged: tk.st, cols: int, panel: int | None) -> tuple[dict, dict, dict]:
        """What a template's layout holds for it, where C is stored in tiles of type `result`, which have `panel` of its `cols` columns or all, and staged in
        `staged`: (`globals` of the residual, those of the operands, and what `finish`, `preload` and `refill` say). The residual comes to where results are
        staged: ahead, and of more than two panels the later ones once those before have left. A value for every column is read by all threads of a warp alike,
        and from global memory each tile would wait for it."""
        given = {name: operand for name in OPERANDS if (operand := getattr(self, name)) is not None}
        operands = {name: tk.sv(x.element, cols) if x.place == "col" else None for name, x in given.items()}
        residual = dict(residual=result) if self.residual else {}
        vectors = {name: tile for name, tile in operands.items() if tile is not None}
        ahead = ("C",) if self.residual else ()
        later = ahead if panel is not None and cols > 2 * panel else ()
        return residual, operands, dict(finish=dict(C=staged, **vectors), preload=(*ahead, *vectors), refill=later)

    def swapped(self) -> Epilogue:
        """The same for Cᵀ."""
        other = {"row": "col", "col": "row"}
        turned: dict[str, Any] = {name: Operand(other.get(x.place, x.place), x.dtype) for name in OPERANDS if (x := getattr(self, name)) is not None}
        return replace(self, **turned)


def turned_bytes(rows: int) -> int:
    """Shared memory that the compiler takes of a consumer to add a residual that is stored transposed: for 64 columns in fp32 at a time."""
    return rows * 64 * 4


@triton.jit
def load_vectors(ctx, staging):
    """The copies of a `load_finish` hook for the operands with a value for every column."""
    E: tl.constexpr = ctx.config.epilogue
    if E.scale_a is not None:
        _load_vector(ctx, staging, "scale_a", E.scale_a.place)
    if E.scale_b is not None:
        _load_vector(ctx, staging, "scale_b", E.scale_b.place)
    if E.bias is not None:
        _load_vector(ctx, staging, "bias", E.bias.place)
    if E.gate is not None:
        _load_vector(ctx, staging, "gate", E.gate.place)


@triton.jit
def _load_vector(ctx, staging, NAME: tl.constexpr, PLACE: tl.constexpr):
    if PLACE == "col":
        tk.load_async(tk.field(staging, NAME), tk.field(ctx.globals, NAME), (ctx.result_col,), staging.arrived)


@triton.jit
def fetch_values(ctx, row):
    """What hook `fetch` reads: operands with one value for all or for every row, few registers each."""
    E: tl.constexpr = ctx.config.epilogue
    values = tk.struct()
    if E.scale_a is not None:
        values = _fetched(ctx, values, "scale_a", E.scale_a.place, row)
    if E.scale_b is not None:
        values = _fetched(ctx, values, "scale_b", E.scale_b.place, row)
    if E.bias is not None:
        values = _fetched(ctx, values, "bias", E.bias.place, row)
    if E.gate is not None:
        values = _fetched(ctx, values, "gate", E.gate.place, row)
    return values


@triton.jit
def _fetched(ctx, values, NAME: tl.constexpr, PLACE: tl.constexpr, row):
    tensor = tk.field(ctx.globals, NAME)
    ELEMENT: tl.constexpr = tensor.pointer.dtype.element_ty
    if PLACE == "scalar":
        return tk.with_field(values, NAME, tl.load(tensor.pointer))
    elif PLACE == "row":
        return tk.with_field(values, NAME, tk.load(tensor, tk.col_vec(tk.rt(tk.fp32, ctx.config.rows, ctx.config.result_cols), ELEMENT), (row,)))
    else:
        return values


@triton.jit
def _combined(ctx, tile, staging, NAME: tl.constexpr, PLACE: tl.constexpr, MULTIPLY: tl.constexpr, row, col, PANEL: tl.constexpr, PANELS: tl.constexpr):
    """The tile times or plus an operand."""
    COLS: tl.constexpr = ctx.config.result_cols // PANELS
    TILE: tl.constexpr = tk.rt(tk.fp32, ctx.config.rows, COLS)
    tensor = tk.field(ctx.globals, NAME)
    ELEMENT: tl.constexpr = tensor.pointer.dtype.element_ty
    if PLACE == "scalar":
        value = tk.field(ctx.fetched, NAME).to(tl.float32)
        return tile * value if MULTIPLY else tile + value
    elif PLACE == "row":
        value = tk.cast(tk.field(ctx.fetched, NAME), tk.fp32)
        return tk.mul_row(tile, value) if MULTIPLY else tk.add_row(tile, value)
    elif PLACE == "col":
        values = tk.field(staging, NAME) if PANELS == 1 else tk.subvector(tk.field(staging, NAME), COLS, PANEL)
        value = tk.cast(tk.load(values, tk.row_vec(TILE, ELEMENT)), tk.fp32)
        return tk.mul_col(tile, value) if MULTIPLY else tk.add_col(tile, value)
    else:
        place = (ctx.batch, row, col * PANELS + PANEL) if ctx.config.batched else (row, col * PANELS + PANEL)
        value = tk.cast(tk.load(tensor, tk.rt(ELEMENT, ctx.config.rows, COLS), place), tk.fp32)
        return tile * value if MULTIPLY else tile + value


@triton.jit
def finish_tile(ctx, tile, staging, residual, row, col, PANEL: tl.constexpr = 0, PANELS: tl.constexpr = 1):
    """The results of a tile of sums, still in fp32; `staging` holds vectors, `residual` the tile that is added. `row`, `col`: which tile, in tiles; `tile` may
    be one panel of columns of several."""
    E: tl.constexpr = ctx.config.epilogue
    if E.scale_a is not None:
        tile = _combined(ctx, tile, staging, "scale_a", E.scale_a.place, True, row, col, PANEL, PANELS)
    if E.scale_b is not None:
        tile = _combined(ctx, tile, staging, "scale_b", E.scale_b.place, True, row, col, PANEL, PANELS)
    if E.bias is not None:
        tile = _combined(ctx, tile, staging, "bias", E.bias.place, False, row, col, PANEL, PANELS)
    if E.activation == "gelu":
        tile = tk.gelu(tile, fast=ctx.config.out_dtype)
    if E.activation == "gelu_tanh":
        tile = tk.gelu(tile, "tanh", fast=True)
    if E.activation == "silu":
        tile = tk.silu(tile, fast=True)
    if E.gate is not None:
        tile = _combined(ctx, tile, staging, "gate", E.gate.place, True, row, col, PANEL, PANELS)
    if E.residual:
        if ctx.config.c_stored_nm:
            tile = tk.add(tile, tk.cast(tk.transpose(tk.load(residual)), tk.fp32))
        else:
            tile = tile + tk.cast(tk.load(residual, like=tile), tk.fp32)
    return tile
