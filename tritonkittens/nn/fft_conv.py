"""Long convolutions on `tritonkittens.kernels.fft_conv`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tritonkittens.kernels._dispatch import is_compiling, takes, unseen_by_function_modes
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.fft_conv import fft_conv, fft_conv_filter, fft_conv_torch
from tritonkittens.kernels.fft_conv.config import has_kernel
from tritonkittens.nn._unscriptable import Unscriptable


class FFTConv(Unscriptable, nn.Module):
    """post_gate · (weight ∗ (pre_gate · u)): a convolution of each channel with a long filter.

    u, pre_gate, post_gate: (B, channels, L); the result has the shape and dtype of u. bf16 and fp16 run on `fft_conv`
    on a Hopper or Blackwell GPU (or in the simulator), for lengths L that `fft_conv` takes. Everything else runs in
    torch, by torch.fft in fp32. In evaluation mode and without gradients, the layer keeps the spectrum of its filter
    until the filter changes.

    Args:
        channels, taps: the shape of the filter `weight`, a parameter in fp32. It starts as normal random numbers with
            the standard deviation 1/√taps.
        causal: y at row i sees u up to row i. False: the convolution is circular, and L is at least `taps`.
        device: of the parameter.

    The state dict has `weight` alone; no other implementation's layout is followed.

    `forward` raises ValueError for shapes that do not fit.

    Example::

        layer = FFTConv(768, 1024, causal=True, device="cuda")
        y = layer(u, pre_gate=gate)
    """

    def __init__(
        self, channels: int, taps: int, causal: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.channels, self.taps, self.causal = channels, taps, causal
        self.weight = nn.Parameter(torch.empty(channels, taps, dtype=torch.float32, device=device))
        self._spectrum: tuple[tuple[object, ...], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.taps**-0.5)

    def _filter(self, u: Tensor) -> Tensor:
        """Return what `fft_conv` takes: the weight, or its spectrum."""
        weight = self.weight
        is_kept = not (self.training or torch.is_grad_enabled() or is_compiling() or weight.is_inference())
        if not is_kept or type(weight) is not nn.Parameter:
            return weight
        key = (weight._version, weight.data_ptr(), weight.device, weight.dtype, u.shape[-1], u.dtype)
        if self._spectrum is None or self._spectrum[0] != key:
            if u.is_cuda and torch.cuda.is_current_stream_capturing():  # the graph's memory is not ours to keep
                return weight
            self._spectrum = key, fft_conv_filter(weight, u.shape[-1], causal=self.causal, dtype=u.dtype)
        return self._spectrum[1]

    @unseen_by_function_modes
    def forward(self, u: Tensor, pre_gate: Tensor | None = None, post_gate: Tensor | None = None) -> Tensor:
        """Return post_gate · (weight ∗ (pre_gate · u)), in the shape and dtype of u. A gate of None is 1."""
        if u.ndim != 3 or u.shape[1] != self.channels:
            raise ValueError(f"FFTConv: u is {tuple(u.shape)}; it must be (B, {self.channels}, L)")
        if not self.causal and u.shape[2] < self.taps:
            raise ValueError(f"FFTConv: u is {tuple(u.shape)}; without causal L is at least {self.taps}, the taps")
        gates = dict(pre_gate=pre_gate, post_gate=post_gate)
        for name, gate in gates.items():
            if gate is not None and gate.shape != u.shape:
                raise ValueError(f"FFTConv: {name} is {tuple(gate.shape)}; it must be {tuple(u.shape)}, as u")
        if (
            takes(HALF_TYPES, u, pre_gate, post_gate, needs_tma=True)
            and self.weight.device == u.device
            and has_kernel(u.shape[-1], self.taps, self.causal)
        ):
            return fft_conv(u, self._filter(u), causal=self.causal, **gates)
        found = fft_conv_torch(u, self.weight, causal=self.causal, **gates, dtype=torch.float32)
        return found.to(u.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.taps}, causal={self.causal}"
