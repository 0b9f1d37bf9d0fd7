"""The core hooks of a template, in one table, which drives the checks, the error messages and the reference page
(`reference`). Extensions add their own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from tritonkittens.lang.core.backend import InterpretedFunction, JITFunction
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.template.renamed import refuse_old

PRODUCER, CONSUMER, STORER, EVERY_ROLE = "producer", "consumer", "storer", "every role"


@dataclass(frozen=True)
class Hook:
    """One hook.

    Args:
        name: the method, an `@triton.jit` function without `self`.
        role: the warp or warpgroup that calls it.
        when: how often.
        arguments: its parameters. `compute` also takes `output` in `lcsf`, and `previous` with `compute_last`.
        returns: "" where it returns nothing.
        text: what it must do.
        layout: the field of `tk.layout` that needs it; a layout with such tiles needs the hook.
        required: does every template need it?
        lcsf: does `lcsf` have it too?
    """

    name: str
    role: str
    when: str
    arguments: tuple[str, ...]
    returns: str
    text: str
    layout: str = ""
    required: bool = False
    lcsf: bool = True


HOOKS: tuple[Hook, ...] = (
    Hook(
        "setup",
        EVERY_ROLE,
        "once a task",
        ("ctx",),
        "`tk.task(iterations, when=…, **coordinates)`",
        "Describes task number `ctx.task_id`. The loop over tasks ends at the first task whose `when` is false.",
        required=True,
    ),
    Hook(
        "load_task",
        PRODUCER,
        'once a task; with `per="consumer"` for each consumer',
        ("ctx", "task"),
        "",
        "Loads the task tiles (those of consumer `ctx.consumer`), with `task.full` as the barrier.",
        "task",
    ),
    Hook(
        "load_late_task",
        PRODUCER,
        "once a task",
        ("ctx", "late_task"),
        "",
        "Loads the late task tiles, with `late_task.full` as the barrier. These are task tiles for which the template "
        "does not wait when the task begins: hook `compute_first` does.",
        "late_task",
        lcsf=False,
    ),
    Hook(
        "load",
        PRODUCER,
        "once an iteration",
        ("ctx", "input"),
        "",
        "Loads every tile of `input`, with `input.full` as the barrier. The template checks the number of bytes.",
        required=True,
    ),
    Hook(
        "load_lagged",
        PRODUCER,
        "once an iteration",
        ("ctx", "lagged"),
        "",
        "Loads every lagged tile, with `lagged.full` as the barrier. Lagged tiles are used one iteration after the "
        "input of the same stage (attention: V).",
        "lagged",
        lcsf=False,
    ),
    Hook(
        "load_epilogue",
        PRODUCER,
        "once a task for each consumer",
        ("ctx", "epilogue"),
        "",
        "Loads the epilogue tiles that the layout names in `epilogue_loads`, with `epilogue.full` as the barrier, "
        "while the task is computed.",
        "epilogue_loads",
    ),
    Hook(
        "load_params",
        CONSUMER,
        "before the first iteration of a task",
        ("ctx",),
        "any value",
        "Reads early what `finish` needs from global memory. Later hooks find it in `ctx.params`.",
    ),
    Hook(
        "start",
        CONSUMER,
        "once a task",
        ("ctx",),
        "the state, a `tk.struct`",
        "Returns the state that a task begins with. Without it the state is empty.",
    ),
    Hook(
        "compute_first",
        CONSUMER,
        "in the first iteration",
        ("ctx", "state", "input"),
        "the state",
        "Replaces `compute` in the first iteration of a computation with `compute_last`. Without it, `compute` gets "
        "the first stage as `input` and as `previous`.",
        lcsf=False,
    ),
    Hook(
        "compute",
        CONSUMER,
        "once an iteration",
        ("ctx", "state", "input"),
        "the state",
        "Computes one iteration. Without `compute_last` the stage is released when it returns, so it must leave no "
        "product in flight. `previous`, an argument with `compute_last` only: the previous stage, or with lagged tiles "
        "the lagged tiles of the previous stage.",
        required=True,
    ),
    Hook(
        "compute_last",
        CONSUMER,
        "after the last iteration",
        ("ctx", "state", "input"),
        "the state",
        "Completes the last iteration. `input` is the last stage, or with lagged tiles the lagged tiles of the last "
        "stage. With this hook the computation is pipelined by one iteration: a stage is released one iteration later, "
        "so that products that read it may be in flight.",
        lcsf=False,
    ),
    Hook(
        "finish",
        CONSUMER,
        "once a task",
        ("ctx", "state", "epilogue"),
        "",
        "Stores the results through the epilogue tiles. When it begins, these are free: earlier stores have read them. "
        "A tile that it writes twice needs `tk.store_read_wait` in between. It need not wait for its stores at its "
        "end.",
        required=True,
    ),
)
STORE = Hook("store", STORER, "once an iteration", ("ctx", "output"), "",
             "Starts `tk.store_async` of every output tile, once.", "output", required=True)  # fmt: skip


def hooks_of(stores: bool, extensions: Sequence[type] = ()) -> dict[str, Hook]:
    """The hooks by name of a template that stores output tiles in every iteration (`lcsf`), or of one that does not
    (`lcf`), and of its extensions."""
    core = (hook for hook in HOOKS if hook.lcsf or not stores)
    added = (hook for extension in extensions for hook in extension.added_hooks)  # type: ignore[attr-defined]
    return {hook.name: hook for hook in (*core, *((STORE,) if stores else ()), *added)}


def parameters_of(hook: Hook, stores: bool, pipelined: bool) -> tuple[str, ...]:
    """The parameters of a hook."""
    if hook.name == "compute":
        return (*hook.arguments, *(("output",) if stores else ()), *(("previous",) if pipelined else ()))
    return hook.arguments


def signature(hook: Hook, stores: bool = False) -> str:
    """A hook as text, with what it takes in some templates only in brackets."""
    optional = "[, previous]" if hook.name == "compute" and not stores else ""
    return f"{hook.name}({', '.join(parameters_of(hook, stores, False))}{optional})"


def reference(hooks: Sequence[Hook], stores: bool = False) -> str:
    """These hooks as text in Markdown, a paragraph each."""
    lines = []
    for hook in hooks:
        returns = f" → {hook.returns}" if hook.returns else ""
        required = hook.required and not (hook.name == "finish" and stores)
        need = " Required." if required else f" For `{hook.layout}` of the layout." if hook.layout else ""
        lines.append(f"`{signature(hook, stores)}`{returns} ({hook.role}, {hook.when}): {hook.text}{need}")
    return "\n\n".join(lines)


def check_hooks(
    cls: type, stores: bool, extensions: Sequence[type], others: Sequence[type], knobs: tuple[type, ...]
) -> bool:
    """Refuse missing, misspelt, malformed and old hooks of a template's class, and old knobs (attributes of types
    `knobs`).

    Args:
        extensions: the extensions that the class derives from; `others`: those that it does not.

    Returns:
        Is the computation pipelined by one iteration?
    """
    table = hooks_of(stores, extensions)
    for c in cls.__mro__:
        for name, value in vars(c).items():
            if isinstance(value, InterpretedFunction):
                raise TileError(
                    f"{cls.__name__}.{name}: templates are explicit kernels and do not run in Triton's interpreter "
                    "(TRITON_INTERPRET=1)"
                )
            if isinstance(value, (JITFunction, *knobs)):
                refuse_old(cls.__name__, "hook" if isinstance(value, JITFunction) else "knob", (name,))
            if isinstance(value, JITFunction) and name not in table and not name.startswith("_"):
                _refuse_unknown(cls, name, table, stores, others)
    replaced = {name for extension in extensions for name in extension.replaced_hooks}  # type: ignore[attr-defined]
    required = [
        hook.name
        for hook in table.values()
        if hook.required and not (hook.name == "finish" and stores) and hook.name not in replaced
    ]
    for name in required:
        if not hasattr(cls, name):
            raise TileError(f"{cls.__name__}: hook {name!r} is missing; a template needs {', '.join(required)}")
    pipelined = hasattr(cls, "compute_last")
    if hasattr(cls, "compute_first") and not pipelined:
        raise TileError(
            f"{cls.__name__}: hook 'compute_first' is for a pipelined computation, which needs hook 'compute_last' too"
        )
    for name, hook in table.items():
        found = getattr(cls, name, None)
        if found is None:
            continue
        if not isinstance(found, JITFunction):
            raise TileError(f"{cls.__name__}.{name}: put @triton.jit over the hook")
        wanted, given = parameters_of(hook, stores, pipelined), inspect.signature(found.fn).parameters
        if len(given) != len(wanted):
            raise TileError(f"{cls.__name__}.{name}({', '.join(given)}): must take ({', '.join(wanted)})")
    return pipelined


def _refuse_unknown(cls: type, name: str, table: dict[str, Hook], stores: bool, others: Sequence[type]) -> None:
    for extension in others:
        if not stores and name in {hook.name for hook in extension.added_hooks}:  # type: ignore[attr-defined]
            raise TileError(
                f"{cls.__name__}: hook {name!r} is of an extension; derive the class from tk.{extension.__name__} too"
            )
    raise TileError(
        f"{cls.__name__}: unknown hook {name!r}; hooks are {', '.join(table)} (start a helper's name with an "
        "underscore)"
    )
