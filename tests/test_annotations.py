"""Host code is annotated. mypy is strict, but it cannot tell functions under `@triton.jit`, which have no annotations,
from the host's: these tests can."""

import ast
import pathlib
from collections.abc import Iterator

import tritonkittens

PACKAGE = pathlib.Path(tritonkittens.__file__).parent
BENCH = pathlib.Path(__file__).parents[1] / "bench"
FILES = sorted(path for folder in (PACKAGE, PACKAGE / "kernels", BENCH) for path in folder.rglob("*.py"))


def host_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions that Python runs, those inside them too: not what is under `@triton.jit` or `@gluon.jit`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            if any(ast.unparse(decorator).endswith(".jit") for decorator in child.decorator_list):
                continue
            yield child
        yield from host_functions(child)


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def test_every_host_function_has_annotations():
    bare = []
    for path in FILES:
        for function in host_functions(ast.parse(path.read_text())):
            of = [p for p in parameters(function) if p.arg not in ("self", "cls")]
            if any(p.annotation is None for p in of) or (function.returns is None and function.name != "__init__"):
                bare.append(f"{path}:{function.lineno}: {function.name}")
    assert not bare


def test_values_of_the_traced_program_are_called_traced():
    """A function of the tracer (its first parameter is a `Trace`) names no `Any`."""
    unnamed = []
    for path in FILES:
        for function in host_functions(ast.parse(path.read_text())):
            types = [p.annotation for p in parameters(function) if p.annotation] + [
                function.returns or ast.Constant(None)
            ]
            if ast.unparse(types[0]) == "Trace" and any(
                isinstance(n, ast.Name) and n.id == "Any" for t in types for n in ast.walk(t)
            ):
                unnamed.append(f"{path}:{function.lineno}: {function.name}")
    assert not unnamed
