"""Gated activations, forward and backward: beside a copy of as many bytes, torch.compile, and liger where it is
installed.

`work` is what a call must read and write. Forwards take turns over so many operands that none is in L2 when it is used
again.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.gemm import OURS, randn
from bench.harness import Case, Suite, Trial, deferred
from bench.quantize import beside_copy, copies, in_turn

SHAPES = ((16384, 14336), (8192, 11008), (4096, 14336), (512, 14336), (131072, 1024))
KINDS = ("swiglu", "swiglu packed", "swiglu interleaved", "geglu", "geglu erf")
BOUND = 1e-2  # results and gradients are rounded to bf16

Activation = Callable[..., Any]  # a function of a and b, or of both in one tensor


def moved(rows: int, width: int, backward: bool) -> float:
    """Bytes that a call reads and writes, in bf16."""
    return 2.0 * rows * width * (5 if backward else 3)


def operands(kind: str, rows: int, width: int) -> list[torch.Tensor]:
    if kind in ("swiglu packed", "swiglu interleaved"):
        return [randn(rows, 2 * width)]
    return [randn(rows, width), randn(rows, width)]


def eager(kind: str, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """The activation in torch, in the dtype of the operands."""
    if b is None:
        a, b = (a[..., 0::2], a[..., 1::2]) if kind == "swiglu interleaved" else a.chunk(2, -1)
    if kind.startswith("swiglu"):
        return torch.nn.functional.silu(a) * b
    return torch.nn.functional.gelu(a, approximate="none" if kind == "geglu erf" else "tanh") * b


def ours(kind: str) -> Activation:
    from tritonkittens.kernels import activation

    if kind.startswith("swiglu"):
        return functools.partial(activation.swiglu, interleaved=kind == "swiglu interleaved")
    return functools.partial(activation.geglu, approximate="none" if kind == "geglu erf" else "tanh")


def compiled(kind: str) -> Activation:
    torch.compiler.reset()
    return torch.compile(functools.partial(eager, kind), dynamic=False)


def liger(kind: str) -> Activation:
    if kind == "geglu":
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        return LigerGELUMulFunction.apply
    if kind == "swiglu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply
    raise ValueError(f"liger has no {kind}")


PEERS: dict[str, Callable[[str], Activation]] = {"torch.compile": compiled, "liger": liger}


def forward(make: Callable[[str], Activation], kind: str, given: Sequence[Any], size: float) -> Callable[[], Any]:
    """A call of the activation on copies of its operands in turn."""
    function, turns = make(kind), [[x.clone() for x in given] for _ in range(copies(size))]
    return in_turn(lambda i: function(*turns[i]), len(turns))


def backward(
    make: Callable[[str], Activation], kind: str, given: Sequence[Any], grad: torch.Tensor
) -> Callable[[], Any]:
    """A backward of the activation. liger writes gradients over its operands; each call finds those of an earlier."""
    import torch._functorch.config

    leaves = [x.clone().requires_grad_() for x in given]
    with torch._functorch.config.patch(donated_buffer=False):  # the backward runs more than once
        found = make(kind)(*leaves)
        run = functools.partial(torch.autograd.grad, found, leaves, grad, retain_graph=True)
        run()
    with torch.no_grad():
        for leaf, x in zip(leaves, given, strict=True):
            leaf.data.copy_(x)
    return run


def parts(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@deferred
def error(kind: str, given: Sequence[Any], grad: torch.Tensor | None) -> Callable[[Any], float]:
    """The relative error of the result, or the largest of the gradients where there is a `grad`."""
    exact = [x.double().requires_grad_(grad is not None) for x in given]
    expected = [eager(kind, *exact)]
    if grad is not None:
        expected = list(torch.autograd.grad(expected[0], exact, grad.double()))
    return lambda found: max(
        float((a.double() - b).norm() / b.norm()) for a, b in zip(parts(found), expected, strict=True)
    )


def prepare(kind: str, rows: int, width: int, both_ways: bool) -> Trial:
    given, size = operands(kind, rows, width), moved(rows, width, both_ways)
    grad = randn(rows, width) if both_ways else None

    def timed(make: Callable[[str], Activation]) -> Callable[[], Callable[[], Any]]:
        if grad is not None:
            return functools.partial(backward, make, kind, given, grad)
        return functools.partial(forward, make, kind, given, size)

    return Trial(
        {OURS: timed(ours)},
        {name: timed(make) for name, make in PEERS.items()},
        error(kind, given, grad),
        BOUND,
        baselines=beside_copy(size),
    )


def cases(options: argparse.Namespace, both_ways: bool = False) -> list[Case]:
    return [
        Case(
            f"{kind} {'backward ' * both_ways}{rows}x{width}",
            moved(rows, width, both_ways),
            {"kind": kind, "rows": rows, "width": width, "backward": both_ways},
            functools.partial(prepare, kind, rows, width, both_ways),
            kind="device" if both_ways else "graph",
        )
        for kind in KINDS
        for rows, width in SHAPES
    ]


SUITES = (
    Suite("activation", "gated activations beside a copy of as many bytes", cases, unit="TB/s"),
    Suite(
        "activation_backward",
        "backwards of gated activations beside a copy of as many bytes",
        functools.partial(cases, both_ways=True),
        unit="TB/s",
    ),
)
