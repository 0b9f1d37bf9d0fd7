"""Attention: `attention` for PyTorch tensors, its reference `attention_torch`, and the templates behind it."""
import functools

import torch

from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.forward import AttentionForward
from tritonkittens.kernels.attention.operator import attention_operator
from tritonkittens.kernels.attention.product import attention, forward
from tritonkittens.kernels.attention.reference import attention_torch


def _compiled(arch: str, dim: int, causal: bool = False) -> object:
    x = torch.empty(4, 16, 4096, dim, dtype=torch.bfloat16, device="meta")
    return forward(torch.bfloat16, dim, dim, causal, False, False, False, Config()).compile(x, x, x, x, scale=1.0, arch=arch)


inspectable = {f"attention_d{dim}{'_causal' * causal}": functools.partial(_compiled, dim=dim, causal=causal) for dim in (64, 128) for causal in (False, True)}
