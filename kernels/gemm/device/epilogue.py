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

    def activates_late(self, out: tl.dtype) -> bool:
        """Of results that wait in registers as `out`: is the activation applied where they are staged? Where nothing else is behind it, to bf16, which has the
        range of fp32."""
        return self.activation is not None and self.gate is None and not self.residual and out == tk.bf16

    def gates_late(self, out: tl.dtype) -> bool:
        """Of results that wait in registers as `out`: are they multiplied by the gate when a residual is added to them? In bf16, by a gate of that type: it
        takes them no instruction more."""
        return self.residual and self.activation is None and out == tk.bf16 and self.gate == Operand("col", "bf16")

    def memory(
        self, result: tk.st, staged: tk.st, cols: int, panel: int | None, packed: bool = False, late_gate: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What a template's layout holds for it, where C is stored in tiles of type `result`, which have `epilogue_n` of its `tile_n` columns or all, and staged in
        `staged`: (`globals` of the residual, those of the operands, and `epilogue`, `epilogue_loads` and `epilogue_reloads`). The residual is
        loaded into the tiles where results are staged: ahead, and of more than two panels the later ones once the panels before have left; with
        `deferred_epilogue`, and a `late_gate` then too, once the previous task's results have. A value for every column is read by all threads of a warp alike, and from global memory each tile would wait for it."""
        given = {name: operand for name in OPERANDS if (operand := getattr(self, name)) is not None}
        operands = {name: tk.sv(x.element, cols) if x.place == "col" else None for name, x in given.items()}
        residual = dict(residual=result) if self.residual else {}
        vectors = {name: tile for name, tile in operands.items() if tile is not None}
        ahead = ("C",) if self.residual and not packed else ()
        later = ("C",) if self.residual and (packed or (panel is not None and cols > 2 * panel)) else ()
        if late_gate:
            later = (*later, "gate")
        loads = (*ahead, *(name for name in vectors if name not in later))
        return residual, operands, dict(epilogue=dict(C=staged, **vectors), epilogue_loads=loads, epilogue_reloads=later)

    def swapped(self) -> Epilogue:
        """The same for Cᵀ."""
        other = {"row": "col", "col": "row"}
        turned: dict[str, Any] = {name: Operand(other.get(x.place, x.place), x.dtype) for name in OPERANDS if (x := getattr(self, name)) is not None}
        return replace(self, **turned)


def turned_bytes(rows: int) -> int:
    """Shared memory that the compiler takes of a consumer to add a residual that is stored transposed: for 64 columns in fp32 at a time."""
    return rows * 64 * 4


@triton.jit
def load_vectors(ctx, epilogue, GATE: tl.constexpr = True):
    """The copies of a `load_epilogue` hook for the operands with a value for every column, but for a gate that comes later."""
    E: tl.constexpr = ctx.config.epilogue
    if E.scale_a is not None:
        _load_vector(ctx, epilogue, "scale_a", E.scale_a.place)
    if E.scale_b is not None:
        _load_vector(ctx, epilogue, "scale_b", E.scale_b.place)
    if E.bias is not None:
        _load_vector(ctx, epilogue, "bias", E.bias.place)
    if GATE and E.gate is not None:
        _load_vector(ctx, epilogue, "gate", E.gate.place)


@triton.jit
def _load_vector(ctx, epilogue, NAME: tl.constexpr, PLACE: tl.constexpr):
    if PLACE == "col":
        tk.load_async(tk.field(epilogue, NAME), tk.field(ctx.globals, NAME), (ctx.result_col,), epilogue.full)


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
        return tk.with_field(values, NAME, tk.load(tensor, tk.col_vec(tk.rt(tk.fp32, ctx.config.tile_m, ctx.config.result_cols), ELEMENT), (row,)))
    else:
        return values


@triton.jit
def of_columns(ctx, epilogue, NAME: tl.constexpr, PANEL: tl.constexpr, PANELS: tl.constexpr):
    """An operand with a value for every column, of a panel's columns."""
    COLS: tl.constexpr = ctx.config.result_cols // PANELS
    ELEMENT: tl.constexpr = tk.field(ctx.globals, NAME).pointer.dtype.element_ty
    values = tk.field(epilogue, NAME) if PANELS == 1 else tk.subvector(tk.field(epilogue, NAME), COLS, PANEL)
    return tk.load(values, tk.row_vec(tk.rt(tk.fp32, ctx.config.tile_m, COLS), ELEMENT))


@triton.jit
def _combined(ctx, tile, epilogue, NAME: tl.constexpr, PLACE: tl.constexpr, MULTIPLY: tl.constexpr, row, col, PANEL: tl.constexpr, PANELS: tl.constexpr):
    """The tile times or plus an operand."""
    COLS: tl.constexpr = ctx.config.result_cols // PANELS
    tensor = tk.field(ctx.globals, NAME)
    ELEMENT: tl.constexpr = tensor.pointer.dtype.element_ty
    if PLACE == "scalar":
        value = tk.field(ctx.params, NAME).to(tl.float32)
        return tile * value if MULTIPLY else tile + value
    elif PLACE == "row":
        value = tk.cast(tk.field(ctx.params, NAME), tk.fp32)
        return tk.mul_row(tile, value) if MULTIPLY else tk.add_row(tile, value)
    elif PLACE == "col":
        value = tk.cast(of_columns(ctx, epilogue, NAME, PANEL, PANELS), tk.fp32)
        return tk.mul_col(tile, value) if MULTIPLY else tk.add_col(tile, value)
    else:
        place = (ctx.batch, row, col * PANELS + PANEL) if ctx.config.batched else (row, col * PANELS + PANEL)
        value = tk.cast(tk.load(tensor, tk.rt(ELEMENT, ctx.config.tile_m, COLS), place), tk.fp32)
        return tile * value if MULTIPLY else tile + value


@triton.jit
def finish_tile(ctx, tile, epilogue, residual, row, col, PANEL: tl.constexpr = 0, PANELS: tl.constexpr = 1):
    """The results of a tile of sums, still in fp32; `epilogue` holds vectors, `residual` the tile that is added. `row`, `col`: which tile, in tiles; `tile` may
    be one panel of columns of several."""
    tile = combine(ctx, tile, epilogue, row, col, PANEL, PANELS)
    return add_residual(ctx, tile, residual) if ctx.config.epilogue.residual else tile


@triton.jit
def combine(ctx, tile, epilogue, row, col, PANEL: tl.constexpr, PANELS: tl.constexpr, ACTIVATE: tl.constexpr = True, GATE: tl.constexpr = True):
    """The same but for the residual, and for an activation or a gate that comes later."""
    E: tl.constexpr = ctx.config.epilogue
    if E.scale_a is not None:
        tile = _combined(ctx, tile, epilogue, "scale_a", E.scale_a.place, True, row, col, PANEL, PANELS)
    if E.scale_b is not None:
        tile = _combined(ctx, tile, epilogue, "scale_b", E.scale_b.place, True, row, col, PANEL, PANELS)
    if E.bias is not None:
        tile = _combined(ctx, tile, epilogue, "bias", E.bias.place, False, row, col, PANEL, PANELS)
    if ACTIVATE and E.activation is not None:
        tile = activate(ctx, tile)
    if GATE and E.gate is not None:
        tile = _combined(ctx, tile, epilogue, "gate", E.gate.place, True, row, col, PANEL, PANELS)
    return tile


@triton.jit
def activate(ctx, tile):
    """The activation of a tile of fp32."""
    ACTIVATION: tl.constexpr = ctx.config.epilogue.activation
    if ACTIVATION == "gelu":
        return tk.gelu(tile, fast=ctx.config.out_dtype)
    elif ACTIVATION == "gelu_tanh":
        return tk.gelu(tile, "tanh", fast=ctx.config.out_dtype)
    else:
        return tk.silu(tile, fast=ctx.config.out_dtype)


@triton.jit
def add_residual(ctx, tile, residual):
    """The tile plus the residual, which lies where results are staged, in the tile's type."""
    if ctx.config.c_stored_nm:
        return tk.add(tile, tk.cast(tk.transpose(tk.load(residual)), tile.dtype))
    else:
        return tile + tk.cast(tk.load(residual, like=tile), tile.dtype)


@triton.jit
def gate_and_add(tile, gate, residual):
    """gate · tile + residual, rounded once; `gate` has a value for every column."""
    return tl.fma(tile, tk.broadcast_col(tile, gate), tk.load(residual, like=tile))
