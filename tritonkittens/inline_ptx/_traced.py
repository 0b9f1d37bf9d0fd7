"""Names for values that exist only while a kernel is traced."""

from typing import Any, TypeAlias

Traced: TypeAlias = Any
"""A value of the traced program, as trace-time Python code holds it: a tensor, a tile, a descriptor, a `tl.constexpr`,
or the plain number or dtype that is one. Which of these it is depends on the kernel, so a type checker cannot know. A
value of the host has its own type instead."""

Semantic: TypeAlias = Any
"""Triton's code generator at the place of a call. Triton fills in the parameter `_semantic`; it is None in Triton's
interpreter and outside a kernel."""
