"""Kernels of gated activations for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.activation.call_plan import Options, run_backward, run_forward
from tritonkittens.kernels.activation.config import KINDS

ROWS, WIDTH = 16384, 14336
LAYOUTS = ("", "_interleaved")  # one tensor of both in halves has the kernel of two


def _empty(width: int) -> torch.Tensor:
    return torch.empty(ROWS, width, dtype=torch.bfloat16, device="meta")


def _run(kind: str, layout: str, backward: bool) -> Any:
    options = Options(kind, layout == "_interleaved")
    a, b = (_empty(2 * WIDTH), None) if layout else (_empty(WIDTH), _empty(WIDTH))
    return run_backward(_empty(WIDTH), a, b, options) if backward else run_forward(a, b, options)


inspectable: dict[str, Inspectable] = {
    name: kernel
    for kind in KINDS
    for layout in LAYOUTS
    for backward in (False, True)
    for name, kernel in launches_of(
        functools.partial(_run, kind, layout, backward), f"gated_{kind}{layout}{'_backward' if backward else ''}"
    ).items()
}
