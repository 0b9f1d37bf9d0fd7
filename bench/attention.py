"""Attention prefill against cuDNN and FlashAttention-2 (both through torch), non-causal, 16 K tokens."""
from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch

from bench.gemm import OURS, randn
from bench.harness import Case, Suite, Trial
from bench.peers import Attention, peers

TOKENS, WIDTH = 16384, 2048
CASES = ((128, 1024), (128, 4096), (128, 16384), (64, 1024), (64, 4096), (64, 16384))
BOUND = 5e-3  # probabilities and result are rounded to bf16


def ours(p: Attention) -> Callable[[], torch.Tensor]:
    from tritonkittens.kernels.attention import attention

    return functools.partial(attention, p.q, p.k, p.v, out=torch.full_like(p.q, float("nan")))


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(batch: int, heads: int, length: int, dim: int) -> Trial:
        p = Attention(*(randn(batch, heads, length, dim) for _ in range(3)))
        return Trial({OURS: functools.partial(ours, p)}, peers("attention", p, options.slow), p.error(), BOUND)

    shapes = [(TOKENS // length, WIDTH // dim, length, dim) for dim, length in CASES]
    return [
        Case(f"bf16 D {d} S {s} B {b} H {h}", 4 * b * h * s * s * d, {"B": b, "H": h, "S": s, "D": d}, functools.partial(prepare, b, h, s, d))
        for b, h, s, d in shapes
    ]


SUITES = (Suite("attention", "attention prefill, non-causal, 16 K tokens", cases, plot={"x": "S", "panel": "D"}),)
