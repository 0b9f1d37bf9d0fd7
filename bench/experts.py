"""Mixtures of experts without gradients: `experts`, and torch: expert by expert, and by `torch._grouped_mm` eagerly and
compiled.

The router's scores are random: tokens choose their experts alike. `work` is that of the products.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gemm import DEVICE, OURS, randn
from bench.grouped import gated
from bench.harness import Case, Suite, Trial, deferred, frobenius_error

BOUND = 1e-2  # hidden rows, results and their sums are rounded to bf16
PREFILL, DECODE = 8192, 64  # tokens
ONE_BY_ONE = 16  # experts up to which torch runs them one after another: each waits for the device


class Shape(NamedTuple):
    """Tokens, choices of each, and gated layers of so many experts."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int

    @property
    def work(self) -> float:
        return 6.0 * self.tokens * self.top_k * self.hidden * self.intermediate


MODELS = {"Mixtral": (2, 8, 4096, 14336), "Qwen3-MoE": (8, 128, 2048, 768), "DeepSeek-V3": (8, 256, 7168, 2048)}
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(shape: Shape) -> Operands:
    """(x, index, weights, gate_up, down), of which products have entries about 1."""
    scores = torch.rand(shape.tokens, shape.experts, dtype=torch.float32, device=DEVICE)
    weights, index = scores.topk(shape.top_k)
    gate_up = randn(shape.experts, 2 * shape.intermediate, shape.hidden).div_(shape.hidden**0.5)
    down = randn(shape.experts, shape.hidden, shape.intermediate).div_(shape.intermediate**0.5)
    return randn(shape.tokens, shape.hidden), index, weights / weights.sum(-1, keepdim=True), gate_up, down


def ours(given: Operands) -> Callable[[], torch.Tensor]:
    from tritonkittens.kernels.experts import experts

    return torch.no_grad()(functools.partial(experts, *given))


@torch.no_grad()
def one_by_one(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Expert by expert, as in transformers; the host waits for each expert's tokens."""
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(index == expert)
        y = gated(x[token] @ gate_up[expert].T) @ down[expert].T
        out.index_add_(0, token, (y * weights[token, choice, None]).to(x.dtype))
    return out


@torch.no_grad()
def by_grouped_mm(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """A sorted copy of tokens, two grouped products, and weighted sums in the order of choices, as in transformers."""
    order = index.flatten().argsort()
    ends = torch.bincount(index.flatten(), minlength=gate_up.shape[0]).cumsum(0, dtype=torch.int32)
    h = gated(torch._grouped_mm(x[order // index.shape[1]], gate_up.mT, offs=ends))
    y = torch._grouped_mm(h, down.mT, offs=ends) * weights.flatten()[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return y[back].view(*index.shape, -1).sum(1).to(x.dtype)


def compiled(given: Operands) -> Callable[[], torch.Tensor]:
    torch.compiler.reset()
    return functools.partial(torch.compile(by_grouped_mm, dynamic=False), *given)


@deferred
def error(given: Operands) -> Callable[[torch.Tensor], float]:
    """The error by each expert in fp32."""
    x, index, weights, gate_up, down = given
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(index == expert)
        y = gated(x[token].float() @ gate_up[expert].float().T) @ down[expert].float().T
        out.index_add_(0, token, y * weights[token, choice, None])
    return frobenius_error(out.double())


def trial(options: argparse.Namespace, shape: Shape) -> Trial:
    given = operands(shape)
    peers: dict[str, Any] = {
        "torch._grouped_mm": lambda: functools.partial(by_grouped_mm, *given),
        "torch._grouped_mm, torch.compile": lambda: compiled(given),
    }
    if shape.experts <= ONE_BY_ONE:
        peers["torch, expert by expert"] = lambda: functools.partial(one_by_one, *given)
    return Trial({OURS: functools.partial(ours, given)}, peers, error(given), BOUND)


def cases(options: argparse.Namespace) -> list[Case]:
    shapes = {
        f"{model}, {tokens} tokens": Shape(tokens, *extents)
        for model, extents in MODELS.items()
        for tokens in (PREFILL, DECODE)
    }
    return [
        Case(name, shape.work, shape._asdict(), functools.partial(trial, options, shape))
        for name, shape in shapes.items()
    ]


SUITES = (Suite("experts", "mixtures of experts", cases),)
