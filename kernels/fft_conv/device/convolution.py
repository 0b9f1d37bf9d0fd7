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
    number,
    signals_of,
    spectrum,
    table,
    times,
)


class SpectralConvolution(Fourier, tk.lcsf):
    """Y = post · (K ∗ (pre · U)).

    K: (2, rows, 64), the spectrum of each channel's filter, real and imaginary parts. `conjugated`: its conjugate,
    which correlates. PRE, POST (`pre_gated`, `post_gated`): as U.
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
        square = tk.st(self.dtype, SIDE.value, SIDE.value)
        return tk.layout(
            globals={**tensors, "K": part, **self.tables, "G": None, "Y": self.box},
            input={**dict.fromkeys(tensors, self.signals), "K": spectra},
            task=self.tables,
            per="block",
            scratch=dict(real=square, imag=square),
            output=dict(Y=self.signals),
            args=("share", "total", "pairs"),
        )

    @triton.jit
    def load(ctx, input):
        tile = number(ctx) // ctx.args.pairs
        load_signals(ctx, ctx.globals.U, input.U, input.full)
        for part in tl.static_range(2):
            tk.load_async(tk.subtile(input.K, SIDE, SIDE, part), ctx.globals.K, (part, tile, 0), input.full)
        if ctx.config.pre_gated:
            load_signals(ctx, ctx.globals.PRE, input.PRE, input.full)
        if ctx.config.post_gated:
            load_signals(ctx, ctx.globals.POST, input.POST, input.full)

    @triton.jit
    def start(ctx):
        g = table(ctx, 0)
        return tk.struct(g=g, h=table(ctx, 2) if ctx.config.padded else g)

    @triton.jit
    def compute(ctx, state, input, output):
        z = spectrum(ctx, state.g, gated_signals(ctx, input))
        k = tk.cast(tk.load(complex_part(input.K, 0)), tk.fp32)
        # the conjugate of the product, whose transform is the conjugate of the signals
        z = tk.mul(tk.conj(z), k) if ctx.config.conjugated else tk.conj(tk.mul(z, k))
        z = tk.mm_AB(tk.cast(z, ctx.config.dtype), complex_part(ctx.task.F, 0))
        home = tk.complex(ctx.scratch.real, ctx.scratch.imag)
        tk.store(home, times(ctx, z, complex_part(ctx.task.T, 0)))
        tk.fence_async()
        if ctx.config.padded:
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
        batch, tile = number(ctx) % ctx.args.pairs * BOXES, number(ctx) // ctx.args.pairs
        for i in tl.static_range(BOXES):
            tk.store_async(ctx.globals.Y, tk.subtile(output.Y, ctx.config.rows, SIDE, i), (batch + i, tile, 0))

    @triton.jit
    def finish(ctx, state, epilogue):
        pass


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
def gated_signals(ctx, input):
    """A consumer's signals in shared memory, times their gate where there is one."""
    x = signals_of(ctx, input.U)
    if ctx.config.pre_gated:
        home = ctx.scratch.real if ctx.config.padded else tk.complex(ctx.scratch.real, ctx.scratch.imag)
        found = gated(ctx, tk.cast(tk.load(x), tk.fp32), signals_of(ctx, input.PRE))
        tk.store(home, tk.cast(found, ctx.config.dtype))
        tk.fence_async()
        return home
    else:
        return x
