"""Kernels of grouped products for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.gemm.reference import BLOCK
from tritonkittens.kernels.grouped_gemm.interface import grouped_gemm

# groups, tokens, columns of tokens and of results: Mixtral, DeepSeek-V3, a model of small experts, and Mixtral's decode
KINDS = {
    "8_groups": (8, 16384, 4096, 14336),
    "256_groups": (256, 65536, 7168, 2048),
    "128_groups": (128, 8192, 2048, 768),
    "few_rows": (8, 256, 4096, 14336),
}


def _forward(groups: int, tokens: int, k: int, n: int, activation: str | None = None) -> Any:
    a, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((tokens, k), (groups, n, k)))
    return grouped_gemm(a, w.mT, torch.empty(groups, dtype=torch.int32, device="meta"), activation=activation)


def _weight_gradient(groups: int, tokens: int, k: int, n: int) -> Any:
    a, y = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((tokens, k), (tokens, n)))
    return grouped_gemm(y.mT, a, torch.empty(groups, dtype=torch.int32, device="meta"))


def _block_scales(groups: int, tokens: int, k: int, n: int) -> Any:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    a, w = empty(tokens, k, dtype=torch.float8_e4m3fn), empty(groups, n, k, dtype=torch.float8_e4m3fn)
    scale_a, scale_w = empty(-(-k // BLOCK), tokens), empty(groups, -(-n // BLOCK), -(-k // BLOCK))
    ends = empty(groups, dtype=torch.int32)
    return grouped_gemm(a, w.mT, ends, scale_a=scale_a.T, scale_b=scale_w.mT)


inspectable: dict[str, Inspectable] = {
    name: kernel
    for kind, shape in KINDS.items()
    for name, kernel in {
        **launches_of(functools.partial(_forward, *shape), f"grouped_gemm_{kind}"),
        **launches_of(
            functools.partial(_weight_gradient, *shape),
            f"grouped_gemm_{kind}_weight_gradient" if kind in ("8_groups", "256_groups") else None,
        ),
    }.items()
}
inspectable |= launches_of(functools.partial(_forward, *KINDS["256_groups"], "swiglu"), "grouped_gemm_swiglu")
inspectable |= launches_of(functools.partial(_block_scales, *KINDS["256_groups"]), "grouped_gemm_block_scales")


def _selected(groups: int, tokens: int, k: int, n: int, activation: str | None, **selected: int) -> Any:
    """`selected`: the tokens that there are of `rows`, or the rows of the result of `out_rows`."""
    numbers = torch.empty(tokens, dtype=torch.int32, device="meta")
    a, w = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((selected.get("rows", tokens), k), (groups, n, k))
    )
    ends = torch.empty(groups, dtype=torch.int32, device="meta")
    return grouped_gemm(a, w.mT, ends, activation=activation, **dict.fromkeys(selected, numbers))


for _name, _activation, _names in (
    ("gathered", None, dict(rows=8192)),
    ("gathered_swiglu", "swiglu", dict(rows=8192)),
    ("scattered", None, dict(out_rows=65536)),
):
    inspectable |= launches_of(
        functools.partial(_selected, *KINDS["256_groups"], _activation, **_names), f"grouped_gemm_{_name}"
    )
