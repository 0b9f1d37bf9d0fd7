"""Kernels of the gated delta rule for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.gated_delta_net.call_plan import run


def _run(heads: int) -> Any:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, v, g = empty(1, 16384, heads, 128), empty(1, 16384, heads, 128), empty(1, 16384, heads, dtype=torch.float32)
    return run(q, q, v, g, g, None, None, 1.0, True)


inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 256), None, "gated_delta_inverse", "gated_delta_rule"),
    **launches_of(functools.partial(_run, 16), None, None, "gated_delta_rule_few_heads"),
}
