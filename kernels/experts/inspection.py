"""Kernels of experts for `python -m tritonkittens inspect`."""

from __future__ import annotations

from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.experts.call_plan import run_combine, run_combine_backward, run_gather

TOKENS, CHOICES, EXPERTS, WIDTH = 8192, 8, 128, 2048


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, Y, WEIGHTS = _empty(TOKENS, WIDTH), _empty(TOKENS * CHOICES, WIDTH), _empty(TOKENS, CHOICES, dtype=torch.float32)
NUMBERS, ENDS, PLACES = (
    _empty(*shape, dtype=torch.int32) for shape in ((TOKENS * CHOICES,), (EXPERTS,), (TOKENS, CHOICES))
)


def _gather() -> Any:
    return run_gather(X, NUMBERS, ENDS, PLACES)


def _combine() -> Any:
    return run_combine(Y, WEIGHTS, PLACES)


def _combine_backward() -> Any:
    return run_combine_backward(X, Y, WEIGHTS, NUMBERS, ENDS)


inspectable: dict[str, Inspectable] = (
    launches_of(_gather, "gather_tokens")
    | launches_of(_combine, "combine_tokens")
    | launches_of(_combine_backward, "combine_tokens_backward")
)
