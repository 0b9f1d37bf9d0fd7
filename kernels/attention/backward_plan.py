"""What backwards of attention of one kind do: allocate, then launch kernels that are bound once and find their tensors by name."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._copies import as_addressable
from tritonkittens.kernels._tensors import addressable, allocator_like

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]  # gradients of O and L, Q, K, V, O, L
Gradients = tuple[Tensor, Tensor, Tensor]  # dQ, dK, dV
Tensors = dict[str, Tensor]
Step = Callable[[Tensors], None]


class Passes:
    """What calls with operands like these do: allocate gradients like these, and launch the `steps` of a subclass.

    Steps find tensors by name: the operands Q, K, V, dO, O, L and dL (of which there may be none: that of L then), the gradients dQ, of_keys and of_values, and
    what `make` adds. Where kernels do not write the gradients themselves, dK and dV are not of_keys and of_values. By itself: where nobody sees a key.
    """

    def __init__(self, operands: Operands, gradients: Iterable[Tensor]):
        grad, _, q, k, v, *_ = operands
        self.as_they_are = all(map(addressable, (grad, q, k, v)))
        self.new_gradients = [allocator_like(x) for x in gradients]
        self.steps: list[Step] = [clear]

    def make(self, tensors: Tensors) -> None:
        """Add what kernels need beside operands and gradients."""

    def tensors(self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Tensors:
        if not self.as_they_are:
            grad, q, k, v = map(as_addressable, (grad, q, k, v))
        dq, dk, dv = [new() for new in self.new_gradients]
        tensors = dict(Q=q, K=k, V=v, dO=grad, O=out, L=lse, dL=lse if grad_lse is None else grad_lse.contiguous(), dQ=dq, dK=dk, dV=dv, of_keys=dk,
                       of_values=dv)  # fmt: skip
        self.make(tensors)
        return tensors

    def __call__(self, *operands: Any) -> Gradients:
        tensors = self.tensors(*operands)
        for step in self.steps:
            step(tensors)
        return tensors["dQ"], tensors["of_keys"], tensors["of_values"]


def clear(tensors: Tensors) -> None:
    for name in ("dQ", "dK", "dV"):
        tensors[name].zero_()


def template_step(kernel: tk.lcf, tensors: Tensors, numbers: dict[str, Any]) -> Step:
    """The launch of a kernel for tensors like these, or other views of their memory."""
    named = itemgetter(*kernel.tensors)
    launch = kernel.call(*named(tensors)).bind(*named(tensors), **numbers)
    return lambda tensors: launch(*named(tensors))


def plain_step(kernel: Any, grid: tuple[int, ...], tensors: Tensors, names: tuple[str, ...], *others: Any) -> Step:
    """The same for a plain kernel, of tensors with these names and what `others` it takes."""
    named = itemgetter(*names)
    launch = kernel.bind(grid, *named(tensors), *others)
    return lambda tensors: launch(*named(tensors))
