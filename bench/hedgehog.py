"""Hedgehog's attention beside its definition through torch.compile, and a copy of as many bytes as a call must move.

The definition computes all weights at once, in bf16: it is a peer up to `MOST_WEIGHTS` rows.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gemm import DEVICE, OURS, randn
from bench.harness import Case, Suite, Trial, deferred
from bench.quantize import beside_copy

BOUND = 1e-2  # weights and states are rounded to bf16
ROWS = 1024  # that are checked
MOST_WEIGHTS = 4096


class Shape(NamedTuple):
    """Operands of 128 columns."""

    batch: int
    length: int
    heads: int

    def __str__(self) -> str:
        return f"B {self.batch} T {self.length} H {self.heads}"

    @property
    def moved(self) -> float:
        """Bytes that a call reads and writes."""
        return 8.0 * 128 * self.batch * self.length * self.heads


SHAPES = tuple(
    Shape(*extents)
    for extents in ((16, 1024, 16), (16, 2048, 16), (4, 4096, 32), (4, 16384, 32), (16, 16384, 16), (1, 65536, 16))
)


@deferred
def error(given: list[torch.Tensor]) -> Callable[[Any], float]:
    """The error of the first rows of a head."""
    from tritonkittens.kernels.hedgehog import hedgehog_attention_torch

    at = slice(1), slice(ROWS), slice(1)
    expected = hedgehog_attention_torch(*(x[at] for x in given[:3]), *(x[:1] for x in given[3:]))[0]
    return lambda found: float((found[at].double() - expected).norm() / expected.norm())


def prepare(shape: Shape) -> Trial:
    heads = shape.heads
    maps = [randn(heads, 128, 64) * 0.1 for _ in range(2)]
    factors = [torch.rand(heads, dtype=torch.float32, device=DEVICE) + 0.1 for _ in range(2)]
    given = [*(randn(*shape, 128) for _ in range(3)), *maps, *factors]

    def ours() -> Callable[[], Any]:
        from tritonkittens.kernels.hedgehog import hedgehog_attention

        return functools.partial(hedgehog_attention, *given)

    def compiled() -> Callable[[], Any]:
        from tritonkittens.kernels.hedgehog import hedgehog_attention_torch

        definition = torch.compile(functools.partial(hedgehog_attention_torch, dtype=torch.bfloat16))
        return lambda: definition(*given)[0]

    peers = {"torch.compile": compiled} if shape.length <= MOST_WEIGHTS else {}
    return Trial({OURS: ours}, peers, error(given), BOUND, baselines=beside_copy(shape.moved))


def cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(str(shape), shape.moved, shape._asdict(), functools.partial(prepare, shape), kind="graph")
        for shape in SHAPES
    ]


SUITES = (Suite("hedgehog", "the attention of Hedgehog", cases, unit="TB/s"),)
