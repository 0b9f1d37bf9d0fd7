"""`torch.nn.CrossEntropyLoss`, and a linear layer together with it, on `tritonkittens.kernels.loss`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritonkittens.kernels._dispatch import autocasts, has_kernels, has_tangent, is_ordinary, unseen_by_function_modes
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.loss import cross_entropy, cross_entropy_torch, linear_cross_entropy
from tritonkittens.kernels.loss.checks import check_options
from tritonkittens.kernels.loss.config import INPUTS, TARGETS, WIDEST
from tritonkittens.nn._unscriptable import Unscriptable


def _fits(target: Tensor, *tensors: Tensor | None) -> bool:
    """Return whether the kernels take such tensors, and targets that are classes."""
    given = [t for t in tensors if t is not None]
    device = given[0].device
    return (
        all(is_ordinary(t) and not is_distributed(type(t)) and t.device == device for t in (*given, target))
        and target.dtype in TARGETS
        and not has_tangent(*given)
    )


class CrossEntropyLoss(Unscriptable, nn.CrossEntropyLoss):
    """A `torch.nn.CrossEntropyLoss` with the same arguments. Losses of bf16 and fp16 logits are always in fp32.

    Logits in bf16, fp16 and fp32, (C), (N, C), or (N, C, …) whose classes are contiguous in memory, with targets that
    are classes, run on the kernels of `tritonkittens.kernels.loss.cross_entropy` on a GPU from sm_80 on (or in the
    simulator). Everything else (class weights, probabilities as targets, other dtypes, devices, tensor subclasses) runs
    as torch's function, bf16 and fp16 after a cast to fp32. Logits (B, S, C) of a language model are given as
    `logits.transpose(1, 2)`.

    The loss of a target that is neither a class nor `ignore_index` is NaN on the kernels, and torch's error elsewhere.

    Raises:
        ValueError: for another reduction, or a label_smoothing outside of [0, 1].

    Example::

        criterion = CrossEntropyLoss(label_smoothing=0.1)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        check_options("CrossEntropyLoss", self.reduction, label_smoothing, None)

    @unseen_by_function_modes
    def _by_kernel(self, input: Tensor, target: Tensor) -> Tensor | None:
        """Return the loss if the kernel takes the operands, else None."""
        if self.weight is not None or not isinstance(target, Tensor) or not _fits(target, input):
            return None
        rows = input.movedim(1, -1) if input.ndim > 2 else input
        fits = rows.ndim > 0 and rows.dtype in INPUTS and rows.shape[:-1] == target.shape
        if not (fits and 1 <= rows.shape[-1] <= WIDEST and (input.ndim <= 2 or rows.stride(-1) == 1)):
            return None  # torch computes it, or says what is wrong
        if not has_kernels(input.device):
            return None
        options: dict[str, Any] = dict(ignore_index=self.ignore_index, label_smoothing=self.label_smoothing)
        loss = cross_entropy(rows, target, reduction=self.reduction, **options)
        assert isinstance(loss, Tensor)
        return loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        loss = self._by_kernel(input, target)
        if loss is not None:
            return loss
        x, weight = (t.float() if t is not None and t.dtype in HALF_TYPES else t for t in (input, self.weight))
        options: dict[str, Any] = dict(ignore_index=self.ignore_index, label_smoothing=self.label_smoothing)
        return nn.functional.cross_entropy(x, target, weight, reduction=self.reduction, **options)


class LinearCrossEntropyLoss(Unscriptable, nn.Module):
    """Cross entropy of the logits `linear(input)`.

    input: (…, in_features), target: classes, int64 or int32, of the shape of the leading dimensions. bf16 and fp16 on a
    Hopper or Blackwell GPU (or in the simulator) run as `tritonkittens.kernels.loss.linear_cross_entropy`, which never
    has the logits of all tokens. Everything else runs as torch's linear layer and operations in fp32, with all logits
    in memory. The loss of a target that is neither a class nor `ignore_index` is NaN.

    The parameters are those of `linear`, a `torch.nn.Linear`, as in torch 2.13's `LinearCrossEntropyLoss`. A weight may
    be shared: `criterion.linear.weight = embedding.weight`. Unlike torch's, it takes leading dimensions of any number,
    int32 targets, a z-loss and a soft-cap, and no out_features, class weights, probabilities or options.

    Args:
        in_features, num_classes: the shape of the layer. bias: whether it has one.
        reduction, ignore_index, label_smoothing, lse_square_scale, softcap: as of `linear_cross_entropy`.

    Example::

        criterion = LinearCrossEntropyLoss(4096, 128256, device="cuda", dtype=torch.bfloat16)
        criterion(hidden, labels).backward()

    Raises TypeError for other dtypes of targets; ValueError for another shape, or an option that does not exist.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        check_options("LinearCrossEntropyLoss", reduction, label_smoothing, softcap)
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.options: dict[str, Any] = dict(
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            softcap=softcap,
        )

    @unseen_by_function_modes
    def _by_kernel(self, input: Tensor, target: Tensor) -> Tensor | None:
        """Return the loss if the kernels take the operands, else None."""
        weight, bias = self.linear.weight, self.linear.bias
        if not _fits(target, input, weight, bias) or input.ndim == 0:
            return None
        dtype, dtypes = autocasts(input.device), {t.dtype for t in (input, weight, bias) if t is not None}
        if dtype is not None and torch.float64 not in dtypes:  # which autocast leaves as it is
            dtypes = {dtype}
        alike = len(dtypes) == 1 and dtypes <= set(HALF_TYPES)
        if not (alike and 1 <= len(weight) <= WIDEST and has_kernels(input.device, needs_tma=True)):
            return None
        return linear_cross_entropy(input, weight, target, bias, **self.options)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss in fp32, of float64 in float64: a number, or with reduction="none" the shape of target."""
        loss = self._by_kernel(input, target)
        if loss is not None:
            return loss
        logits = self.linear(input)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return cross_entropy_torch(logits, target, dtype=dtype, **self.options)[0]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
