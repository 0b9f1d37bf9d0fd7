"""Kernels of the scan of Mamba-2 for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.mamba2.backward_plan import run_backward
from tritonkittens.kernels.mamba2.call_plan import run
from tritonkittens.kernels.mamba2.checks import Operands


def _run(heads: int, gated: bool, backward: bool = False, states: int = 128) -> Any:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, of_heads = empty(1, 16384, heads, 64), empty(heads, dtype=torch.float32)
    B, dt = empty(1, 16384, 1, states), empty(1, 16384, heads, dtype=torch.float32)
    D, z = (of_heads, x) if gated else (None, None)
    given = Operands(x, dt, of_heads, B, B, D, z, of_heads, None, None)
    if backward:
        return run_backward(given, True, (0.0, 1.0), x, None)
    return run(given, True, (0.0, 1.0), True)


# with 256 heads sequences stay whole, with 32 they are cut
inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 32, True), "mamba_steps", "mamba_states", None, "mamba_scan_gated"),
    **launches_of(functools.partial(_run, 256, False), None, "mamba_scan"),
    **launches_of(
        functools.partial(_run, 32, True, states=256), None, "mamba_states_256", None, "mamba_scan_gated_256"
    ),
    **launches_of(functools.partial(_run, 256, False, states=256), None, "mamba_scan_256"),
    **launches_of(
        functools.partial(_run, 256, False, True), None, "mamba_chunks", None, "mamba_gradients", "mamba_step_gradients"
    ),
}
