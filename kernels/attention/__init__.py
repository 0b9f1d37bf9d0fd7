"""Attention: `attention` for PyTorch tensors, its reference `attention_torch`, and the templates behind it."""
import functools
from collections.abc import Callable
from typing import cast

import torch

import tritonkittens.lang as tk
from tritonkittens.kernels.attention.config import Config
from tritonkittens.kernels.attention.decode import AttentionDecode, AttentionDecodePaged
from tritonkittens.kernels.attention.forward import AttentionForward
from tritonkittens.kernels.attention.fused_backward import AttentionBackward
from tritonkittens.kernels.attention.operator import attention_operator
from tritonkittens.kernels.attention.product import attention, attention_decode, backward, forward, fused_backward
from tritonkittens.kernels.attention.reference import attention_torch


def _tensor(dim: int) -> torch.Tensor:
    return torch.empty(4, 16, 4096, dim, dtype=torch.bfloat16, device="meta")


def _forward(arch: str, dim: int, causal: bool) -> object:
    x = _tensor(dim)
    return forward(torch.bfloat16, dim, dim, causal, False, False, False, Config()).compile(x, x, x, x, scale=1.0, arch=arch)


def _backward(arch: str, dim: int, causal: bool, part: int) -> object:
    """The single pass (part 0), or the pass of dQ or of dK and dV (1, 2)."""
    x, numbers = _tensor(dim), torch.empty(4, 16, 4096, device="meta")
    kind = (torch.bfloat16, dim, dim, causal, False, False)
    queries, keys = backward(*kind)
    template = cast(tk.lcf, (fused_backward(*kind), queries, keys[0])[part])
    tensors = dict.fromkeys(template.tensors, x) | dict.fromkeys(("offsets", "deltas"), numbers) | ({} if part else {"dQ": numbers})
    return template.compile(*(tensors[name] for name in template.tensors), scale=1.0, gradient=1.0, arch=arch)


KERNELS: dict[str, Callable[..., object]] = {
    "": _forward, "backward_": functools.partial(_backward, part=0), "dq_": functools.partial(_backward, part=1), "dkdv_": functools.partial(_backward, part=2),
}  # fmt: skip
inspectable: dict[str, Callable[[str], object]] = {
    f"attention_{name}d{dim}{'_causal' * causal}": functools.partial(compiled, dim=dim, causal=causal)
    for name, compiled in KERNELS.items()
    for dim in (64, 128) for causal in (False, True)
}
