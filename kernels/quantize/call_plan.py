"""What a call of a quantiser does: its launches, and the memory of its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.quantize.checks import check_beside, check_matrix, check_pairs, check_reachable
from tritonkittens.kernels.quantize.config import MXFP8, NVFP4, Format, result_shapes, sides
from tritonkittens.kernels.quantize.device.quantize import SIDE, mxfp8_tiles, nvfp4_tiles, tensor_scale, tile_amax

TILE = SIDE.value
CONVERT = "fastest"  # the conversions of the kernels (`device.formats`); tests set it to "arithmetic"
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Matrices:
    """How the kernels read `x`, (…, M, K), as matrices: with the contiguous dimension last, if there is one.

    Where `swapped`, they read the transposed matrix: its rows are the columns of `x`.
    """

    def __init__(self, x: Tensor):
        self.swapped = x.stride(-1) != 1 and x.stride(-2) == 1
        view = self.view(x)
        self.batch, self.rows, self.cols = view.shape
        self.strides = view.stride()
        self.is_whole = self.rows % TILE == 0 and self.cols % TILE == 0
        self.is_wide = TILE * (abs(self.strides[1]) + abs(self.strides[2])) >= 1 << 31
        self.grid = (-(-self.cols // TILE), -(-self.rows // TILE), self.batch)

    def view(self, x: Tensor) -> Tensor:
        """Return `x` with three dimensions. It is a copy where leading dimensions cannot be merged."""
        x = x.mT if self.swapped else x
        return x.unsqueeze(0) if x.ndim == 2 else x.flatten(0, -3)

    def axes(self, axes: str) -> tuple[bool, bool]:
        """Return whether the kernels quantise their rows, and their columns."""
        rows, cols = sides(axes)
        return (cols, rows) if self.swapped else (rows, cols)


class Plan:
    """A launch of a quantiser for tensors of one kind. `kernel` takes `operands`, values and scales of its rows and its
    columns, the numbers of the matrices, `numbers`, matrix strides of the scales, which sides it has, and
    `constants`."""

    def __init__(
        self, kernel: Any, form: Format, x: Tensor, axes: str, layout: str, numbers: tuple[int, ...], *constants: Any
    ):
        self.kernel, self.form, self.numbers, self.constants = kernel, form, numbers, constants
        self.matrices = Matrices(x)
        self.sides = self.matrices.axes(axes)
        self.results = [
            (allocator(shape, torch.uint8, x.device), dtype) for shape, dtype in result_shapes(x, form, axes, layout)
        ]
        self.is_empty = x.numel() == 0
        self.bound: Callable[..., None] | None = None

    def __call__(self, x: Tensor, *operands: Tensor) -> list[Tensor]:
        found = [allocate() for allocate, _ in self.results]
        if not self.is_empty:
            # of rows, then of columns; a side that is left out has the memory of the other
            outputs = (*found[2:], *found[:2]) if self.matrices.swapped else found
            outputs = (*outputs, *outputs)[:4]
            tensors = (self.matrices.view(x), *operands, *outputs)
            if self.bound is None:
                self.bound = self._bind(tensors)
            self.bound(*tensors)
        return [memory.view(dtype) for memory, (_, dtype) in zip(found, self.results, strict=True)]

    def _bind(self, tensors: tuple[Tensor, ...]) -> Callable[..., None]:
        m = self.matrices
        scales = [t.numel() // m.batch for t in (tensors[-3], tensors[-1])]
        return self.kernel.bind(
            m.grid, *tensors, m.rows, m.cols, *m.strides, *self.numbers, *scales, *self.sides, *self.constants,
            m.is_whole, m.is_wide,
        )  # fmt: skip


_plans: dict[Hashable, Any] = {}  # by what is known of a call


def run_mxfp8(x: Tensor, dtype: torch.dtype, axes: str, scaling: str, layout: str) -> list[Tensor]:
    """`quantize_mxfp8` of a plain tensor: values and scales of rows, then of columns."""
    key = (signature(x), dtype, axes, scaling, layout)
    plan = _plans.get(key)
    if plan is None:
        check_matrix("quantize_mxfp8", x)
        check_reachable("quantize_mxfp8", x)
        mantissa = 3 if dtype == torch.float8_e4m3fn else 2
        constants = (mantissa, scaling == "up", layout == "blocked", CONVERT)
        plan = Plan(mxfp8_tiles, MXFP8[dtype], x, axes, layout, (), *constants)
        remember(_plans, key, plan)
    return plan(x)


def run_nvfp4(
    x: Tensor, scale: Tensor, axes: str, layout: str, random_bits: Tensor | None, hadamard: Tensor | None
) -> list[Tensor]:
    """`quantize_nvfp4` of plain tensors: values and scales of rows, then of columns."""
    key = (signature(x, scale, random_bits, hadamard), axes, layout)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, _nvfp4_plan(x, scale, axes, layout, random_bits, hadamard))
    return plan(x, scale, random_bits, hadamard)


def _nvfp4_plan(
    x: Tensor, scale: Tensor, axes: str, layout: str, random_bits: Tensor | None, hadamard: Tensor | None
) -> Callable[..., list[Tensor]]:
    check_matrix("quantize_nvfp4", x)
    check_reachable("quantize_nvfp4", x)
    check_pairs(x, axes)
    check_beside("quantize_nvfp4", x, scale, random_bits, hadamard)
    matrices = Matrices(x)

    def bytes_of(random_bits: Tensor) -> Tensor:
        found = random_bits.contiguous().view(torch.uint8)
        found = found.unsqueeze(0) if found.ndim == 2 else found.flatten(0, -3)
        return found.mT if matrices.swapped else found

    strides = (0, 0, 0) if random_bits is None else bytes_of(random_bits).stride()
    units = [8 if length % 8 == 0 else 2 for length in (matrices.cols, matrices.rows)]
    numbers = (*strides, matrices.cols // units[0], matrices.rows // units[1])
    constants = (*units, random_bits is not None, hadamard is not None, layout == "blocked", CONVERT)
    plan = Plan(nvfp4_tiles, NVFP4, x, axes, layout, numbers, *constants)

    def run(x: Tensor, scale: Tensor, random_bits: Tensor | None, hadamard: Tensor | None) -> list[Tensor]:
        signs = scale if hadamard is None else hadamard.contiguous()
        return plan(x, scale, scale if random_bits is None else bytes_of(random_bits), signs)

    return run


def run_tensor_scale(x: Tensor, axes: str, hadamard: Tensor | None) -> Tensor:
    """`nvfp4_tensor_scale` of plain tensors."""
    check_matrix("nvfp4_tensor_scale", x)
    check_reachable("nvfp4_tensor_scale", x)
    check_beside("nvfp4_tensor_scale", x, None, None, hadamard)
    if x.numel() == 0:
        return torch.full((), SMALLEST_SCALE, dtype=torch.float32, device=x.device)
    m = Matrices(x)
    parts = m.grid[0] * m.grid[1] * m.batch
    largest = torch.empty(parts, dtype=torch.int32, device=x.device)
    found = torch.empty((), dtype=torch.float32, device=x.device)
    given = (m.view(x), largest if hadamard is None else hadamard.contiguous(), largest)
    tile_amax[m.grid](*given, m.rows, m.cols, *m.strides, *m.axes(axes), hadamard is not None, m.is_whole, m.is_wide)
    tensor_scale[(1,)](largest, found, parts)
    return found
