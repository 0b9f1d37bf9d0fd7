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


TASKS, ITERATIONS, SMS = 5, 8, 4  # of the figure of schedules
SCHEDULES = (tk.Persistent(), tk.SplitK(2), tk.ClusterSplitK(2), tk.SplitTail(), tk.StreamK())


class _Walk(tk.lcf):
    """Writes down the task of each iteration that a CTA computes, in its order: `done` (CTAs), `log` (CTAs, most)."""

    consumers: int = 1

    def layout(self) -> tk.layout:
        tile, sums = tk.st(tk.fp32, 16, 16), tk.rt(tk.fp32, 64, 64)
        tensors = {"X": tile, "log": None, "done": None}
        return tk.layout(globals=tensors, input={"X": tile}, accumulators={"sums": sums}, args=("tasks", "iterations"))

    def tasks(self, X: tuple[int, ...], log: tuple[int, ...], done: tuple[int, ...]) -> int:
        return TASKS

    @triton.jit
    def setup(ctx):
        return tk.task(ctx.args.iterations, when=ctx.task_id < ctx.args.tasks)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.X, ctx.globals.X, (0, 0), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(sums=tk.zero(tk.rt(tk.fp32, 64, 64)))

    @triton.jit
    def compute(ctx, state, input):
        cta = tk.block_index()
        order = tl.atomic_add(ctx.globals.done.pointer + cta, 1)
        tl.store(ctx.globals.log.pointer + cta * ctx.args.tasks * ctx.args.iterations + order, ctx.task_id)
        return state

    @triton.jit
    def finish(ctx, state, epilogue):
        pass


def walked(schedule: tk.Schedule) -> list[list[int]]:
    """The task of every iteration of each CTA, in the order of the CTA."""
    log, done = torch.zeros(SMS, TASKS * ITERATIONS, dtype=torch.int32), torch.zeros(SMS, dtype=torch.int32)
    with sim.device("sm_90a", multiprocessors=SMS):
        _Walk(schedule=schedule)(torch.zeros(16, 16), log, done, tasks=TASKS, iterations=ITERATIONS)
    return [row[:n].tolist() for row, n in zip(log, done.tolist(), strict=True)]


def schedules() -> str:
    """Which CTA computes which iterations of five tasks on four SMs."""
    cell, height, gap = 13, 22, 34
    width, most = 2 * ITERATIONS * cell, 3
    shapes: list[str] = []
    for i, schedule in enumerate(SCHEDULES):
        x, y = LEFT + i % most * (width + LEFT + gap), i // most * (HEAD + SMS * height + 8)
        ctas = walked(schedule)
        shapes.append(_text(x, y + 14, f"{schedule!r}: {max(map(len, ctas))} iterations", 13, "start"))
        for cta, tasks in enumerate(ctas):
            top = y + 30 + cta * height
            shapes.append(_text(x - 6, top + height / 2, f"CTA {cta}", 11, "end"))
            for j, task in enumerate(tasks):
                place = f'x="{x + j * cell}" y="{top}" width="{cell - 1}" height="{height - 2}"'
                shapes.append(f'<rect {place} fill="{_colour(task, TASKS)}"/>')
                if j == 0 or tasks[j - 1] != task:
                    shapes.append(_text(x + (j + 0.5) * cell, top + height / 2 - 1, str(task), 11))
    return _svg(most * (width + LEFT + gap), 2 * (HEAD + SMS * height + 8), shapes)


FIGURES = {"schedules": schedules, "swizzles": swizzles, "register_layouts": register_layouts, "pipeline": pipeline}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
