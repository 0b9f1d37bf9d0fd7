"""Mixtures of experts on `tritonkittens.kernels.experts`, with the parameters of transformers' modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tritonkittens.kernels._dispatch import autocast, autocasts, unseen_by_function_modes
from tritonkittens.kernels.experts import experts
from tritonkittens.kernels.experts.checks import are_taken
from tritonkittens.kernels.experts.config import INDICES
from tritonkittens.kernels.experts.interface import ACTIVATIONS
from tritonkittens.nn._unscriptable import Unscriptable


class Experts(Unscriptable, nn.Module):
    """Gated MLPs; each token is sent to k of them: Σ weights[t, j] · down[e] · (act(gate[e] · x) · (up[e] · x)).

    `forward(x, index, weights)` takes tokens (tokens, hidden), the experts of each token, int32 or int64 (tokens, k),
    and weights (tokens, k); it returns (tokens, hidden). bf16 and fp16 on a Hopper or Blackwell GPU (or in the
    simulator), with at most 1,024 experts and k up to 32, run on `tritonkittens.kernels.experts.experts`, without
    waiting for the device. Everything else runs in torch, without a warning: one expert after the other, far slower,
    and the host waits. Under `torch.autocast`, x and the parameters are cast first, and the result has that dtype.

    Args:
        hidden_size, intermediate_size, num_experts: of the parameters gate_up_proj, (experts, 2 · intermediate,
            hidden), gates first, and down_proj, (experts, hidden, intermediate).
        activation: "silu", or "gelu_tanh".

    Raises TypeError or ValueError for another dtype of index, or shapes that do not fit.

    Example::

        layer = Experts(2048, 768, 128, device="cuda", dtype=torch.bfloat16)
        y = layer(x, index, weights)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        activation: str = "silu",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"Experts: activation={activation!r}; it must be {' or '.join(map(repr, ACTIVATIONS))}")
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.activation = activation

        def matrices(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, rows, cols, device=device, dtype=dtype))

        self.gate_up_proj = matrices(2 * intermediate_size, hidden_size)
        self.down_proj = matrices(hidden_size, intermediate_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw parameters as `torch.nn.Linear` does."""
        for matrices in self.parameters():
            bound = 1 / math.sqrt(matrices.shape[-1])
            nn.init.uniform_(matrices, -bound, bound)

    def forward(self, input: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of weighted results of each token's experts, (tokens, hidden)."""
        self._check(input, index, weights)
        x, gate_up, down = input, self.gate_up_proj, self.down_proj
        if (dtype := autocasts(x.device)) is not None:
            x, gate_up, down = autocast(x, dtype), autocast(gate_up, dtype), autocast(down, dtype)
        y = self._by_kernel(x, index, weights, gate_up, down)
        return self._one_by_one(x, index, weights, gate_up, down) if y is None else y

    @staticmethod
    def _check(x: Tensor, index: Tensor, weights: Tensor) -> None:
        """Raise TypeError or ValueError for operands that the kernels would refuse."""
        if index.dtype not in INDICES:
            raise TypeError(f"Experts: index has dtype {index.dtype}; it must be {' or '.join(map(str, INDICES))}")
        if x.ndim != 2 or index.ndim != 2 or index.shape[0] != x.shape[0] or weights.shape != index.shape:
            raise ValueError(
                f"Experts: input is {tuple(x.shape)}, index {tuple(index.shape)}, weights {tuple(weights.shape)}; they "
                "must be (tokens, hidden), (tokens, k) and (tokens, k)"
            )

    @unseen_by_function_modes
    def _by_kernel(self, *given: Tensor) -> Tensor | None:
        """Return the result if the kernels take the operands, else None."""
        return experts(*given, activation=self.activation) if are_taken(*given) else None

    def _one_by_one(self, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            a, b = functional.linear(x[token], gate_up[expert]).chunk(2, -1)
            a = functional.silu(a) if self.activation == "silu" else functional.gelu(a, approximate="tanh")
            y = functional.linear(a * b, down[expert]) * weights[token, choice, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, activation={self.activation!r}"
        )


class MixtureOfExperts(Unscriptable, nn.Module):
    """A router and `Experts`: each token has the `top_k` experts of the largest softmax of its scores.

    `forward(x)` takes (…, hidden) and returns the same shape. Parameters are named as in transformers' blocks
    (Qwen3-MoE, Mixtral): gate.weight, experts.gate_up_proj, experts.down_proj. Scores have the dtype of x; their
    softmax and the weights are in fp32. What runs on kernels, and what slower in torch: see `Experts`, with k = top_k.

    Args:
        hidden_size, intermediate_size, num_experts, activation: as of `Experts`.
        top_k: experts of a token.
        norm_topk_prob: divide the weights of a token by their sum, as Mixtral does. Take it from a model's
            configuration: Qwen3-MoE's default is False.

    Example::

        block = MixtureOfExperts(2048, 768, 128, top_k=8, device="cuda", dtype=torch.bfloat16)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        norm_topk_prob: bool = True,
        activation: str = "silu",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"MixtureOfExperts: top_k={top_k}; it must be from 1 to num_experts={num_experts}")
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, activation, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the block's result for tokens (…, hidden), in their shape."""
        x = input.reshape(-1, input.shape[-1])
        weights, index = self.gate(x).softmax(-1, dtype=torch.float32).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        y: Tensor = self.experts(x, index, weights)
        return y.view(input.shape)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, norm_topk_prob={self.norm_topk_prob}"
