"""The kernel of a few rows for `python -m tritonkittens inspect`: a step of each recurrence, and several rows."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.recurrent_step.call_plan import Rule, Step, run_steps

BATCH, HEADS = 16, 32


def _run(rule: Rule, rows: int, values: int, shared: bool, *given: str) -> Any:
    """Of these operands besides q, k and v. shared: heads share q and k."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    k = empty(BATCH, rows, 1 if shared else HEADS, 128, dtype=torch.bfloat16)
    v = empty(BATCH, rows, HEADS, values, dtype=torch.bfloat16)
    of_row, of_head, state = empty(BATCH, rows, HEADS), empty(HEADS), empty(BATCH, HEADS, values, 128)
    kinds = dict(gates=of_row, beta=of_row, decay=of_head, bias=of_head, skip=of_head, z=v)
    return run_steps(Step(k, k, v, **{name: kinds[name] for name in given}, state=state), rule, True, lambda: None)


MAMBA = functools.partial(_run, Rule(weights=True, softplus=True), 1, 64, True, "gates", "decay", "bias", "skip", "z")
LAYER = functools.partial(
    _run, Rule(1.0, -1.0, softplus=True, log_decay=True, logits=True, unit=True), 1, 128, False, "gates", "beta",
    "decay", "bias",
)  # fmt: skip
inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, Rule(sign=-1.0), 1, 128, False, "decay"), "linear_attention_step"),
    **launches_of(functools.partial(_run, Rule(), 1, 128, False, "gates", "beta"), "gated_delta_step"),
    **launches_of(functools.partial(_run, Rule(), 4, 128, False, "gates", "beta"), "gated_delta_steps"),
    **launches_of(LAYER, "gated_delta_layer_step"),
    **launches_of(MAMBA, "mamba_step"),
}
