"""How much device code the shipped kernels are, helpers included: docs/notes/device_code.md says what is counted.

`python -m tests.test_device_code` writes the table of that page.
"""

import ast
import functools
import inspect
import io
import pathlib
import pkgutil
import re
import tokenize
from importlib import import_module

import pytest

import tritonkittens.lang as tk
from tritonkittens import kernels
from tritonkittens.lang.template.hook_table import hooks_of
from tritonkittens.launch import PlainKernel

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "notes" / "device_code.md"
DEVICE = {"triton.jit", "op", "tk.op"}  # decorators of functions that run on the device
STEPS = ("tritonkittens.kernels.gemm.device.epilogue", "Steps")
GIVEN = {"unaligned_product": [STEPS]}  # what a plain kernel calls without naming it: its caller gives it as a constant
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


class Module:
    """What a module of a family defines and imports from it, by name."""

    def __init__(self, name):
        self.source = inspect.getsource(import_module(name))
        self.family = ".".join(name.split(".")[:3])
        self.defined, self.imported = {}, {}
        for node in ast.parse(self.source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.defined[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.defined |= {x.id: node for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(self.family):
                self.imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}

    @functools.cached_property
    def code_lines(self):
        """Numbers of the lines that are neither blank nor comments nor docstrings."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        lines = {
            line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)
        }
        for node in ast.walk(ast.parse(self.source)):
            if (
                isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                and ast.get_docstring(node, clean=False) is not None
            ):
                lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        return lines


module = functools.cache(Module)


def reached(name, definition, found):
    """Adds to `found` what a definition refers to, itself included, as far as its family defines it: (module, name)."""
    if (name, definition) in found or definition not in (here := module(name)).defined:
        return found
    found.add((name, definition))
    for node in ast.walk(here.defined[definition]):
        if isinstance(node, ast.Name):
            reached(*here.imported.get(node.id, (name, node.id)), found)
    return found


def device_lines(name, definition):
    """Lines of the device functions in a definition: of it, or of a class's hooks and helpers."""
    node = module(name).defined[definition]
    functions = [
        f
        for f in ast.walk(node)
        if isinstance(f, ast.FunctionDef) and DEVICE & {ast.unparse(d) for d in f.decorator_list}
    ]
    lines = {line for f in functions for line in range(min(d.lineno for d in f.decorator_list), f.end_lineno + 1)}
    return len(lines & module(name).code_lines)


def subclasses(cls):
    return {cls, *(deeper for found in cls.__subclasses__() for deeper in subclasses(found))}


def is_whole(cls):
    """Has a template class every hook that it needs? Others are bases of several."""
    optional = {"finish"} if cls._stores else set()
    return all(
        hasattr(cls, hook.name)
        for hook in hooks_of(cls._stores).values()
        if hook.required and hook.name not in optional
    )


def shipped():
    """(module, name) of every template class and plain kernel."""
    names = [m.name for m in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".") if m.name.count(".") > 2]
    modules = [import_module(name) for name in names]
    templates = {cls for cls in subclasses(tk.lcf) if cls.__module__ in names and is_whole(cls)}
    plain = {
        (x.fn.fn.__module__, x.fn.__name__)
        for m in modules
        for x in vars(m).values()
        if isinstance(x, PlainKernel) and x.fn.fn.__module__ in names
    }
    return sorted({(cls.__module__, cls.__name__) for cls in templates} | plain)


def code_of(where, kernel):
    """All of its family that a kernel needs, (module, name) each."""
    found = set()
    for definition in ((where, kernel), *GIVEN.get(kernel, ())):
        reached(*definition, found)
    return found


def counts():
    """By kernel: (lines of its own hooks or of itself, all lines that it needs of its family)."""
    return {
        kernel: (device_lines(where, kernel), sum(device_lines(*x) for x in code_of(where, kernel)))
        for where, kernel in shipped()
    }


def table():
    return [
        "| kernel | its hooks | all device code |",
        "|---|---|---|",
        *(f"| `{name}` | {own} | {every} |" for name, (own, every) in counts().items()),
    ]


def test_the_page_states_how_much_device_code_each_kernel_is():
    stated = [line for line in PAGE.read_text().splitlines() if re.fullmatch(r"\| `\w+` \| \d+ \| \d+ \|", line)]
    assert stated == table()[2:], "python -m tests.test_device_code writes the table"


@pytest.mark.parametrize(
    "kernel, helper",
    [
        ("Gemm", "finish_tile"),
        ("Gemm", "silu"),
        ("Gemm", "_multiply"),
        ("BlockwiseGemm", "_store_subtiles"),
        ("unaligned_product", "multiply"),
        ("AttentionDecodePaged", "nothing_seen"),
    ],
)
def test_helpers_of_other_modules_count(kernel, helper):
    where = next(where for where, name in shipped() if name == kernel)
    assert helper in {name for _, name in code_of(where, kernel)}


def test_other_kernels_of_a_family_do_not_count():
    where = next(where for where, name in shipped() if name == "BlockwiseGemm")
    found = {name for _, name in code_of(where, "BlockwiseGemm")}
    assert not found & {"Gemm", "unaligned_product", "_load_a"}


def test_blank_lines_comments_and_docstrings_do_not_count(tmp_path, monkeypatch):
    lines = [
        "@triton.jit",
        "def f(x):",
        '    """What',
        '    it is."""',
        "",
        "    # why",
        "    y = (x +",
        "         1)  # more",
        "    return y",
    ]
    (tmp_path / "counted.py").write_text("\n".join(["import triton", "", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    assert device_lines("counted", "f") == 5


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"\| kernel \| its hooks \|.*\n(\|.*\n)+", "\n".join(table()) + "\n", page))
