"""Random GEMMs: the suites `gemm_random` and `gemm_fp8_random`, which measure the choices that nobody tuned.

`--seed` and `--count` name the shapes, so that every seed is a fresh set.
"""

from __future__ import annotations

import argparse
import functools
import random
from typing import NamedTuple

from bench.gemm import LAYOUTS, SCALINGS, bf16_trial, case, fp8_trial
from bench.harness import Case, Suite, log_uniform
from bench.peers import SCALE_BLOCK

COUNT, FP8_COUNT = 60, 30
M, N, K = (8, 16384), (128, 32768), (128, 24576)  # extents, drawn log-uniformly
MULTIPLE, MULTIPLES = 64, 0.8  # this share of the shapes has N and K, and M of a transposed A, of such multiples


class Shape(NamedTuple):
    """C (M × N) = A (M × K) · B (K × N) and the layout of A and B: T is stored transposed."""

    m: int
    n: int
    k: int
    layout: str

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.layout}"

    @staticmethod
    def of(text: str) -> Shape:
        """The shape that `str` writes as `text`."""
        extents, layout = text.split()
        m, n, k = map(int, extents.split("x"))
        return Shape(m, n, k, layout)


def shapes(seed: int, count: int) -> list[Shape]:
    """Return `count` random shapes. Most have N and K that are multiples of 64, as weights have; M is any number of
    tokens, and a multiple of 64 where A is stored transposed. The others have any extents."""
    draw = random.Random(seed)

    def extent(low: int, high: int, multiple: int) -> int:
        return max(multiple, round(log_uniform(draw, low, high) / multiple) * multiple)

    found = []
    for _ in range(count):
        layout, multiple = draw.choice(LAYOUTS), MULTIPLE if draw.random() < MULTIPLES else 1
        m = extent(*M, multiple if layout[0] == "T" else 1)
        found.append(Shape(m, extent(*N, multiple), extent(*K, multiple), layout))
    return found


def has_aligned_rows(shape: Shape) -> bool:
    """Whether rows of A, B and C start at multiples of 16 bytes in bf16, so that TMA can address all of them."""
    a, b = (shape.m if shape.layout[0] == "T" else shape.k), (shape.k if shape.layout[1] == "T" else shape.n)
    return a % 8 == 0 and b % 8 == 0 and shape.n % 8 == 0


def drawn(options: argparse.Namespace, count: int) -> list[Shape]:
    """Return the shapes that `--seed` and `--count` name."""
    return shapes(options.seed or 0, options.count or count)


def random_cases(options: argparse.Namespace) -> list[Case]:
    return [
        case(
            f"bf16 {shape}",
            shape[:3],
            functools.partial(bf16_trial, options, shape[:3], shape.layout),
            layout=shape.layout,
            tma="TMA" if has_aligned_rows(shape) else "copies",
        )
        for shape in drawn(options, COUNT)
    ]


def fp8_random_cases(options: argparse.Namespace) -> list[Case]:
    """As `torch._scaled_mm` takes them: N and K are multiples of 16; with block scales K is one of 128."""
    found = []
    for index, shape in enumerate(drawn(options, FP8_COUNT)):
        scaling = SCALINGS[index % len(SCALINGS)]
        multiple = SCALE_BLOCK if scaling == "block" else 16
        m, n, k = shape.m, max(16, shape.n // 16 * 16), max(multiple, shape.k // multiple * multiple)
        if scaling == "block":
            n = max(SCALE_BLOCK, n // SCALE_BLOCK * SCALE_BLOCK)
        prepare = functools.partial(fp8_trial, options, (m, n, k), scaling)
        found.append(case(f"e4m3 {m}x{n}x{k} scale per {scaling}", (m, n, k), prepare, scaling=scaling))
    return found


SUITES = (
    Suite(
        "gemm_random",
        "bf16 GEMM at random shapes",
        random_cases,
        plot={"x": "M", "y": "ratio", "panel": "tma", "series": "layout"},
    ),
    Suite(
        "gemm_fp8_random",
        "e4m3 GEMM at random shapes",
        fp8_random_cases,
        plot={"x": "M", "y": "ratio", "panel": "scaling"},
    ),
)
