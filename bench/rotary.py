"""Rotary embedding of q and k, forward and backward: beside a copy of as many bytes, torch.compile, and liger
where it is installed.

`work` is what a call must read and write of q and k. Forwards take turns over so many operands that none is in L2 when
it is used again.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bench.gemm import OURS, randn
from bench.harness import Case, Suite, Trial, deferred
from bench.quantize import beside_copy, copies, in_turn


class Model(NamedTuple):
    """Heads of q and of k, and their dimension."""

    q_heads: int
    k_heads: int
    dim: int


LLAMA = Model(32, 8, 128)
SHAPES = (
    (LLAMA, 1, 512),
    (LLAMA, 4, 4096),
    (LLAMA, 128, 1),
    (Model(32, 32, 64), 8, 2048),
    (Model(64, 8, 128), 1, 32768),
)
KINDS = ("halves", "interleaved", "inplace", "packed qkv", "norm")
EPS = 1e-6
BOUND = 1e-2  # results and gradients are rounded to bf16

Rotation = Callable[..., Any]  # a function of q and k, (B, S, H, D), and of weights where heads are normalised


def moved(kind: str, model: Model, batch: int, tokens: int, backward: bool) -> float:
    """Bytes of q and k, and of their gradients, that a call reads and writes, in bf16."""
    numbers = batch * tokens * (model.q_heads + model.k_heads) * model.dim
    return 2.0 * numbers * (3 if backward and kind == "norm" else 2)


def operands(kind: str, model: Model, batch: int, tokens: int) -> list[torch.Tensor]:
    """q and k, of (B, S, H, D), and weights where heads are normalised."""
    if kind == "packed qkv":
        packed = randn(batch, tokens, model.q_heads + 2 * model.k_heads, model.dim)
        return list(packed.split([model.q_heads, model.k_heads, model.k_heads], 2)[:2])
    weights = [randn(model.dim), randn(model.dim)] if kind == "norm" else []
    return [*(randn(batch, tokens, heads, model.dim) for heads in (model.q_heads, model.k_heads)), *weights]


def table(model: Model, tokens: int, device: torch.device) -> list[torch.Tensor]:
    frequency = 10000.0 ** -(torch.arange(0, model.dim, 2, device=device) / model.dim)
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    return [angle.cos(), angle.sin()]


def eager(kind: str, cos: torch.Tensor, sin: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
    """The rotation in torch, in fp32 or the dtype of wider operands, rounded once."""
    cos, sin = cos[:, None], sin[:, None]
    found = []
    for x, weight in zip(given[:2], given[2:] or (None, None), strict=True):
        wide = x.to(torch.promote_types(x.dtype, cos.dtype))
        if weight is not None:
            wide = torch.nn.functional.rms_norm(wide, x.shape[-1:], weight.to(wide.dtype), EPS)
        if kind == "interleaved":
            x1, x2 = wide[..., 0::2], wide[..., 1::2]
            y = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2)
        else:
            x1, x2 = wide.chunk(2, -1)
            y = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
        found.append(y.to(x.dtype))
    return found


def ours(kind: str, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    from tritonkittens.kernels.rotary import rotary

    def run(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> Any:
        named: dict[str, Any] = dict(zip(("q_weight", "k_weight"), weights, strict=False))
        return rotary(
            q, k, cos, sin, unsqueeze_dim=2, interleaved=kind == "interleaved", inplace=kind == "inplace", eps=EPS,
            **named,
        )  # fmt: skip

    return run


def compiled(kind: str, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    torch.compiler.reset()
    return torch.compile(functools.partial(eager, kind, cos, sin), dynamic=False)


def liger(kind: str, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    """In place where tokens come before heads in memory, as here."""
    from liger_kernel.ops.rope import LigerRopeFunction

    if kind in ("interleaved", "norm"):
        raise ValueError(f"liger has no such rotation: {kind}")
    wide = [torch.cat([t, t], -1)[None] for t in (cos, sin)]

    def run(q: torch.Tensor, k: torch.Tensor) -> Any:
        return [t.transpose(1, 2) for t in LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *wide)]

    return run


PEERS: dict[str, Callable[..., Rotation]] = {"torch.compile": compiled, "liger": liger}


def forward(
    make: Callable[..., Rotation], kind: str, table: Sequence[Any], given: Sequence[Any], bytes_moved: float
) -> Callable[[], Any]:
    """A rotation of copies of q and k in turn. In place it rotates what it has rotated before, at the same cost."""
    function = make(kind, *table)
    turns = [[*map(_like, given[:2]), *given[2:]] for _ in range(copies(bytes_moved))]
    return in_turn(lambda i: function(*turns[i]), len(turns))


def _like(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of x, whose memory may have gaps."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return torch.empty(extent, dtype=x.dtype, device=x.device).as_strided(x.shape, x.stride()).copy_(x)


def backward(
    make: Callable[..., Rotation], kind: str, table: Sequence[Any], given: Sequence[Any], grads: Sequence[torch.Tensor]
) -> Callable[[], Any]:
    """A backward: gradients of q and k, and of weights."""
    import torch._functorch.config

    leaves = [_like(x).requires_grad_() for x in given]
    with torch._functorch.config.patch(donated_buffer=False):  # the backward runs more than once
        found = make(kind, *table)(*(x.clone() for x in leaves))  # whose backward costs nothing
        own = [g.clone() for g in grads]  # liger writes into them
        run = functools.partial(torch.autograd.grad, tuple(found), leaves, tuple(own), retain_graph=True)
        run()
    for mine, g in zip(own, grads, strict=True):
        mine.copy_(g)
    return run


@deferred
def error(
    kind: str, table: Sequence[Any], given: Sequence[Any], grads: Sequence[torch.Tensor]
) -> Callable[[Any], float]:
    """The largest relative error of results, or of gradients where there are `grads`."""
    exact = [x.double().requires_grad_(bool(grads)) for x in given]
    expected = eager(kind, *(t.double() for t in table), *exact)
    if grads:
        expected = list(torch.autograd.grad(expected, exact, [g.double() for g in grads]))
    return lambda found: max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def prepare(kind: str, model: Model, batch: int, tokens: int, both_ways: bool) -> Trial:
    given, size = operands(kind, model, batch, tokens), moved(kind, model, batch, tokens, both_ways)
    angles = table(model, tokens, given[0].device)
    grads = [randn(*x.shape) for x in given[:2]] if both_ways else []

    def timed(make: Callable[..., Rotation]) -> Callable[[], Callable[[], Any]]:
        if both_ways:
            return functools.partial(backward, make, kind, angles, given, grads)
        return functools.partial(forward, make, kind, angles, given, size)

    return Trial(
        {OURS: timed(ours)},
        {name: timed(make) for name, make in PEERS.items()},
        error(kind, angles, given, grads),
        BOUND,
        baselines=beside_copy(size),
    )


def cases(options: argparse.Namespace, both_ways: bool = False) -> list[Case]:
    return [
        Case(
            f"{kind} {'backward ' * both_ways}{model.q_heads}/{model.k_heads}x{model.dim} {batch}x{tokens}",
            moved(kind, model, batch, tokens, both_ways),
            {"kind": kind, **model._asdict(), "batch": batch, "tokens": tokens, "backward": both_ways},
            functools.partial(prepare, kind, model, batch, tokens, both_ways),
            kind="device" if both_ways else "graph",
        )
        for kind in KINDS
        for model, batch, tokens in SHAPES
    ]


SUITES = (
    Suite("rotary", "rotary embeddings beside a copy of as many bytes", cases, unit="TB/s"),
    Suite(
        "rotary_backward",
        "backwards of rotary embeddings beside a copy of as many bytes",
        functools.partial(cases, both_ways=True),
        unit="TB/s",
    ),
)
