"""Operations with side effects, by name: `f(role, op, *operand values) -> result`, a tuple where the operation has several results.

A function may be a generator: it yields a `Wait` to suspend its role until something has happened, or None to let others go first; what it returns is the
result. Operations without side effects are in `pure_operations`.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

EFFECTS: dict[str, Callable[..., Any]] = {}
VIEWS: dict[str, Callable[..., Any]] = {}  # of memory descriptors: no side effect, but they need the role


def effect(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what an operation does that others may see."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in EFFECTS, name
            EFFECTS[name] = fn
        return fn

    return register


def view(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operation that nobody else sees."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in VIEWS, name
            VIEWS[name] = fn
        return fn

    return register
