"""The figures of the documentation, drawn by the library: `python docs/figures.py` writes docs/figures/*.svg. No GPU
needed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tritonkittens import sim
from tritonkittens.kernels.gemm import gemm
from tritonkittens.lang.types import swizzle
from tritonkittens.sim.layouts import bases, evaluate

FOLDER = Path(__file__).parent / "figures"
CELL, GAP, HEAD, LEFT = 30, 40, 44, 52  # pixels
LAYOUT_CELL = 22
CORNER = 16  # rows and columns of a register tile that are drawn


def _colour(number: int, of: int) -> str:
    return f"hsl({360 * number // of} 70% {82 if number % 2 else 74}%)"


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y + 0.35 * size:g}" font-size="{size}" text-anchor="{anchor}" fill="#222222">{text}</text>'  # noqa: E501


def _grid(x: float, title: str, labels: np.ndarray, of: int, cell: int) -> list[str]:
    """A titled grid of numbered cells, equal numbers in equal colours."""
    out = [_text(x, 14, title, 13, "start"), '<g font-size="11" text-anchor="middle">']
    for (row, column), label in np.ndenumerate(labels):
        left, top = x + column * cell, HEAD + row * cell
        out.append(
            f'<rect x="{left:g}" y="{top}" width="{cell - 1}" height="{cell - 1}" fill="{_colour(int(label), of)}"/>'
        )
        out.append(f'<text x="{left + cell / 2:g}" y="{top + cell / 2 + 4:g}">{label}</text>')
    return [*out, "</g>"]


def _svg(width: float, height: float, shapes: list[str]) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif">'  # noqa: E501
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>', *shapes, "</svg>\n"])


def swizzles() -> str:
    """Which four banks hold each 16-byte chunk of the first 8 rows of a bf16 tile with 64 columns, without a swizzle
    and with each of the three."""
    chunks = swizzle.LINE // swizzle.CHUNK
    plain = np.tile(np.arange(chunks), (8, 1))
    shapes = [_text(LEFT - 8, HEAD + (row + 0.5) * CELL, f"row {row}", 12, "end") for row in range(8)]
    for i, span in enumerate((0, 32, 64, 128)):
        banks = np.array(swizzle.picture_rows(64, swizzle.LINE, span)) // 4 if span else plain
        shapes += _grid(
            LEFT + i * (chunks * CELL + GAP), f"swizzle {span} bytes" if span else "no swizzle", banks, chunks, CELL
        )
    return _svg(LEFT + 4 * (chunks * CELL + GAP), HEAD + 8 * CELL + 12, shapes)


@tk.kernel
@triton.jit
def _fill(X, TILE: tl.constexpr):
    tk.store(X, tk.zero(TILE), (0, 0))


def lanes(layout: str, rows: int = 64, cols: int = 64) -> np.ndarray:
    """The lane of its warp that holds each element of a register tile, fp32, on Hopper."""
    ttgir = _fill.compile(
        tk.gl(torch.empty(rows, cols, device="meta")), tk.rt(tk.fp32, rows, cols, layout), arch="sm_90a"
    ).asm["ttgir"]
    (alias,) = set(re.findall(rf"tensor<{rows}x{cols}xf32, #(\w+)>", ttgir))
    (text,) = re.findall(rf"^#{alias} = (.*)$", ttgir, re.MULTILINE)
    found = bases(text, "tensor", (rows, cols)).inputs
    places = evaluate([*found["register"], *found["lane"], *found["warp"]], 2)
    out = np.empty((rows, cols), int)
    out[tuple(places.T)] = np.arange(len(places)) >> len(found["register"]) & 31
    return out


def register_layouts() -> str:
    """Which lane holds each element of the upper left corner of rt(fp32, 64, 64) in each layout."""
    shapes: list[str] = []
    for i, layout in enumerate(("mma", "memory", "row")):
        shapes += _grid(
            12 + i * (CORNER * LAYOUT_CELL + GAP),
            f'layout="{layout}": lane of each element',
            lanes(layout)[:CORNER, :CORNER],
            32,
            LAYOUT_CELL,
        )
    return _svg(3 * (CORNER * LAYOUT_CELL + GAP), HEAD + CORNER * LAYOUT_CELL + 12, shapes)


def pipeline() -> str:
    """The timeline of a GEMM with K = 512 in one cluster."""
    timeline = sim.Timeline(clusters=1)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((128, 512), (512, 128)))
    with sim.device("sm_90a", recorder=timeline, multiprocessors=1):
        gemm(a, b)
    path = FOLDER / "pipeline.svg"
    timeline.draw(path, title="GEMM 128×128×512", width=1300)
    drawn = path.read_text()
    return re.sub(r"<title>.*?</title>", "", drawn, flags=re.DOTALL)  # without the tooltips a third as large


FIGURES = {"swizzles": swizzles, "register_layouts": register_layouts, "pipeline": pipeline}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
