"""The kernel of causal convolutions for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.causal_conv.checks import Operands
from tritonkittens.kernels.causal_conv.operators import run, run_backward


def _run(backward: bool = False) -> Any:
    x, weight = (torch.empty(*n, dtype=torch.bfloat16, device="meta") for n in ((1, 16384, 4352), (4352, 4)))
    given = Operands(x.mT, weight, weight[:, 0])
    return run_backward(x.mT, given, True) if backward else run(given, True)


inspectable: dict[str, Inspectable] = {
    **launches_of(_run, "causal_conv"),
    **launches_of(functools.partial(_run, True), "causal_conv_gradients"),
}
