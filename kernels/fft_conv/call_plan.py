"""What a call of an FFT convolution does: its spectra, its launch, and the memory of its results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._tensors import addressable, remember, signature
from tritonkittens.kernels.fft_conv.checks import check, is_spectrum, length_of
from tritonkittens.kernels.fft_conv.config import SIDE, filter_dtype, parts_of, tables, transform_length
from tritonkittens.kernels.fft_conv.device.convolution import SpectralConvolution
from tritonkittens.kernels.fft_conv.device.spectrum_gradient import SpectrumGradient
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Plan] = {}  # by what is known of a call


def spectrum_of(k: Tensor, n: int, padded: bool, dtype: torch.dtype) -> Tensor:
    """The spectra (2, H, n / 64, 64) of filters (H, Lk), for signals of `dtype`, as the kernels read them."""
    scale = tables(n, padded, dtype, k.device).scale
    spectrum = torch.fft.fft(k.float(), n) / scale
    # frequency k₂ + R k₁ at [k₂, k₁], even k₂ before odd ones where there are two parts
    order = spectrum.view(-1, SIDE, n // SIDE // parts_of(n), parts_of(n)).permute(0, 3, 2, 1).flatten(1, 2)
    return torch.view_as_real(order).movedim(-1, 0).to(filter_dtype(dtype)).contiguous()


def is_padded(length: int, n: int) -> bool:
    """Is at least half of a tile zeros behind the signals?"""
    return length <= n // 2 and parts_of(n) == 1


def consumers_of(batch: int, crowded: bool) -> int:
    """The consumers of a CTA, each with two rows of the batch. crowded: tiles leave no room for two."""
    return 1 if crowded or batch <= 2 else 2


class Plan:
    """The launch of calls of one kind: signals (B, H, L) and transforms of `n` numbers."""

    def __init__(self, u: Tensor, n: int):
        self.batch, self.heads, self.length = u.shape
        self.n, self.dtype, self.device = n, u.dtype, u.device
        self.padded = is_padded(self.length, n)
        self.stored = n // 2 if self.length <= n // 2 else n  # numbers of a signal in memory

    def launched(self, template: type[Any], *operands: Tensor, by_tile: bool = False, **knobs: Any) -> None:
        """Launch a template. `by_tile`: a CTA has whole tiles."""
        consumers = knobs.get("consumers", 2)
        pairs = -(-self.batch // (2 * consumers))
        tiles, parts = -(-self.heads * self.n // (SIDE * SIDE)), parts_of(self.n)  # tiles of all parts
        made = template(dtype=tk.from_torch(self.dtype), padded=self.padded, parts=parts, **knobs)
        slots = device_facts(self.device).multiprocessors * made.blocks_per_sm
        # iterations, and those that one CTA has together
        total, together = tiles * pairs, pairs if by_tile else parts
        share = -(-total // together // slots) * together
        made(*operands, blocks=-(-total // share), share=share, total=total, pairs=pairs)

    def rows(self, x: Tensor) -> Tensor:
        """Signals (B, H, L) as rows of 64 of a length that the kernel takes, (B, rows, 64)."""
        if self.length != self.stored:
            x = F.pad(x, (0, self.stored - self.length))
        elif not (x.stride()[1:] == (self.length, 1) and addressable(x)):
            x = x.contiguous()
        return self.rows_of(x)

    def rows_of(self, x: Tensor) -> Tensor:
        """Signals in memory as the kernel takes them, as rows of 64."""
        return x.view(self.batch, -1, SIDE)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory that kernels write."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def convolve(
        self, u: Tensor, spectrum: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, conjugated: bool
    ) -> Tensor:
        """Y of `SpectralConvolution`."""
        y = self.empty(self.batch, self.heads, self.stored, dtype=self.dtype)
        if u.numel():
            of = tables(self.n, self.padded, self.dtype, self.device)
            given = [self.rows(x) for x in (u, pre_gate, post_gate) if x is not None]
            # what leaves shared memory for two stages of one consumer only
            crowded = len(given) > 1 or (parts_of(self.n) > 1 and spectrum.dtype == torch.float32)
            self.launched(
                SpectralConvolution, *given, spectrum.flatten(1, 2), of.g, of.f, of.t, of.w, self.rows_of(y),
                consumers=consumers_of(self.batch, crowded), conjugated=conjugated,
                filter_dtype=tk.from_torch(spectrum.dtype),
                pre_gated=pre_gate is not None, post_gated=post_gate is not None,
            )  # fmt: skip
        return y if self.stored == self.length else y[..., : self.length].contiguous()

    def correlate(self, u: Tensor, v: Tensor, taps: int) -> Tensor:
        """Σ_batch Σₙ u[n] v[n + j] for j < `taps`, (H, taps) in fp32."""
        if not u.numel():
            return torch.zeros(self.heads, taps, dtype=torch.float32, device=self.device)
        of = tables(self.n, self.padded, self.dtype, self.device)
        consumers = consumers_of(self.batch, crowded=parts_of(self.n) > 1)
        p = self.empty(consumers, 2, self.heads * self.n // SIDE, SIDE, dtype=torch.float32)
        self.launched(
            SpectrumGradient, self.rows(u), self.rows(v), of.f, of.t, of.g, p, by_tile=True, consumers=consumers
        )
        parts = parts_of(self.n)
        real, imag = p.sum(0).view(2, self.heads, parts, -1, SIDE).permute(0, 1, 4, 3, 2).flatten(2)  # by frequency
        return torch.fft.ifft(torch.complex(real, imag)).real[:, :taps] * (self.n / of.scale)


def run(
    u: Tensor, k: Tensor, pre_gate: Tensor | None, post_gate: Tensor | None, causal: bool, conjugated: bool
) -> Tensor:
    """`fft_conv` of plain tensors, without its gradient."""
    key = (signature(u, k, pre_gate, post_gate), causal)
    plan = _plans.get(key)
    if plan is None:
        check(u, k, pre_gate, post_gate, causal)
        plan = remember(_plans, key, Plan(u, length_of(u, k, causal)))
    spectrum = k if is_spectrum(k) else spectrum_of(k, plan.n, plan.padded, u.dtype)
    return plan.convolve(u, spectrum, pre_gate, post_gate, conjugated)


def run_correlation(u: Tensor, v: Tensor, taps: int, causal: bool) -> Tensor:
    """Gradients of filters: Σ_batch Σₙ u[n] v[n + j] for j < `taps`, of signals (B, H, L)."""
    key = (signature(u, v), taps, causal)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, Plan(u, transform_length(u.shape[-1], taps, causal)))
    return plan.correlate(u, v, taps)
