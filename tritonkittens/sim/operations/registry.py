"""Operations with side effects, by name: `f(role, op, *operand values) -> result`, a tuple for several results.

A function may be a generator. It yields a `Wait` to suspend its role, or None to let others run first; its return
value is the result. Operations without side effects are in `pure_operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EFFECTS: dict[str, Callable[..., Any]] = {}
VIEWS: dict[str, Callable[..., Any]] = {}  # operations on memory descriptors: no side effect, but they need the role


def effect(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operation with effects visible to others."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in EFFECTS, name
            EFFECTS[name] = fn
        return fn

    return register


def view(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operation without visible effects."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in VIEWS, name
            VIEWS[name] = fn
        return fn

    return register
