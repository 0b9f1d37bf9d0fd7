"""Norms by tiles that their configuration could choose: warps of a CTA, CTAs of a cluster and rows of a tile.

The shapes have as many elements, so that rows of the table compare. `ours` has the tiles of
`tritonkittens.kernels.norm.config`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from bench.gemm import OURS, randn
from bench.harness import Case, Suite, Trial
from bench.norm import BOUND, EPS, error, moved, operands
from bench.quantize import beside_copy, copies, in_turn
from tritonkittens.arch import chip_of
from tritonkittens.kernels._tensors import power_of_two
from tritonkittens.kernels.norm import call_plan
from tritonkittens.kernels.norm.config import Tiles, backward_tiles, forward_tiles, row_tiles
from tritonkittens.launch import device_facts

ELEMENTS = 1 << 26
KINDS = ("rms", "layer")
# (warps, CTAs, rows) by columns; 0 warps: one part of a power of two, 4 warps
FORWARD = {
    512: ((1, 1, 2),),
    768: ((0, 1, 4), (1, 1, 1), (2, 1, 2)),
    1024: ((0, 1, 4), (2, 1, 2)),
    1536: ((0, 1, 2), (2, 1, 1), (4, 1, 2)),
    2048: ((0, 1, 2), (4, 1, 2)),
    2560: ((4, 1, 1), (4, 1, 2)),
    3072: ((4, 1, 1),),
    6144: ((8, 1, 1),),
    12288: ((16, 1, 1), (8, 2, 1)),
    16384: ((8, 2, 1),),
    32768: ((16, 2, 1), (8, 4, 1)),
    65536: ((32, 2, 1), (8, 8, 1)),
}
BACKWARD = {
    1024: ((2, 1, 2),),
    1536: ((4, 1, 2), (2, 1, 1)),
    2560: ((4, 1, 1), (2, 1, 1)),
    3072: ((4, 1, 1), (2, 1, 1)),
    4096: ((8, 1, 2),),
    6144: ((8, 1, 1), (8, 1, 2), (4, 2, 1)),
    8192: ((4, 2, 1), (16, 1, 1)),
    12288: ((16, 1, 1), (8, 2, 1), (4, 2, 1), (4, 4, 1)),
    16384: ((8, 1, 1), (8, 2, 1), (4, 4, 1)),
    32768: ((16, 2, 1), (4, 8, 1)),
    65536: ((16, 4, 1),),
}


def tiles_of(width: int, warps: int, ctas: int, rows: int) -> Tiles:
    if warps == 0:
        return Tiles(rows, power_of_two(width), 1, 1, 4)
    return row_tiles(width, warps, ctas, rows)


def named(tiles: Tiles) -> str:
    cluster = f"{tiles.ctas} CTAs of " if tiles.ctas > 1 else ""
    return f"{cluster}{tiles.warps} warps, {tiles.rows} x {tiles.parts} x {tiles.cols}"


def planned(kind: str, given: Sequence[Any], grads: Sequence[torch.Tensor], tiles: Tiles) -> Callable[[], Any]:
    """A call of the forward, or with `grads` of the backward, on copies of its operands in turn."""
    x, w, b, _ = given
    rows, width = x.shape
    options = call_plan.Options(EPS, 0.0, kind == "rms", False, False, None)
    operated = call_plan.Operands(x, w, b, *(None,) * 6)
    turns = [x.clone() for _ in range(copies(moved(kind, rows, width, bool(grads))))]
    if not grads:
        forward = call_plan.Forward(operated, options, tiles)
        return in_turn(lambda i: forward(operated._replace(x=turns[i]))[0], len(turns))
    mean, rstd = call_plan.run_forward(operated, options)[3:]
    saved = call_plan.Gradients(grads[0], None, None, x, w, None, None, None, mean, rstd)
    names = "weight" if b is None else "weight bias"
    wanted = call_plan.Wanted(x.dtype, None, w.dtype, False, names, 0.0, kind == "rms", False)
    backward = call_plan.Backward(saved, wanted, tiles)

    def run(i: int) -> list[Any]:
        dx, _, _, dparams = backward(saved._replace(z=turns[i]))
        return [dx, *cast(torch.Tensor, dparams)]

    return in_turn(run, len(turns))


def prepare(kind: str, rows: int, width: int, both_ways: bool) -> Trial:
    given: list[Any] = [*operands(kind, rows, width)]
    grads = [randn(rows, width)] if both_ways else []
    chip, size = chip_of(device_facts(given[0].device).capability), moved(kind, rows, width, both_ways)
    chosen = backward_tiles(width, 1 + (kind == "layer"), chip) if both_ways else forward_tiles(width, chip)
    others = [tiles_of(width, *parts) for parts in (BACKWARD if both_ways else FORWARD).get(width, ())]
    ours = {f"{OURS} {named(chosen)}": chosen, **{named(tiles): tiles for tiles in others}}
    return Trial(
        {name: functools.partial(planned, kind, given, grads, tiles) for name, tiles in ours.items()},
        {},
        error(kind, given, grads),
        BOUND,
        baselines=beside_copy(size),
    )


def cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(
            f"{kind} {'backward ' * both_ways}{ELEMENTS // width}x{width}",
            moved(kind, ELEMENTS // width, width, both_ways),
            {"kind": kind, "rows": ELEMENTS // width, "width": width, "backward": both_ways},
            functools.partial(prepare, kind, ELEMENTS // width, width, both_ways),
            kind="graph",
        )
        for both_ways, widths in ((False, FORWARD), (True, BACKWARD))
        for kind in KINDS
        for width in widths
    ]


SUITES = (Suite("norm_tiles", "norms by tiles, beside a copy of as many bytes", cases, unit="TB/s"),)
