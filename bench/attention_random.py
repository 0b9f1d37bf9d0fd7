"""Random attention: the suites `attention_random` and `attention_backward_random`, which measure shapes that nobody
tuned.

`--seed` and `--count` name the shapes, so that every seed is a fresh set.
"""

from __future__ import annotations

import argparse
import functools
import random
from typing import NamedTuple

from bench.attention import BOUND, GRADIENT_BOUND, ours, peers_of
from bench.gemm import OURS, randn
from bench.harness import Case, Suite, Trial, log_uniform
from bench.peers import Attention

COUNT = 40
LENGTHS = (64, 16384)  # drawn log-uniformly
TOKENS = 16384  # of all sequences, at most, unless one is longer
DIMS = (64, 64, 64, 128, 128, 128, 32, 48, 80, 96, 112, 160, 192, 256)
KV_HEADS, GROUPS = (1, 2, 4, 8), (1, 1, 2, 3, 4, 7, 8)  # heads of K, and queries' heads for each
CAUSAL, WINDOW = 0.6, 0.25  # shares of the shapes; a window is causal
LEAST_WINDOW = 64


class Shape(NamedTuple):
    """Self-attention of `batch` sequences; window: the keys that a query sees before its own, None for all."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    causal: bool
    window: int | None

    def __str__(self) -> str:
        seen = f" window {self.window}" if self.window is not None else " causal" if self.causal else ""
        return f"B {self.batch} H {self.heads}/{self.kv_heads} S {self.length} D {self.dim}{seen}"


def shapes(seed: int, count: int) -> list[Shape]:
    """Return `count` random shapes."""
    draw = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(log_uniform(draw, low, high))

    found = []
    for _ in range(count):
        length, dim, kv_heads, group = between(*LENGTHS), draw.choice(DIMS), draw.choice(KV_HEADS), draw.choice(GROUPS)
        batch = between(1, max(1, TOKENS // length))
        windowed = draw.random() < WINDOW and length > 2 * LEAST_WINDOW
        window = between(LEAST_WINDOW, length // 2) if windowed else None
        causal = windowed or draw.random() < CAUSAL
        found.append(Shape(batch, kv_heads * group, kv_heads, length, dim, causal, window))
    return found


def scores(shape: Shape) -> int:
    """Return how many scores a head computes; a causal score counts half."""
    if shape.window is None:
        return shape.length**2 // (2 if shape.causal else 1)
    return shape.length * (shape.window + 1) - shape.window * (shape.window + 1) // 2


def cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    def prepare(shape: Shape) -> Trial:
        q, grad = (randn(shape.batch, shape.heads, shape.length, shape.dim) for _ in range(2))
        k, v = (randn(shape.batch, shape.kv_heads, shape.length, shape.dim) for _ in range(2))
        if backward:
            q, k, v = (x.requires_grad_() for x in (q, k, v))
        p = Attention(q, k, v, shape.causal, grad if backward else None, shape.window)
        error, bound = (p.gradient_error(), GRADIENT_BOUND) if backward else (p.error(), BOUND)
        return Trial({OURS: functools.partial(ours, p)}, peers_of(p, options), error, bound)

    return [
        Case(
            f"bf16 {shape}",
            (10 if backward else 4) * shape.batch * shape.heads * shape.dim * scores(shape),
            {**shape._asdict(), "S": shape.length, "panel": "backward" if backward else "forward"},
            functools.partial(prepare, shape),
        )
        for shape in dict.fromkeys(shapes(options.seed or 0, options.count or COUNT))
    ]


PLOT = {"x": "S", "y": "ratio", "panel": "panel"}
SUITES = (
    Suite("attention_random", "attention forward at random shapes", cases, plot=PLOT),
    Suite(
        "attention_backward_random",
        "attention backward at random shapes",
        functools.partial(cases, backward=True),
        plot=PLOT,
    ),
)
