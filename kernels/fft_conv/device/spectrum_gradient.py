"""The gradient of the filters of convolutions, as spectra."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.fft_conv.device.fourier import (
    SIDE,
    Inner,
    complex_part,
    load_signals,
    place,
    signals_of,
    spectrum,
    tile_of,
)


class SpectrumGradient(Inner, tk.lcf):
    """P = Σ_batch conj(spectrum of U) · (spectrum of V). The real part of the inverse transform of P is the sum of the
    correlations of the real and of the imaginary parts of the signals.

    P: (consumers, 2, rows, 64) fp32, a sum for each consumer, or one `across`. A CTA has all iterations of a tile.
    """

    @property
    def tables(self) -> dict[str, Any]:
        return super().tables | dict(G=tk.st(self.dtype, 2 * SIDE.value, SIDE.value))

    def layout(self) -> tk.layout:
        return tk.layout(
            globals={"U": self.box, "V": self.box, **self.tables, "P": None},
            input=dict(U=self.signals, V=self.signals),
            task=self.tables,
            per="block",
            scratch=dict.fromkeys(("real", "imag"), self.box),
            args=("share", "total", "pairs"),
        )

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.F, ctx.globals.F, (0, 0), task.full)
        tk.load_async(task.T, ctx.globals.T, (0, 0), task.full)
        tk.load_async(task.G, ctx.globals.G, (0, 0), task.full)

    @triton.jit
    def load(ctx, input):
        load_signals(ctx, ctx.globals.U, input.U, input.full)
        load_signals(ctx, ctx.globals.V, input.V, input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(p=tk.zero(tk.crt(tk.fp32, SIDE, SIDE)))

    @triton.jit
    def compute(ctx, state, input):
        _, pair = place(ctx)
        g = complex_part(ctx.task.G, 0)
        home = tk.complex(ctx.scratch.real, ctx.scratch.imag)  # registers hold three complex tiles already
        tk.store(home, tk.cast(spectrum(ctx, g, signals_of(ctx, input.U)), ctx.config.dtype))
        v = spectrum(ctx, g, signals_of(ctx, input.V))
        added = tk.mul(tk.conj(tk.cast(tk.load(home), tk.fp32)), v)
        p = tk.add(tk.mul(state.p, tl.where(pair == 0, 0.0, 1.0)), added)
        if pair == ctx.args.pairs - 1:
            sum = 0 if ctx.config.across else ctx.consumer
            tk.store(ctx.globals.P, p.real, (sum, 0, tile_of(ctx, ctx.consumer), 0))
            tk.store(ctx.globals.P, p.imag, (sum, 1, tile_of(ctx, ctx.consumer), 0))
        return state.replace(p=p)

    @triton.jit
    def finish(ctx, state, epilogue):
        pass
