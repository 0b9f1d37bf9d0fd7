"""Epilogues of `gemm`: `Epilogue`, which users make of a `@triton.jit` function, and the steps of a kernel that a call's arguments are."""
from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.epilogue import Operand, Step, Steps, built_in

PREFIX = "epilogue."  # of the names of a user's operands, which may be called like gemm's own


@dataclass(frozen=True)
class Function:
    """What the plan of a call depends on of an `Epilogue`: all but its tensors."""

    key: str
    tensors: tuple[str, ...]
    values: tuple[tuple[str, Any], ...]
    function: JITFunction = field(compare=False)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the run time by the names that the kernel has for them."""
        return {PREFIX + name: value for name, value in self.values if not _is_constant(self.function, name)}

    def step(self, tensors: dict[str, Operand]) -> Step:
        """The function as a step, whose tensors are these by their names with the prefix."""
        values = dict(self.values)

        def operand(name: str) -> Operand:
            if name not in values:
                return tensors[PREFIX + name]
            return Operand(name, "constant", constant=values[name]) if _is_constant(self.function, name) else Operand(PREFIX + name, "number")

        return Step(self.function, tuple(operand(name) for name in self.function.arg_names[1:]))


class Epilogue:
    """A user's function as an epilogue of `gemm`: `Epilogue(scaled, scale=scale, alpha=2.0)` for a function `scaled(acc, scale, alpha)`.

    function: a `@triton.jit` function of one thread block's piece of the sums, (rows, cols) in fp32, and of operands by name; it returns (rows, cols) in fp32,
    which is rounded to the result's type. It is compiled into the kernel. `tl` and `tk` operations on registers are at its disposal.
    operands: for every parameter behind the first that has no default a tensor or a number. A tensor (bf16, fp16, fp32, or the result's type) broadcasts to the
    result (…, M, N) as in torch: one number, (N,), (1, N), (M, 1) or the result's shape. The function sees fp32 scalars or (rows, cols). A number is an argument
    of the run time, fp32; that of a parameter annotated `tl.constexpr`, any hashable value, is compiled in.

    Raises TypeError for what is no `@triton.jit` function, and operands that do not fit its parameters.

        @triton.jit
        def scaled(acc, scale, alpha):
            return tk.gelu(acc * scale) * alpha

        y = gemm(a, b, epilogue=Epilogue(scaled, scale=scale, alpha=2.0))
    """

    def __init__(self, function: Any, /, **operands: Any):
        if not isinstance(function, JITFunction):
            raise TypeError(f"Epilogue({getattr(function, '__name__', repr(function))}): must be a @triton.jit function of a tile of sums and its operands")
        given = _bound(function, operands)
        for name, value in given.items():
            _check(function, name, value)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        values = tuple((name, value if _is_constant(function, name) else float(value)) for name, value in given.items() if name not in tensors)
        self.tensors = tuple(tensors.values())
        self.function = Function(function.cache_key, tuple(tensors), values, function)

    def __repr__(self) -> str:
        return f"Epilogue({self.function.function.__name__})"


def _is_constant(function: JITFunction, name: str) -> bool:
    return function.params[function.arg_names.index(name)].is_constexpr


def _bound(function: JITFunction, operands: dict[str, Any]) -> dict[str, Any]:
    """The operands by parameter, in their order, with defaults."""
    taken, *parameters = function.signature.parameters.values() or [None]
    shown = f"{function.__name__}({', '.join(function.arg_names)})"
    if taken is None or taken.name in operands:
        raise TypeError(f"Epilogue({function.__name__}): {shown} must take the sums first, which are no operand")
    named = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])
    try:
        bound = named.bind(**operands)
    except TypeError as error:
        raise TypeError(f"Epilogue({', '.join([function.__name__, *(f'{name}=…' for name in operands)])}): {error}; it is {shown}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _check(function: JITFunction, name: str, value: Any) -> None:
    said = f"Epilogue({function.__name__}, {name}={type(value).__name__})"
    if _is_constant(function, name):
        if isinstance(value, Tensor) or getattr(value, "__hash__", None) is None:
            raise TypeError(f"{said}: {name} is a tl.constexpr of {function.__name__}; give a hashable value")
    elif not isinstance(value, (Tensor, int, float)):
        raise TypeError(f"{said}: must be a tensor or a number")


# ---------------------------------------------------------------- the steps of a call

Applied = str | Function | None  # what stands behind the bias: a built-in activation by name, or a user's function
BUILT_IN = ("bias", "gate", "residual", "scale_a", "scale_b")


def names_of(applied: Applied) -> tuple[str, ...]:
    """Names of the operands of a call, in its order."""
    return (*BUILT_IN, *(PREFIX + name for name in applied.tensors)) if isinstance(applied, Function) else BUILT_IN


def steps_of(operands: tuple[Tensor | None, ...], places: dict[str, str], applied: Applied, out: torch.dtype, staging: bool = True) -> Steps:
    """The steps of a call whose operands lie in C as `places` says. `staging`: is the residual staged, or without one the first of a user's tiles that is of
    the result's type?"""
    present = {name: x for name, x in zip(names_of(applied), operands, strict=True) if x is not None and places[name] != "block"}
    given = {name: Operand(name, places[name], tk.from_torch(x.dtype).name) for name, x in present.items()}
    staged = None
    if staging:
        tiles = ("residual", *(name for name in given if name.startswith(PREFIX)))
        staged = next((name for name in tiles if given.get(name) == Operand(name, "tile", tk.from_torch(out).name)), None)
    if staged is not None:
        given[staged] = Operand(staged, "staged", given[staged].dtype)
    activation = applied.step(given) if isinstance(applied, Function) else applied
    # By ordinary loads only the exact GELU is as short as its result allows
    fast = tk.from_torch(out) if staging or activation == "gelu" else tk.fp32
    return built_in(activation=activation, fast=fast, **{name: x for name, x in given.items() if name in BUILT_IN})
