"""Circular convolutions by the discrete Fourier transform, whose factors are matrix products.

A signal of N = 64 · R numbers is R rows of 64, x[n₂, n₁] = x[n₁ + 64 n₂]. Its transform, at frequency k₂ + R k₁, is
X[k₂, k₁] = Σ_n₁ (T ∘ G x)[k₂, n₁] F[n₁, k₁], where G = (W_R^{n₂ k₂}), F = (W_64^{n₁ k₁}), T = (W_N^{k₂ n₁}) and W_N =
e^{-2πi/N}. A tile of 64 rows holds the R rows of 64 / R neighbouring channels, for which G is block diagonal. Two
rows of the batch are one complex signal u₁ + i u₂, since the filter is real.

The spectrum times that of the filter, conjugated, runs through the same steps in reverse order: F, T, and the transpose
of G. This gives the conjugate of the result.

Convolutions that are not circular (`real`) take the spectrum at the frequencies k + 1/4 (right-angle convolution:
Crandall and Pomerance, Prime Numbers, 9.5). Then an index that passes N comes back times i. A real signal and a real
filter of up to N numbers have their linear convolution in the result: numbers 0 to N - 1 in its real part, the others
in its imaginary part. So a signal needs no zeros behind it and no partner, and the products with G on both sides are
products with real tiles. In G and T, k₂ is k₂ + 1/4.

Longer transforms have further factors. The signal is M rows of P = N / M numbers, n = p + P m. G of size M and T
(`device.outer`) turn it into M complex rows, whose transforms of P numbers are its spectrum: that of row j has the
frequencies j + M k. M need not be a power of two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.fft_conv import config

SIDE: tl.constexpr = tl.constexpr(config.SIDE)


class Fourier:
    """What the templates share: an iteration has a tile of channels, and a signal of the batch for each consumer. That
    is two rows, or one where signals are `real`. `across`: consumers have the same rows, and neighbouring tiles.

    Tensors of signals: (batch, rows, columns), whose rows are those of all channels. G: (64 · matrices, 64), F: (128,
    64) and T: (128, columns) fp16, those of `config.tables`, real parts over imaginary parts.
    """

    dtype: tl.dtype = tk.bf16
    consumers: int = 2
    real: bool = False
    across: bool = False

    @property
    def rows(self) -> int:
        """Rows of the batch of a signal."""
        return 2 - self.real

    @property
    def box(self) -> tk.st:
        """A tile of one row of the batch."""
        return tk.st(self.dtype, SIDE.value, SIDE.value)

    @property
    def signals(self) -> tk.st:
        """The tiles of the batch rows of all consumers, one over the other."""
        return self.spectra if not self.real else tk.st(self.dtype, SIDE.value * self.consumers, SIDE.value)

    @property
    def spectra(self) -> tk.st:
        """Real and imaginary parts of all consumers."""
        return tk.st(self.dtype, 2 * SIDE.value * self.consumers, SIDE.value)

    @property
    def factors(self) -> tk.st:
        """A tile of T."""
        return tk.st(tk.fp16, 2 * SIDE.value, SIDE.value)


class Inner(Fourier):
    """A CTA has one task, `share` iterations, and the tables of a transform in shared memory."""

    @property
    def tables(self) -> dict[str, Any]:
        """Tables in shared memory."""
        return dict(F=tk.st(self.dtype, 2 * SIDE.value, SIDE.value), T=self.factors)

    @triton.jit
    def setup(ctx):
        first = ctx.task_id * ctx.args.share
        last = tl.minimum(first + ctx.args.share, ctx.args.total)
        return tk.task(last - first, when=first < ctx.args.total, first=first)

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.F, ctx.globals.F, (0, 0), task.full)
        tk.load_async(task.T, ctx.globals.T, (0, 0), task.full)


@triton.jit
def place(ctx):
    """(number of the tiles of channels, place in the batch) of this iteration."""
    number = ctx.first + ctx.iter
    return number // ctx.args.pairs, number % ctx.args.pairs


@triton.jit
def tile_of(ctx, consumer):
    """The tile of channels of a consumer."""
    tile, _ = place(ctx)
    return tile * ctx.config.consumers + consumer if ctx.config.across else tile


@triton.jit
def place_of(ctx, i: tl.constexpr, ROWS: tl.constexpr):
    """(row of the batch, tile of channels) of tile `i` of an iteration, which has `ROWS` of each consumer."""
    _, pair = place(ctx)
    if ctx.config.across:
        return pair * ROWS + i % ROWS, tile_of(ctx, i // ROWS)
    else:
        return pair * (ROWS * ctx.config.consumers) + i, tile_of(ctx, 0)


@triton.jit
def load_signals(ctx, X, tile, full):
    """Load the signals of all consumers."""
    ROWS: tl.constexpr = ctx.config.rows
    for i in tl.static_range(ROWS * ctx.config.consumers):
        batch, row = place_of(ctx, i, ROWS)
        tk.load_async(tk.subtile(tile, SIDE, SIDE, i), X, (batch, row, 0), full)


@triton.jit
def complex_part(tile, i):
    """Complex tile number `i` of a tile of real parts over imaginary parts."""
    return tk.complex(tk.subtile(tile, SIDE, SIDE, 2 * i), tk.subtile(tile, SIDE, SIDE, 2 * i + 1))


@triton.jit
def signals_of(ctx, tile):
    """A consumer's rows of the batch: a real tile, or a complex one of two."""
    if ctx.config.real:
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
    """The transform of signals in shared memory."""
    z = times(ctx, tk.mm_AB(g, x), complex_part(ctx.task.T, 0))
    return tk.mm_AB(z, complex_part(ctx.task.F, 0))


@triton.jit
def inverse(ctx, h, z, home):
    """The last steps, T and G: the signals of `z`, the conjugate of what G and T made of theirs. `home`: a tile for the
    operand of the last product."""
    tk.store(home, times(ctx, z, complex_part(ctx.task.T, 0)))
    tk.fence_async()
    if ctx.config.real:
        y = tk.mm_AB(h.real, home.real, wait=False)
        return tk.mma_wait(tk.mma_AB(h.imag, home.imag, y, wait=False))
    else:
        return tk.conj(tk.mm_AB(h, home))


@triton.jit
def times_real(x, gate):
    """Real signals times a gate in shared memory."""
    return tk.mul(x, tk.cast(tk.load(gate), tk.fp32))


@triton.jit
def gated(ctx, x, gate):
    """Signals times a gate in shared memory: the two parts of a complex signal have gates of their own."""
    if ctx.config.real:
        return times_real(x, gate)
    else:
        return tk.complex(times_real(x.real, gate.real), times_real(x.imag, gate.imag))


@triton.jit
def gated_signals(ctx, x, gate, home):
    """Signals times a gate, all in shared memory, in `home`."""
    home = home.real if ctx.config.real else home
    tk.store(home, tk.cast(gated(ctx, tk.cast(tk.load(x), tk.fp32), gate), ctx.config.dtype))
    tk.fence_async()
    return home
