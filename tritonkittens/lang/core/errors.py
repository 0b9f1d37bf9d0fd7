"""Errors of the language. Each is one message that quotes the input and states the rule."""

from typing import Any, Self

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources

from tritonkittens.arch import ArchitectureError
from tritonkittens.inline_ptx._asm import OperandError

__all__ = [
    "REFUSALS",
    "RULES",
    "ArchitectureError",
    "BudgetError",
    "KernelAssertionError",
    "KernelError",
    "OperandError",
    "TileError",
]


class TileError(ValueError):
    """A tile, an operation or a template breaks a rule of the language or of the hardware."""

    function: Any = None  # the `@triton.jit` function that breaks the rule, where that is seen after its call

    def of(self, function: Any) -> Self:
        """Name the `@triton.jit` function that breaks the rule: the message then points to it."""
        self.function = function
        return self


class BudgetError(TileError, OutOfResources):
    """A kernel exceeds the shared memory, tensor memory or registers of a CTA. `triton.autotune` skips
    configurations that raise it.
    """

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class KernelError(CompilationError):
    """A kernel or a hook has a mistake of Python or Triton (an unknown name, layouts that differ).

    The message quotes the kernel's line; `__cause__` is the original exception.
    """

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.src, self.node, self.error_message, self.message = None, None, message, message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)


class KernelAssertionError(KernelError, CompileTimeAssertionFailure):
    """A `tl.static_assert` of a kernel or a hook fails."""


RULES = (TileError, ArchitectureError, OperandError)
REFUSALS = (*RULES, KernelError)  # their messages are complete; tracebacks omit the library's frames
