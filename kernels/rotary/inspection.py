"""Kernels of rotary embeddings for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.rotary.call_plan import Operands, Options, run_norm_backward
from tritonkittens.kernels.rotary.interface import rotary

TOKENS, Q_HEADS, K_HEADS, DIMS = 16384, 32, 8, (64, 128)
BF16 = torch.bfloat16


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _heads(dim: int) -> list[torch.Tensor]:
    return [_empty(TOKENS, heads, dim) for heads in (Q_HEADS, K_HEADS)]


def _rotary(dim: int, interleaved: bool, packed: bool, norm: bool) -> Any:
    q, k = _heads(dim)
    table = _empty(TOKENS, dim // 2, dtype=torch.float32)
    cu = _empty(9, dtype=torch.int32) if packed else None
    weights = dict(q_weight=_empty(dim), k_weight=_empty(dim)) if norm else {}
    return rotary(q, k, table, table, interleaved=interleaved, cu_seqlens=cu, **weights)


def _norm_backward(dim: int, interleaved: bool) -> Any:
    q, k = _heads(dim)
    table = _empty(TOKENS, dim // 2, dtype=torch.float32)
    operands = Operands(q, k, table, table, None, None, None, _empty(dim), _empty(dim))
    return run_norm_backward((q, k), operands, Options(1, dim, interleaved, False, 1e-6))


inspectable: dict[str, Inspectable] = {
    name: kernel
    for dim in DIMS
    for interleaved in (False, True)
    for kind in [f"rotary_{dim}{'_interleaved' if interleaved else ''}"]
    for name, kernel in {
        **launches_of(functools.partial(_rotary, dim, interleaved, False, False), kind),
        **launches_of(functools.partial(_rotary, dim, interleaved, True, False), f"{kind}_packed"),
        **launches_of(functools.partial(_rotary, dim, interleaved, False, True), f"{kind}_norm"),
        **launches_of(functools.partial(_norm_backward, dim, interleaved), f"{kind}_norm_backward", None),
    }.items()
}
