"""Mixtures of experts for PyTorch tensors: `experts`, and the steps that it is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import call, check_tensors, requires_grad
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.activation import geglu, swiglu
from tritonkittens.kernels.experts.checks import check_experts, check_index, check_routing
from tritonkittens.kernels.grouped_gemm import grouped_gemm

ACTIVATIONS = {"silu": swiglu, "gelu_tanh": geglu}
IN_EPILOGUE = {"silu": "swiglu", "gelu_tanh": "geglu"}  # what `grouped_gemm` calls them


class Routing(NamedTuple):
    """Where the choices of tokens are in a matrix that is sorted by expert.

    Attributes:
        choices: int32 (tokens · k,). Row i is choice choices[i] of all, that is choice choices[i] % k of token
            choices[i] // k. Rows of one expert are in the order of tokens.
        ends: int32 (experts,). The rows of expert e end before row ends[e]; those of choices whose expert is elsewhere
            are after the last.
        places: int32 (tokens, k). The row of each choice; -1 if its expert is elsewhere.
    """

    choices: Tensor
    ends: Tensor
    places: Tensor

    @property
    def tokens(self) -> Tensor:
        """int32 (tokens · k,): the token of each row, for `grouped_gemm(x, weights, ends, rows=tokens)`."""
        return self.choices // self.places.shape[1]


def route(index: Tensor, experts: int) -> Routing:
    """Sort the choices of tokens by expert, without waiting for the device.

    Args:
        index: int32 or int64 (tokens, k), k up to 32: the experts of each token. Numbers below 0 or from `experts` on
            are experts elsewhere (of another device, for example).
        experts: how many are here, up to 32,767.

    Raises TypeError or ValueError for others.

    Example::

        routing = route(scores.topk(8).indices, experts=128)
    """
    check_tensors("route", index=index)
    check_index(index, experts)
    expert = torch.where((index >= 0) & (index < experts), index, experts).to(torch.int16).flatten()
    sorted_expert, choices = expert.sort(stable=True)
    numbers = torch.arange(experts, dtype=torch.int16, device=index.device)
    ends = torch.searchsorted(sorted_expert, numbers, right=True, out_int32=True)
    row = torch.arange(expert.shape[0], dtype=torch.int32, device=index.device)
    row = torch.where(sorted_expert < experts, row, -1)
    places = torch.empty_like(row).scatter_(0, choices, row).view(index.shape)
    return Routing(choices.to(torch.int32), ends, places)


def _refuse_shards(name: str, argument: str, x: Tensor) -> None:
    if is_distributed(type(x)):
        raise TypeError(f"{name}: {argument} is a DTensor; give its shard, {argument}.to_local()")


def gather_tokens(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows of tokens by expert, (tokens · k, columns), zeros for choices whose expert is elsewhere.

    x: (tokens, columns) in bf16, fp16 or fp32. Its gradient is the sum of those of its copies, in fp32.
    """
    check_tensors("gather_tokens", x=x)
    check_routing("gather_tokens", routing)
    _refuse_shards("gather_tokens", "x", x)
    found: Tensor = call("gather_tokens", x, *routing)
    return found


def combine_tokens(y: Tensor, weights: Tensor | None, routing: Routing) -> Tensor:
    """Return for each token the sum of weights · y over its choices, (tokens, columns) in the dtype of y.

    Sums are in fp32, in the order of choices: the same bits in every run. Choices whose expert is elsewhere count 0,
    whatever y and weights hold there.

    Args:
        y: (tokens · k, columns), the rows by expert, in bf16, fp16 or fp32.
        weights: (tokens, k) in any of these dtypes; None: 1.
    """
    check_tensors("combine_tokens", y=y)
    check_routing("combine_tokens", routing)
    _refuse_shards("combine_tokens", "y", y)
    check_tensors("combine_tokens", optional=True, weights=weights)
    found: Tensor = call("combine_tokens", y, weights, *routing)
    return found


def experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, activation: str = "silu"
) -> Tensor:
    """Return the results of a mixture of experts: for token t, Σⱼ weights[t, j] · expert(index[t, j])(x[t]).

    Expert e is down[e] · (act(a) · b), where a and b are the halves of gate_up[e] · x. The host does not wait for the
    device, so a CUDA graph may have it. Differentiable in x, weights and both matrices.

    Args:
        x: (tokens, hidden) in bf16 or fp16.
        index: int32 or int64 (tokens, k), the experts of each token, k up to 32. Numbers outside of [0, experts) add
            nothing: those experts are on another device, for example.
        weights: (tokens, k), bf16, fp16 or fp32.
        gate_up: (experts, 2 · intermediate, hidden) in the dtype of x, as transformers keeps it; up to 1,024 experts.
        down: (experts, hidden, intermediate) in the dtype of x.
        activation: "silu" (SwiGLU), or "gelu_tanh" (GeGLU).

    Returns (tokens, hidden) in the dtype of x. Sums over experts are in fp32.

    Raises TypeError or ValueError for what does not fit together; ArchitectureError on a GPU without TMA.

    Example::

        scores = (x @ router.T).softmax(-1, dtype=torch.float32)
        weights, index = scores.topk(8)
        y = experts(x, index, weights / weights.sum(-1, keepdim=True), gate_up, down)
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"experts: activation={activation!r}; it must be {' or '.join(map(repr, ACTIVATIONS))}")
    check_tensors("experts", x=x, index=index, weights=weights, gate_up=gate_up, down=down)
    _refuse_shards("experts", "x", x)
    check_experts(x, index, weights, gate_up, down)
    routing = route(index, int(gate_up.shape[0]))  # a trace has a tensor or a symbol for it
    h = _hidden(x, routing, gate_up, activation, wants_gradients=requires_grad(x, weights, gate_up, down))
    return combine_tokens(grouped_gemm(h, down.mT, routing.ends), weights, routing)


def _hidden(x: Tensor, routing: Routing, gate_up: Tensor, activation: str, wants_gradients: bool) -> Tensor:
    """The hidden rows of experts. Gradients need both halves of the product: then the activation is a kernel of its
    own."""
    rows, b = gather_tokens(x, routing), gate_up.mT
    if wants_gradients:
        return ACTIVATIONS[activation](grouped_gemm(rows, b, routing.ends))
    return grouped_gemm(rows, b, routing.ends, activation=IN_EPILOGUE[activation])
