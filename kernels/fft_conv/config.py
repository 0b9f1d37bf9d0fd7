"""The factors of the transforms of FFT convolution, and which lengths have one."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 64  # rows and columns of a tile
NARROW = 32  # columns of a spectrum for `causal`, which tell it from others
TILE = SIDE * SIDE  # numbers of the longest transform in one kernel
SHORTEST, LONGEST = SIDE, 1 << 22  # numbers of a transform


class Tables(NamedTuple):
    """The factors of a transform of n numbers, or the outer factors of one that has more than a tile. Each is scaled by
    a power of two, so that spectra are about as large as signals.

    f: (2 · SIDE, SIDE), in the dtype of signals, real over imaginary part: F of `device.fourier`.
    t: (2 · SIDE, columns), in fp16, real over imaginary part: T.
    g: (matrices · SIDE, SIDE), in the dtype of signals: G. Two matrices of complex signals, real and imaginary part.
    Four of real ones, A, B, C and D: A x + i B x, and back C z.real + D z.imag.
    """

    f: Tensor
    t: Tensor
    g: Tensor


def roots(rows: Tensor, cols: Tensor, period: int) -> Tensor:
    """exp(-2πi · rows · cols / period), in complex128."""
    turns = torch.outer(rows, cols) % period / period
    return torch.polar(torch.ones_like(turns), -2 * math.pi * turns)


def numbers(n: int) -> Tensor:
    """0 to n - 1, in float64."""
    return torch.arange(n, dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=64)
def tables(n: int, real: bool, dtype: torch.dtype, device: torch.device) -> Tables:
    """The factors of a transform of `n` numbers."""
    side, rows = numbers(SIDE), factors_of(n)[0]
    row, channel = side % height_of(rows), side // height_of(rows)
    frequency, exists = row + 0.25 * real, row < rows
    f = roots(side, side, SIDE) / _root(SIDE)
    t = roots(frequency, numbers(n // rows), n)
    g = roots(frequency, row, rows) * (channel[:, None] == channel) * torch.outer(exists, exists) / _root(rows)
    matrices = [g.real, g.imag, g.real.mT, -g.imag.mT] if real else [g.real, g.imag]
    return Tables(
        torch.cat([f.real, f.imag]).to(device, dtype),
        torch.cat([t.real, t.imag]).to(device, torch.float16),
        torch.cat(matrices).to(device, dtype),
    )


@functools.lru_cache(maxsize=16)
def turns(n: int, device: torch.device) -> Tensor:
    """The factors of a filter whose spectrum has the frequencies k + 1/4, (n) in complex64."""
    quarter = torch.full((1,), 0.25, dtype=torch.float64, device="cpu")
    return roots(numbers(n), quarter, n)[:, 0].to(device, torch.complex64)


def _root(rows: int) -> int:
    """The scale of a table of `rows` numbers: about √rows, and a power of two."""
    return 1 << (rows.bit_length() - 1) // 2


def height_of(rows: int) -> int:
    """The rows of a tile that a channel takes."""
    return 1 << (rows - 1).bit_length()


def inner_length(n: int) -> int:
    """The numbers of a row of signals of about `n` numbers, more than a tile."""
    return min(TILE, height_of(n) // 16) if n <= SIDE * TILE else -(-n // SIDE)


def factors_of(n: int) -> list[int]:
    """The rows of the factors of a transform of `n` numbers, the outermost first. The last have 64 columns each."""
    if n <= TILE:
        return [n // SIDE]
    return [n // inner_length(n), *factors_of(inner_length(n))]


def scale_of(n: int) -> float:
    """The product of n and of the scales of a transform of `n` numbers and of its inverse."""
    return math.prod([rows / _root(rows) ** 2 for rows in factors_of(n)])  # a list: torch.compile takes no generator


def filter_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of spectra of filters, for signals of `dtype`: the range of fp16 is too small."""
    return torch.float32 if dtype == torch.float16 else torch.bfloat16


def is_length(n: int) -> bool:
    """Do the kernels have a transform of `n` numbers?"""
    return SHORTEST <= n <= LONGEST and n == transform_length(n, True)


def has_kernel(length: int, taps: int, causal: bool) -> bool:
    """Is there a kernel for signals and filters of these lengths?"""
    return min(length, taps) > 0 and is_length(transform_length(length, causal)) and (causal or taps <= length)


def transform_length(length: int, causal: bool) -> int:
    """The numbers of a transform for signals of this length: for `causal`, up to the next one."""
    if not causal:
        return length
    if length <= TILE:
        return max(SHORTEST, height_of(length))
    row = inner_length(length)
    return SIDE * transform_length(row, True) if length > SIDE * TILE else -(-length // row) * row
