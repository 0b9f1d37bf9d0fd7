"""The hooks of a template, in one table: it drives the checks, the error messages and the reference page (`reference`)."""
from __future__ import annotations

import inspect
from dataclasses import dataclass

from tritonkittens.lang.core.backend import InterpretedFunction, JITFunction
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.template.renamed import refuse_old

PRODUCER, CONSUMER, STORER, SENDER, EVERY_ROLE = "producer", "consumer", "storer", "sender", "every role"


@dataclass(frozen=True)
class Hook:
    """One hook.

    Args:
        name: the method, an `@triton.jit` function without `self`.
        role: the warp or warpgroup that calls it.
        when: how often.
        arguments: its parameters. `compute` of a pipelined computation takes `previous`, too.
        returns: "" where it returns nothing.
        text: what it must do.
        layout: the field of `tk.layout` that needs it; such tiles without the hook are refused.
        required: must every template have it?
        lcsf: does `lcsf` have it, too?
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
    Hook("setup", EVERY_ROLE, "once a task", ("ctx",), "`tk.task(iterations, when=…, **coordinates)`",
         "What task number `ctx.task_id` is. The loop over tasks ends at the first task whose `when` is false.", required=True),
    Hook("load_task", PRODUCER, "once a task for each consumer", ("ctx", "scratch"), "",
         "Copies into the scratch tiles of consumer `ctx.consumer`, on `task.full`.", "scratch"),
    Hook("load_task", PRODUCER, "once a task", ("ctx", "common"), "", "Copies into the common tiles, on `task.full`.", "common"),
    Hook("load_late_task", PRODUCER, "once a task", ("ctx", "deferred"), "",
         "Copies into the deferred tiles, on `late_task.full`. Hook `compute_first` waits for them itself.", "deferred", lcsf=False),
    Hook("entry", PRODUCER, "ahead of the iterations", ("ctx", "n"), "pointers to int32",
         "Where entries number `n` of a table stand in global memory: a tile of numbers, counted from iteration `ctx.iter` on. Each iteration has as many "
         "entries as the layout says; `load` and `load_lagged` read them as `ctx.page_indices[k]`. A copy that reads a page number itself would wait for that "
         "load behind the copies in flight. Every pointer must be valid, also those of iterations past the last.", "entries"),
    Hook("load", PRODUCER, "once an iteration", ("ctx", "input"), "",
         "Copies into every tile of `input`, on `input.full`. The template checks the number of bytes.", required=True),
    Hook("load_lagged", PRODUCER, "once an iteration", ("ctx", "lagged"), "",
         "Copies into every lagged tile, on `lagged.full`.", "lagged", lcsf=False),
    Hook("load_epilogue", PRODUCER, "once a task for each consumer", ("ctx", "epilogue"), "",
         "Copies into the finish tiles that the layout names in `epilogue_loads`, on `epilogue.full`, while the task is computed.", "epilogue_loads"),
    Hook("fetch", CONSUMER, "before the first iteration of a task", ("ctx",), "any value",
         "Reads what `finish` needs from global memory early; the later hooks have it as `ctx.params`."),
    Hook("start", CONSUMER, "once a task", ("ctx",), "the state, a `tk.struct`", "The state that a task begins with. Without it the state is empty."),
    Hook("compute_first", CONSUMER, "in the first iteration", ("ctx", "state", "input"), "the state",
         "Replaces `compute` in the first iteration of a pipelined computation; without it `compute` gets the same stage twice.", lcsf=False),
    Hook("compute", CONSUMER, "once an iteration", ("ctx", "state", "input"), "the state",
         "One iteration. Without `compute_last` the stage is released as soon as it returns: it must leave no product in flight.", required=True),
    Hook("compute_last", CONSUMER, "after the last iteration", ("ctx", "state", "input"), "the state",
         "Pipelines the computation by one iteration: a stage is released one iteration later, so that products that read it may still be in flight. `compute` "
         "then sees the stage before as `previous`, and `compute_last` ends the work on the last one.", lcsf=False),
    Hook("reduce_store", SENDER, "once an iteration", ("ctx", "working"), "any value",
         "A warp beside each consumer waits for the working tiles (`tk.reduce_wait`) and starts copies out of them. They go back to the consumer "
         "(`tk.reduce_acquire`) when they have been read.", lcsf=False),
    Hook("sent", SENDER, "after `reduce_store`", ("ctx", "value"), "", "What else is to be done, with what `reduce_store` returned.", lcsf=False),
    Hook("part", CONSUMER, "after the iterations of a part", ("ctx", "state"), "a `tk.struct` of the layout's `merged`",
         "What a part of a task comes to, where the tile scheduler splits tasks. Without `part` and `merge` the accumulators are added.", "merged", lcsf=False),
    Hook("merge", CONSUMER, "once for each further part", ("ctx", "mine", "theirs"), "a `tk.struct` of the layout's `merged`",
         "Two parts together. `finish` gets all parts, in their order; in a cluster (`ClusterSplitK`) each block gets its columns.", "merged", lcsf=False),
    Hook("defer_results", CONSUMER, "once a task, instead of `finish`", ("ctx", "state", "epilogue"), "a `tk.struct` of the layout's `packed`",
         "Results in fewer registers than accumulators take. They leave under the products of the block's next task.", "packed", lcsf=False),
    Hook("store_deferred", CONSUMER, "after the product of an iteration", ("ctx", "tile", "epilogue", "n"), "",
         "Stores packed tile number `n` (a constant) through the epilogue tiles, those in `epilogue_loads` excepted. `ctx` is that of the task that packed it.",
         "packed", lcsf=False),
    Hook("finish_deferred", CONSUMER, "after each of the next `deferred_steps` iterations", ("ctx", "epilogue", "n", "step", "steps"), "",
         "One of `steps` (a constant) equal steps on tile number `n`, which `store_deferred` has only staged; where no products are left to hide it, all in one "
         "step. `n` and `step` are run-time numbers: one copy of the code serves all tiles and stays in the instruction cache.", lcsf=False),
    Hook("prefetch_deferred", CONSUMER, "once a task, before `defer_results`", ("ctx", "epilogue"), "",
         "Starts the copies of what will be added to the first packed tile, as soon as the results of the task before have left the epilogue tiles.",
         lcsf=False),
    Hook("finish", CONSUMER, "once a task", ("ctx", "state", "epilogue"), "",
         "Stores the results through the epilogue tiles. Those that the layout names in `epilogue_reloads` it fills first, or again, on `epilogue.reload_full`, an even number "
         "of times (`tk.expect`, `tk.load_async`, `tk.wait` with parities 0, 1, 0 …).", required=True),
)  # fmt: skip
STORE = Hook("store", STORER, "once an iteration", ("ctx", "output"), "",
             "Starts `tk.store_async` of every output tile, once.", "output", required=True)  # fmt: skip


def hooks_of(stores: bool) -> dict[str, Hook]:
    """The hooks by name of a template that stores output tiles in every iteration (`lcsf`), or of one that does not (`lcf`)."""
    if not stores:
        return {hook.name: hook for hook in HOOKS}
    return {hook.name: hook for hook in HOOKS if hook.lcsf} | {"store": STORE}


def parameters_of(hook: Hook, stores: bool, pipelined: bool) -> tuple[str, ...]:
    """What a hook takes."""
    if hook.name == "compute":
        return (*hook.arguments, *(("output",) if stores else ()), *(("previous",) if pipelined else ()))
    return hook.arguments


def reference(stores: bool = False) -> str:
    """The hooks as text in Markdown, a paragraph each, in the order of the table."""
    lines = []
    for hook in hooks_of(stores).values():
        returns = f" → {hook.returns}" if hook.returns else ""
        need = " Required." if hook.required else f" For `{hook.layout}` of the layout." if hook.layout else ""
        lines.append(f"`{hook.name}({', '.join(parameters_of(hook, stores, False))})`{returns} ({hook.role}, {hook.when}): {hook.text}{need}")
    return "\n\n".join(lines)


def check_hooks(cls: type, stores: bool, knobs: tuple[type, ...]) -> bool:
    """Refuse missing, misspelt, malformed and old hooks of a template's class, and old knobs (attributes of types `knobs`).

    Returns:
        Is the computation pipelined by one iteration?
    """
    table = hooks_of(stores)
    required = [hook.name for hook in table.values() if hook.required and not (hook.name == "finish" and (stores or hasattr(cls, "defer_results")))]
    for c in cls.__mro__:
        for name, value in vars(c).items():
            if isinstance(value, InterpretedFunction):
                raise TileError(f"{cls.__name__}.{name}: templates are explicit kernels and do not run in Triton's interpreter (TRITON_INTERPRET=1)")
            if isinstance(value, (JITFunction, *knobs)):
                refuse_old(cls.__name__, "hook" if isinstance(value, JITFunction) else "knob", (name,))
            if isinstance(value, JITFunction) and name not in table and not name.startswith("_"):
                raise TileError(f"{cls.__name__}: unknown hook {name!r}; hooks are {', '.join(table)} (start a helper's name with an underscore)")
    for name in required:
        if not hasattr(cls, name):
            raise TileError(f"{cls.__name__}: hook {name!r} is missing; a template needs {', '.join(required)}")
    pipelined = hasattr(cls, "compute_last")
    if hasattr(cls, "compute_first") and not pipelined:
        raise TileError(f"{cls.__name__}: hook 'compute_first' is for a pipelined computation, which needs hook 'compute_last' too")
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
