"""Kernels of the gated delta rule for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.gated_delta_net.backward_plan import run_backward
from tritonkittens.kernels.gated_delta_net.call_plan import run
from tritonkittens.kernels.gated_delta_net.checks import Operands


def _run(heads: int, backward: bool = False) -> Any:
    q = torch.empty(1, 16384, heads, 128, dtype=torch.bfloat16, device="meta")
    g = torch.empty(1, 16384, heads, dtype=torch.float32, device="meta")
    given = Operands(q, q, q, g, g)
    if backward:
        return run_backward(given, q, None, 1.0)
    return run(given, 1.0, True)


BACKWARD = tuple(f"gated_delta_{name}" for name in ("states", "state_gradients", "gradients", "gates"))


inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 256), None, "gated_delta_inverse", "gated_delta_rule"),
    **launches_of(functools.partial(_run, 16), None, None, "gated_delta_rule_few_heads"),
    **launches_of(functools.partial(_run, 16, True), None, None, *BACKWARD),
}
