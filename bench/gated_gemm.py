"""The first half of a gated MLP, silu(x·gate) · (x·up), in one kernel, beside two products of ours, cuBLAS's product of
both weights and torch.compile's activation. A baseline is the product of both weights alone."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from bench.gemm import BF16_BOUND, OURS, randn
from bench.harness import Case, Contender, Suite, Trial, deferred, frobenius_error, with_knobs

# tokens, hidden, intermediate: Llama-3-8B, Llama-2-7B, Qwen3-32B, and few tokens
SHAPES = (
    (8192, 4096, 14336),
    (2048, 4096, 14336),
    (8192, 4096, 11008),
    (8192, 5120, 25600),
    (512, 4096, 14336),
    (64, 4096, 14336),
    (1, 4096, 14336),
)


def silu_and_product(y: torch.Tensor) -> torch.Tensor:
    first, second = y.chunk(2, -1)
    return torch.nn.functional.silu(first) * second


@deferred
def error(x: torch.Tensor, w: torch.Tensor) -> Callable[[torch.Tensor], float]:
    return frobenius_error(silu_and_product(x.float() @ w.float().T))


def trial(options: argparse.Namespace, tokens: int, hidden: int, intermediate: int) -> Trial:
    from tritonkittens.kernels.activation import swiglu
    from tritonkittens.kernels.gated_gemm import Config, gated_gemm
    from tritonkittens.kernels.gemm import gemm

    x, w = randn(tokens, hidden), randn(2 * intermediate, hidden)
    gate, up = w.chunk(2)

    def fused(**config: Any) -> Callable[[], Any]:
        settings: dict[str, Any] = {"config": Config(**config)} if config else {}
        return functools.partial(gated_gemm, x, gate.T, up.T, **settings)

    torch.compiler.reset()
    activation = torch.compile(silu_and_product, dynamic=False)
    ours = {
        OURS: fused,
        f"{OURS}, two kernels": lambda: lambda: swiglu(gemm(x, w.T)),
        f"{OURS}, gate of the second product": lambda: lambda: gemm(x, up.T, gate=gemm(x, gate.T, activation="silu")),
    }
    knobs = with_knobs(OURS, options.knobs, lambda fields: functools.partial(fused, **fields))
    peers = {"cuBLAS and torch.compile": lambda: lambda: activation(torch.mm(x, w.T))}
    baselines = {"the product alone": Contender(lambda: functools.partial(torch.mm, x, w.T), lambda found: 0.0)}
    return Trial(ours | knobs, peers, error(x, w), 2 * BF16_BOUND, baselines=baselines)


def cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(
            f"{tokens} tokens, {hidden}→2×{intermediate}",
            4.0 * tokens * hidden * intermediate,
            dict(tokens=tokens, hidden=hidden, intermediate=intermediate),
            functools.partial(trial, options, tokens, hidden, intermediate),
        )
        for tokens, hidden, intermediate in SHAPES
    ]


SUITES = (Suite("gated_gemm", "gated products", cases),)
