"""Softmax and cross entropy, forward and backward: beside a copy of as many bytes, torch.compile, and quack and liger
where these are installed. A linear layer with cross entropy, forward and backward at once, beside the same peers.

`work` of the former is what a call must read and write. Forwards take turns over so many operands that none is in L2
when it is used again. `work` of a linear layer is that of its three products.
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

SOFTMAX_SHAPES = tuple((16384, width) for width in (256, 1024, 4096, 8192, 16384, 32768)) + ((4096, 131072),)
SHAPES = ((32768, 4096), (8192, 32000), (8192, 50257), (8192, 128256), (4096, 256000), (1024, 128256))
KINDS = ("softmax", "cross_entropy", "cross_entropy capped")
CAP = 30.0
BOUND = 1e-2  # results and gradients are rounded to bf16

Function = Callable[[torch.Tensor, torch.Tensor], Any]  # of rows and targets


def moved(kind: str, rows: int, width: int, backward: bool) -> float:
    """Bytes of the rows that a call reads and writes, in bf16."""
    streams = {False: 2, True: 3} if kind == "softmax" else {False: 1, True: 2}
    return 2.0 * rows * width * streams[backward]


def eager(kind: str, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The function in torch, a loss in fp32."""
    if kind == "softmax":
        return torch.softmax(x, -1)
    logits = x if x.dtype == torch.float64 else x.float()
    if "capped" in kind:
        logits = CAP * torch.tanh(logits / CAP)
    return torch.nn.functional.cross_entropy(logits, target)


def ours(kind: str) -> Function:
    from tritonkittens.kernels import loss

    if kind == "softmax":
        return lambda x, target: loss.softmax(x)
    return functools.partial(loss.cross_entropy, softcap=CAP if "capped" in kind else None)


def compiled(kind: str) -> Function:
    torch.compiler.reset()
    return torch.compile(functools.partial(eager, kind), dynamic=False)


def quack(kind: str) -> Function:
    import quack

    if kind == "softmax":
        return lambda x, target: quack.softmax(x)
    return lambda x, target: quack.cross_entropy(x, target, reduction="mean")


def liger(kind: str) -> Function:
    if kind == "softmax":
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return lambda x, target: LigerSoftmaxFunction.apply(x)
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    cap = CAP if "capped" in kind else None
    rest = (None, -100, 0.0, 0.0, "mean", cap, False)  # weight, ignored, z-loss, smoothing, reduction, cap, z returned
    return lambda x, target: LigerCrossEntropyFunction.apply(x, target, *rest)[0]


PEERS: dict[str, Callable[[str], Function]] = {"torch.compile": compiled, "quack": quack, "liger": liger}


def peers(kind: str, backward: bool) -> dict[str, Callable[[str], Function]]:
    """Those that compute the same. quack has no soft-cap; liger has no pass of the gradient of cross entropy alone."""
    left_out = {"quack"} if "capped" in kind else set()
    if backward and kind != "softmax":
        left_out.add("liger")
    return {name: make for name, make in PEERS.items() if name not in left_out}


def forward(make: Callable[[str], Function], kind: str, given: Sequence[Any], bytes_moved: float) -> Callable[[], Any]:
    """A call on copies of the rows in turn."""
    function, (x, target) = make(kind), given
    turns = [x.clone() for _ in range(copies(bytes_moved))]
    return in_turn(lambda i: function(turns[i], target), len(turns))


def backward(
    make: Callable[[str], Function], kind: str, given: Sequence[Any], gradient: torch.Tensor
) -> Callable[[], Any]:
    """The gradient of the rows."""
    import torch._functorch.config

    x, target = given
    leaf = x.clone().requires_grad_()
    with torch._functorch.config.patch(donated_buffer=False):  # the backward runs more than once
        found = make(kind)(leaf, target)

        def run() -> torch.Tensor:
            return torch.autograd.grad(found, leaf, gradient, retain_graph=True)[0]

        run()
    return run


@deferred
def error(kind: str, given: Sequence[Any], gradient: torch.Tensor | None) -> Callable[[torch.Tensor], float]:
    """The relative error of results, or of gradients where there is a `gradient`."""
    x, target = given
    exact = x.double().requires_grad_(gradient is not None)
    expected = eager(kind, exact, target)
    if gradient is not None:
        (expected,) = torch.autograd.grad(expected, exact, gradient.double())

    def relative(found: torch.Tensor) -> float:
        return float((found.double() - expected).norm() / expected.norm())

    return relative


def prepare(kind: str, rows: int, width: int, both_ways: bool) -> Trial:
    x, size = randn(rows, width), moved(kind, rows, width, both_ways)
    given = (x, torch.randint(0, width, (rows,), device=x.device))
    gradient = None
    if both_ways:
        gradient = randn(rows, width) if kind == "softmax" else torch.ones((), dtype=torch.float32, device=x.device)

    def timed(make: Callable[[str], Function]) -> Callable[[], Callable[[], Any]]:
        if gradient is not None:
            return functools.partial(backward, make, kind, given, gradient)
        return functools.partial(forward, make, kind, given, size)

    return Trial(
        {OURS: timed(ours)},
        {name: timed(make) for name, make in peers(kind, both_ways).items()},
        error(kind, given, gradient),
        BOUND,
        baselines=beside_copy(size),
    )


def cases(options: argparse.Namespace | None, kinds: Sequence[str] = KINDS, both_ways: bool = False) -> list[Case]:
    return [
        Case(
            f"{kind} {'backward ' * both_ways}{rows}x{width}",
            moved(kind, rows, width, both_ways),
            {"kind": kind, "rows": rows, "width": width, "backward": both_ways},
            functools.partial(prepare, kind, rows, width, both_ways),
            kind="device" if both_ways else "graph",
        )
        for kind in kinds
        for rows, width in (SOFTMAX_SHAPES if kind == "softmax" else SHAPES)
    ]


# ---------------------------------------------------------------- a linear layer with cross entropy

LINEAR_SHAPES = (  # tokens, features, classes
    (8192, 4096, 128256),
    (8192, 2048, 32000),
    (4096, 4096, 128256),
    (32768, 4096, 128256),
    (16384, 1024, 50257),
    (8192, 2304, 256000),
)

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of x, weight and targets


def eager_linear(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss in torch, from logits in the dtype of x."""
    logits = torch.nn.functional.linear(x, w)
    return torch.nn.functional.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), target)


def linear_ours() -> Linear:
    from tritonkittens.kernels.loss import linear_cross_entropy

    return linear_cross_entropy


def linear_compiled() -> Linear:
    torch.compiler.reset()
    return torch.compile(eager_linear, dynamic=False)


def linear_quack() -> Linear:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x, w, target: chunked_linear_cross_entropy(x, w, target, chunk_size=4096)


def linear_liger() -> Linear:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda x, w, target: LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]


LINEAR_PEERS: dict[str, Callable[[], Linear]] = {
    "torch.compile": linear_compiled,
    "quack": linear_quack,
    "liger": linear_liger,
}


def both(make: Callable[[], Linear], given: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """The loss and the gradients of x and weight."""
    function, (x, w, target) = make(), given
    leaves = [t.clone().requires_grad_() for t in (x, w)]

    def run() -> list[torch.Tensor]:
        loss = function(leaves[0], leaves[1], target)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return run


@deferred
def linear_error(given: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], float]:
    """The largest relative error of the loss and the gradients."""
    *operands, target = given
    leaves = [t.double().requires_grad_() for t in operands]
    loss = eager_linear(leaves[0], leaves[1], target)
    expected = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    return lambda found: max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def prepare_linear(tokens: int, features: int, classes: int) -> Trial:
    x, w = randn(tokens, features), randn(classes, features) * features**-0.5
    given = (x, w, torch.randint(0, classes, (tokens,), device=x.device))

    def timed(make: Callable[[], Linear]) -> Callable[[], Callable[[], Any]]:
        return functools.partial(both, make, given)

    peers = {name: timed(make) for name, make in LINEAR_PEERS.items()}
    return Trial({OURS: timed(linear_ours)}, peers, linear_error(given), BOUND)


def linear_cases(options: argparse.Namespace | None) -> list[Case]:
    return [
        Case(
            f"{tokens} tokens {features}->{classes}",
            6.0 * tokens * features * classes,
            {"tokens": tokens, "features": features, "classes": classes},
            functools.partial(prepare_linear, tokens, features, classes),
        )
        for tokens, features, classes in LINEAR_SHAPES
    ]


def _suite(name: str, title: str, kinds: Sequence[str], both_ways: bool) -> Suite:
    return Suite(name, title, functools.partial(cases, kinds=kinds, both_ways=both_ways), unit="TB/s")


SUITES = (
    _suite("softmax", "softmax beside a copy of as many bytes", KINDS[:1], False),
    _suite("softmax_backward", "backward of softmax beside a copy of as many bytes", KINDS[:1], True),
    _suite("cross_entropy", "cross entropy beside a copy of as many bytes", KINDS[1:], False),
    _suite("cross_entropy_backward", "gradient of cross entropy beside a copy of as many bytes", KINDS[1:], True),
    Suite("linear_cross_entropy", "a linear layer with cross entropy, forward and backward", linear_cases),
)
