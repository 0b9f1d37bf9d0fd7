"""Quantisers to MXFP8 and NVFP4 beside a copy of as many bytes: rows, columns and both, with a cold L2.

Calls are in a CUDA graph. They take turns over copies of the operands, and keep their results, so that none of both is
in L2 when it is used again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from bench.gemm import OURS, randn
from bench.harness import Case, Contender, Suite, Trial
from bench.timing import GRAPH_CALLS
from tritonkittens.launch import l2_bytes

SHAPES = ((4096, 4096), (8192, 4096), (8192, 8192), (16384, 8192), (4096, 14336))
AXES = ("rows", "cols", "both")
KINDS = ("mxfp8", "nvfp4", "nvfp4 hadamard", "nvfp4 stochastic", "nvfp4 tensor scale")
TIMES_L2 = 3  # bytes of all operands and results, at least


def moved(kind: str, rows: int, cols: int, axes: str) -> float:
    """Bytes that a call reads and writes."""
    if kind == "nvfp4 tensor scale":
        return 2.0 * rows * cols
    written = 33 / 32 if kind == "mxfp8" else 9 / 16
    return rows * cols * (2 + (kind == "nvfp4 stochastic") + written * (1 + (axes == "both")))


def in_turn(call: Callable[[int], Any], count: int) -> Callable[[], Any]:
    """`call` of 0, 1, …, count - 1, 0, …; the results of the last `count` calls are kept."""
    numbers, kept = itertools.cycle(range(count)), [None] * count

    def run() -> Any:
        i = next(numbers)
        kept[i] = call(i)
        return kept[i]

    return run


def copies(bytes_moved: float) -> int:
    """How many copies of the operands a graph of calls takes turns over."""
    fits = (
        n for n in range(1, GRAPH_CALLS + 1) if GRAPH_CALLS % n == 0 and n * bytes_moved >= TIMES_L2 * l2_bytes(None)
    )
    return next(fits, GRAPH_CALLS)


def beside(kind: str, axes: str, x: torch.Tensor) -> dict[str, Any]:
    """Arguments of the quantiser beside `x`."""
    from tritonkittens.kernels.quantize import nvfp4_tensor_scale

    if kind == "nvfp4 tensor scale":
        return {}
    given: dict[str, Any] = {"axes": axes}
    if kind == "nvfp4 hadamard":
        given["hadamard"] = torch.randint(0, 2, (16,), device=x.device).to(torch.bfloat16) * 2 - 1
    if kind == "nvfp4 stochastic":
        words = (*x.shape[:-1], x.shape[-1] // 4)
        given["random_bits"] = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=x.device)
    if kind != "mxfp8":
        given["tensor_scale"] = nvfp4_tensor_scale(x, axes=axes, hadamard=given.get("hadamard"))
    return given


def ours(kind: str, given: dict[str, Any], x: torch.Tensor, bytes_moved: float) -> Callable[[], Any]:
    from tritonkittens.kernels import quantize

    function: Callable[..., Any] = quantize.quantize_nvfp4
    if not given:
        function = quantize.nvfp4_tensor_scale
    elif kind == "mxfp8":
        function = quantize.quantize_mxfp8
    operands = [x.clone() for _ in range(copies(bytes_moved))]
    return in_turn(lambda i: function(operands[i], **given), len(operands))


def copy_of(bytes_moved: float) -> Callable[[], Any]:
    """A copy that reads half of the bytes and writes the other half."""
    count = copies(bytes_moved)
    pairs = [
        torch.randint(256, (2, int(bytes_moved) // 32 * 16), dtype=torch.uint8, device="cuda") for _ in range(count)
    ]
    return in_turn(lambda i: pairs[i][1].copy_(pairs[i][0]), count)


def beside_copy(bytes_moved: float) -> dict[str, Contender]:
    """A copy as a baseline."""
    return {"copy of as many bytes": Contender(functools.partial(copy_of, bytes_moved), lambda found: 0.0)}


def parts(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [x for part in found for x in parts(part)]


def share_wrong(kind: str, given: dict[str, Any], x: torch.Tensor) -> Callable[[Any], float]:
    """A function: the share of bytes of a result that the reference has otherwise."""
    from tritonkittens.kernels import quantize

    reference: Callable[..., Any] = quantize.quantize_nvfp4_torch
    if not given:
        reference = quantize.nvfp4_tensor_scale_torch
    elif kind == "mxfp8":
        reference = quantize.quantize_mxfp8_torch

    def error(found: Any) -> float:
        wrong = total = 0
        for a, b in zip(parts(found), parts(reference(x, **given)), strict=True):
            if a.dtype != torch.float32:
                a, b = a.view(torch.uint8), b.view(torch.uint8)
            wrong, total = wrong + int((a != b).sum()), total + a.numel()
        return wrong / total

    return error


def cases(options: argparse.Namespace) -> list[Case]:
    def prepare(kind: str, axes: str, rows: int, cols: int) -> Trial:
        x, size = randn(rows, cols), moved(kind, rows, cols, axes)
        given = beside(kind, axes, x)
        return Trial(
            {OURS: functools.partial(ours, kind, given, x, size)},
            {},
            share_wrong(kind, given, x),
            0.0,
            baselines=beside_copy(size),
        )

    return [
        Case(
            f"{kind} {axes} {rows}x{cols}",
            moved(kind, rows, cols, axes),
            {"kind": kind, "axes": axes, "rows": rows, "cols": cols},
            functools.partial(prepare, kind, axes, rows, cols),
            kind="graph",
        )
        for kind in KINDS
        for axes in (AXES if kind != "nvfp4 tensor scale" else ("rows",))
        for rows, cols in SHAPES
    ]


SUITES = (Suite("quantize", "quantisers beside a copy of as many bytes", cases, unit="TB/s"),)
