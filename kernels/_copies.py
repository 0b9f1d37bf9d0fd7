"""Copies of matrices whose rows TMA cannot address into rows that it can address, and back; and rows of zeros."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import addressable, padded_empty, power_of_two
from tritonkittens.launch import device_facts, is_reachable, plain_kernel
from tritonkittens.launch.launcher import GRID_LIMITS

ELEMENTS = 1024  # of a program, eight a thread: enough loads in flight to saturate HBM (measured: docs/notes/gemm.md)


@plain_kernel(launch_pdl=True)
@triton.jit
def copy_rows(X, Y, extents, x_strides, y_strides, ROWS: tl.constexpr, COLS: tl.constexpr, BESIDE: tl.constexpr):
    """Y = X. Grid: parts of ROWS rows, parts of COLS columns, batch.

    extents: rows and columns. x_strides, y_strides: of the batch and of the rows, in elements; columns are contiguous.
    They are tuples because Triton does not specialise numbers in tuples. With a known multiple, a thread would move
    several elements. Where one side is misaligned, a warp would then access no whole cache lines on either side.

    `launch_pdl`: it starts early. It waits for the previous kernel before it reads X or, with BESIDE, before it ends.
    In both cases this kernel ends after the previous one, so the next kernel waits for both.
    """
    if not BESIDE:
        tk.dependency_wait()
    tk.dependents_launch()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    batch = tl.program_id(2).to(tl.int64)
    inside = (row < extents[0]) & (col < extents[1])
    x = tl.load(X + (batch * x_strides[0] + row * x_strides[1] + col), mask=inside)
    tl.store(Y + (batch * y_strides[0] + row * y_strides[1] + col), x, mask=inside)
    if BESIDE:
        tk.dependency_wait()


def copied(x: Tensor, out: Tensor, beside: bool = False) -> Tensor:
    """Copy `x` to `out`, which has its shape and dtype, and return `out`.

    Matrices and batches of them with contiguous rows are copied by `copy_rows`. All else is copied by `Tensor.copy_`,
    which is slower (measured: docs/notes/gemm.md).

    `beside`: the copy may overlap the previous kernels of the stream, back to the last copy without `beside`. Before
    that one is launched, `x` must be complete and `out` allocated. Another thread may launch a kernel between the two,
    and free memory that this kernel still uses.
    """
    contiguous = x.ndim in (2, 3) and x.stride(-1) == out.stride(-1) == 1 and x.dtype == out.dtype
    if contiguous and x.numel() > 0 and is_reachable(x.device):
        batch, rows, cols = x.shape if x.ndim == 3 else (1, *x.shape)
        width = power_of_two(min(cols, ELEMENTS))
        height = ELEMENTS // width
        grid = (-(-rows // height), -(-cols // width), batch)
        if all(extent <= limit for extent, limit in zip(grid, GRID_LIMITS, strict=True)):
            # for a single matrix the kernel multiplies the first stride by batch number 0
            strides = [(t.stride(0), t.stride(-2)) for t in (x, out)]
            copy_rows[grid](x, out, (rows, cols), *strides, height, width, beside)
            return out
    return out.copy_(x)


@plain_kernel(num_warps=4)
@triton.jit
def zero_rows_behind(X, ENDS, sequences, rows, pitch, BLOCK: tl.constexpr):
    """X, (rows, pitch), becomes 0 behind the end of the last sequence. Grid: any number of programs."""
    first = tl.maximum(tl.load(ENDS + sequences - 1), 0).to(tl.int64) * pitch
    end = tl.cast(rows, tl.int64) * pitch
    for start in range(first + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(X + at, tl.zeros((BLOCK,), X.dtype.element_ty), mask=at < end)


def zero_behind(x: Tensor, ends: Tensor) -> Tensor:
    """Fill rows of `x`, which begin at equal distances, with zeros behind the last of `ends`. Return `x`."""
    if x.numel():
        grid = (device_facts(x.device).multiprocessors, 1, 1)
        zero_rows_behind[grid](x, ends, len(ends), len(x), x.stride(0), ELEMENTS)
    return x


def _home(x: Tensor) -> Tensor:
    """`x` itself, or memory for a copy whose rows TMA can address."""
    return x if addressable(x) else padded_empty(tuple(x.shape), x)


def as_addressable(x: Tensor) -> Tensor:
    """`x` itself, or a copy whose rows TMA can address."""
    home = _home(x)
    return x if home is x else copied(x, home)


def both_addressable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`as_addressable` of two matrices whose copies overlap."""
    home_a, home_b = _home(a), _home(b)  # both before the first launch, see `copied`
    if home_a is not a:
        copied(a, home_a, False)
    if home_b is not b:
        copied(b, home_b, home_a is not a)
    return home_a, home_b
