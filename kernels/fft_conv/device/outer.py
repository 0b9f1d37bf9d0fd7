"""The outer factors of transforms that have more numbers than a tile: M rows of P numbers become M complex signals of P
numbers, and back (`device.fourier`).

A task has 64 columns of all signals, whose factors T stay in shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens.kernels.fft_conv.device.fourier import (
    SIDE,
    Fourier,
    complex_part,
    gated,
    gated_signals,
    inverse,
    place_of,
    signals_of,
    table,
    times,
)


class Outer(Fourier):
    """What both directions share. X: signals, with a gate (`gated`) or None. Z: (2 · signals, …), real and imaginary
    parts by turns: those of two rows of the batch, or of one where signals are `real`.

    Tensors of signals are (batch, channels, M, P), and a tile has the rows of `channels` channels, one below the other.
    `channels` = 0: they are (batch, 1, rows, P), with M a power of two, and a tile is 64 rows.
    """

    gated: bool = False
    channels: int = 0

    @property
    def box(self) -> tk.st:
        """What a copy moves."""
        return tk.st(self.dtype, SIDE.value // max(1, self.channels), SIDE.value)

    @triton.jit
    def setup(ctx):
        cols = tk.extent(ctx.globals.T, 1) // SIDE
        first = ctx.task_id // cols * ctx.args.share
        last = tl.minimum(first + ctx.args.share, ctx.args.total)
        return tk.task(last - first, when=first < ctx.args.total, first=first, col=ctx.task_id % cols)

    @triton.jit
    def load_task(ctx, task):
        tk.load_async(task.T, ctx.globals.T, (0, ctx.col), task.full)


@triton.jit
def box_at(ctx, i: tl.constexpr, ROWS: tl.constexpr):
    """The coordinates of box `i` of an iteration, which has `ROWS` rows of the batch of each consumer."""
    CHANNELS: tl.constexpr = ctx.config.channels
    if CHANNELS:
        batch, tile = place_of(ctx, i // CHANNELS, ROWS)
        return batch, tile * CHANNELS + i % CHANNELS, 0, ctx.col
    else:
        batch, tile = place_of(ctx, i, ROWS)
        return batch, 0, tile, ctx.col


@triton.jit
def load_boxes(ctx, X, tile, full, ROWS: tl.constexpr):
    """Load tiles of `ROWS` rows of the batch for each consumer."""
    CHANNELS: tl.constexpr = max(1, ctx.config.channels)
    for i in tl.static_range(ROWS * ctx.config.consumers * CHANNELS):
        tk.load_async(tk.subtile(tile, SIDE // CHANNELS, SIDE, i), X, box_at(ctx, i, ROWS), full)


@triton.jit
def store_boxes(ctx, X, tile, ROWS: tl.constexpr):
    """Store tiles of `ROWS` rows of the batch of each consumer. TMA skips rows that a channel does not have."""
    CHANNELS: tl.constexpr = max(1, ctx.config.channels)
    for i in tl.static_range(ROWS * ctx.config.consumers * CHANNELS):
        tk.store_async(X, tk.subtile(tile, SIDE // CHANNELS, SIDE, i), box_at(ctx, i, ROWS))


class OuterTransform(Outer, tk.lcsf):
    """Z = T ∘ G (gate · X)."""

    def layout(self) -> tk.layout:
        tensors = dict.fromkeys(("X", "GATE") if self.gated else ("X",), self.box)
        return tk.layout(
            globals={**tensors, "G": None, "T": self.factors, "Z": self.box},
            input=dict.fromkeys(tensors, self.signals),
            task=dict(T=self.factors),
            per="block",
            output=dict(Z=self.spectra),
            args=("share", "total", "pairs"),
        )

    @triton.jit
    def load(ctx, input):
        load_boxes(ctx, ctx.globals.X, input.X, input.full, ctx.config.rows)
        if ctx.config.gated:
            load_boxes(ctx, ctx.globals.GATE, input.GATE, input.full, ctx.config.rows)

    @triton.jit
    def start(ctx):
        return tk.struct(g=table(ctx, 0))

    @triton.jit
    def compute(ctx, state, input, output):
        z, x = complex_part(output.Z, ctx.consumer), signals_of(ctx, input.X)
        if ctx.config.gated:
            x = gated_signals(ctx, x, signals_of(ctx, input.GATE), z)
        tk.store(z, times(ctx, tk.mm_AB(state.g, x), complex_part(ctx.task.T, 0)))
        return state

    @triton.jit
    def store(ctx, output):
        store_boxes(ctx, ctx.globals.Z, output.Z, 2)


class OuterInverse(Outer, tk.lcsf):
    """X = gate · (the signals of which `OuterTransform` makes Z)."""

    def layout(self) -> tk.layout:
        tensors = dict(Z=self.box) | (dict(GATE=self.box) if self.gated else {})
        tiles = dict(Z=self.spectra) | (dict(GATE=self.signals) if self.gated else {})
        return tk.layout(
            globals={**tensors, "G": None, "T": self.factors, "X": self.box},
            input=tiles,
            task=dict(T=self.factors),
            per="block",
            scratch=dict.fromkeys(("real", "imag"), tk.st(self.dtype, SIDE.value, SIDE.value)),
            output=dict(X=self.signals),
            args=("share", "total", "pairs"),
        )

    @triton.jit
    def load(ctx, input):
        load_boxes(ctx, ctx.globals.Z, input.Z, input.full, 2)
        if ctx.config.gated:
            load_boxes(ctx, ctx.globals.GATE, input.GATE, input.full, ctx.config.rows)

    @triton.jit
    def start(ctx):
        return tk.struct(h=table(ctx, 2 if ctx.config.real else 0))

    @triton.jit
    def compute(ctx, state, input, output):
        home = tk.complex(ctx.scratch.real, ctx.scratch.imag)
        z = tk.conj(tk.cast(tk.load(complex_part(input.Z, ctx.consumer)), tk.fp32))
        x = inverse(ctx, state.h, z, home)
        if ctx.config.gated:
            x = gated(ctx, x, signals_of(ctx, input.GATE))
        tk.store(signals_of(ctx, output.X), tk.cast(x, ctx.config.dtype))
        return state

    @triton.jit
    def store(ctx, output):
        store_boxes(ctx, ctx.globals.X, output.X, ctx.config.rows)
