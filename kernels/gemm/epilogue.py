"""`Epilogue`, which users make of a `@triton.jit` function, and the steps that the arguments of a `gemm` call are."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.device.epilogue import Operand, Step, Steps

PREFIX = "epilogue."  # of the names of a user's operands, which may be called like gemm's own


@dataclass(frozen=True)
class Function:
    """What the plan of a call depends on of an `Epilogue`, all but its tensors: `key` says it all."""

    key: str
    tensors: tuple[str, ...] = field(compare=False)
    values: dict[str, Any] = field(compare=False)
    function: JITFunction = field(compare=False)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the run time by the names that the kernel has for them."""
        return {PREFIX + name: value for name, value in self.values.items() if not _is_constant(self.function, name)}

    def step(self, tensors: dict[str, Operand]) -> Step:
        """The function as a step, whose tensors are these by their names with the prefix."""

        def operand(name: str) -> Operand:
            if name not in self.values:
                return tensors[PREFIX + name]
            return (
                Operand(name, "constant", constant=self.values[name])
                if _is_constant(self.function, name)
                else Operand(PREFIX + name, "number")
            )

        return Step(self.function, tuple(operand(name) for name in self.function.arg_names[1:]))


class Epilogue:
    """A user's function as an epilogue of `gemm`.

        @triton.jit
        def scaled(acc, scale, alpha):
            return tk.gelu(acc * scale) * alpha

        y = gemm(a, b, epilogue=Epilogue(scaled, scale=scale, alpha=2.0))

    function: a `@triton.jit` function of a piece of the sums, (rows, cols) in fp32, and of operands by name. It returns
    (rows, cols) in fp32, and is compiled into the kernel. It works element by element: a piece is some rows and columns
    of the result, as the configuration chooses, so a reduction over a row is not possible.
    operands: a tensor or a number for every other parameter without a default. A tensor (bf16, fp16, fp32, or the
    result's dtype) broadcasts to the result (…, M, N) as in torch: one number, (N,), (1, N), (M, 1) or the result's
    shape. The function sees it in fp32. A number is an fp32 argument of the kernel; for a parameter annotated
    `tl.constexpr` any hashable value is compiled in.

    Raises TypeError for what is no `@triton.jit` function, and for operands that do not fit its parameters.
    """

    def __init__(self, function: Any, /, **operands: Any):
        if not isinstance(function, JITFunction):
            name = getattr(function, "__name__", repr(function))
            raise TypeError(f"Epilogue({name}): must be a @triton.jit function of a tile of sums and its operands")
        given = _bound(function, operands)
        for name, value in given.items():
            _check(function, name, value)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        values = {
            name: value if _is_constant(function, name) else float(value)
            for name, value in given.items()
            if name not in tensors
        }
        self.tensors = tuple(tensors.values())
        self.function = Function(f"{function.cache_key} {tuple(tensors)} {values}", tuple(tensors), values, function)

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
        raise TypeError(
            f"Epilogue({', '.join([function.__name__, *(f'{name}=…' for name in operands)])}): {error}; it is {shown}"
        ) from None
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


def steps_of(
    operands: tuple[Tensor | None, ...],
    places: dict[str, str],
    applied: Applied,
    out: torch.dtype,
    epilogue: bool = True,
) -> Steps:
    """The steps of a call whose operands lie in C as `places` says.

    epilogue: does the kernel stage results? It stages the residual, or else a user's first tile of the result's dtype.
    """
    present = {
        name: x
        for name, x in zip(names_of(applied), operands, strict=True)
        if x is not None and places[name] not in ("block", "micro")
    }
    given = {name: Operand(name, places[name], tk.from_torch(x.dtype).name) for name, x in present.items()}
    staged = None
    if epilogue:
        tiles = ("residual", *(name for name in given if name.startswith(PREFIX)))
        staged = next(
            (name for name in tiles if given.get(name) == Operand(name, "tile", tk.from_torch(out).name)), None
        )
    if staged is not None:
        given[staged] = Operand(staged, "staged", given[staged].dtype)
    activation = applied.step(given) if isinstance(applied, Function) else applied
    # The kernel of ordinary loads takes exact forms, but for the GELU by erf
    fast = tk.from_torch(out) if epilogue or activation == "gelu" else tk.fp32
    return Steps.built_in(
        activation=activation, fast=fast, **{name: x for name, x in given.items() if name in BUILT_IN}
    )
