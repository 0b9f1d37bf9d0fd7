"""What gated products take: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor
from tritonkittens.kernels.gated_gemm.choice import gates
from tritonkittens.kernels.gemm.config import Config

ACTIVATIONS = ("silu", "gelu_tanh")


def check_kinds(a: Tensor, gate: Tensor, up: Tensor) -> None:
    """Raise TypeError for what is no tensor, or one of several devices."""
    check_tensors("gated_gemm", a=a, gate=gate, up=up)
    for name, x in (("a", a), ("gate", gate), ("up", up)):
        if is_distributed(type(x)):
            raise TypeError(f"gated_gemm: {name} is a DTensor; give its shard, {name}.to_local()")


def check_shapes(a: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """Raise TypeError or ValueError for operands that do not multiply."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_gemm(activation={activation!r}): must be one of {', '.join(map(repr, ACTIVATIONS))}")
    for name, x in (("gate", gate), ("up", up)):
        if x.dtype != a.dtype:
            raise TypeError(f"gated_gemm: {name} has dtype {x.dtype}, a {a.dtype}; they must be equal")
    if a.ndim < 1 or gate.ndim != 2 or a.shape[-1] != gate.shape[0]:
        raise ValueError(
            f"gated_gemm: a is {tuple(a.shape)}, gate is {tuple(gate.shape)}; they must be (…, K) and (K, N)"
        )
    if up.shape != gate.shape:
        raise ValueError(f"gated_gemm: up is {tuple(up.shape)}; it must be {tuple(gate.shape)}, as gate")


def check(a: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """Raise TypeError or ValueError for operands that the kernel does not take."""
    check_kinds(a, gate, up)
    for name, x in (("a", a), ("gate", gate), ("up", up)):
        check_tensor("gated_gemm", name, x, HALF_TYPES, "a", a)
    check_shapes(a, gate, up, activation)


def check_config(config: object) -> None:
    """Raise TypeError for what is neither None nor a `Config`, ValueError for one that the kernel does not have."""
    if config is None:
        return
    if not isinstance(config, Config):
        raise TypeError(f"gated_gemm(config={config!r}): must be a Config")
    if not gates(config):
        raise ValueError(
            f"gated_gemm(config={config}): it needs tile_n=128 or 256, an epilogue_n that divides a quarter of it, "
            "swap_ab=False, cluster=1, one or two consumers and a schedule that splits no tasks"
        )
