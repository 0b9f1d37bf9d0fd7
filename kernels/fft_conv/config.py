"""The factors of the transforms of FFT convolution, and which template a call takes."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 64  # rows and columns of a tile
SHORTEST, LONGEST = 256, SIDE * SIDE  # numbers of a transform of one part


class Tables(NamedTuple):
    """The factors of a transform of n numbers. Each is scaled by a power of two, so that spectra are about as large as
    signals; `scale` is the product of those of a transform and of its inverse, and of n.

    f, t: (2 · SIDE, SIDE), t for each part of the spectrum, real over imaginary part, in the dtype of signals and in
    fp16: F and T of `device.fourier`.
    g: (matrices · SIDE, SIDE), in the dtype of signals. Two matrices of a signal as long as the transform, real and
    imaginary part. Padded, four matrices A, B, C and D: A x + i B x for x = [real; imaginary], then
    [real; imaginary] = C z.real + D z.imag. Two matrices of each part where there are several.
    w: (2 · parts, SIDE), in fp32. The inverse of a part has the matrices of part 0, and w as factors of its rows.
    """

    f: Tensor
    t: Tensor
    g: Tensor
    w: Tensor
    scale: float


def roots(rows: Tensor, cols: Tensor, period: int) -> Tensor:
    """exp(-2πi · rows · cols / period), in complex128."""
    turns = torch.outer(rows, cols) % period / period
    return torch.polar(torch.ones_like(turns), -2 * math.pi * turns)


@functools.lru_cache(maxsize=64)
def tables(n: int, padded: bool, dtype: torch.dtype, device: torch.device) -> Tables:
    """The factors of a transform of `n` numbers."""
    parts = parts_of(n)
    rows, side = n // SIDE // parts, torch.arange(SIDE, dtype=torch.float64, device="cpu")
    halves = math.log2(SIDE) // 2, math.log2(rows) // 2
    f = roots(side, side, SIDE) * 2.0 ** -halves[0]
    row, channel = side % rows, side // rows
    t = [roots(parts * row + part, side, n) for part in range(parts)]
    of_one = (channel[:, None] == channel) * 2.0 ** -halves[1]
    of_parts = [roots(parts * row + part, row, parts * rows) * of_one for part in range(parts)]
    matrices = [x for g in of_parts for x in (g.real, g.imag)]
    w = roots(torch.arange(parts, dtype=torch.float64, device="cpu"), row, parts * rows)
    if padded:
        g = of_parts[0][:, row < rows // 2]
        matrices = [
            torch.cat([g.real, -g.imag], 1),
            torch.cat([g.imag, g.real], 1),
            torch.cat([g.real, -g.imag], 1).mT,
            torch.cat([-g.imag, -g.real], 1).mT,
        ]
    return Tables(
        torch.cat([f.real, f.imag]).to(device, dtype),
        torch.cat([x for part in t for x in (part.real, part.imag)]).to(device, torch.float16),
        torch.cat(matrices).to(device, dtype),
        torch.stack([w.real, w.imag], 1).flatten(0, 1).to(device, torch.float32),
        n * 4.0 ** -sum(halves),
    )


def filter_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of spectra of filters, for signals of `dtype`: the range of fp16 is too small."""
    return torch.float32 if dtype == torch.float16 else torch.bfloat16


def parts_of(n: int) -> int:
    """The tiles of a spectrum of `n` numbers that has several."""
    return max(1, n // LONGEST)


def is_length(n: int, length: int) -> bool:
    """Do the kernels have a transform of `n` numbers, for signals of this length?"""
    return not n & (n - 1) and SHORTEST <= n <= (2 if length <= n // 2 else 1) * LONGEST


def has_kernel(length: int, taps: int, causal: bool) -> bool:
    """Is there a kernel for signals and filters of these lengths?"""
    n = transform_length(length, taps, causal) if min(length, taps) else 0
    return is_length(n, length) and taps <= n


def transform_length(length: int, taps: int, causal: bool) -> int:
    """The numbers of a transform for signals and filters of these lengths: without `causal`, those of the signal."""
    n = length + taps - 1 if causal else length
    return max(SHORTEST, 1 << (n - 1).bit_length()) if causal else n
