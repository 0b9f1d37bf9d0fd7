"""What calls of softmax and cross entropy do: their launches, and the memory of their results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonkittens.arch import chip_of
from tritonkittens.kernels._dispatch import announce_write, check_written
from tritonkittens.kernels._rows import Rows
from tritonkittens.kernels._tensors import allocator, remember, signature
from tritonkittens.kernels.loss.checks import check_reachable, check_rows, check_target
from tritonkittens.kernels.loss.config import (
    MORE_REGISTERS,
    MOST_SUMMED,
    REGISTERS,
    SUM_PROGRAMS,
    SUM_ROWS,
    Parts,
    gradient_tiles,
    group_of,
    loss_tiles,
    registers_of,
    softmax_tiles,
    stages_of,
)
from tritonkittens.kernels.loss.device.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_sum,
)
from tritonkittens.kernels.loss.device.softmax import softmax_backward, softmax_forward
from tritonkittens.launch import device_facts

_plans: dict[Hashable, Any] = {}  # by what is known of a call
Bound = Callable[..., None]


def _is_apart(x: Tensor) -> bool:
    """Return whether no two elements share memory."""
    try:
        check_written("", x)
    except ValueError:
        return False
    return True


class Softmax:
    """The launch of a softmax for tensors of one kind."""

    def __init__(self, x: Tensor, dtype: torch.dtype):
        self.rows, (self.tiles, self.parts) = Rows((x,)), softmax_tiles(x.shape[-1], backward=False)
        self.group = group_of(self.tiles, x.element_size())
        self.result = allocator(tuple(x.shape), dtype, x.device)
        self.bound: Bound | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.result()
        if self.rows.count:
            tensors = (*self.rows.ready((x,), x), y)
            if self.bound is None:
                rows, tiles = self.rows, self.tiles
                self.bound = softmax_forward.with_options(num_warps=tiles.warps, maxnreg=REGISTERS).bind(
                    (-(-rows.count // tiles.rows), 1, 1), *tensors, rows.size, rows.inner, rows.at, *tiles[:2],
                    self.parts, self.group, rows.unit, stages_of(tiles),
                )  # fmt: skip
            self.bound(*tensors)
        return y


class SoftmaxBackward:
    """The launch of a softmax's backward for tensors of one kind."""

    def __init__(self, dy: Tensor, y: Tensor, dtype: torch.dtype):
        self.rows, (self.tiles, self.parts) = Rows((dy, y)), softmax_tiles(y.shape[-1], backward=True)
        self.result = allocator(tuple(y.shape), dtype, y.device)
        self.bound: Bound | None = None

    def __call__(self, dy: Tensor, y: Tensor) -> Tensor:
        dx = self.result()
        if self.rows.count:
            tensors = (*self.rows.ready((dy, y), y), dx)
            if self.bound is None:
                rows, tiles = self.rows, self.tiles
                registers = REGISTERS if self.parts else MORE_REGISTERS
                self.bound = softmax_backward.with_options(num_warps=tiles.warps, maxnreg=registers).bind(
                    (-(-rows.count // tiles.rows), 1, 1), *tensors, rows.size, rows.inner, rows.at, *tiles[:2],
                    self.parts, rows.unit, stages_of(tiles),
                )  # fmt: skip
            self.bound(*tensors)
        return dx


def run_softmax(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The softmax of a plain tensor."""
    key = ("softmax", signature(x), out_dtype)
    plan = _plans.get(key)
    if plan is None:
        check_rows("softmax", "x", x)
        check_reachable("softmax", "x", x)
        plan = remember(_plans, key, Softmax(x, out_dtype or x.dtype))
    result: Tensor = plan(x)
    return result


def run_softmax_backward(dy: Tensor, y: Tensor, x_dtype: torch.dtype) -> Tensor:
    """The gradient of x, of this dtype."""
    key = ("softmax_backward", signature(dy, y), x_dtype)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, SoftmaxBackward(dy, y, x_dtype))
    result: Tensor = plan(dy, y)
    return result


# ---------------------------------------------------------------- cross entropy


class Options(NamedTuple):
    """Options of a cross entropy, in the order of its operator."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None
    lse_wanted: bool

    def parts(self, dlse: bool = False) -> Parts:
        skips = not (self.lse_wanted or dlse)
        return Parts(self.softcap is not None, self.label_smoothing > 0, skips, self.reduction == "mean", dlse)

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        """Return the numbers that the kernels take."""
        return self.ignore_index, self.softcap or 1.0, self.label_smoothing, self.lse_square_scale


class Losses(NamedTuple):
    """Results of a cross entropy: the loss, log-sum-exps of the rows, and for a mean the number of rows that are not
    ignored, in fp32."""

    loss: Tensor
    lse: Tensor
    number: Tensor | None


def starts_early(device: torch.device) -> bool:
    """Return whether a kernel can start before the previous one of its stream ends."""
    return chip_of(device_facts(device).capability).tma


class LossSum:
    """The launches that add up losses of one number of rows."""

    def __init__(self, losses: Tensor, options: Options):
        self.count, self.options = len(losses), options
        programs = SUM_PROGRAMS if self.count > MOST_SUMMED else 1
        self.programs = (programs, 1) if programs > 1 else (1,)  # of launches one after the other
        self.sums = [allocator((n,) if n > 1 else (), torch.float32, losses.device) for n in self.programs]
        self.early = starts_early(losses.device)
        self.bound: list[Bound] = []

    def __call__(self, losses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        sums = [(allocate(), allocate()) for allocate in self.sums]
        tensors = [(*read, *found) for read, found in zip(((losses, target), *sums), sums, strict=False)]
        if not self.bound:  # all launches at once: another thread may run this plan while they are compiled
            self.bound = [self._bind(i, given) for i, given in enumerate(tensors)]
        for launch, given in zip(self.bound, tensors, strict=True):
            launch(*given)
        return sums[-1]

    def _bind(self, i: int, tensors: tuple[Tensor, ...]) -> Bound:
        numbers = (self.count if i == 0 else self.programs[0], self.options.ignore_index)
        is_mean = self.options.reduction == "mean" and self.programs[i] == 1
        kernel = cross_entropy_sum.with_options(launch_pdl=True) if self.early else cross_entropy_sum
        constants = (i == 0, is_mean, SUM_ROWS, self.early)
        return kernel.bind((self.programs[i], 1, 1), *tensors, *numbers, *constants)


class CrossEntropy:
    """The launches of a cross entropy for tensors of one kind."""

    def __init__(self, logits: Tensor, target: Tensor, options: Options):
        self.rows, self.tiles, self.options = Rows((logits,)), loss_tiles(logits.shape[-1]), options
        self.itemsize, self.shape = logits.element_size(), tuple(target.shape)
        self.early = starts_early(logits.device)
        self.of_rows = allocator((self.rows.count,), torch.float32, logits.device)
        self.bound: Bound | None = None

    def __call__(self, logits: Tensor, target: Tensor) -> Losses:
        losses, lse = self.of_rows(), self.of_rows()
        target = target.reshape(-1).contiguous()
        if self.rows.count:
            tensors = (*self.rows.ready((logits,), logits), target, losses, lse)
            if self.bound is None:
                self.bound = self._bind(tensors)
            self.bound(*tensors)
        if self.options.reduction == "none":
            return Losses(losses.view(self.shape), lse.view(self.shape), None)
        loss, number = run_loss_sum(losses, target, self.options)
        return Losses(loss, lse.view(self.shape), number if self.options.reduction == "mean" else None)

    def _bind(self, tensors: Any) -> Bound:
        rows, tiles, one_chunk = self.rows, self.tiles, self.tiles.chunks == 1
        parts = self.options.parts()
        early = self.early and self.options.reduction != "none"
        parts = replace(parts, mean=False, skips=parts.skips and not one_chunk, early=early)
        return cross_entropy_forward.with_options(num_warps=tiles.warps, maxnreg=registers_of(parts)).bind(
            (-(-rows.count // tiles.rows), 1, 1), *tensors, rows.size, rows.inner, rows.at, *self.options.numbers,
            parts, *tiles[:2], group_of(tiles, self.itemsize), rows.unit, stages_of(tiles),
        )  # fmt: skip


class CrossEntropyBackward:
    """The launch of a cross entropy's backward for tensors of one kind. `inplace`: its result is the logits' memory."""

    def __init__(self, logits: Tensor, options: Options, is_lse_differentiated: bool, inplace: bool):
        self.rows, self.tiles = Rows((logits,)), gradient_tiles(logits.shape[-1])
        self.options, self.parts = options, options.parts(is_lse_differentiated)
        self.inplace = inplace and not self.rows.copied[0] and _is_apart(logits)
        self.result = allocator(tuple(logits.shape), logits.dtype, logits.device)
        self.bound: Bound | None = None

    def __call__(
        self, dloss: Tensor, dlse: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor | None
    ) -> Tensor:
        dx = logits if self.inplace else self.result()
        if self.rows.count == 0:
            return dx
        x = self.rows.ready((logits,), logits)[0]
        dloss, target, lse = (t.reshape(-1).contiguous() for t in (dloss, target, lse))
        dlse = lse if dlse is None else dlse.reshape(-1).contiguous()
        tensors = (x, target, lse, dloss, dlse, lse if count is None else count, dx)
        if self.bound is None:
            self.bound = self._bind(tensors)
        self.bound(*tensors)
        return dx

    def _bind(self, tensors: Any) -> Bound:
        rows, tiles = self.rows, self.tiles
        width = rows.width // rows.unit
        stored = rows.at[0] if self.inplace else (rows.inner * width, width)
        parts = self.parts
        return cross_entropy_backward.with_options(num_warps=tiles.warps, maxnreg=registers_of(parts)).bind(
            (-(-rows.count // tiles.rows) * tiles.chunks, 1, 1), *tensors, rows.size, rows.inner, (rows.at[0], stored),
            int(self.options.reduction == "none"), *self.options.numbers, parts, *tiles[:2], rows.unit,
        )  # fmt: skip


def run_loss_sum(losses: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The sum or mean of the losses of rows, (rows), and the number of rows that are not ignored, in fp32."""
    key = ("loss_sum", signature(losses, target), options)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, LossSum(losses, options))
    result: tuple[Tensor, Tensor] = plan(losses, target)
    return result


def run_cross_entropy(logits: Tensor, target: Tensor, options: Options) -> Losses:
    """The cross entropy of plain tensors."""
    key = ("cross_entropy", signature(logits, target), options)
    plan = _plans.get(key)
    if plan is None:
        check_rows("cross_entropy", "input", logits)
        check_target("cross_entropy", target, tuple(logits.shape[:-1]), logits.device, "input")
        check_reachable("cross_entropy", "input", logits)
        plan = remember(_plans, key, CrossEntropy(logits, target, options))
    result: Losses = plan(logits, target)
    return result


def run_cross_entropy_backward(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    count: Tensor | None,
    options: Options,
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits. `inplace`: write it over the logits, if their memory can hold it."""
    key = ("cross_entropy_backward", signature(dloss, dlse, logits, target, lse, count), options, inplace)
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, CrossEntropyBackward(logits, options, dlse is not None, inplace))
    if plan.inplace:
        announce_write(logits)
    result: Tensor = plan(dloss, dlse, logits, target, lse, count)
    return result
