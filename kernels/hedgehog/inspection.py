"""Kernels of Hedgehog for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.hedgehog.backward_plan import GivenGradients, run_backward
from tritonkittens.kernels.hedgehog.call_plan import run
from tritonkittens.kernels.hedgehog.checks import Operands


def _operands(state: bool, batch: int = 16) -> Operands:
    x = torch.empty(batch, 65536 // batch, 16, 128, dtype=torch.bfloat16, device="meta")
    map_ = torch.empty(16, 128, 64, dtype=torch.bfloat16, device="meta")
    factor = torch.empty(16, dtype=torch.float32, device="meta")
    kv, z = (torch.empty(batch, 16, *n, dtype=torch.float32, device="meta") for n in ((128, 128), (128,)))
    given = Operands(x, x, x, map_, map_, factor, factor)
    return given._replace(kv=kv, z=z) if state else given


def _run(batch: int) -> Any:
    return run(_operands(False, batch), True)


def _gradient() -> Any:
    given = _operands(True)
    o, _, totals = run(given, False, True)
    assert totals is not None
    return run_backward(given, GivenGradients(o, totals, o, given.kv, given.z))


inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 16), "hedgehog_attention"),
    **launches_of(functools.partial(_run, 1), "hedgehog_states", None, None, "hedgehog_attention_cut"),
    **launches_of(
        _gradient,
        "hedgehog_attention_totals",
        "hedgehog_rows",
        "hedgehog_feature_gradients",
        "hedgehog_feature_gradients_reverse",
        "hedgehog_window_gradients",
        "hedgehog_window_gradients_reverse",
    ),
}
