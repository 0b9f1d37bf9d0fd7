"""The convolution of signals with a filter of each channel, by the spectrum of the filter."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.fft_conv.device.fourier import (
    SIDE,
    Fourier,
    complex_part,
    load_signals,
    place,
    signals_of,
    spectrum,
    table,
    times,
)


class SpectralConvolution(Fourier, tk.lcsf):
    """Y = post · (K ∗ (pre · U)).

    K: (2, rows, 64), the spectrum of each channel's filter, real and imaginary parts. `conjugated`: its conjugate,
    which correlates. PRE, POST (`pre_gated`, `post_gated`): as U. W: (2 · parts, 64) fp32, real and imaginary parts of
    factors of the rows of Y.
    """

    output_stages: int = 1
    filter_dtype: tl.dtype = tk.bf16
    conjugated: bool = False
    pre_gated: bool = False
    post_gated: bool = False

    def layout(self) -> tk.layout:
        gates = [name for name, given in (("PRE", self.pre_gated), ("POST", self.post_gated)) if given]
        tensors = dict.fromkeys(("U", *gates), self.box)
        part, spectra = (tk.st(self.filter_dtype, n * SIDE.value, SIDE.value) for n in (1, 2))
        square = dict.fromkeys(("real", "imag"), tk.st(self.dtype, SIDE.value, SIDE.value))
        return tk.layout(
            globals={**tensors, "K": part, "G": None, **self.tables, "W": None, "Y": self.box},
            input={**dict.fromkeys(tensors, self.signals), "K": spectra},
            task=self.tables,
            per="block",
            scratch=square if self.parts == 1 else {},
            output=dict(Y=self.signals),
            args=("share", "total", "pairs"),
        )

    @triton.jit
    def load(ctx, input):
        row, part, _ = place(ctx)
        load_signals(ctx, ctx.globals.U, input.U, input.full)
        for i in tl.static_range(2):
            tile = tk.subtile(input.K, SIDE, SIDE, i)
            tk.load_async(tile, ctx.globals.K, (i, row * ctx.config.parts + part, 0), input.full)
        if ctx.config.pre_gated:
            load_signals(ctx, ctx.globals.PRE, input.PRE, input.full)
        if ctx.config.post_gated:
            load_signals(ctx, ctx.globals.POST, input.POST, input.full)

    @triton.jit
    def start(ctx):
        if ctx.config.shares_g:
            return tk.struct(y=tk.zero(tk.crt(tk.fp32, SIDE, SIDE)))
        else:
            g = table(ctx, 0)
            return tk.struct(g=g, h=table(ctx, 2) if ctx.config.padded else g)

    @triton.jit
    def compute(ctx, state, input, output):
        _, part, _ = place(ctx)
        g = complex_part(ctx.task.G, part) if ctx.config.shares_g else state.g
        home = operand(ctx, output)
        z = spectrum(ctx, g, gated_signals(ctx, input, home))
        k = tk.cast(tk.load(complex_part(input.K, 0)), tk.fp32)
        # the conjugate of the product, whose transform is the conjugate of the signals
        z = tk.mul(tk.conj(z), k) if ctx.config.conjugated else tk.conj(tk.mul(z, k))
        z = tk.mm_AB(tk.cast(z, ctx.config.dtype), complex_part(ctx.task.F, 0))
        tk.store(home, times(ctx, z, complex_part(ctx.task.T, part)))
        tk.fence_async()
        if ctx.config.shares_g:
            state = state.replace(y=sum_of_parts(ctx, state.y, tk.mm_AB(complex_part(ctx.task.G, 0), home), part))
            y = tk.conj(state.y)
        elif ctx.config.padded:
            y = tk.mm_AB(state.h.real, home.real, wait=False)
            y = tk.mma_wait(tk.mma_AB(state.h.imag, home.imag, y, wait=False))
        else:
            y = tk.conj(tk.mm_AB(state.h, home))
        if ctx.config.post_gated:
            y = gated(ctx, y, signals_of(ctx, input.POST))
        tk.store(signals_of(ctx, output.Y), tk.cast(y, ctx.config.dtype))
        return state

    @triton.jit
    def store(ctx, output):
        BOXES: tl.constexpr = 2 * ctx.config.consumers
        row, part, pair = place(ctx)
        batch = pair * BOXES
        if ctx.config.parts > 1:  # TMA skips what is outside of the tensor
            batch = tl.where(part == ctx.config.parts - 1, batch, tk.extent(ctx.globals.Y, 0))
        for i in tl.static_range(BOXES):
            tk.store_async(ctx.globals.Y, tk.subtile(output.Y, ctx.config.rows, SIDE, i), (batch + i, row, 0))

    @triton.jit
    def finish(ctx, state, epilogue):
        pass


@triton.jit
def operand(ctx, output):
    """A complex tile of a consumer for the operand of its last product. The tile of the result is free until then."""
    if ctx.config.parts == 1:
        return tk.complex(ctx.scratch.real, ctx.scratch.imag)
    else:
        return complex_part(output.Y, ctx.consumer)


@triton.jit
def sum_of_parts(ctx, sums, added, part):
    """The sum over parts of products by the first part's G, times factors of rows."""
    VECTOR: tl.constexpr = tk.col_vec(tk.rt(tk.fp32, SIDE, SIDE))
    w = tk.complex(tk.load(ctx.globals.W, VECTOR, (2 * part, 0)), tk.load(ctx.globals.W, VECTOR, (2 * part + 1, 0)))
    return tk.add(tk.mul(sums, tl.where(part == 0, 0.0, 1.0)), tk.mul_row(added, w))


@triton.jit
def times_real(x, gate):
    return tk.mul(x, tk.cast(tk.load(gate), tk.fp32))


@triton.jit
def gated(ctx, x, gate):
    """Signals times a gate in shared memory: the two parts of a complex signal have gates of their own."""
    if ctx.config.padded:
        return times_real(x, gate)
    else:
        return tk.complex(times_real(x.real, gate.real), times_real(x.imag, gate.imag))


@triton.jit
def gated_signals(ctx, input, home):
    """A consumer's signals in shared memory, times their gate where there is one, in `home`."""
    x = signals_of(ctx, input.U)
    if ctx.config.pre_gated:
        home = home.real if ctx.config.padded else home
        found = gated(ctx, tk.cast(tk.load(x), tk.fp32), signals_of(ctx, input.PRE))
        tk.store(home, tk.cast(found, ctx.config.dtype))
        tk.fence_async()
        return home
    else:
        return x
