"""Hedgehog's attention, and its backward, beside its definition through torch.compile, and a copy of as many bytes as a
call must move.

The definition computes all weights at once, in bf16: it is a peer up to `MOST_WEIGHTS` rows.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gemm import DEVICE, OURS, randn
from bench.harness import Case, Suite, Trial, both_ways, call_of, deferred
from bench.quantize import beside_copy

BOUND = 1e-2  # weights and states are rounded to bf16
GRADIENT_BOUND = 3e-2  # torch.compile rounds features, too
ROWS = 1024  # that are checked
MOST_WEIGHTS = 4096


class Shape(NamedTuple):
    """Operands of 128 columns."""

    batch: int
    length: int
    heads: int

    def __str__(self) -> str:
        return f"B {self.batch} T {self.length} H {self.heads}"

    def moved(self, backward: bool = False) -> float:
        """Bytes that a call reads and writes: backwards, q, k and v, their gradients, and that of results."""
        return 2.0 * 128 * self.batch * self.length * self.heads * (7 if backward else 4)


SHAPES = tuple(
    Shape(*extents)
    for extents in ((16, 1024, 16), (16, 2048, 16), (4, 4096, 32), (4, 16384, 32), (16, 16384, 16), (1, 65536, 16))
)


@deferred
def error(given: list[torch.Tensor], grad: torch.Tensor | None) -> Callable[[Any], float]:
    """The error of the first rows of a head; of gradients, where those are all rows that have one. In those of alpha
    and beta terms cancel, so that they are not checked."""
    from tritonkittens.kernels.hedgehog import hedgehog_attention_torch

    at = slice(1), slice(ROWS), slice(1)
    exact = [
        x.double().requires_grad_(grad is not None) for x in (*(x[at] for x in given[:3]), *(x[:1] for x in given[3:]))
    ]
    expected = [hedgehog_attention_torch(*exact)[0]]
    if grad is not None:
        expected = list(torch.autograd.grad(expected[0], exact[:5], grad[at].double()))

    def of(found: Any) -> float:
        parts = [found] if isinstance(found, torch.Tensor) else found[:5]
        checked = [x[at] if x.ndim == 4 else x[:1] for x in parts]
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(checked, expected, strict=True))

    return of


def prepare(shape: Shape, backward: bool = False) -> Trial:
    heads = shape.heads
    maps = [randn(heads, 128, 64) * 0.1 for _ in range(2)]
    factors = [torch.rand(heads, dtype=torch.float32, device=DEVICE) + 0.1 for _ in range(2)]
    given = [*(randn(*shape, 128) for _ in range(3)), *maps, *factors]
    grad = randn(*shape, 128) if backward else None
    if grad is not None:
        grad[1:] = grad[:, ROWS:] = 0  # gradients of other rows have no part in those that are checked

    def ours() -> Callable[[], Any]:
        from tritonkittens.kernels.hedgehog import hedgehog_attention

        return call_of(hedgehog_attention, given, grad)

    def compiled() -> Callable[[], Any]:
        from tritonkittens.kernels.hedgehog import hedgehog_attention_torch

        definition = torch.compile(functools.partial(hedgehog_attention_torch, dtype=torch.bfloat16))
        return call_of(lambda *given: definition(*given)[0], given, grad)

    peers = {"torch.compile": compiled} if shape.length <= MOST_WEIGHTS else {}
    checked, baselines = error(given, grad), beside_copy(shape.moved(backward))
    return Trial({OURS: ours}, peers, checked, GRADIENT_BOUND if backward else BOUND, baselines=baselines)


def cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    return both_ways(SHAPES, prepare, backward)


SUITES = (
    Suite("hedgehog", "the attention of Hedgehog", cases, unit="TB/s"),
    Suite(
        "hedgehog_backward", "backwards of Hedgehog's attention", functools.partial(cases, backward=True), unit="TB/s"
    ),
)
