"""Which layers of a model of transformers the kernels compute, and their forwards on the kernels.

A layer is recognised by the code of its class's forward, which is that of a class below: transformers writes the same
code for most models. Nothing else about a class counts, and a forward that the instance replaces is left alone.
A forward runs transformers' own code where the kernels do not take the tensors.
Source: transformers 5.24, models/*/modeling_*.py.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tritonkittens.kernels._dispatch import has_kernels, has_tangent, is_ordinary, unseen_by_function_modes
from tritonkittens.kernels._sharding import is_distributed
from tritonkittens.kernels.activation import geglu, swiglu
from tritonkittens.kernels.norm import rms_norm
from tritonkittens.kernels.norm.config import INPUTS, WIDEST

Forward: TypeAlias = Callable[..., Any]


class Replacement(NamedTuple):
    """An attribute that a module gets while it is patched."""

    kind: str
    module: nn.Module
    name: str
    value: Any


def replacements(model: nn.Module, kinds: tuple[str, ...]) -> Iterator[Replacement]:
    """Find what the kernels compute of a model."""
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        for kind, find in FINDERS.items():
            forward = find(module) if kind in kinds else None
            if forward is not None:
                yield Replacement(kind, module, "forward", types.MethodType(forward, module))


def _code(function: Any) -> tuple[Any, ...] | None:
    """What a function computes, without its text, place and annotations. None of what is no Python function."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        return None
    code = function.__code__
    constants = tuple(x for x in code.co_consts if x != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants, function.__defaults__


def _is_like(module: nn.Module, known: type, *methods: str) -> bool:
    """Do these methods of a module compute what those of a known class do?"""
    return all(_code(getattr(type(module), name, None)) == _code(getattr(known, name)) for name in methods)


def _takes(*tensors: Tensor) -> bool:
    """Do the kernels of rows take these tensors together?"""
    device = tensors[0].device
    for x in tensors:
        if not is_ordinary(x) or is_distributed(type(x)) or x.device != device or x.dtype not in INPUTS:
            return False
    return has_kernels(device) and not has_tangent(*tensors)


# ---------------------------------------------------------------- norms


@unseen_by_function_modes
def _norm(x: Tensor, weight: Tensor, eps: float, is_gemma: bool) -> Tensor | None:
    """The norm, in the dtype that transformers' operations give, or None where the kernel does not take the tensors.

    Gemma multiplies by weight + 1 in fp32 and rounds to the dtype of x. The others round the norm to it, and multiply
    by the weight in the dtype of both; the kernel rounds once, at the end.
    """
    if not (_takes(x, weight) and x.ndim and weight.shape == x.shape[-1:] and 1 <= x.shape[-1] <= WIDEST):
        return None
    dtype = x.dtype if is_gemma else torch.promote_types(x.dtype, weight.dtype)
    y: Tensor = rms_norm(x, weight, eps=eps, zero_centered_weight=is_gemma, out_dtype=dtype)
    return y


def _llama_norm(self: Any, hidden_states: Tensor) -> Tensor:
    y = _norm(hidden_states, self.weight, self.variance_epsilon, False)
    return type(self).forward(self, hidden_states) if y is None else y


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    y = _norm(x, self.weight, self.eps, True)
    return type(self).forward(self, x) if y is None else y


def _find_norm(module: nn.Module) -> Forward | None:
    if _is_like(module, LlamaRMSNorm, "forward"):
        return _llama_norm
    return _gemma_norm if _is_like(module, GemmaRMSNorm, "forward", "_norm") else None


# ---------------------------------------------------------------- gated MLPs

GATED: dict[type, Callable[[Tensor, Tensor], Tensor]] = {
    SiLUActivation: swiglu,
    nn.SiLU: swiglu,
    GELUTanh: geglu,
    GELUActivation: functools.partial(geglu, approximate="none"),
}


@unseen_by_function_modes
def _gated(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor | None:
    fits = gate.ndim and gate.shape == up.shape and gate.dtype == up.dtype and _takes(gate, up)
    return GATED[type(activation)](gate, up) if fits else None


def _mlp(self: Any, x: Tensor) -> Any:
    gate, up = self.gate_proj(x), self.up_proj(x)
    y = _gated(self.act_fn, gate, up)
    return self.down_proj(self.act_fn(gate) * up if y is None else y)


def _find_mlp(module: nn.Module) -> Forward | None:
    activation = getattr(module, "act_fn", None)
    known = _is_like(module, LlamaMLP, "forward") and type(activation) in GATED
    return _mlp if known and "forward" not in activation.__dict__ else None


FINDERS: dict[str, Callable[[nn.Module], Forward | None]] = {"norm": _find_norm, "mlp": _find_mlp}
