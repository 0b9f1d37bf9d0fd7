"""Formats and layouts of the quantisers: what the results of a call are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# two numbers in an element; a torch without this dtype has bytes instead
FP4: torch.dtype = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
AXES = ("rows", "cols", "both")
SCALINGS = ("up", "floor")
LAYOUTS = ("blocked", "plain")
LINES = 128  # of a block of scales
SCALES = 4  # of a line of a block of scales


@dataclass(frozen=True)
class Format:
    """Elements of `values` hold `packed` numbers each; `block` numbers share a scale of dtype `scales`."""

    values: torch.dtype
    scales: torch.dtype
    block: int
    packed: int = 1

    def shapes(self, lines: int, length: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the values and of the scales of a matrix."""
        across = -(-length // self.block)
        if layout == "plain":
            return (lines, length // self.packed), (lines, across)
        return (lines, length // self.packed), (-(-lines // LINES), -(-across // SCALES), LINES // 4, 4 * SCALES)


MXFP8 = {dtype: Format(dtype, torch.float8_e8m0fnu, 32) for dtype in FP8}
NVFP4 = Format(FP4, torch.float8_e4m3fn, 16, packed=2)


def sides(axes: str) -> tuple[bool, bool]:
    """Return whether rows are quantised, and columns."""
    return axes != "cols", axes != "rows"


def result_shapes(x: Tensor, form: Format, axes: str, layout: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each result: values and scales of rows, then of columns."""
    *batch, rows, cols = x.shape
    wanted = [extents for extents, side in zip(((rows, cols), (cols, rows)), sides(axes), strict=True) if side]
    return [
        ((*batch, *shape), dtype)
        for extents in wanted
        for shape, dtype in zip(form.shapes(*extents, layout), (form.values, form.scales), strict=True)
    ]
