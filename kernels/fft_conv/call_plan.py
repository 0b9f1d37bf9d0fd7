"""What a call of an FFT convolution does: its spectra, its launches, and the memory of its results."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._dispatch import is_plain
from tritonkittens.kernels._tensors import addressable, remember, signature
from tritonkittens.kernels.fft_conv import config
from tritonkittens.kernels.fft_conv.checks import check, is_spectrum, length_of
from tritonkittens.kernels.fft_conv.config import SIDE, factors_of, filter_dtype, tables, transform_length, turns
from tritonkittens.kernels.fft_conv.device.convolution import SpectralConvolution
from tritonkittens.kernels.fft_conv.device.outer import OuterInverse, OuterTransform
from tritonkittens.kernels.fft_conv.device.spectrum_gradient import SpectrumGradient
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


def spectrum_of(k: Tensor, n: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """The spectra of filters (H, Lk), for signals of `dtype`, as the kernels read them: (2, H, n / 64, 64), or with
    `causal` in rows of `config.NARROW`. Numbers behind the first n do not matter."""
    k = k[:, :n].float() / config.scale_of(n)
    if causal:  # no cache keeps tensors of a trace
        k = k * (turns if is_plain(k) else turns.__wrapped__)(n, k.device)[: k.shape[1]]
    spectrum = torch.fft.fft(k, n)
    # frequency j + rows · i at [j, i], and so on for the frequencies i
    factors = factors_of(n)
    order = spectrum.view(-1, SIDE, *reversed(factors)).permute(0, *range(len(factors) + 1, 0, -1))
    parts = torch.view_as_real(order).movedim(-1, 0)
    parts = parts.to(filter_dtype(dtype), memory_format=torch.contiguous_format, copy=True)
    return parts.view(2, k.shape[0], -1, config.NARROW if causal else SIDE)


def by_number(spectrum: Tensor, n: int) -> Tensor:
    """Spectra in the order of the kernels, of any shape, as (H, n) in the order of frequencies."""
    factors = factors_of(n)
    return spectrum.view(-1, *factors, SIDE).permute(0, *range(len(factors) + 1, 0, -1)).reshape(-1, n)


@functools.lru_cache(maxsize=256)
def made_for(template: Any, alone: bool, across: bool, **knobs: Any) -> Any:
    """A template with one consumer (`alone`), or with two that take a signal each, or a tile each of one signal, unless
    shared memory leaves them a single stage. With one output stage, consumers wait until the last result has left."""
    teams = [dict(consumers=1)] if alone else [dict(consumers=2, across=across)]
    if hasattr(template, "output_stages"):
        teams.append(dict(output_stages=1, **teams[0]))
    for team in teams:
        try:
            made = template(**team, **knobs)
            if made.placement(90).stages > 1:
                return made
        except tk.TileError:  # not even one
            pass
    return template(**knobs, consumers=1) if alone else made_for(template, True, across, **knobs)


class Plan:
    """The launches of calls of one kind: signals (B, H, L) and transforms of `n` numbers."""

    def __init__(self, u: Tensor, n: int, causal: bool):
        self.batch, self.heads, self.length = u.shape
        self.n, self.causal, self.dtype, self.device = n, causal, u.dtype, u.device

    def tables(self, n: int, real: bool) -> config.Tables:
        """The tables of transforms of `n` numbers."""
        return tables(n, real, self.dtype, self.device)

    def team(self, template: Any, signals: int, tiles: int, columns: int = 1, **knobs: Any) -> Any:
        """The template for so many signals of the batch, tiles of channels, and columns of tiles."""
        across = signals <= 1
        few = tiles <= 1 or tiles * columns <= device_facts(self.device).multiprocessors
        return made_for(template, across and few, across, dtype=tk.from_torch(self.dtype), **knobs)

    def launched(
        self, made: Any, *operands: Tensor, signals: int, tiles: int, columns: int = 1, whole: bool = False
    ) -> None:
        """Launch a template of `team`. `whole`: a CTA has whole tiles."""
        slots = device_facts(self.device).multiprocessors * made.blocks_per_sm
        pairs, steps = -(-signals // made.consumers), -(-tiles // made.consumers) if made.across else tiles
        # iterations of a column, and those that one task has together
        total, together = steps * pairs, pairs if whole else 1
        # a wave of tasks, or at least four where columns leave much of one empty
        splits = slots // columns if 2 * columns <= slots else -(-4 * slots // columns)
        share = -(-total // together // splits) * together
        blocks = min(slots, columns * -(-total // share))
        made(*operands, blocks=blocks, share=share, total=total, pairs=pairs)

    def flat(self, x: Tensor) -> Tensor:
        """Signals (B, H, L) as (B, H · n), which the kernels take."""
        if self.length != self.n:
            x = F.pad(x, (0, self.n - self.length))
        elif not (x.stride()[1:] == (self.length, 1) and addressable(x)):
            x = x.clone(memory_format=torch.contiguous_format)
        return x.view(self.batch, -1)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory that kernels write."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def outer(self, template: type[Any], x: Tensor, z: Tensor, gate: Tensor | None, n: int, real: bool) -> None:
        """`OuterTransform` of x, or `OuterInverse` of z."""
        (rows, *_), of, columns = factors_of(n), self.tables(n, real), config.inner_length(n)
        height = config.height_of(rows)
        channels = 0 if rows == height else SIDE // height
        given, result = (x, z) if template is OuterTransform else (z, x)
        shape = (-1, rows, columns) if channels else (1, -1, columns)
        given, gate, result = (None if t is None else t.view(t.shape[0], *shape) for t in (given, gate, result))
        work = dict(signals=z.shape[0] // 2, tiles=-(-x.shape[1] // n * height // SIDE), columns=columns // SIDE)
        made = self.team(template, **work, real=real, gated=gate is not None, channels=channels)
        self.launched(made, *(t for t in (given, gate) if t is not None), of.g, of.t, result, **work)

    def transformed(self, x: Tensor, gate: Tensor | None, n: int, real: bool) -> Tensor:
        """The complex signals (2 · pairs, …) that `OuterTransform` makes."""
        z = self.empty(2 * x.shape[0] if real else x.shape[0] + x.shape[0] % 2, x.shape[1], dtype=self.dtype)
        self.outer(OuterTransform, x, z, gate, n, real)
        return z

    def _convolve(
        self, x: Tensor, y: Tensor, spectrum: Tensor, gates: tuple[Tensor | None, Tensor | None], n: int, real: bool,
        conjugated: bool,
    ) -> None:  # fmt: skip
        """Convolve the signals x, (batch, channels · n), into y, which may be x."""
        if n > config.TILE:
            z = self.transformed(x, gates[0], n, real)
            self._convolve(z, z, spectrum, (None, None), n // factors_of(n)[0], False, conjugated)
            self.outer(OuterInverse, y, z, gates[1], n, real)
            return
        of, given = self.tables(n, real), [t for t in (x, *gates) if t is not None]
        work = dict(signals=-(-x.shape[0] // (2 - real)), tiles=-(-x.shape[1] // SIDE**2))
        made = self.team(
            SpectralConvolution, **work, real=real, conjugated=conjugated, filter_dtype=tk.from_torch(spectrum.dtype),
            pre_gated=gates[0] is not None, post_gated=gates[1] is not None,
        )  # fmt: skip
        y = y.view(y.shape[0], -1, SIDE)
        self.launched(made, *(t.view(t.shape[0], -1, SIDE) for t in given), spectrum, of.g, of.f, of.t, y, **work)

    def convolve(
        self, u: Tensor, spectrum: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, conjugated: bool
    ) -> Tensor:
        """`fft_conv` of a spectrum."""
        y = self.empty(self.batch, self.heads, self.n, dtype=self.dtype)
        pre, post = (None if t is None else self.flat(t) for t in (pre_gate, post_gate))
        if not (spectrum.is_contiguous() and addressable(spectrum)):
            spectrum = spectrum.clone(memory_format=torch.contiguous_format)
        rows, result = spectrum.view(2, -1, SIDE), y.view(self.batch, -1)
        self._convolve(self.flat(u), result, rows, (pre, post), self.n, self.causal, conjugated)
        return y if self.n == self.length else y[..., : self.length].contiguous()

    def correlate(self, u: Tensor, v: Tensor, taps: int) -> Tensor:
        """Σ_batch Σₙ u[n] v[n + j] for j < `taps`, (H, taps) in fp32."""
        if not u.numel():
            return torch.zeros(self.heads, taps, dtype=torch.float32, device=self.device)
        u, v, n, real = self.flat(u), self.flat(v), self.n, self.causal
        while n > config.TILE:
            u, v = (self.transformed(x, None, n, real) for x in (u, v))
            n, real = n // factors_of(n)[0], False
        of, work = self.tables(n, real), dict(signals=-(-u.shape[0] // (2 - real)), tiles=-(-u.shape[1] // SIDE**2))
        made = self.team(SpectrumGradient, **work, real=real)
        p = self.empty(1 if made.across else made.consumers, 2, u.shape[1] // SIDE, SIDE, dtype=torch.float32)
        signals = (x.view(x.shape[0], -1, SIDE) for x in (u, v))
        self.launched(made, *signals, of.f, of.t, of.g, p, **work, whole=True)
        real_part, imag_part = (by_number(x, self.n) for x in p.sum(0))
        found = torch.fft.ifft(torch.complex(real_part, imag_part))
        if self.causal:
            found = found * turns(self.n, self.device).conj()
        known = found.real[:, : min(taps, self.length)] * (self.n / config.scale_of(self.n))
        return F.pad(known, (0, taps - known.shape[1]))


def run(
    u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, causal: bool, conjugated: bool
) -> Tensor:
    """`fft_conv` of plain tensors, without its gradient."""
    key = (signature(u, k, pre_gate, post_gate), causal)
    plan = _plans.get(key)
    if plan is None:
        check(u, k, pre_gate, post_gate, causal)
        plan = remember(_plans, key, Plan(u, length_of(u, k, causal), causal))
    if not u.numel():
        return torch.empty_like(u, memory_format=torch.contiguous_format)
    spectrum = k if is_spectrum(k) else spectrum_of(k[:, : plan.length], plan.n, causal, u.dtype)
    return plan.convolve(u, spectrum, pre_gate, post_gate, conjugated)


def run_correlation(u: Tensor, v: Tensor, taps: int, causal: bool) -> Tensor:
    """Gradients of filters: Σ_batch Σₙ u[n] v[n + j] for j < `taps`, of signals (B, H, L)."""
    key = (signature(u, v), taps, causal)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, Plan(u, transform_length(u.shape[-1], causal), causal))
    return plan.correlate(u, v, taps)
