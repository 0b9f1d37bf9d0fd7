"""A directive that generates reference pages from the library.

`public-names` documents a package's public names, a group for each module that defines some:

    .. public-names:: tritonkittens.lang
       :below: tritonkittens.lang.register

A name is public where `__all__` has it, or in a module without `__all__` where it is defined there without a leading
underscore. `below` keeps those that are defined in a package or a module of it, `jit` the `@triton.jit` functions.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, ClassVar

import triton
from docstrings import convert, shortened
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective


def public_names(package: str, below: str, jit: bool = False) -> dict[str, list[str]]:
    """Names of `package` by the module that defines them, modules and names in alphabetical order."""
    module = importlib.import_module(package)
    groups: dict[str, list[str]] = {}
    for name in getattr(module, "__all__", None) or sorted(vars(module)):
        subject = getattr(module, name)
        origin = getattr(subject, "__module__", "") or ""
        wanted = isinstance(subject, triton.JITFunction) if jit else callable(subject)
        if not name.startswith("_") and wanted and (origin == below or origin.startswith(below + ".")):
            groups.setdefault(origin, []).append(name)
    return {origin: sorted(groups[origin], key=str.lower) for origin in sorted(groups)}


def entry(package: str, name: str) -> list[str]:
    """The reStructuredText that documents a name."""
    subject = getattr(importlib.import_module(package), name)
    if isinstance(subject, triton.JITFunction):  # no function to autodoc
        text = convert(inspect.cleandoc(subject.fn.__doc__ or "").splitlines())
        signature = shortened(str(inspect.signature(subject.fn)))
        return [
            f".. py:function:: {name}{signature}",
            f"   :module: {package}",
            "",
            *(f"   {line}" for line in text),
            "",
        ]
    if inspect.isclass(subject):
        members = [] if issubclass(subject, BaseException) else ["   :members:", "   :exclude-members: extra_repr"]
        return [f".. autoclass:: {package}.{name}", *members, ""]
    return [f".. autofunction:: {package}.{name}", ""]


class PublicNames(SphinxDirective):
    """The reference of a package."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"below": directives.unchanged, "jit": directives.flag}

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        below = self.options.get("below", package)
        groups = public_names(package, below, "jit" in self.options)
        if not groups:
            raise self.error(f"{package} has no public names below {below}")
        text: list[str] = []
        for origin, names in groups.items():
            if len(groups) > 1:
                text += [f".. rubric:: {origin.removeprefix(below).lstrip('.') or below}", ""]
            for name in names:
                text += entry(package, name)
        return self.parse_text_to_nodes("\n".join(text))


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("public-names", PublicNames)
    return {"version": "1", "parallel_read_safe": True}
