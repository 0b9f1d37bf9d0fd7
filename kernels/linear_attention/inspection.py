"""Kernels of linear attention for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.linear_attention.backward_plan import run_backward
from tritonkittens.kernels.linear_attention.call_plan import run
from tritonkittens.kernels.linear_attention.checks import Operands


def _run(heads: int, dim: int, decayed: bool, reverse: bool = False) -> Any:
    x = torch.empty(1, 16384, heads, dim, dtype=torch.bfloat16, device="meta")
    decay = torch.empty(heads, dtype=torch.float32, device="meta") if decayed else None
    return run(Operands(x, x, x, decay), 1.0, True, reverse)


def _run_packed(heads: int, dim: int) -> Any:
    x = torch.empty(1, 16384, heads, dim, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(17, dtype=torch.int32, device="meta")
    return run(Operands(x, x, x, cu_seqlens=starts), 1.0, True, False)


def _run_backward(heads: int, dim: int) -> Any:
    x = torch.empty(1, 16384, heads, dim, dtype=torch.bfloat16, device="meta")
    g = torch.empty(1, 16384, heads, dtype=torch.float32, device="meta")
    return run_backward(Operands(x, x, x, g=g), x, None, 1.0)


# with 256 heads sequences stay whole, with 16 they are cut
CUT = ("linear_attention_sums", *(f"linear_attention_{name}" for name in ("states", "carry", "128")))
inspectable: dict[str, Inspectable] = {
    **launches_of(functools.partial(_run, 16, 128, True), *CUT),
    **launches_of(functools.partial(_run, 256, 128, False), "linear_attention_128_without_decay"),
    **launches_of(functools.partial(_run, 256, 128, True, True), None, "linear_attention_128_reverse"),
    **launches_of(functools.partial(_run, 512, 64, True), None, "linear_attention_64"),
    **launches_of(functools.partial(_run, 256, 256, True), None, "linear_attention_256"),
    **launches_of(functools.partial(_run_packed, 256, 128), "zero_rows_behind", None),
    **launches_of(
        functools.partial(_run_backward, 256, 128),
        None,
        "linear_attention_chunks",
        None,
        "linear_attention_gradients_128",
        "linear_attention_gates",
    ),  # fmt: skip
}
