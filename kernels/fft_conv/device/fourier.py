"""Circular convolutions by the discrete Fourier transform, whose factors are matrix products.

A signal of N = 64 · R numbers is R rows of 64, x[n₂, n₁] = x[n₁ + 64 n₂]. Its transform, at frequency k₂ + R k₁, is
X[k₂, k₁] = Σ_n₁ (T ∘ G x)[k₂, n₁] F[n₁, k₁], where G = (W_R^{n₂ k₂}), F = (W_64^{n₁ k₁}), T = (W_N^{k₂ n₁}) and W_N =
e^{-2πi/N}. A tile of 64 rows holds the R rows of 64 / R neighbouring channels, for which G is block diagonal. Two
rows of the batch are one complex signal u₁ + i u₂, since the filter is real.

The spectrum times that of the filter, conjugated, runs through the same steps in reverse order: F, T, and G. This gives
the conjugate of the result.

Zeros at the end of signals (`padded`) are in no memory: then a signal is R / 2 rows, a tile of its two parts is 64
rows, and the products by G are products by a real matrix. A longer signal of 64 rows and as many zeros has a spectrum
of two tiles (`parts`), of even and of odd k₂, each with tables T and G of its own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.fft_conv import config

SIDE: tl.constexpr = tl.constexpr(config.SIDE)


class Fourier:
    """What the templates share: a CTA has one task, `share` iterations, each of a tile of channels, a part of its
    spectrum, and two rows of the batch a consumer.

    Tensors of signals: (batch, rows, 64), whose rows are those of all channels. F: (128, 64) and T: (128 · parts, 64)
    fp16, real parts over imaginary parts. G: (64 · matrices, 64), those of `config.tables`.
    """

    dtype: tl.dtype = tk.bf16
    consumers: int = 2
    padded: bool = False
    parts: int = 1
    parts_first: bool = True  # the number of an iteration counts parts first, then places in the batch; or reversed

    @property
    def rows(self) -> int:
        """Rows of a tile of one row of the batch."""
        return SIDE.value // (1 + self.padded)

    @property
    def box(self) -> tk.st:
        """A tile of one row of the batch."""
        return tk.st(self.dtype, self.rows, SIDE.value)

    @property
    def signals(self) -> tk.st:
        """The tiles of the batch rows of all consumers, one over the other."""
        return tk.st(self.dtype, 2 * self.rows * self.consumers, SIDE.value)

    @property
    def tables(self) -> dict[str, Any]:
        """Tables in shared memory."""
        side = SIDE.value
        found = dict(F=tk.st(self.dtype, 2 * side, side), T=tk.st(tk.fp16, 2 * side * self.parts, side))
        return found | (dict(G=tk.st(self.dtype, 2 * side * self.parts, side)) if self.shares_g else {})

    @property
    def shares_g(self) -> bool:
        """Does G lie in shared memory? Else consumers have it in registers."""
        return self.parts > 1

    @triton.jit
    def setup(ctx):
        first = ctx.task_id * ctx.args.share
        last = tl.minimum(first + ctx.args.share, ctx.args.total)
        return tk.task(last - first, when=first < ctx.args.total, first=first)

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.F, ctx.globals.F, (0, 0), task.full)
        tk.load_async(task.T, ctx.globals.T, (0, 0), task.full)
        if ctx.config.shares_g:
            tk.load_async(task.G, ctx.globals.G, (0, 0), task.full)


@triton.jit
def place(ctx):
    """(tile of channels, part of its spectrum, place in the batch) of this iteration."""
    number, pairs = ctx.first + ctx.iter, ctx.args.pairs
    PARTS: tl.constexpr = ctx.config.parts
    if PARTS == 1:
        return number // pairs, 0, number % pairs
    elif ctx.config.parts_first:
        return number // PARTS // pairs, number % PARTS, number // PARTS % pairs
    else:
        return number // pairs // PARTS, number // pairs % PARTS, number % pairs


@triton.jit
def load_signals(ctx, X, tile, full):
    """Load a tile of each row of the batch of an iteration."""
    BOXES: tl.constexpr = 2 * ctx.config.consumers
    row, _, pair = place(ctx)
    for i in tl.static_range(BOXES):
        tk.load_async(tk.subtile(tile, ctx.config.rows, SIDE, i), X, (pair * BOXES + i, row, 0), full)


@triton.jit
def complex_part(tile, i):
    """Complex tile number `i` of a tile of real parts over imaginary parts."""
    return tk.complex(tk.subtile(tile, SIDE, SIDE, 2 * i), tk.subtile(tile, SIDE, SIDE, 2 * i + 1))


@triton.jit
def signals_of(ctx, tile):
    """A consumer's two rows of the batch: a complex tile, or a real one of both parts."""
    if ctx.config.padded:
        return tk.subtile(tile, SIDE, SIDE, ctx.consumer)
    else:
        return complex_part(tile, ctx.consumer)


@triton.jit
def table(ctx, i: tl.constexpr):
    """Matrices `i` and `i` + 1 of G, in registers."""
    HOME: tl.constexpr = tk.rt(ctx.config.dtype, SIDE, SIDE)
    return tk.complex(tk.load(ctx.globals.G, HOME, (i, 0)), tk.load(ctx.globals.G, HOME, (i + 1, 0)))


@triton.jit
def times(ctx, z, factors):
    """The products of a tile in registers and of factors in shared memory, as an operand."""
    return tk.cast(tk.mul(z, tk.cast(tk.load(factors), tk.fp32)), ctx.config.dtype)


@triton.jit
def spectrum(ctx, g, x):
    """A part of the transform of signals in shared memory."""
    _, part, _ = place(ctx)
    z = times(ctx, tk.mm_AB(g, x), complex_part(ctx.task.T, part))
    return tk.mm_AB(z, complex_part(ctx.task.F, 0))
