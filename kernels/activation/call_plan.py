"""What a call of a gated activation does: its launch, and the memory of its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tritonkittens.kernels._rows import Rows
from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.activation.checks import check_operands, check_reachable
from tritonkittens.kernels.activation.config import shape_of
from tritonkittens.kernels.activation.device.gated import gated_backward, gated_forward


class Options(NamedTuple):
    """Options of a gated activation, in the order of its operator. interleaved: columns of a and b alternate."""

    kind: str
    interleaved: bool


def parts_of(a: Tensor, b: Tensor | None, interleaved: bool) -> list[Tensor]:
    """Return a and b of the shape of the result. Of interleaved columns both are the first half, of which the kernels
    use the address and the strides."""
    if b is not None:
        return [a, b]
    half = a.shape[-1] // 2
    first = a[..., :half]
    return [first, first if interleaved else a[..., half:]]


class Plan:
    """The launch of a call of one kind, of its backward where there is a `dy`."""

    def __init__(self, a: Tensor, b: Tensor | None, dy: Tensor | None, options: Options, inplace: bool = False):
        self.options, self.packed, self.backward = options, b is None, dy is not None
        # a copy of one part alone would leave the other behind
        self.copied = self.packed and Rows(parts_of(a, b, options.interleaved)).copied[0]
        self.rows = Rows(self._read(a, b, dy))
        self.inplace = inplace and not self.copied and not any(self.rows.copied[:2])
        self.shape = shape_of(*options, self.rows.width, self.rows.unit)
        self.grid = (-(-self.rows.count // self.shape.rows) * -(-self.rows.width // self.shape.cols), 1, 1)
        shapes = [a.shape] * (1 if self.packed else 2) if self.backward else [(*a.shape[:-1], self.rows.width)]
        self.results = [allocator(tuple(shape), a.dtype, a.device) for shape in shapes]
        self.bound: Callable[..., None] | None = None

    def _read(self, a: Tensor, b: Tensor | None, dy: Tensor | None) -> list[Tensor]:
        a = a.contiguous() if self.copied else a
        return [*parts_of(a, b, self.options.interleaved), *([] if dy is None else [dy])]

    def __call__(self, a: Tensor, b: Tensor | None, dy: Tensor | None = None) -> list[Tensor]:
        if self.inplace:
            found = [a] if b is None else [a, b]
        else:
            found = [allocate() for allocate in self.results]
        if self.grid[0]:
            written = parts_of(found[0], None, self.options.interleaved) if self.packed and self.backward else found
            tensors = (*self.rows.ready(self._read(a, b, dy), a), *written)
            if self.bound is None:
                self.bound = self._bind(tensors)
            self.bound(*tensors)
        return found

    def _bind(self, tensors: Sequence[Tensor]) -> Callable[..., None]:
        rows = self.rows
        kernel, at = gated_forward, rows.at
        if self.backward:
            kernel, pitch = gated_backward, rows.width * (2 if self.packed else 1) // rows.unit
            at = (*at, *(at[:2] if self.inplace else [(rows.inner * pitch, pitch)] * 2))
        return kernel.bind(self.grid, *tensors, rows.size, rows.inner, at, self.shape)


_plans: dict[Hashable, Any] = {}  # by what is known of a call


def run_forward(a: Tensor, b: Tensor | None, options: Options) -> Tensor:
    """The activation of plain tensors."""
    key = (signature(a, b), options)
    plan = _plans.get(key)
    if plan is None:
        check_operands(a, b, *options)
        check_reachable(a, options.kind)
        plan = remember(_plans, key, Plan(a, b, None, options))
    found: Tensor = plan(a, b)[0]
    return found


def run_backward(dy: Tensor, a: Tensor, b: Tensor | None, options: Options, inplace: bool = False) -> list[Tensor]:
    """Gradients of a, and of b where it is given. inplace: in their memory, where kernels read it without a copy."""
    key = (signature(dy, a, b), options, inplace)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, Plan(a, b, dy, options, inplace))
    found: list[Tensor] = plan(a, b, dy)
    return found
