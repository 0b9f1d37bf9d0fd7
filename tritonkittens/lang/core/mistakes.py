"""One error that quotes the user's line, in place of the compiler's chain of exceptions."""

from __future__ import annotations

import ast
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.jit import JITFunction

from tritonkittens.lang.core.errors import RULES, KernelAssertionError, KernelError, TileError

PACKAGE = Path(__file__).parents[2]
HINTS = {  # what Triton says, and what helps
    "Layout mismatch in broadcast": "these tiles have different layouts, and Python's operators take those of one; "
    "tk.add, tk.mul and others convert their second operand to the layout of the first"
}
_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (Path(triton.__file__).parent, PACKAGE / "lang", PACKAGE / "inline_ptx", PACKAGE / "launch")
)


def plain_error(error: BaseException) -> BaseException:
    """Return the error to raise where tracing a kernel raised `error`.

    A broken rule keeps its class. Other exceptions become a `KernelError`, with the original as `__cause__`. Both
    name the innermost line of the kernel that is neither the library's nor Triton's.
    """
    original = error
    for cause in _chain(error):
        original = cause
        if not isinstance(cause, CompilationError):
            break
    broken_by = original.function if isinstance(original, TileError) else None
    where = _where(error) if broken_by is None else _line_of(broken_by, 1)
    if isinstance(original, RULES):
        plain: BaseException = type(original)(f"{original}{where}")
        plain.__suppress_context__ = True
        return plain
    if isinstance(original, CompilationError):
        failed = isinstance(original, CompileTimeAssertionFailure)
        said = (
            f"static_assert failed: {original.error_message}".removesuffix(": ") if failed else original.error_message
        )
        plain = (KernelAssertionError if failed else KernelError)(f"{said}{where}")
    else:
        said = f"{type(original).__name__}: {str(original) or _failed_line(original)}"
        plain = KernelError(f"{next((hint for text, hint in HINTS.items() if text in said), said)}{where}")
    for cause in _chain(original):
        cause.__traceback__ = _of_the_user(cause.__traceback__)
    plain.__cause__ = original
    return plain


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file == ast.__file__


def _of_the_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of the library, of Triton and of Python's `ast`."""
    if trace is None:
        return None
    rest = _of_the_user(trace.tb_next)
    return (
        rest
        if _is_library(trace.tb_frame.f_code.co_filename)
        else types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    )


def _visited(error: BaseException) -> Iterator[tuple[JITFunction, int]]:
    """Return the code generator's lines in jit functions, from the outermost call to the innermost: function, and
    line in its source from 1.
    """
    for cause in _chain(error):
        trace = cause.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is CodeGenerator.visit.__code__:
                function, node = trace.tb_frame.f_locals["self"].jit_fn, trace.tb_frame.f_locals["node"]
                if function is not None and hasattr(node, "lineno"):
                    yield function, node.lineno
            trace = trace.tb_next


def _failed_line(error: BaseException) -> str:
    """The source line that raised an exception without a message, such as a bare assertion of Triton's."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} fails in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _where(error: BaseException) -> str:
    """Return " [in NAME: LINE, FILE:NUMBER]" for the user's innermost line, or the library's where there is no
    other."""
    visited = list(_visited(error))
    outside = [(function, number) for function, number in visited if not _is_library(function.file_name)]
    if not visited:
        return ""
    return _line_of(*(outside or visited)[-1])


def _line_of(function: JITFunction, number: int) -> str:
    """Return " [in NAME: LINE, FILE:NUMBER]" for a line of a function's source, from 1."""
    lines = function.src.split("\n")
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f" [in {function.__name__}: {line}, {function.file_name}:{function.def_file_line_number + number - 1}]"
