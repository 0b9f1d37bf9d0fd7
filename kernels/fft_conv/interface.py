"""FFT convolutions for PyTorch tensors: `fft_conv` and `fft_conv_filter`."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_tensors, has_tangent, have_memory, is_plain, requires_grad
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.fft_conv.call_plan import run, spectrum_of
from tritonkittens.kernels.fft_conv.checks import NAME, check_kinds, check_length, check_shapes
from tritonkittens.kernels.fft_conv.config import transform_length


def fft_conv(
    u: Tensor, k: Tensor, *, causal: bool = False, pre_gate: Tensor | None = None, post_gate: Tensor | None = None
) -> Tensor:
    """Return post_gate · (k ∗ (pre_gate · u)): a convolution of each channel with a filter of up to millions of taps.

    Args:
        u: (B, H, L) in bf16 or fp16.
        k: (H, Lk) in fp32, bf16 or fp16, Lk from 1 to L, or with `causal` at least 1; or its spectrum, from
            `fft_conv_filter`, which has no gradient.
        causal: True: yᵢ = Σ_{j ≤ i} kⱼ u_{i-j}, L up to 4,194,304; lengths that are not those of a circular convolution
            are copied, with zeros behind them. False: circular, yᵢ = Σⱼ kⱼ u_{(i-j) mod L}, where L is a power of two
            from 64 to 4,194,304, or from 4,096 to 262,144 a multiple of 4,096 or of 1/16 of the next power of two.
        pre_gate, post_gate: (B, H, L) in the dtype of u; None: 1.

    Returns (B, H, L) in the dtype of u. Sums are in fp32. Products take signals, their spectra and factors in the dtype
    of u, spectra of filters in bf16, or for u of fp16 in fp32. Differentiable any number of times, in u, k and the
    gates; not in forward mode. There is no state: a call cannot continue another.

    Infinities and NaN spread within a tile of 4,096 numbers, which has several channels where L is smaller. Without
    `causal`, they also spread between two signals of the batch, and rounding errors of both are relative to the larger.

    Raises TypeError or ValueError for other operands; ArchitectureError on a GPU without TMA.

    Example::

        y = fft_conv(u, k, causal=True, pre_gate=gate)

    Source: Fu et al., FlashFFTConv (2023).
    """
    check_kinds(u, k, pre_gate, post_gate)
    operands = (u, k, pre_gate, post_gate)
    if has_tangent(*operands):
        raise ValueError(f"{NAME}: it has no forward-mode derivative; use {NAME}_torch")
    check_shapes(*operands, causal)
    if is_plain(*operands) and have_memory(*operands) and not requires_grad(*operands):
        return run(*operands, causal, False)
    found: Tensor = call(NAME, *operands, causal)
    return found


def fft_conv_filter(k: Tensor, length: int, *, causal: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the spectrum of filters, as `fft_conv` takes it in their place, for filters that serve many calls.

    Args:
        k: (H, Lk) in fp32, bf16 or fp16.
        length: L of the signals. With `causal`, the spectrum serves all signals of at most this length.
        causal: as in `fft_conv`.
        dtype: of the signals, bf16 or fp16.

    Returns a tensor for `fft_conv` with the same `causal`, in bf16, or fp32 for signals of fp16. It is the real and the
    imaginary part of N frequencies: (2, H, N / 64, 64) with N = L; with `causal` (2, H, N / 32, 32), where N is L, or
    the next length that a circular convolution may have. Frequencies are in an order of their own. It has no gradient,
    and does not follow changes of k.

    Raises TypeError or ValueError for what `fft_conv` would refuse.
    """
    check_tensors(f"{NAME}_filter", k=k)
    if dtype not in HALF_TYPES:
        raise TypeError(f"{NAME}_filter: dtype is {dtype}; it must be {' or '.join(map(str, HALF_TYPES))}")
    if k.ndim != 2 or not k.shape[1]:
        raise ValueError(f"{NAME}_filter: k is {tuple(k.shape)}; it must be (H, Lk)")
    check_length(length, causal)
    if not causal and k.shape[1] > length:
        raise ValueError(f"{NAME}_filter: k is {tuple(k.shape)}; without causal Lk is at most {length}")
    with torch.no_grad():
        return spectrum_of(k, transform_length(length, causal), causal, dtype)
