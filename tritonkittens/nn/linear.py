"""`torch.nn.Linear` on `tritonkittens.kernels.gemm`: bias and activation in the product's epilogue, gradients,
torch.compile.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor

from tritonkittens.arch import chip_of
from tritonkittens.kernels._dispatch import (
    autocast,
    autocasts,
    constant_in_traces,
    is_inference,
    is_ordinary,
    is_plain,
    unseen_by_function_modes,
)
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.gemm.call_plan import linear
from tritonkittens.kernels.gemm.device.epilogue import ACTIVATIONS
from tritonkittens.kernels.gemm.reference import activated
from tritonkittens.launch import device_facts, is_reachable
from tritonkittens.nn._unscriptable import Unscriptable


@functools.cache
def _gpu_has_kernels(device: torch.device) -> bool:
    return chip_of(device_facts(device).capability).tma


@constant_in_traces  # a device does not change between a trace and its runs
def _has_kernels(device: torch.device) -> bool:
    if device.type == "cuda":
        return _gpu_has_kernels(device)
    return is_reachable(device) and chip_of(device_facts(device).capability).tma


def _known(activation: str | None) -> str | None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"Linear(activation={activation!r}): must be one of {', '.join(map(repr, ACTIVATIONS))}")
    return activation


class Linear(Unscriptable, nn.Linear):
    """y = activation(x · Wᵀ + bias), a `torch.nn.Linear` with the same parameters, initialisation and state_dict.

    x: (…, in_features) gives (…, out_features), of the dtype of x. bf16 and fp16 on a Hopper or Blackwell GPU (or in
    the simulator) run as one kernel, `tritonkittens.kernels.gemm.gemm`. It sums in fp32, and adds the bias and
    applies the activation before it rounds. Large bf16 products round before the activation too, as torch's do.
    A jagged nested tensor runs as the matrix of its rows, and a DTensor as `gemm` of its shards. Everything else (other
    dtypes, devices, tensor subclasses) runs as `torch.nn.functional.linear` and torch's activation. Under
    `torch.autocast`, x, weight and bias are cast first, as in torch's own Linear.

    Args:
        activation: None, "gelu", "gelu_tanh" or "silu". The other arguments are those of `torch.nn.Linear`.

    Raises:
        ValueError: for another activation.

    Example::

        layer = Linear(4096, 1024, activation="gelu", device="cuda", dtype=torch.bfloat16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = _known(activation)

    @classmethod
    def from_torch(cls, module: nn.Linear, activation: str | None = None) -> Linear:
        """Return a Linear that shares parameters, hooks and mode with a torch.nn.Linear. Training one trains the
        other.

        Raises TypeError for another module, ValueError for an unknown activation.
        """
        if not isinstance(module, nn.Linear):
            raise TypeError(f"Linear.from_torch({type(module).__name__}): it takes a torch.nn.Linear")
        new = cls.__new__(cls)
        new.__dict__ = {
            name: copy.copy(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()
        }
        new.activation = _known(activation)
        return new

    def forward(self, input: Tensor) -> Tensor:
        if is_inference() and type(self) is Linear:
            parameters = self._parameters  # which gives them ten times faster than the module
            if "weight" in parameters and "bias" in parameters:  # as they are not in a parametrised module
                y = linear(input, parameters["weight"], parameters["bias"], self.activation)
                if y is not None:
                    return y
        # its rows form one matrix
        if isinstance(input, NestedTensor) and input._ragged_idx == 1 and input._lengths is None:
            lengths = dict(min_seqlen=input._maybe_min_seqlen, max_seqlen=input._maybe_max_seqlen)
            return torch.nested.nested_tensor_from_jagged(self.forward(input.values()), input.offsets(), **lengths)
        y = self._by_kernel(input)
        return activated(nn.functional.linear(*self._operands(input)), self.activation) if y is None else y

    @unseen_by_function_modes
    def _by_kernel(self, input: Tensor) -> Tensor | None:
        """Return the result if the kernel takes the operands, else None."""
        x, weight, bias = self._operands(input)
        device, dtype, rank = x.device, x.dtype, x.ndim
        fits = (
            dtype in HALF_TYPES
            and weight.dtype is dtype
            and weight.device == device
            and rank > 0
            and is_ordinary(x)
            and is_ordinary(weight)
        )
        if not (fits and _has_kernels(device)):
            return None
        if rank > 1 and is_inference() and is_plain(x, weight, bias):
            return linear(x, weight, bias, self.activation, is_checked=True)
        y = gemm(x if rank > 1 else x.unsqueeze(0), weight.T, bias=bias, activation=self.activation)
        return y if rank > 1 else y.squeeze(0)

    def _operands(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return input, weight and bias after autocast's casts."""
        x, weight, bias = input, self.weight, self.bias
        dtype = autocasts(x.device)
        if dtype is not None:
            x, weight = autocast(x, dtype), autocast(weight, dtype)
            bias = None if bias is None else autocast(bias, dtype)
        return x, weight, bias

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")


def replace_linears(model: nn.Module, filter: Callable[[str, nn.Linear], bool] | None = None) -> int:
    """Replace every torch.nn.Linear of a model by a `Linear` with the same parameters.

    Args:
        model: a module that contains Linears.
        filter: `filter(name, module)`, name as in `model.named_modules()`; False keeps a module.

    Returns:
        The number of replaced modules.

    Raises:
        ValueError: where the model itself is a torch.nn.Linear.

    Subclasses stay, because they may compute something else. A module with several names is replaced once, under all
    of them.
    """
    if type(model) is nn.Linear:
        raise ValueError(
            "replace_linears(Linear): a model that is one Linear has nothing to hold another; use "
            "Linear.from_torch(model)"
        )
    wanted = [
        (name, m) for name, m in model.named_modules() if type(m) is nn.Linear and (filter is None or filter(name, m))
    ]
    new = {id(module): Linear.from_torch(module) for _, module in wanted}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, new[id(child)])
    return len(new)
