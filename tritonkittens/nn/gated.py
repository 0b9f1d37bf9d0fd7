"""A gated MLP on `tritonkittens.kernels.gated_gemm`, and in training on those of `gemm` and `activation`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tritonkittens.kernels._dispatch import takes, unseen_by_function_modes
from tritonkittens.kernels.activation import swiglu
from tritonkittens.kernels.activation.config import INPUTS
from tritonkittens.kernels.gated_gemm.layers import gated_product
from tritonkittens.nn._unscriptable import Unscriptable
from tritonkittens.nn.linear import Linear


class SwiGLU(Unscriptable, nn.Module):
    """y = w3(silu(a) · b), where w12(x) = (a, b): the MLP of Llama with its two first weights as one product. Arguments
    and state_dict are those of xformers' SwiGLU.

    x: (…, in_features) gives (…, out_features). The layers are `Linear`s. Without bias, from 2,048 rows on, and where
    no gradient is wanted, the first product and the activation are one kernel,
    `tritonkittens.kernels.gated_gemm.gated_gemm`, where `Linear` has kernels. Otherwise the activation in bf16, fp16
    and fp32 runs on the kernels of `tritonkittens.kernels.activation.swiglu` on a GPU from sm_80 on (or in the
    simulator), which round once. Everything else (other dtypes, devices, tensor subclasses) runs as torch's operations.

    Args:
        hidden_features: of a, and of b.
        out_features: None: in_features.

    Example, with the weights of an MLP of Llama, `theirs`::

        mlp = SwiGLU(4096, 14336, bias=False, device="cuda", dtype=torch.bfloat16)
        w12 = torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight])
        mlp.load_state_dict({"w12.weight": w12, "w3.weight": theirs.down_proj.weight})
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.w12 = Linear(in_features, 2 * hidden_features, bias, device, dtype)
        self.w3 = Linear(hidden_features, in_features if out_features is None else out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return w3(silu(a) · b) with (a, b) = w12(x): (…, out_features)."""
        h = gated_product(x, "silu", Linear, self.w12)
        y: Tensor = self.w3(self._activated(self.w12(x)) if h is None else h)
        return y

    @unseen_by_function_modes
    def _activated(self, x: Tensor) -> Tensor:
        if takes(INPUTS, x):
            return swiglu(x)
        a, b = x.chunk(2, -1)
        return nn.functional.silu(a) * b
