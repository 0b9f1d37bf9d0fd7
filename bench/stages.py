"""Table 1 of the paper: TFLOP/s against pipeline stages."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

import tritonkittens.lang as tk
from bench.gemm import OURS, bf16, case, ours, trial
from bench.harness import Case, Suite, Trial, require_context
from bench.peers import Product

SIDE = 4096
STAGES = (1, 2, 3, 4)
# From the default down: what a stage count refuses or has no shared memory for.
TILES: tuple[dict[str, Any], ...] = ({}, {"tile_n": 192}, {"tile_n": 128}, {"tile_n": 128, "consumers": 1})


class OneStage(tk.lcf):
    """C = A·B with the default tile of the GEMM and one slot: its products have ended before the next copy begins,
    where those of the GEMM are under way while the next slot is waited for."""

    consumers = 2
    stages = 1

    def layout(self) -> tk.layout:
        a, b, c = tk.st(tk.bf16, 128, 64), tk.st(tk.bf16, 64, 256), tk.st(tk.bf16, 64, 256)
        return tk.layout(globals=dict(A=a, B=b, C=c), input=dict(A=a, B=b), epilogue=dict(C=c))

    def tasks(self, A: torch.Size, B: torch.Size, C: torch.Size) -> int:
        return -(-C[0] // 128) * -(-C[1] // 256)

    @triton.jit
    def setup(ctx):
        rows, cols = tk.ceil_div(tk.extent(ctx.globals.C, 0), 128), tk.ceil_div(tk.extent(ctx.globals.C, 1), 256)
        row, col = tk.supergroup(ctx.task_id, rows, cols, 8)
        return tk.task(tk.ceil_div(tk.extent(ctx.globals.A, 1), 64), when=ctx.task_id < rows * cols, row=row, col=col)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (ctx.row, ctx.iter), input.full)
        tk.load_async(input.B, ctx.globals.B, (ctx.iter, ctx.col), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(tk.rt(tk.fp32, 64, 256)))

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(acc=tk.mma_AB(tk.subtile(input.A, 64, 64, ctx.consumer, 0), input.B, state.acc))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.C, state.acc)
        tk.fence_async()
        tk.store_async(ctx.globals.C, epilogue.C, (ctx.row * 2 + ctx.consumer, ctx.col))


def one_stage(p: Product) -> Callable[[], torch.Tensor]:
    template, out = OneStage(), p.out()

    def call() -> torch.Tensor:
        template(p.a, p.b, out)
        return out

    return call


def accepted(p: Product, configs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The first configuration that the GEMM runs, and what it says of those before. Without one, the first: the row
    then shows its error."""
    refused: list[tuple[dict[str, Any], str]] = []
    for config in configs:
        try:
            ours(p, **config)()
            return config, "".join(
                f"{spelled(other)} is refused ({why}); " for other, why in refused
            ) + f"measured with {spelled(config)}"
        except Exception as error:
            require_context()
            refused.append((config, str(error).split("\n")[0]))
    return configs[0], ""


def spelled(config: dict[str, Any]) -> str:
    return f"Config({', '.join(f'{name}={value!r}' for name, value in config.items())})"


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(stages: int) -> Trial:
        p = bf16(SIDE, SIDE, SIDE)
        if stages == 1:
            return trial(
                p,
                {OURS: functools.partial(one_stage, p)},
                note="a template that ends an iteration's products before it loads the next",
            )
        config, note = accepted(p, [{"stages": stages, **tile} for tile in TILES])
        return trial(p, {OURS: functools.partial(ours, p, **config)}, note=note)

    return [
        case(f"bf16 {SIDE}³, stages {stages}", (SIDE, SIDE, SIDE), functools.partial(prepare, stages), stages=stages)
        for stages in STAGES
    ]


SUITES = (Suite("stages", "TFLOP/s against pipeline stages (Table 1)", cases, plot={"x": "stages"}),)
