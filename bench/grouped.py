"""Grouped products of mixtures of experts, forward and gradients of weights, beside `torch._grouped_mm` and one product
of the same work; groups of random sizes; SwiGLU in the epilogue; fp8 beside `torch._scaled_grouped_mm`; fp8 with block
scales beside one dense product of the same work.

Groups of a case are "even", of one size, or "uneven": each token takes a group by itself, with probabilities that
differ from group to group about as much as a router's do. Cases of few tokens also have a copy that reads and writes
as many bytes together as the weights have.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gemm import BF16_BOUND, BLOCK_FP8_BOUND, DEVICE, FAST_FP8_BOUND, OURS, randn
from bench.harness import Case, Contender, Suite, Trial, deferred, frobenius_error, log_uniform, with_knobs
from bench.peers import SCALE_BLOCK
from bench.quantize import copy_of

FEW_TOKENS = 512
COUNT = 30
GROUPS, TOKENS, COLS = (2, 256), (64, 65536), (256, 16384)  # of random cases, drawn log-uniformly
MOST_WEIGHTS = 1 << 32  # elements of all weights of a random case
SPREAD = 0.5  # standard deviation of the logarithm of a group's probability
TORCH, ONE = "torch._grouped_mm", "one mm of the same work"


class Shape(NamedTuple):
    """Tokens (tokens × k) and weights (groups × n × k) as stored."""

    groups: int
    tokens: int
    k: int
    n: int
    sizes: str

    def __str__(self) -> str:
        return f"{self.groups} groups, {self.tokens} tokens, {self.k}→{self.n}, {self.sizes}"

    @property
    def work(self) -> float:
        return 2.0 * self.tokens * self.k * self.n


MODELS = (
    (8, 16384, 4096, 14336),  # Mixtral
    (8, 16384, 14336, 4096),
    (256, 65536, 7168, 2048),  # DeepSeek-V3
    (256, 65536, 2048, 7168),
    (64, 32768, 2048, 1408),  # DeepSeek-V2-Lite
    (128, 8192, 2048, 768),  # Qwen3-30B-A3B
    (128, 65536, 2048, 768),
    (8, 256, 4096, 14336),
    (8, 32, 4096, 14336),
    (128, 256, 2048, 768),
    (256, 512, 7168, 2048),
)


def sizes_of(shape: Shape) -> list[int]:
    """The rows of each group."""
    if shape.sizes == "even":
        return [shape.tokens // shape.groups] * shape.groups
    draw = random.Random(shape.groups * shape.tokens)
    weights = [draw.lognormvariate(0, SPREAD) for _ in range(shape.groups)]
    found = [0] * shape.groups
    for group in draw.choices(range(shape.groups), weights, k=shape.tokens):
        found[group] += 1
    return found


def offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)


def gated(y: torch.Tensor) -> torch.Tensor:
    first, second = y.chunk(2, -1)
    return torch.nn.functional.silu(first) * second


@deferred
def error(
    a: torch.Tensor, b: torch.Tensor, sizes: list[int], after: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Callable[[torch.Tensor], float]:
    """The error of a product by that of each group in fp32, and a function of it `after` that."""
    parts = torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0).tolist()
    groups = [slice(*bounds) for bounds in zip(parts, parts[1:], strict=False)]
    if b.ndim == 3:
        found = torch.cat([a[part].float() @ b[g].float() for g, part in enumerate(groups)])
        found = found if after is None else after(found)
    else:
        found = torch.stack([a[:, part].float() @ b[part].float() for part in groups])
    return frobenius_error(found.flatten(0, -2))


def ours(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, **config: Any) -> Callable[[], Any]:
    from tritonkittens.kernels.grouped_gemm import Config, grouped_gemm

    settings: dict[str, Any] = {"config": Config(**config)} if config else {}
    return functools.partial(grouped_gemm, a, b, ends, out=out, **settings)


def trial(options: argparse.Namespace, shape: Shape, weight_gradient: bool) -> Trial:
    """Ours and torch's on random tokens, and products and copies as baselines."""
    sizes = sizes_of(shape)
    ends, x = offsets(sizes), randn(shape.tokens, shape.k)
    if weight_gradient:
        a, b = randn(shape.tokens, shape.n).T, x
        out = randn(shape.groups, shape.n, shape.k)
        one = functools.partial(torch.mm, a, b)
    else:
        a, b = x, randn(shape.groups, shape.n, shape.k).mT
        out = randn(shape.tokens, shape.n)
        one = functools.partial(torch.mm, a, b[0])
    baselines = {ONE: Contender(lambda: one, lambda found: 0.0)}
    if shape.tokens <= FEW_TOKENS:
        moved = 2.0 * shape.n * shape.k * sum(n > 0 for n in sizes)
        baselines["copy of as many bytes as the weights"] = Contender(lambda: copy_of(moved), lambda found: 0.0)
    given = functools.partial(ours, a, b, ends, out)
    knobs = with_knobs(OURS, options.knobs, lambda fields: functools.partial(given, **fields))
    peers = {TORCH: lambda: functools.partial(torch._grouped_mm, a, b, offs=ends)}
    return Trial({OURS: given} | knobs, peers, error(a, b, sizes), BF16_BOUND, baselines=baselines)


def case(options: argparse.Namespace, shape: Shape, weight_gradient: bool) -> Case:
    facts = shape._asdict() | {"gradient": weight_gradient, "rows": shape.tokens // shape.groups}
    prepare = functools.partial(trial, options, shape, weight_gradient)
    return Case(f"{'weight gradient, ' * weight_gradient}{shape}", shape.work, facts, prepare)


def forward_cases(options: argparse.Namespace) -> list[Case]:
    return [case(options, Shape(*model, sizes), False) for model in MODELS for sizes in ("even", "uneven")]


def gradient_cases(options: argparse.Namespace) -> list[Case]:
    return [
        case(options, Shape(*model, sizes), True)
        for model in MODELS
        for sizes in ("even", "uneven")
        if model[1] > FEW_TOKENS
    ]


def random_cases(options: argparse.Namespace) -> list[Case]:
    """Forward and gradient in turn, of shapes that `--seed` and `--count` name."""
    draw = random.Random(options.seed or 0)
    found = []
    for index in range(options.count or COUNT):
        k, n = (round(log_uniform(draw, *COLS) / 64) * 64 for _ in range(2))
        groups = min(round(log_uniform(draw, *GROUPS)), max(1, MOST_WEIGHTS // (n * k)))
        shape = Shape(groups, round(log_uniform(draw, *TOKENS)), k, n, "uneven")
        found.append(case(options, shape, index % 2 == 1))
    return found


def swiglu_trial(options: argparse.Namespace, shape: Shape) -> Trial:
    """SwiGLU in the product's epilogue, beside products and SwiGLU of their own; `n` counts both halves."""
    from tritonkittens.kernels.activation import swiglu
    from tritonkittens.kernels.grouped_gemm import Config, grouped_gemm

    sizes = sizes_of(shape)
    ends, a, b = offsets(sizes), randn(shape.tokens, shape.k), randn(shape.groups, shape.n, shape.k).mT

    def fused(**config: Any) -> Callable[[], Any]:
        settings: dict[str, Any] = {"config": Config(**config)} if config else {}
        return functools.partial(grouped_gemm, a, b, ends, activation="swiglu", **settings)

    ours = {OURS: fused, f"{OURS}, two kernels": lambda: lambda: swiglu(grouped_gemm(a, b, ends))}
    knobs = with_knobs(OURS, options.knobs, lambda fields: functools.partial(fused, **fields))
    peers = {f"{TORCH}, silu and product": lambda: lambda: gated(torch._grouped_mm(a, b, offs=ends))}
    return Trial(ours | knobs, peers, error(a, b, sizes, gated), 2 * BF16_BOUND)


def fp8_trial(options: argparse.Namespace, shape: Shape) -> Trial:
    """e4m3 with a scale for each row of tokens and each column of weights."""
    from tritonkittens.kernels.grouped_gemm import Config, grouped_gemm

    sizes, e4m3 = sizes_of(shape), torch.float8_e4m3fn
    ends, a = offsets(sizes), randn(shape.tokens, shape.k, dtype=e4m3)
    b = randn(shape.groups, shape.n, shape.k, dtype=e4m3).mT
    scale_a, scale_b = (
        torch.rand(extents, dtype=torch.float32, device=DEVICE) + 0.5
        for extents in ((shape.tokens,), (shape.groups, shape.n))
    )
    scaled_b = b.float() * scale_b[:, None]

    def ours(**config: Any) -> Callable[[], Any]:
        settings: dict[str, Any] = {"config": Config(**config)} if config else {}
        return functools.partial(grouped_gemm, a, b, ends, scale_a=scale_a, scale_b=scale_b, **settings)

    knobs = with_knobs(OURS, options.knobs, lambda fields: functools.partial(ours, **fields))
    peers = {
        "torch._scaled_grouped_mm": lambda: functools.partial(
            torch._scaled_grouped_mm, a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    }
    return Trial({OURS: ours} | knobs, peers, error(a.float() * scale_a[:, None], scaled_b, sizes), FAST_FP8_BOUND)


def block_trial(options: argparse.Namespace, shape: Shape) -> Trial:
    """e4m3 with block scales, as DeepSeek-V3 has them. No grouped product of torch takes these scales on Hopper: beside
    it are one `gemm` of all tokens with one group's weights, and torch's product with scales of rows and columns."""
    from tritonkittens.kernels.gemm import gemm
    from tritonkittens.kernels.grouped_gemm import Config, grouped_gemm

    sizes, e4m3 = sizes_of(shape), torch.float8_e4m3fn
    across, deep = -(-shape.n // SCALE_BLOCK), -(-shape.k // SCALE_BLOCK)
    ends, a = offsets(sizes), randn(shape.tokens, shape.k, dtype=e4m3)
    b = randn(shape.groups, shape.n, shape.k, dtype=e4m3).mT
    scale_a, scale_b, rows, cols = (
        torch.rand(extents, dtype=torch.float32, device=DEVICE) + 0.5
        for extents in ((deep, shape.tokens), (shape.groups, across, deep), (shape.tokens,), (shape.groups, shape.n))
    )
    given = dict(scale_a=scale_a.T, scale_b=scale_b.mT)

    def ours(**config: Any) -> Callable[[], Any]:
        settings: dict[str, Any] = {"config": Config(**config)} if config else {}
        return functools.partial(grouped_gemm, a, b, ends, **given, **settings)

    def of_blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.repeat_interleave(SCALE_BLOCK, dim)

    @deferred
    def block_error() -> Callable[[torch.Tensor], float]:
        parts = a.float().mul_(of_blocks(scale_a, 0)[: shape.k].T).split(sizes)
        found = []
        for g, part in enumerate(parts):
            scale = of_blocks(of_blocks(scale_b[g], 1), 0)[: shape.n, : shape.k].T
            found.append(part @ b[g].float().mul_(scale))
        return frobenius_error(torch.cat(found))

    baselines = {
        "one gemm of the same work": lambda: functools.partial(gemm, a, b[0], scale_a=scale_a.T, scale_b=scale_b[0].T),
        "torch._scaled_grouped_mm, rows and columns": lambda: functools.partial(
            torch._scaled_grouped_mm, a, b, rows, cols, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
    }
    knobs = with_knobs(OURS, options.knobs, lambda fields: functools.partial(ours, **fields))
    return Trial(
        {OURS: ours} | knobs,
        {},
        block_error(),
        BLOCK_FP8_BOUND,
        baselines={name: Contender(factory, lambda found: 0.0) for name, factory in baselines.items()},
    )


def other_cases(
    options: argparse.Namespace,
    name: str,
    prepare: Callable[[argparse.Namespace, Shape], Trial],
    most_groups: int = 128,
) -> list[Case]:
    shapes = [Shape(*model, sizes) for model in MODELS for sizes in ("even", "uneven") if model[0] <= most_groups]
    return [
        Case(f"{name} {shape}", shape.work, shape._asdict(), functools.partial(prepare, options, shape))
        for shape in shapes
    ]


def fp8_cases(options: argparse.Namespace) -> list[Case]:
    return other_cases(options, "e4m3", fp8_trial) + other_cases(options, "e4m3, block scales,", block_trial, 256)


SUITES = (
    Suite("grouped", "grouped products", forward_cases, plot={"x": "rows", "y": "ratio", "panel": "sizes"}),
    Suite("grouped_gradient", "gradients of the weights of grouped products", gradient_cases),
    Suite("grouped_random", "grouped products of random shapes", random_cases),
    Suite(
        "grouped_swiglu",
        "grouped products with SwiGLU",
        functools.partial(other_cases, name="swiglu", prepare=swiglu_trial),
    ),
    Suite("grouped_fp8", "grouped e4m3 products", fp8_cases),
)
