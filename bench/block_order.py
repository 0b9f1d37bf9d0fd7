"""Table 3 of the paper: the order in which blocks walk over their tasks, tiles of C or of queries, with the bytes of
HBM that each costs."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from bench import attention, gemm
from bench.gemm import bf16, case, ours, trial
from bench.harness import Case, Suite, Trial
from bench.hbm import COLUMN, adding_bytes
from bench.peers import Attention, peers

ORDERS: dict[str, dict[str, Any]] = {
    "row_major": {"order": "row_major"},
    "column_major": {"order": "column_major"},
    "supergroup_4": {"order": "supergroup", "group": 4},
    "supergroup_8": {"order": "supergroup", "group": 8},
    "supergroup_16": {"order": "supergroup", "group": 16},
}
SIZES = (4096, 8192, 16384)
LENGTHS, HEAD_DIM = (4096, 16384), 128
HEAD_BY_HEAD, TILE_BY_TILE, DRAWN = "head by head", "tile by tile", "drawn by the blocks"
# names of `tk` orders, None for that which is chosen; rows are the tiles of queries of a head
ATTENTION_ORDERS: dict[bool, dict[str, str | None]] = {
    False: {HEAD_BY_HEAD: "ColumnMajor", TILE_BY_TILE: "RowMajor"},
    True: {HEAD_BY_HEAD: "ColumnMajor", TILE_BY_TILE: "RowMajor", "longest first": "LongestFirst", DRAWN: None},
}


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(size: int) -> Trial:
        p = bf16(size, size, size)
        return trial(p, {name: functools.partial(ours, p, **config) for name, config in ORDERS.items()})

    return [case(f"bf16 {size}³", (size, size, size), functools.partial(prepare, size), size=size) for size in SIZES]


def attend(p: Attention, order: str | None) -> Callable[[], torch.Tensor]:
    import tritonkittens.lang as tk
    from tritonkittens.kernels import attention as kernels

    config = None if order is None else kernels.Config(order=getattr(tk, order)())
    return functools.partial(
        kernels.attention, p.q, p.k, p.v, causal=p.causal, config=config, out=torch.full_like(p.q, float("nan"))
    )


def attention_cases(options: argparse.Namespace) -> list[Case]:
    def prepare(length: int, causal: bool) -> Trial:
        shape = (max(1, attention.TOKENS // length), attention.WIDTH // HEAD_DIM, length, HEAD_DIM)
        q, k, v = (gemm.randn(*shape) for _ in range(3))
        p = Attention(q, k, v, causal)
        orders = ATTENTION_ORDERS[causal]
        return Trial(
            {name: functools.partial(attend, p, order) for name, order in orders.items()},
            peers("attention", p, False),
            p.error(),
            attention.BOUND,
        )

    return [
        Case(
            f"bf16 {'causal ' * causal}D {HEAD_DIM} S {s}",
            4 * attention.TOKENS * attention.WIDTH * s / (2 if causal else 1),
            {"S": s, "panel": "causal" if causal else "not causal"},
            functools.partial(prepare, s, causal),
        )
        for causal in ATTENTION_ORDERS
        for s in LENGTHS
    ]


SUITES = (
    Suite(
        "block_order",
        "block order: TFLOP/s and bytes of HBM (Table 3)",
        cases,
        plot={"x": "size", "y": ["value", COLUMN]},
        extend=adding_bytes(__name__, "block_order"),
    ),
    Suite(
        "block_order_attention",
        "block order of attention: TFLOP/s and bytes of HBM (Table 3)",
        attention_cases,
        plot={"x": "S", "panel": "panel", "y": ["value", COLUMN]},
        extend=adding_bytes(__name__, "block_order_attention"),
    ),
)
