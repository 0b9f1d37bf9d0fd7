"""Kernels of softmax and losses for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.loss.call_plan import (
    Options,
    run_cross_entropy,
    run_cross_entropy_backward,
    run_softmax_backward,
)
from tritonkittens.kernels.loss.interface import softmax
from tritonkittens.kernels.loss.linear import run_scale

ROWS, SOFTMAX, CLASSES = 8192, (128, 4096, 16384, 131072), (4096, 128256)
PLAIN = Options(-100, "mean", 0.0, 0.0, None, False)
ALL = Options(-100, "mean", 0.1, 1e-4, 30.0, True)
OPTIONS = {"": PLAIN, "_capped": ALL}


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _softmax(width: int) -> Any:
    return softmax(_empty(ROWS, width))


def _softmax_backward(width: int) -> Any:
    return run_softmax_backward(_empty(ROWS, width), _empty(ROWS, width), torch.bfloat16)


def _cross_entropy(classes: int, options: Options) -> Any:
    return run_cross_entropy(_empty(ROWS, classes), _empty(ROWS, dtype=torch.int64), options)


def _cross_entropy_backward(classes: int, options: Options) -> Any:
    row, one = _empty(ROWS, dtype=torch.float32), _empty(dtype=torch.float32)
    dlse = row if options.lse_wanted else None
    target = _empty(ROWS, dtype=torch.int64)
    return run_cross_entropy_backward(one, dlse, _empty(ROWS, classes), target, row, one, options)


def _scale() -> Any:
    return run_scale(_empty(ROWS, 4096), _empty(dtype=torch.float32))


inspectable: dict[str, Inspectable] = launches_of(_scale, "loss_scale")
for width in SOFTMAX:
    inspectable |= launches_of(functools.partial(_softmax, width), f"softmax_{width}")
    inspectable |= launches_of(functools.partial(_softmax_backward, width), f"softmax_{width}_backward")
for classes in CLASSES:
    for kind, options in OPTIONS.items():
        name = f"cross_entropy_{classes}{kind}"
        sums = "cross_entropy_sum" if (classes, kind) == (CLASSES[0], "") else None
        inspectable |= launches_of(functools.partial(_cross_entropy, classes, options), name, sums)
        inspectable |= launches_of(functools.partial(_cross_entropy_backward, classes, options), f"{name}_backward")
