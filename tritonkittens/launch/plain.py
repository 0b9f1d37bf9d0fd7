"""Plain `@triton.jit` kernels on this library's launch path, which takes a third of the host time of Triton's own
(measured: docs/notes/launch.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from .arguments import Args, Types, signature_of
from .device import capability
from .launcher import Launcher

# Triton specialises integers that are multiples of 16: such a row length is a multiple of any vector access
MULTIPLE = 16
ONE, A_MULTIPLE, ANY = "one", "multiple", "any"  # specialisations of an argument that is no constant


class Specialization:
    """The part of the compile key besides the types of arguments.

    It holds compiled-in values by parameter, parameters that are multiples of a number, and Triton's options.
    Compiled kernels are found by its identity, so `specialization` returns one object for equal values.
    """

    def __init__(
        self,
        constants: tuple[tuple[str, Any], ...],
        multiples: tuple[tuple[str, int], ...],
        options: tuple[tuple[str, Any], ...],
    ):
        self.constants, self.multiples, self.options = dict(constants), dict(multiples), dict(options)


specialization = functools.lru_cache(maxsize=None)(Specialization)


class PlainKernel:
    """A `@triton.jit` kernel; `kernel[grid](*args)` launches it as Triton does.

    Numbers are specialised as in Triton: 1 is compiled in, and a multiple of 16 is known as one. Numbers in tuples
    are not specialised. Arguments are positional: tensors, numbers, None, tuples of these, and any hashable value for
    a `tl.constexpr`.
    `options` are Triton's (num_warps, num_stages, launch_pdl …). With TRITON_INTERPRET=1, Triton's own launch runs.
    """

    def __init__(self, fn: Any, **options: Any):
        self.fn, self.options = fn, {"num_warps": 4, "enable_fp_fusion": True, **options}
        self.variants: dict[tuple[tuple[str, Any], ...], PlainKernel] = {}
        functools.update_wrapper(self, fn.fn, updated=())  # type: ignore[arg-type]
        if isinstance(fn, JITFunction):
            self.names = fn.arg_names
            self._is_constant = [p.is_constexpr for p in fn.params]
            self.runtime = [name for name, constant in zip(self.names, self._is_constant, strict=True) if not constant]
            self.launcher = Launcher(
                self._compile_for_launch, name=fn.__name__, described=lambda key: (fn.__name__, self._names(key))
            )
            self._found: dict[tuple[Any, ...], Specialization] = {}

    def _names(self, key: Specialization) -> list[str]:
        """Return the parameters that are not compiled in."""
        return [name for name in self.runtime if name not in key.constants]

    def with_options(self, **options: Any) -> PlainKernel:
        """Return the kernel with other options of Triton, one object for equal ones."""
        key = tuple(sorted(options.items()))
        if key not in self.variants:
            self.variants[key] = PlainKernel(self.fn, **{**self.options, **options})
        return self.variants[key]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self.launch, grid) if isinstance(self.fn, JITFunction) else self.fn[grid]

    def launch(self, grid: Any, *args: Any) -> None:
        """Launch on the current stream of the tensors' device.

        Raises TypeError for a wrong number of arguments, and the errors of a `Launcher`.
        """
        runtime, key = self._specialized(args)
        self.launcher(grid, runtime, key)

    def bind(self, grid: Any, *args: Any) -> Callable[..., None]:
        """Return `launch` with these numbers and constants as a function of the tensors alone, which precede them;
        see `Launcher.bind`.
        """
        tensors = next((i for i, x in enumerate(args) if not isinstance(x, torch.Tensor)), len(args))
        if not isinstance(self.fn, JITFunction):
            interpreted, rest = self.fn[grid], args[tensors:]
            return lambda *given: interpreted(*given, *rest)
        runtime, key = self._specialized(args)
        launcher, numbers = self.launcher, runtime[tensors:]
        return launcher.bind(
            grid, runtime, key, tuple(range(tensors)), lambda *given: launcher(grid, given + numbers, key)
        )

    def _specialized(self, args: Args) -> tuple[Args, Specialization]:
        """Return (arguments that the code does not contain, the specialisation)."""
        if len(args) != len(self._is_constant):
            raise TypeError(
                f"{self.fn.__name__}: {len(args)} arguments; it takes {len(self._is_constant)} "
                f"({', '.join(self.names)})"
            )
        runtime: list[Any] = []
        kinds: list[Any] = []
        for value, constant in zip(args, self._is_constant, strict=True):
            if constant:
                kinds.append((value.__class__, value))  # True is not 1, nor is 1.0
            elif value.__class__ is int and value == 1:
                kinds.append(ONE)
            else:
                runtime.append(value)
                kinds.append(A_MULTIPLE if value.__class__ is int and value % MULTIPLE == 0 else ANY)
        key = self._found.get(found := tuple(kinds))
        if key is None:
            key = self._found[found] = self._specialization(found)
        return tuple(runtime), key

    def _specialization(self, kinds: tuple[Any, ...]) -> Specialization:
        constants, multiples = [], []
        for name, kind in zip(self.names, kinds, strict=True):
            if isinstance(kind, tuple):
                constants.append((name, kind[1].value if isinstance(kind[1], constexpr) else kind[1]))
            elif kind is ONE:
                constants.append((name, 1))
            elif kind is A_MULTIPLE:
                multiples.append((name, MULTIPLE))
        return Specialization(tuple(constants), tuple(multiples), tuple(self.options.items()))

    def _compile_for_launch(self, key: Any, types: Types, device: int) -> Any:
        major, minor = capability(device)
        return self.compile(key, types, 10 * major + minor)

    def compile(self, key: Specialization, types: Types, arch: int) -> Any:
        """Compile for an architecture and argument types. Returns Triton's CompiledKernel.

        `arch` is the compute capability as an integer (90). `types` leaves out the values that `key` compiles in.
        """
        place = {name: i for i, name in enumerate(self.names)}
        signature: dict[str, Any] = dict.fromkeys(self.names, "constexpr")
        constexprs: dict[tuple[int, ...], Any] = {(place[name],): value for name, value in key.constants.items()}
        attributes: dict[tuple[int, ...], Any] = {
            (place[name],): [["tt.divisibility", n]] for name, n in key.multiples.items()
        }

        for name, kind in zip(self._names(key), types, strict=True):
            signature[name] = signature_of(kind, (place[name],), attributes, constexprs)
        return triton.compile(
            ASTSource(self.fn, signature, constexprs, attributes),
            target=GPUTarget("cuda", arch, 32),
            options=key.options,
        )


def plain_kernel(fn: Any = None, **options: Any) -> Any:
    """Launch a `@triton.jit` function `fn` by this library's path: `@plain_kernel` or
    `@plain_kernel(launch_pdl=True)` over `@triton.jit`.

    Returns a `PlainKernel`; the options are Triton's.
    """
    return functools.partial(plain_kernel, **options) if fn is None else PlainKernel(fn, **options)
