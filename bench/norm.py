"""RMSNorm and LayerNorm, alone, with a residual stream, and of heads, forward and backward: beside a copy of as many
bytes, torch.compile, and quack and liger where these are installed.

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

TOKENS = 16384
LARGE = (*((TOKENS, width) for width in (1024, 2048, 4096, 5120, 8192, 16384)), (131072, 256), (TOKENS * 32, 128))
SHAPES = (*LARGE, (4096, 2048), (1024, 8192), (128, 4096))  # and below 64 MiB
KINDS = ("rms", "rms residual", "layer")
EPS = 1e-6
BOUND = 1e-2  # results and gradients are rounded to bf16

Norm = Callable[..., Any]  # a function of x, weight, bias and residual; the last two may be None


def moved(kind: str, rows: int, width: int, backward: bool) -> float:
    """Bytes of the rows that a call reads and writes, in bf16."""
    streams = {False: 2, True: 3}[backward] + ("residual" in kind) * (1 if backward else 2)
    return 2.0 * rows * width * streams


def operands(kind: str, rows: int, width: int) -> list[torch.Tensor | None]:
    """x, weight, bias and residual."""
    bias = randn(width) if kind == "layer" else None
    residual = randn(rows, width) if "residual" in kind else None
    return [randn(rows, width), randn(width), bias, residual]


def eager(kind: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, r: torch.Tensor | None) -> Any:
    """The norm in torch, in the dtype of the operands: y, and with a residual the sum."""
    z = x if r is None else x + r
    width = x.shape[-1:]
    functional = torch.nn.functional
    y = functional.layer_norm(z, width, w, b, EPS) if kind == "layer" else functional.rms_norm(z, width, w, EPS)
    return y if r is None else (y, z)


def ours(kind: str) -> Norm:
    from tritonkittens.kernels import norm

    function = norm.layer_norm if kind == "layer" else norm.rms_norm
    return lambda x, w, b, r: function(x, w, b, r, eps=EPS, prenorm=r is not None)


def compiled(kind: str) -> Norm:
    torch.compiler.reset()
    return torch.compile(functools.partial(eager, kind), dynamic=False)


def quack(kind: str) -> Norm:
    import quack

    if kind == "layer":
        return lambda x, w, b, r: quack.layernorm(x, w.float(), b.float(), eps=EPS)
    return lambda x, w, b, r: quack.rmsnorm(x, w, residual=r, eps=EPS, prenorm=r is not None)


def liger(kind: str) -> Norm:
    if kind == "layer":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, w, b, r: LigerLayerNormFunction.apply(x, w, b, EPS)
    if kind == "rms":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, w, b, r: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, w, b, r: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)


PEERS: dict[str, Callable[[str], Norm]] = {"torch.compile": compiled, "quack": quack, "liger": liger}


def forward(make: Callable[[str], Norm], kind: str, given: Sequence[Any], bytes_moved: float) -> Callable[[], Any]:
    """A call of the norm on copies of its operands in turn."""
    function, (x, w, b, r) = make(kind), given
    turns = [(x.clone(), r if r is None else r.clone()) for _ in range(copies(bytes_moved))]
    return in_turn(lambda i: function(turns[i][0], w, b, turns[i][1]), len(turns))


def backward(
    make: Callable[[str], Norm], kind: str, given: Sequence[Any], grads: Sequence[torch.Tensor]
) -> Callable[[], Any]:
    """A backward of the norm: gradients of all operands."""
    import torch._functorch.config

    leaves = [t if t is None else t.clone().requires_grad_() for t in given]
    with torch._functorch.config.patch(donated_buffer=False):  # the backward runs more than once
        found = make(kind)(*leaves)
        results = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        wanted = [t for t in leaves if t is not None]
        run = functools.partial(torch.autograd.grad, results, wanted, tuple(grads), retain_graph=True)
        run()
    return run


def parts(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@deferred
def error(kind: str, given: Sequence[Any], grads: Sequence[torch.Tensor]) -> Callable[[Any], float]:
    """The largest relative error of results, or of gradients where there are `grads`."""
    exact = [t if t is None else t.double().requires_grad_(bool(grads)) for t in given]
    expected = parts(eager(kind, *exact))
    if grads:
        wanted = [t for t in exact if t is not None]
        expected = list(torch.autograd.grad(expected, wanted, [g.double() for g in grads]))

    def largest(found: Any) -> float:
        pairs = zip(parts(found), expected, strict=True)
        return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)

    return largest


def prepare(kind: str, rows: int, width: int, both_ways: bool) -> Trial:
    given, size = operands(kind, rows, width), moved(kind, rows, width, both_ways)
    grads = [randn(rows, width) for _ in range(1 + ("residual" in kind))] if both_ways else []

    def timed(make: Callable[[str], Norm]) -> Callable[[], Callable[[], Any]]:
        if both_ways:
            return functools.partial(backward, make, kind, given, grads)
        return functools.partial(forward, make, kind, given, size)

    return Trial(
        {OURS: timed(ours)},
        {name: timed(make) for name, make in PEERS.items()},
        error(kind, given, grads),
        BOUND,
        baselines=beside_copy(size),
    )


def cases(options: argparse.Namespace, both_ways: bool = False) -> list[Case]:
    return [
        Case(
            f"{kind} {'backward ' * both_ways}{rows}x{width}",
            moved(kind, rows, width, both_ways),
            {"kind": kind, "rows": rows, "width": width, "backward": both_ways},
            functools.partial(prepare, kind, rows, width, both_ways),
            kind="device" if both_ways else "graph",
        )
        for kind in KINDS
        for rows, width in SHAPES
    ]


SUITES = (
    Suite("norm", "norms beside a copy of as many bytes", cases, unit="TB/s"),
    Suite(
        "norm_backward",
        "backwards of norms beside a copy of as many bytes",
        functools.partial(cases, both_ways=True),
        unit="TB/s",
    ),
)
