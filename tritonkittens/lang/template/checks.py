"""What a template's knobs and layout must satisfy, checked when it is constructed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tritonkittens.lang.core.backend import JITFunction
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.kernel import CLUSTER_SIZES
from tritonkittens.lang.schedule.raster import Order
from tritonkittens.lang.schedule.tile_scheduler import Schedule
from tritonkittens.lang.template.dependencies import OVERLAP
from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.extensions import EXTENSIONS
from tritonkittens.lang.template.hook_table import hooks_of
from tritonkittens.lang.template.layout import layout

if TYPE_CHECKING:
    from tritonkittens.lang.template.template import lcf

MAX_CONSUMERS = 4
LANGUAGE = "tritonkittens.lang"


def error_of(T: lcf, message: str) -> TileError:
    """The error of a template: its name and the message."""
    return TileError(f"{type(T).__name__}{message if message.startswith(('(', '.')) else ': ' + message}")


def check_knobs(T: lcf) -> None:
    """Raise `TileError` for knobs that no template has, or that do not go together."""
    if not isinstance(T.consumers, int) or not 1 <= T.consumers <= MAX_CONSUMERS:
        raise error_of(T, f"(consumers={T.consumers!r}): must be 1 to {MAX_CONSUMERS} warpgroups")
    if not isinstance(T.blocks_per_sm, int) or T.blocks_per_sm < 1:
        raise error_of(T, f"(blocks_per_sm={T.blocks_per_sm!r}): must be at least 1")
    if T.cluster not in CLUSTER_SIZES[:-1]:
        raise error_of(T, f"(cluster={T.cluster!r}): must be one of {', '.join(map(str, CLUSTER_SIZES[:-1]))} blocks")
    if not isinstance(T.lagged_producer, bool) or (T.lagged_producer and T.cluster > 1):
        raise error_of(
            T,
            f"(lagged_producer={T.lagged_producer!r}, cluster={T.cluster}): must be False, or True where blocks load "
            "alone",
        )
    if T.launch_pdl not in (False, True, OVERLAP):
        raise error_of(T, f"(launch_pdl={T.launch_pdl!r}): must be False, True or {OVERLAP!r}")
    if T.launch_pdl == OVERLAP and (T.schedule.counters or T.schedule.splits):
        raise error_of(
            T,
            f"(launch_pdl={OVERLAP!r}, schedule={T.schedule!r}): kernels of a stream share the counters of this "
            "schedule, so they run one after the other; launch_pdl=True waits first",
        )
    for name, kind in (("schedule", Schedule), ("order", Order)):
        if not isinstance(getattr(T, name), kind):
            raise error_of(T, f"({name}={getattr(T, name)!r}): must be a tk.{kind.__name__}")
    if conflict := T.schedule.conflict(T.cluster, T.pingpong):
        raise error_of(T, f"(schedule={T.schedule!r}, cluster={T.cluster}, pingpong={T.pingpong}): {conflict}")
    if T.one_tile_per_block and (T.pingpong or not T.schedule.may_have_one_tile_per_block):
        raise error_of(
            T,
            f"(one_tile_per_block=True, schedule={T.schedule!r}, pingpong={T.pingpong}): a block with one work tile "
            "neither fetches it nor enters a task in the middle, and its consumers share it; that needs another "
            "schedule and pingpong=False",
        )
    if T.staggered_epilogue and T.warp_scheduler_barrier:
        raise error_of(
            T, "(staggered_epilogue=True, warp_scheduler_barrier=True): consumers that take turns end together"
        )
    if T.pingpong and T.warp_scheduler_barrier:
        raise error_of(
            T, "(pingpong=True, warp_scheduler_barrier=True): consumers with tasks of their own take no turns"
        )


def check_layout(T: lcf, extensions: tuple[type[Extension], ...]) -> None:
    """Raise `TileError` for a layout without the hooks that it needs, or that does not go with the knobs. `extensions`:
    those that the class derives from."""
    plan = T._plan
    if not isinstance(plan, layout):
        raise error_of(T, f".layout must return tk.layout(…), got {plan!r}")
    _check_extension_fields(T, plan, extensions)
    _check_hooks(T, plan, extensions)
    if T.lagged_producer and not plan.lagged:
        raise error_of(T, "(lagged_producer=True): its layout has no lagged tiles")
    if T.pingpong and (plan.task or plan.output or plan.late_task or plan.exchange):
        raise error_of(
            T, "(pingpong=True): consumers with tasks of their own have no task, late_task, exchange or output tiles"
        )
    _check_pingpong_hooks(T)
    if T.staggered_epilogue and plan.exchange:
        raise error_of(T, "(staggered_epilogue=True): consumers that write exchange tiles for each other end together")
    for extension in T.extensions:
        extension.check_template(T)
    if (T.splits or T.sharers > 1) and not (plan.merged or plan.accumulators):
        raise error_of(
            T,
            f"(schedule={T.schedule!r}): tasks that are split are summed up by their accumulators; declare them in "
            "the layout",
        )
    if plan.output and not T._stores:
        raise error_of(T, "output tiles are for the store hook of an lcsf template")
    if T._stores and not plan.output:
        raise error_of(T, "its layout has no output tiles to store")


def _check_pingpong_hooks(T: lcf) -> None:
    """Raise `TileError` for a hook that reads the consumers of the block where each has a task of its own: rows that it
    counts by them are never computed."""
    if not T.pingpong:
        return
    for name in dir(type(T)):
        function = getattr(type(T), name)
        if isinstance(function, JITFunction) and (reader := _reader_of_consumers(function, set())) is not None:
            where = "reads" if reader is function else f"calls {reader.__name__}, which reads"
            raise error_of(
                T,
                f"(pingpong=True): {name} {where} config.consumers, but each consumer has a task of its own; read "
                "config.team, the consumers that share a task",
            ).of(reader)


def _reader_of_consumers(function: JITFunction, seen: set[int]) -> JITFunction | None:
    """The function, or one that it calls by its name, that reads `….config.consumers`; not the library's."""
    if id(function) in seen or function.__module__.startswith(LANGUAGE):
        return None
    seen.add(id(function))
    tree = ast.parse(function.src)
    configs = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and getattr(node.value, "attr", None) == "config"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "consumers":
            base = node.value
            if getattr(base, "attr", None) == "config" or getattr(base, "id", None) in configs:
                return function
    called = (function.__globals__.get(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name))
    readers = (_reader_of_consumers(f, seen) for f in called if isinstance(f, JITFunction))
    return next((reader for reader in readers if reader is not None), None)


def _check_extension_fields(T: lcf, plan: layout, extensions: tuple[type[Extension], ...]) -> None:
    """Check that the layout has fields of the class's extensions only, and those that they need."""
    for extension in EXTENSIONS:
        given = [name for name in extension.added_fields if getattr(plan, name)]
        if given and not any(issubclass(e, extension) for e in extensions):
            raise error_of(
                T,
                f"its layout has {given[0]}=…, which is of an extension; derive the class from "
                f"tk.{extension.__name__} too",
            )
    for extension in extensions:
        fields = extension.added_fields
        if fields and extension.needs_fields and not any(getattr(plan, name) for name in fields):
            raise error_of(T, f"tk.{extension.__name__} needs {fields[0]}=… in its layout")


def _check_hooks(T: lcf, plan: layout, extensions: tuple[type[Extension], ...]) -> None:
    """Check that the class has the hooks that the fields of its layout need."""
    for hook in hooks_of(T._stores, extensions).values():
        if hook.layout and getattr(plan, hook.layout) and not hasattr(type(T), hook.name):
            raise error_of(T, f"its layout has {hook.layout}=…, but hook {hook.name!r} is missing")
    has_finish = hasattr(type(T), "finish") or any("finish" in extension.replaced_hooks for extension in T.extensions)
    if not T._stores and not has_finish:
        raise error_of(T, "hook 'finish' is missing; its layout has no deferred_results")
    if plan.accumulators and not hasattr(type(T), "start"):
        raise error_of(
            T,
            "its layout has accumulators, but hook 'start' is missing; it returns them as the state, for example "
            f"tk.struct(acc=tk.zero(ctx.accumulators.{plan.accumulators[0][0]}))",
        )
    if plan.lagged and not T.pipelined:
        raise error_of(
            T, "its layout has lagged tiles, which are used one iteration later: that needs hook 'compute_last'"
        )
    if plan.late_task and not hasattr(type(T), "compute_first"):
        raise error_of(
            T,
            "its layout has late_task tiles, for which hook 'compute_first' of a pipelined computation waits; hook "
            "'compute_first' is missing",
        )
