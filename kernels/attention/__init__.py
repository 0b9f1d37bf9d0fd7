"""Attention: `attention` for PyTorch tensors, `attention_varlen` for packed sequences, the reference `attention_torch`, and the templates behind them."""
import functools
from collections.abc import Callable

import torch

from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.decode import AttentionDecode
from tritonkittens.kernels.attention.forward import AttentionForward
from tritonkittens.kernels.attention.operator import attention_operator
from tritonkittens.kernels.attention.product import attention, attention_decode, backward, forward
from tritonkittens.kernels.attention.reference import attention_torch
from tritonkittens.kernels.attention.varlen import attention_varlen, packed_forward, varlen_operator


def _tensor(dim: int) -> torch.Tensor:
    return torch.empty(4, 16, 4096, dim, dtype=torch.bfloat16, device="meta")


def _forward(arch: str, dim: int, causal: bool) -> object:
    x = _tensor(dim)
    return forward(torch.bfloat16, dim, dim, causal, False, False, False, Config()).compile(x, x, x, x, scale=1.0, arch=arch)


def _backward(arch: str, dim: int, causal: bool, of_queries: bool) -> object:
    x, numbers = _tensor(dim), torch.empty(4, 16, 4096, device="meta")
    queries, keys = backward(torch.bfloat16, dim, dim, causal, False, False)
    template = queries if of_queries else keys[0]
    tensors = (numbers if name in ("offsets", "deltas") else x for name in template.tensors)
    return template.compile(*tensors, scale=1.0, gradient=1.0, arch=arch)


def _packed(arch: str, dim: int, causal: bool) -> object:
    x, entries = torch.empty(16, 4096, dim, dtype=torch.bfloat16, device="meta"), torch.empty(64, 6, dtype=torch.int32, device="meta")
    return packed_forward(torch.bfloat16, dim, dim, causal, False, False, False, Config()).compile(x, x, x, x, entries, scale=1.0, arch=arch)


KERNELS: dict[str, Callable[..., object]] = {
    "": _forward, "dq_": functools.partial(_backward, of_queries=True), "dkdv_": functools.partial(_backward, of_queries=False),
}  # fmt: skip
inspectable: dict[str, Callable[[str], object]] = {
    "attention_varlen_d128_causal": functools.partial(_packed, dim=128, causal=True),
    **{f"attention_{name}d{dim}{'_causal' * causal}": functools.partial(compiled, dim=dim, causal=causal)
       for name, compiled in KERNELS.items()
       for dim in (64, 128) for causal in (False, True)},
}  # fmt: skip
