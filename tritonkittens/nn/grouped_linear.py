"""Linear layers of groups of rows, such as the experts of a mixture, on `tritonkittens.kernels.grouped_gemm`."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from tritonkittens.kernels._dispatch import autocast, autocasts, is_ordinary, takes, unseen_by_function_modes
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.grouped_gemm import grouped_gemm
from tritonkittens.kernels.grouped_gemm.checks import MAX_GROUPS
from tritonkittens.nn._unscriptable import Unscriptable


class GroupedLinear(Unscriptable, nn.Module):
    """y = x · W[g]ᵀ + bias[g] for the rows x of group g: a `torch.nn.Linear` for each group, in one kernel.

    Rows are sorted by group. `forward(x, offsets)` takes x, (rows, in_features), and offsets, int32 (groups,), on the
    device: group g ends before row offsets[g]. It returns (rows, out_features); rows after the last group are
    undefined. bf16 and fp16 on a Hopper or Blackwell GPU (or in the simulator), with at most 1,024 groups, run on
    `tritonkittens.kernels.grouped_gemm.grouped_gemm`, without waiting for the device. Everything else (other dtypes,
    devices, tensor subclasses) runs group by group in torch, far slower, and the host waits. Under `torch.autocast`, x
    and the parameters are cast first.

    Raises TypeError or ValueError for other offsets.

    Args:
        groups, in_features, out_features: of the weight, (groups, out_features, in_features).
        bias: whether there is a bias, (groups, out_features).

    Example::

        experts = GroupedLinear(64, 2048, 1408, device="cuda", dtype=torch.bfloat16)
        y = experts(tokens_by_expert, torch.bincount(expert, minlength=64).cumsum(0, dtype=torch.int32))
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(groups, out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw parameters as `torch.nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        """Return the products of groups of rows, (rows, out_features)."""
        self._check(input, offsets)
        x, weight, bias = input, self.weight, self.bias
        if (dtype := autocasts(x.device)) is not None:
            x, weight = autocast(x, dtype), autocast(weight, dtype)
            bias = None if bias is None else autocast(bias, dtype)
        y = self._by_kernel(x, weight, bias, offsets)
        return self._group_by_group(x, weight, bias, offsets) if y is None else y

    def _check(self, x: Tensor, offsets: Tensor) -> None:
        """Raise TypeError or ValueError for offsets that the kernel would refuse."""
        if offsets.dtype != torch.int32:
            raise TypeError(f"GroupedLinear: offsets has dtype {offsets.dtype}; it must be torch.int32")
        if tuple(offsets.shape) != (self.groups,):
            raise ValueError(f"GroupedLinear: offsets is {tuple(offsets.shape)}; it must be ({self.groups},)")
        if offsets.device != x.device:
            raise ValueError(f"GroupedLinear: offsets is on {offsets.device}, input on {x.device}; they must be equal")

    @staticmethod
    @unseen_by_function_modes
    def _by_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor | None:
        """Return the result if the kernel takes the operands, else None."""
        fits = weight.shape[0] <= MAX_GROUPS and weight.dtype is x.dtype and is_ordinary(offsets)
        if not (fits and takes(HALF_TYPES, x, weight, bias, needs_tma=True)):
            return None
        return grouped_gemm(x, weight.mT, offsets, bias=bias)

    @staticmethod
    def _group_by_group(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        ends = offsets.tolist()
        biases = [None] * len(ends) if bias is None else list(bias)
        parts = [
            nn.functional.linear(x[begin:end], w, b)
            for (begin, end), w, b in zip(pairwise([0, *ends]), weight, biases, strict=True)
        ]
        rest = x.new_zeros(x.shape[0] - (ends[-1] if ends else 0), weight.shape[1])
        return torch.cat([*parts, rest])

    def extra_repr(self) -> str:
        return f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}, " + (
            f"bias={self.bias is not None}"
        )
