"""Attention against cuDNN and FlashAttention-2 (both through torch), forward and backward, causal or not, 16 K tokens."""
from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from bench.gemm import OURS, randn
from bench.harness import Case, Suite, Trial
from bench.peers import Attention, peers

TOKENS, WIDTH = 16384, 2048
LENGTHS, DIMS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128)
BOUND, GRADIENT_BOUND = 5e-3, 1e-2  # probabilities and results are rounded to bf16; in gradients dS as well


def ours(p: Attention) -> Callable[[], Any]:
    from tritonkittens.kernels.attention import attention

    given = {} if p.grad is not None else dict(out=torch.full_like(p.q, float("nan")))
    return p.timed(functools.partial(attention, causal=p.causal, **given))


def cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    def prepare(batch: int, heads: int, length: int, dim: int, causal: bool) -> Trial:
        q, k, v, grad = (randn(batch, heads, length, dim) for _ in range(4))
        if backward:
            p = Attention(*(x.requires_grad_() for x in (q, k, v)), causal, grad)
            return Trial({OURS: functools.partial(ours, p)}, peers("attention backward", p, options.slow), p.gradient_error(), GRADIENT_BOUND)
        p = Attention(q, k, v, causal)
        return Trial({OURS: functools.partial(ours, p)}, peers("attention", p, options.slow), p.error(), BOUND)

    out = []
    for dim in DIMS:
        for causal in (False, True):
            for s in LENGTHS:
                b, h = max(1, TOKENS // s), WIDTH // dim
                products = (5 if backward else 2) / (2 if causal else 1)
                name = f"bf16 {'causal ' * causal}D {dim} S {s} B {b} H {h}"
                facts = {"B": b, "H": h, "S": s, "D": dim, "causal": causal, "panel": f"D {dim}{', causal' * causal}"}
                out.append(Case(name, products * 2 * b * h * s * s * dim, facts, functools.partial(prepare, b, h, s, dim, causal)))
    return out


PLOT = {"x": "S", "panel": "panel"}
SUITES = (
    Suite("attention", "attention forward, 16 K tokens (a causal score counts half)", cases, plot=PLOT),
    Suite("attention_backward", "attention backward, 16 K tokens (a causal score counts half)", functools.partial(cases, backward=True), plot=PLOT),
)
