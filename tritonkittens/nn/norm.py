"""`torch.nn.RMSNorm` and `torch.nn.LayerNorm` on `tritonkittens.kernels.norm`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tritonkittens.kernels._dispatch import autocasts, takes, unseen_by_function_modes
from tritonkittens.kernels.norm import layer_norm, rms_norm
from tritonkittens.kernels.norm.composed import gated_rms_norm
from tritonkittens.kernels.norm.config import INPUTS, WIDEST
from tritonkittens.nn._unscriptable import Unscriptable


class _Norm(Unscriptable, nn.Module):
    """What both modules share: how a kernel is reached."""

    normalized_shape: tuple[int, ...]
    eps: float | None
    weight: Any
    bias: Any
    _kernel: Any

    @unseen_by_function_modes
    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Return the result if the kernel takes the operands, else None."""
        shape, weight, bias = self.normalized_shape, self.weight, getattr(self, "bias", None)
        casts = autocasts(x.device) is not None
        given = [x] + [t for t in (weight, bias) if t is not None]
        alike = all(t.dtype == (given[1] if casts else x).dtype for t in given[1:])
        if not (alike and 1 <= math.prod(shape) <= WIDEST and takes(INPUTS, *given)):
            return None
        if tuple(x.shape[x.ndim - len(shape) :]) != tuple(shape) or x.ndim < len(shape):
            return None  # torch says what is wrong
        rows = x if len(shape) == 1 else x.flatten(-len(shape))
        weight, bias = (t if t is None or t.ndim == 1 else t.flatten() for t in (weight, bias))
        y: Tensor = type(self)._kernel(rows, weight, bias, eps=self.eps)
        return y if len(shape) == 1 else y.view(x.shape)


class RMSNorm(_Norm, nn.RMSNorm):
    """y = x / √(mean of x² + eps) · weight, a `torch.nn.RMSNorm` with the same arguments and state_dict.

    bf16, fp16 and fp32 on a GPU from sm_80 on (or in the simulator) run on the kernels of
    `tritonkittens.kernels.norm.rms_norm`, which compute in fp32. Everything else (other dtypes, devices, tensor
    subclasses, more than 65,536 numbers in a row) runs as torch's module. Under `torch.autocast` on a GPU the result is
    fp32, as of torch's.

    Example::

        norm = RMSNorm(4096, eps=1e-6, device="cuda", dtype=torch.bfloat16)
    """

    _kernel = staticmethod(rms_norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self._by_kernel(x)
        return nn.RMSNorm.forward(self, x) if y is None else y


class LayerNorm(_Norm, nn.LayerNorm):
    """y = (x - mean) / √(variance + eps) · weight + bias, a `torch.nn.LayerNorm` with the same arguments and
    state_dict. All else is as of `RMSNorm`.

    Example::

        norm = LayerNorm(1024, bias=False, device="cuda", dtype=torch.bfloat16)
    """

    _kernel = staticmethod(layer_norm)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised rows, in the shape of input."""
        y = self._by_kernel(input)
        return nn.LayerNorm.forward(self, input) if y is None else y


class GatedRMSNorm(Unscriptable, nn.Module):
    """y = rms_norm(x) · weight · silu(gate), or rms_norm(x · silu(gate)) · weight: the norms of mixers, which
    transformers calls RMSNormGated. x and gate: (…, N), a gate of None where x is gated already. group_size: columns
    that are normalised together."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        norm_before_gate: bool,
        group_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.norm_before_gate = eps, norm_before_gate
        self.group_size = hidden_size if group_size is None else group_size

    def forward(self, x: Tensor, gate: Tensor | None) -> Tensor:
        kind: dict[str, Any] = dict(norm_before_gate=self.norm_before_gate, group_size=self.group_size)
        y = gated_rms_norm(x, gate, self.weight, self.eps, **kind)
        if y is not None:
            return y
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        opening = 1.0 if gate is None else nn.functional.silu(gate.to(y.dtype))
        y = (y if self.norm_before_gate else y * opening).unflatten(-1, (-1, self.group_size))
        y = nn.functional.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        return (y * opening if self.norm_before_gate else y).to(x.dtype)
