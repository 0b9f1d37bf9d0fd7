"""FFT convolutions: beside torch.fft in fp32, FlashFFTConv, and a copy of as many bytes as a call must read and write.

Filters are transformed beforehand for `ours` and `torch.fft`, as in a model that is evaluated; in the backward, each
step transforms them. Errors are those of a few channels, against float64.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gemm import DEVICE, OURS, randn
from bench.harness import Case, Suite, Trial, both_ways, call_of, deferred
from bench.quantize import beside_copy

CHECKED = 2  # channels
BOUND = 1e-2  # tables, signals and spectra are rounded to bf16


class Shape(NamedTuple):
    """Signals (batch, heads, length), padded to twice the length where `causal`, with two gates where `gated`."""

    batch: int
    heads: int
    length: int
    causal: bool
    gated: bool

    def __str__(self) -> str:
        kind = "causal" if self.causal else "circular"
        return f"{kind}{' gated' * self.gated} B {self.batch} H {self.heads} L {self.length}"

    def moved(self, backward: bool) -> float:
        """Bytes that a call reads and writes, without the filter."""
        tensors = (3 if backward else 2) + 2 * self.gated * (1 + backward)
        return 2.0 * self.batch * self.heads * self.length * tensors


# ThunderKittens' and FlashFFTConv's shapes, small batches, and lengths with outer factors
EXTENTS = (
    (16, 1024, 1024, False, False), (16, 1024, 4096, False, False), (64, 768, 1024, False, False),
    (64, 768, 256, False, False), (64, 768, 512, False, False), (16, 768, 2048, False, False),
    (16, 1024, 2048, True, False), (16, 1024, 4096, True, False), (64, 768, 512, True, False),
    (1, 4096, 4096, False, False), (16, 1024, 4096, False, True), (16, 1024, 2048, True, True),
    (8, 1024, 8192, False, False), (8, 768, 8192, True, False), (8, 256, 32768, True, False),
    (8, 256, 32768, True, True), (2, 256, 131072, True, False), (1, 256, 163840, True, False),
    (1, 64, 1 << 20, True, False),
)  # fmt: skip


def by_torch(u: torch.Tensor, kf: torch.Tensor, n: int, gates: list[torch.Tensor]) -> torch.Tensor:
    """The result by torch.fft in fp32, of the filter's spectrum."""
    x = u * gates[0] if gates else u
    y = torch.fft.irfft(torch.fft.rfft(x.float(), n) * kf, n)[..., : u.shape[-1]].to(u.dtype)
    return y * gates[1] if gates else y


@deferred
def error(shape: Shape, given: list[torch.Tensor], grad: torch.Tensor | None) -> Callable[[Any], float]:
    from tritonkittens.kernels.fft_conv import fft_conv_torch

    at = (slice(None), slice(CHECKED))
    exact = [(x[:CHECKED] if x.ndim == 2 else x[at]).double().requires_grad_(grad is not None) for x in given]
    gates = dict(zip(("pre_gate", "post_gate"), exact[2:], strict=False))
    expected = [fft_conv_torch(*exact[:2], causal=shape.causal, **gates)]
    if grad is not None:
        expected = list(torch.autograd.grad(expected[0], exact, grad[at].double()))

    def of(found: Any) -> float:
        parts = [found] if isinstance(found, torch.Tensor) else found
        few = [x[:CHECKED] if x.ndim == 2 else x[at] for x in parts]
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(few, expected, strict=True))

    return of


def prepare(shape: Shape, backward: bool) -> Trial:
    batch, heads, length, causal, gated = shape
    n = 2 * length if causal else length
    signals = [randn(batch, heads, length) for _ in range(3 if gated else 1)]
    k = torch.randn(heads, length, dtype=torch.float32, device=DEVICE) / length**0.5
    given = [signals[0], k, *signals[1:]]
    grad = randn(batch, heads, length) if backward else None

    def differentiated(function: Callable[..., Any]) -> Callable[[], Any]:
        return call_of(function, given, grad)

    def ours() -> Callable[[], Any]:
        from tritonkittens.kernels.fft_conv import fft_conv, fft_conv_filter

        def function(u: torch.Tensor, k: torch.Tensor, *gates: torch.Tensor) -> Any:
            return fft_conv(u, k, causal=causal, **dict(zip(("pre_gate", "post_gate"), gates, strict=False)))

        if grad is not None:
            return differentiated(function)
        return functools.partial(function, given[0], fft_conv_filter(k, length, causal=causal), *given[2:])

    def fft() -> Callable[[], Any]:
        if grad is not None:
            return differentiated(lambda u, k, *gates: by_torch(u, torch.fft.rfft(k, n), n, list(gates)))
        return functools.partial(by_torch, given[0], torch.fft.rfft(k, n), n, given[2:])

    def flash() -> Callable[[], Any]:
        from flashfftconv import FlashFFTConv

        module = FlashFFTConv(n, dtype=torch.bfloat16).to(DEVICE)
        if grad is not None:
            return differentiated(module)
        return functools.partial(module, *given)

    peers = {"torch.fft": fft, "FlashFFTConv": flash}
    baselines = beside_copy(shape.moved(backward))
    return Trial({OURS: ours}, peers, error(shape, given, grad), BOUND, baselines=baselines)


def cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    return both_ways((Shape(*extents) for extents in EXTENTS), prepare, backward)


SUITES = (
    Suite("fft_conv", "FFT convolutions", cases, unit="TB/s"),
    Suite("fft_conv_backward", "backwards of FFT convolutions", functools.partial(cases, backward=True), unit="TB/s"),
)
