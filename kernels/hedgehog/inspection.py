"""Kernels of Hedgehog for `python -m tritonkittens inspect`."""

from __future__ import annotations

from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.hedgehog.call_plan import run
from tritonkittens.kernels.hedgehog.checks import Operands


def _run() -> Any:
    x = torch.empty(16, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    map_ = torch.empty(16, 128, 64, dtype=torch.bfloat16, device="meta")
    factor = torch.empty(16, dtype=torch.float32, device="meta")
    return run(Operands(x, x, x, map_, map_, factor, factor, None, None, None), True)


inspectable: dict[str, Inspectable] = launches_of(_run, "hedgehog_attention")
