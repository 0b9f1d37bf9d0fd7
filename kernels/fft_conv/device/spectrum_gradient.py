"""The gradient of the filters of convolutions, as spectra."""

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
)


class SpectrumGradient(Fourier, tk.lcf):
    """P = Σ_batch conj(spectrum of U) · (spectrum of V). The real part of the inverse transform of P is the sum of the
    correlations of the real and of the imaginary parts of the signals.

    P: (consumers, 2, rows, 64) fp32, a sum for each consumer. A CTA has all iterations of a tile and part.
    """

    parts_first: bool = False

    @property
    def shares_g(self) -> bool:
        return True

    def layout(self) -> tk.layout:
        return tk.layout(
            globals={"U": self.box, "V": self.box, **self.tables, "P": None},
            input=dict(U=self.signals, V=self.signals),
            task=self.tables,
            per="block",
            scratch=dict.fromkeys(("real", "imag"), tk.st(self.dtype, SIDE.value, SIDE.value)),
            args=("share", "total", "pairs"),
        )

    @triton.jit
    def load(ctx, input):
        load_signals(ctx, ctx.globals.U, input.U, input.full)
        load_signals(ctx, ctx.globals.V, input.V, input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(p=tk.zero(tk.crt(tk.fp32, SIDE, SIDE)))

    @triton.jit
    def compute(ctx, state, input):
        row, part, pair = place(ctx)
        g = complex_part(ctx.task.G, part)
        home = tk.complex(ctx.scratch.real, ctx.scratch.imag)  # registers hold three complex tiles already
        tk.store(home, tk.cast(spectrum(ctx, g, signals_of(ctx, input.U)), ctx.config.dtype))
        v = spectrum(ctx, g, signals_of(ctx, input.V))
        added = tk.mul(tk.conj(tk.cast(tk.load(home), tk.fp32)), v)
        p = tk.add(tk.mul(state.p, tl.where(pair == 0, 0.0, 1.0)), added)
        if pair == ctx.args.pairs - 1:
            tile = row * ctx.config.parts + part
            tk.store(ctx.globals.P, p.real, (ctx.consumer, 0, tile, 0))
            tk.store(ctx.globals.P, p.imag, (ctx.consumer, 1, tile, 0))
        return state.replace(p=p)

    @triton.jit
    def finish(ctx, state, epilogue):
        pass
