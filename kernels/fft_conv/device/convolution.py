"""The convolution of signals with a filter of each channel, by the spectrum of the filter."""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.fft_conv.device.fourier import (
    SIDE,
    Inner,
    complex_part,
    gated,
    gated_signals,
    inverse,
    load_signals,
    place_of,
    signals_of,
    spectrum,
    table,
    tile_of,
)


class SpectralConvolution(Inner, tk.lcsf):
    """Y = post · (K ∗ (pre · U)).

    K: (2, rows, 64), the spectrum of each channel's filter, real and imaginary parts. `conjugated`: its conjugate,
    which correlates. PRE, POST (`pre_gated`, `post_gated`): as U.
    """

    filter_dtype: tl.dtype = tk.bf16
    conjugated: bool = False
    pre_gated: bool = False
    post_gated: bool = False

    @property
    def filters(self) -> int:
        """Tiles of spectra of filters that an iteration has."""
        return self.consumers if self.across else 1

    def layout(self) -> tk.layout:
        gates = [name for name, given in (("PRE", self.pre_gated), ("POST", self.post_gated)) if given]
        tensors = dict.fromkeys(("U", *gates), self.box)
        part, filters = (tk.st(self.filter_dtype, n * SIDE.value, SIDE.value) for n in (1, 2 * self.filters))
        return tk.layout(
            globals={**tensors, "K": part, "G": None, **self.tables, "Y": self.box},
            input={**dict.fromkeys(tensors, self.signals), "K": filters},
            task=self.tables,
            per="block",
            scratch=dict.fromkeys(("real", "imag"), self.box),
            output=dict(Y=self.signals),
            args=("share", "total", "pairs"),
        )

    @triton.jit
    def load(ctx, input):
        load_signals(ctx, ctx.globals.U, input.U, input.full)
        for i in tl.static_range(2 * ctx.config.filters):
            place = i % 2, tile_of(ctx, i // 2), 0
            tk.load_async(tk.subtile(input.K, SIDE, SIDE, i), ctx.globals.K, place, input.full)
        if ctx.config.pre_gated:
            load_signals(ctx, ctx.globals.PRE, input.PRE, input.full)
        if ctx.config.post_gated:
            load_signals(ctx, ctx.globals.POST, input.POST, input.full)

    @triton.jit
    def start(ctx):
        g = table(ctx, 0)
        return tk.struct(g=g, h=table(ctx, 2) if ctx.config.real else g)

    @triton.jit
    def compute(ctx, state, input, output):
        home, x = tk.complex(ctx.scratch.real, ctx.scratch.imag), signals_of(ctx, input.U)
        if ctx.config.pre_gated:
            x = gated_signals(ctx, x, signals_of(ctx, input.PRE), home)
        z = spectrum(ctx, state.g, x)
        k = tk.cast(tk.load(complex_part(input.K, ctx.consumer if ctx.config.across else 0)), tk.fp32)
        # the conjugate of the product, whose transform is the conjugate of the signals
        z = tk.mul(tk.conj(z), k) if ctx.config.conjugated else tk.conj(tk.mul(z, k))
        z = tk.mm_AB(tk.cast(z, ctx.config.dtype), complex_part(ctx.task.F, 0))
        y = inverse(ctx, state.h, z, home)
        if ctx.config.post_gated:
            y = gated(ctx, y, signals_of(ctx, input.POST))
        tk.store(signals_of(ctx, output.Y), tk.cast(y, ctx.config.dtype))
        return state

    @triton.jit
    def store(ctx, output):
        ROWS: tl.constexpr = ctx.config.rows
        for i in tl.static_range(ROWS * ctx.config.consumers):
            batch, row = place_of(ctx, i, ROWS)
            tk.store_async(ctx.globals.Y, tk.subtile(output.Y, SIDE, SIDE, i), (batch, row, 0))
