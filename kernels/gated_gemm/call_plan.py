"""The plan of a gated product: operands of one kind are checked and planned once, so that later calls only launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._dispatch import begin_alike
from tritonkittens.kernels._tensors import addressable, allocator, padded_empty, remember, signature, storable
from tritonkittens.kernels.gated_gemm.checks import check, check_config
from tritonkittens.kernels.gated_gemm.choice import family
from tritonkittens.kernels.gated_gemm.device.gated import GatedGemm
from tritonkittens.kernels.gemm.call_plan import check_chip
from tritonkittens.kernels.gemm.config import Config, Problem
from tritonkittens.kernels.gemm.device.epilogue import Steps
from tritonkittens.kernels.gemm.templates import template_of
from tritonkittens.launch import l2_bytes

_plans: dict[Hashable, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}  # by the kind of a call


def computed(a: Tensor, gate: Tensor, up: Tensor, activation: str, config: Config | None) -> Tensor:
    """`gated_gemm` of matrices without its gradient, by the plan of calls of this kind."""
    key = (signature(a, gate, up), activation, config)
    plan = _plans.get(key)
    if plan is None:
        check(a, gate, up, activation)
        check_config(config)
        plan = remember(_plans, key, _plan(a, gate, up, activation, config))
    return plan(a, gate, up)


def _plan(
    a: Tensor, gate: Tensor, up: Tensor, activation: str, config: Config | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    shape = (a.shape[0], gate.shape[1])
    if 0 in (*shape, a.shape[1]):
        return lambda a, gate, up: a.new_zeros(shape)
    plan = CallPlan(a, gate, up, activation, config)
    return plan.straight(a, gate, up) or plan


class CallPlan:
    """How operands become what the kernel takes, and the kernel."""

    def __init__(self, a: Tensor, gate: Tensor, up: Tensor, activation: str, config: Config | None):
        (m, k), n = a.shape, gate.shape[1]
        self.shape, self.dtype = (m, n), a.dtype
        self.transposes_a = not addressable(a) and addressable(a.mT)
        self.transposes_b = not addressable(gate) and addressable(gate.mT)
        dtype = tk.from_torch(a.dtype)
        orders = "km" if self.transposes_a else "mk", "nk" if self.transposes_b else "kn"
        self.problem = Problem(dtype.name, dtype.name, *orders, activation, "", 1, m, 2 * n, k)
        index = a.device.index if a.device.type == "cuda" else None
        check_chip(index)
        self.config = config or family.choose(self.problem, None, index)
        self.template = template_of(
            self.config,
            self.config.ordering(self.problem, l2_bytes(index)),
            *orders,
            False,
            Steps(),
            "",
            "fp32",
            any(not begin_alike(x, y) for x, y in zip((a, gate, up), self._stored(a, gate, up), strict=True)),
            template=GatedGemm,
            **dict.fromkeys(("dtype", "b_dtype", "out_dtype"), dtype),
            gated_by=activation,
        )

    def _stored(self, a: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All as TMA reads them: views or, where it cannot address those, copies."""
        first, second = (gate.mT, up.mT) if self.transposes_b else (gate, up)
        return as_addressable(a.mT if self.transposes_a else a), as_addressable(first), as_addressable(second)

    def straight(self, a: Tensor, gate: Tensor, up: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """The plan in as few steps as possible, where neither an operand nor the result has to be copied."""
        new_result = allocator(self.shape, self.dtype, a.device)
        home, views = new_result(), self._stored(a, gate, up)
        if not storable(home) or not all(begin_alike(x, y) for x, y in zip((a, gate, up), views, strict=True)):
            return None
        # the bound launch takes the tensors themselves: each begins at the address of its view
        launch = self.template.call(*views, home).bind(*views, home)

        def run(a: Tensor, gate: Tensor, up: Tensor) -> Tensor:
            out = new_result()
            launch(a, gate, up, out)
            return out

        return run

    def __call__(self, a: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        home = padded_empty(self.shape, a, self.dtype)
        self.template(*self._stored(a, gate, up), home)
        return home if home.is_contiguous() else torch.empty(self.shape, dtype=self.dtype, device=a.device).copy_(home)
