"""What a matrix product does with a tile of sums before it leaves the registers: scale, bias, activation, gate, residual."""
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

import tritonkittens.lang as tk

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
PLACES = (None, "scalar", "row", "col", "tile")  # one number; one for each row, each column, each element


@dataclass(frozen=True)
class Epilogue(tk.Knob):
    """y = activation(sum · scale_a · scale_b + bias), then residual + gate · y.

    Scales, bias and gate are None or where their values lie: "scalar" (one number), "row" (one for each row of C), "col" (one for each column) and, for the
    gate, "tile" (one for each element). `residual`: is a matrix added?
    """

    scale_a: str | None = None
    scale_b: str | None = None
    bias: str | None = None
    activation: str | None = None
    gate: str | None = None
    residual: bool = False

    def operands(self) -> tuple[str, ...]:
        """The tensors beside the residual that it reads, in the order in which the kernel takes them."""
        return tuple(name for name in ("scale_a", "scale_b", "bias", "gate") if getattr(self, name) is not None)


@triton.jit
def _combined(ctx, tile, tensor, PLACE: tl.constexpr, MULTIPLY: tl.constexpr, row, col):
    """The tile times or plus values that lie along its rows, its columns, everywhere or nowhere."""
    if PLACE == "scalar":
        value = tl.load(tensor.pointer).to(tl.float32)
        return tile * value if MULTIPLY else tile + value
    elif PLACE == "row":
        value = tk.cast(tk.load(tensor, tk.col_vec(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols), tensor.pointer.dtype.element_ty), (row,)), tk.fp32)
        return tk.mul_row(tile, value) if MULTIPLY else tk.add_row(tile, value)
    elif PLACE == "col":
        value = tk.cast(tk.load(tensor, tk.row_vec(tk.rt(tk.fp32, ctx.config.rows, ctx.config.cols), tensor.pointer.dtype.element_ty), (col,)), tk.fp32)
        return tk.mul_col(tile, value) if MULTIPLY else tk.add_col(tile, value)
    elif PLACE == "tile":
        TYPE: tl.constexpr = tk.rt(tensor.pointer.dtype.element_ty, ctx.config.rows, ctx.config.cols)
        place = (ctx.batch, row, col) if ctx.config.batched else (row, col)
        value = tk.cast(tk.load(tensor, TYPE, place), tk.fp32)
        return tile * value if MULTIPLY else tile + value
    else:
        return tile


@triton.jit
def finish_tile(ctx, tile, staging, row, col):
    """The results of a tile of sums, still in fp32; `staging` holds the residual's tile where there is one. `row`, `col`: which tile, in tiles."""
    E: tl.constexpr = ctx.config.epilogue
    if E.scale_a is not None:
        tile = _combined(ctx, tile, ctx.globals.scale_a, E.scale_a, True, row, col)
    if E.scale_b is not None:
        tile = _combined(ctx, tile, ctx.globals.scale_b, E.scale_b, True, row, col)
    if E.bias is not None:
        tile = _combined(ctx, tile, ctx.globals.bias, E.bias, False, row, col)
    if E.activation == "gelu":
        tile = tk.gelu(tile)
    if E.activation == "gelu_tanh":
        tile = tk.gelu(tile, "tanh")
    if E.activation == "silu":
        tile = tk.silu(tile)
    if E.gate is not None:
        tile = _combined(ctx, tile, ctx.globals.gate, E.gate, True, row, col)
    if E.residual:
        if ctx.config.c_stored_nm:
            tile = tk.add(tile, tk.cast(tk.transpose(tk.load(staging)), tk.fp32))
        else:
            tile = tile + tk.cast(tk.load(staging, like=tile), tk.fp32)
    return tile
