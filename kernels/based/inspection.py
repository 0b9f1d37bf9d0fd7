"""Kernels of Based for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.based.call_plan import run, run_gradient
from tritonkittens.kernels.based.checks import Operands


def _run(heads: int, values: int, normalized: bool = False) -> Any:
    q, v = (torch.empty(1, 16384, heads, n, dtype=torch.bfloat16, device="meta") for n in (16, values))
    return run(Operands(q, q, v), 0.25, normalized, True)


def _gradient(heads: int, reverse: bool) -> Any:
    q, v = (torch.empty(1, 16384, heads, n, dtype=torch.bfloat16, device="meta") for n in (16, 64))
    return run_gradient(Operands(q, q, v), v, 0.25, reverse)


# with 512 heads sequences stay whole, with 16 they are cut
inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 512, 64), "based_attention"),
    **launches_of(functools.partial(_run, 256, 128), "based_attention_128"),
    **launches_of(functools.partial(_run, 512, 64, True), "based_attention_normalized"),
    **launches_of(functools.partial(_run, 16, 64), "based_states", "based_carry", "based_attention_cut"),
    **launches_of(functools.partial(_gradient, 512, False), "based_gradient"),
    **launches_of(functools.partial(_gradient, 512, True), "based_gradient_reverse"),
}
