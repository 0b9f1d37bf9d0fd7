"""What an extension of a template is: a mixin class that adds hooks, layout fields, shared memory, warps, and code at
points of the roles' loops.

    class MyKernel(tk.ReduceStoreWarp, tk.lcf): …

A kernel may define an extension of its own. It has hooks, points, warps and shared memory; new fields of `tk.layout`
are the library's alone:

    @triton.jit
    def count(carried, ctx, memory, CONSUMER: tl.constexpr, turn):
        tl.atomic_add(ctx.globals.counter.pointer, turn)

    class CountedTasks(tk.Extension):
        points = dict(consumer_ends=count)

The roles call a fixed list of points (`POINTS`) and name no extension. A template without extensions has no code there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tritonkittens.lang.core.backend import Trace, Traced, op
from tritonkittens.lang.core.configuration import Configuration
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import struct
from tritonkittens.lang.template.hook_table import Hook

# Points by role: what an extension's function gets there, and what it returns. `ctx` is the context that hooks get, `T`
# the template, `A` the run-time arguments, `memory` what `storage.py` makes, `turn` how many tasks the role has done,
# `tile` the work tile, `phases` the phase bits of the input ring. `CONSUMER` is the number of the consumer in its block
# (`ctx.consumer`: among those that share its task)
POINTS: dict[str, str] = {
    # consumer
    "consumer_begins": "(ctx, A, T) → what is carried from task to task",
    "task_begins": "(carried, ctx, memory, CONSUMER, turn) → what is constant during a task",
    "consumer_iteration": "(ctx, memory, phases) → the context of an iteration, or of compute_last",
    "iteration_ends": "(constant, ctx, memory, i): after the hook of iteration i of a pipelined computation",
    "task_ends": "(carried, ctx, ended, state, memory, CONSUMER, turn, tile) → carried: instead of hook finish; ended: "
    "the task's context",
    "epilogue_begins": "(ctx, memory, phases): before results are staged over tiles that the task used",
    "consumer_ends": "(carried, ctx, memory, CONSUMER, turn)",
    # before the roles begin
    "block_begins": "(ctx, tile, memory, T): before the barriers are made",
    "early_loads_begin": "(): before the loads that precede the roles",
    # producer; PART is 0, or 1 in a producer of lagged tiles
    "producer_task_begins": "(ctx, memory, turn, PART, T)",
    "producer_iteration_begins": "(i, T)",
    "producer_iteration": "(ctx, memory, i, PART, T) → the context of iteration i",
    "producer_iteration_ends": "(ctx, memory, i, PART, T)",
}


class Extension:
    """Base of the extensions. The methods get the template `T`; what they return adds to what the core has."""

    added_hooks: ClassVar[tuple[Hook, ...]] = ()
    # hooks of the core that a template with this extension does not need
    replaced_hooks: ClassVar[tuple[str, ...]] = ()
    added_fields: ClassVar[tuple[str, ...]] = ()  # fields of `tk.layout`
    # must a layout have one of them? Otherwise the extension is active where it has
    needs_fields: ClassVar[bool] = True
    # fields of the bill (`core/resources.py`) that are counted in the compute hooks, for `check_hook`
    counters: ClassVar[tuple[str, ...]] = ()
    points: ClassVar[dict[str, Callable[..., Any]]] = {}
    role_warps: ClassVar[int] = 1  # of each of `added_warps`

    def __init_subclass__(cls) -> None:
        for name in cls.points:
            if name not in POINTS:
                raise TileError(f"{cls.__name__}.points[{name!r}]: no such point; points are {', '.join(POINTS)}")

    @staticmethod
    def check_template(T: Any) -> None:
        """Raise `TileError` for knobs, hooks or a layout that do not go together."""

    @staticmethod
    def check_hook(T: Any, what: str, counts: dict[str, int]) -> None:
        """Raise `TileError` where compute hook `what` does not call the extension's operations as often as it must."""

    @staticmethod
    def added_memory(t: Trace, T: Traced) -> dict[str, Traced]:
        """Tiles and pipelines in shared memory, by name."""
        return {}

    @staticmethod
    def added_warps(T: Any) -> list[tuple[Any, int]]:
        """Roles of `role_warps` warps each: (`@triton.jit` function, its number)."""
        return []

    @staticmethod
    def role_registers(arch: int) -> int:
        """Registers that a thread of `added_warps` needs; 0 where those of a producer are enough."""
        return 0

    @staticmethod
    def explained_lines(T: Any, arch: int) -> list[str]:
        """Lines of `explain()`."""
        return []


def extensions_of(cls: type) -> tuple[type[Extension], ...]:
    """The extensions that a template's class derives from; of one that derives from another only the former."""
    found = [
        c for c in cls.__mro__ if issubclass(c, Extension) and c is not Extension and not issubclass(c, Configuration)
    ]
    return tuple(c for c in found if not any(c in other.__mro__[1:] for other in found))


def _functions(T: Any, point: Any) -> list[tuple[str, Any]]:
    name = unwrap(point)
    return [(e.__name__, e.points[name]) for e in unwrap(T).extensions if name in e.points]


@op
def values_at(t: Trace, T: Traced, point: Traced, *args: Traced) -> Traced:
    """Call a point of every extension: a record of what each returns."""
    return struct(**{name: t.call(function, *args) for name, function in _functions(T, point)})


@op
def values_from(t: Trace, T: Traced, point: Traced, values: Traced, *args: Traced) -> Traced:
    """The same, where each gets its own of these values, and keeps it where it has no such point."""
    changed = {name: t.call(function, values.fields.get(name), *args) for name, function in _functions(T, point)}
    return struct(**(values.fields | changed))


@op
def at(t: Trace, T: Traced, point: Traced, *args: Traced) -> Traced:
    """Call a point of every extension."""
    for _, function in _functions(T, point):
        t.call(function, *args)


@op
def at_with(t: Trace, T: Traced, point: Traced, values: Traced, *args: Traced) -> Traced:
    """The same, where each gets its own of these values."""
    for name, function in _functions(T, point):
        t.call(function, values.fields.get(name), *args)


@op
def context_at(t: Trace, T: Traced, point: Traced, ctx: Traced, *args: Traced) -> Traced:
    """A context, after a point of every extension has added to it."""
    for _, function in _functions(T, point):
        ctx = t.call(function, ctx, *args)
    return ctx
