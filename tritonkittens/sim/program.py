"""A lowered kernel prepared to run: every operation with its meaning and its modelled cost, and the roles of a CTA
with their names.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonkittens.inline_ptx import extern
from tritonkittens.inspect._roles import distinct

from .control_flow import CONTROL, partitions
from .costs import Cost, operation_cost
from .layouts import crosses_ctas
from .operations import EFFECTS, VIEWS
from .operations.control import exchange
from .operations.inline_asm import extern_function
from .origins import origins
from .pure_operations import PURE
from .pure_tensor import sink_constants
from .spinning import only_looks
from .ttgir import Block, Module, Op

PURE_KIND, VIEW_KIND, EFFECT_KIND, GENERATOR_KIND, CONTROL_KIND, UNKNOWN_KIND = range(6)
BETWEEN_ROLES = "tritonkittens/lang/sync/warp_specialize.py"  # its code is in every role


@dataclass(eq=False)
class Step:
    """One operation, resolved."""

    kind: int
    function: Callable[..., Any] | None
    op: Op
    cost: Cost
    looks: bool = False  # whether it has no visible effect
    meets: bool = False  # whether a barrier of the role's threads is in it


@dataclass(eq=False)
class Program:
    module: Module
    name: str
    num_warps: int
    num_ctas: int
    total_warps: int
    shared_bytes: int
    tensor_columns: int
    uses_tensor_memory: bool
    multiplies_by_ptx: bool  # whether inline PTX issues tcgen05.mma
    arch: int
    role_names: list[str]
    first_partition: dict[int, int]  # id of a warp_specialize → index of its first worker among a CTA's roles
    origins: dict[int, frozenset[int]]  # id of an access → the parameters from which its address comes
    steps: dict[int, list[Step]] = field(default_factory=dict, repr=False)  # id of a block → its operations

    def role_warps(self) -> list[int]:
        """The warps of each role, in the order of `role_names`."""
        partitions = [
            op.attributes["partitionNumWarps"] for op in self.module.walk() if op.name == "ttg.warp_specialize"
        ]
        return [self.num_warps, *(warps for each in partitions for warps in each)]

    def block(self, block: Block, warps: int) -> list[Step]:
        """Return the steps of a block, resolved at its first run."""
        found = self.steps.get(id(block))
        if found is None:
            found = self.steps[id(block)] = [resolve(op, warps, self.num_ctas) for op in block.operations]
        return found


# Operations with a barrier of the role's threads. The compiler lets others meet, too: where they pass values through
# shared memory.
BARRIERS = {"ttg.barrier", "gpu.barrier", "ttg.local_barrier", "ttg.local_load", "ttg.local_store", "ttg.local_alloc"}


def resolve(op: Op, warps: int, num_ctas: int = 1) -> Step:
    step = _resolved(op, warps, num_ctas)
    step.meets = op.name in BARRIERS or bool(op.results and "allocation.offset" in op.attributes)
    return step


def _resolved(op: Op, warps: int, num_ctas: int) -> Step:
    cost = operation_cost(op, warps)
    if op.name in CONTROL:
        return Step(CONTROL_KIND, CONTROL[op.name], op, cost)
    if op.name == "tt.extern_elementwise" and op.attributes["symbol"] in extern.PTX:
        return Step(GENERATOR_KIND, extern_function, op, cost)
    if num_ctas > 1 and crosses_ctas(op):
        return Step(EFFECT_KIND, exchange(PURE[op.name]), op, cost)
    if op.name in PURE:
        return Step(PURE_KIND, PURE[op.name], op, cost)
    if op.name in VIEWS:
        return Step(VIEW_KIND, VIEWS[op.name], op, cost)
    if op.name in EFFECTS:
        function = EFFECTS[op.name]
        return Step(
            GENERATOR_KIND if inspect.isgeneratorfunction(function) else EFFECT_KIND, function, op, cost, only_looks(op)
        )
    return Step(UNKNOWN_KIND, None, op, cost)


def role_names(module: Module) -> tuple[list[str], dict[int, int]]:
    """Return the names of the default role and of the partitions of every `warp_specialize`, from the Python
    functions of their code.
    """
    first: dict[int, int] = {}
    kernel = module.kernel.attributes["sym_name"]
    names = ["kernel"]
    for op in module.walk():
        if op.name != "ttg.warp_specialize":
            continue
        if names == ["kernel"]:
            names = [function_of(op.regions[0].blocks, kernel) or "default"]
        first[id(op)] = len(names)
        for region in partitions(op):
            names.append(function_of(region.blocks, kernel) or f"partition{len(names) - 1}")
    return distinct(names), first


def function_of(blocks: list[Block], kernel: str) -> str | None:
    """Return the Python function of most operations: the outermost call below the kernel."""
    found: Counter[str] = Counter()
    stack = [op for block in blocks for op in block.operations]
    while stack:
        op = stack.pop()
        if any(frame.file.endswith(BETWEEN_ROLES) for frame in op.location.frames):
            continue
        for frame in reversed(op.location.frames):
            name = enclosing_function(frame.file, frame.line)
            if name and name != kernel:
                found[name] += 1
                break
    return found.most_common(1)[0][0] if found else None


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    return [(n.lineno, n.end_lineno or n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


def enclosing_function(file: str, line: int) -> str | None:
    """Return the name of the innermost `def` around a source line; None where the source cannot be read."""
    around = [(end - start, name) for start, end, name in _functions(file) if start <= line <= end]
    return min(around)[1] if around else None


def prepare(module: Module, name: str | None = None) -> Program:
    sink_constants(module)
    names, first = role_names(module)
    target = str(module.attributes.get("ttg.target", "cuda:90"))
    columns = module.integer("ttg.tensor_memory_size", 0)
    return Program(
        module=module,
        name=name or module.kernel.attributes["sym_name"].strip("_"),
        num_warps=module.integer("ttg.num-warps", 4),
        num_ctas=module.integer("ttg.num-ctas", 1),
        total_warps=module.integer("ttg.total-num-warps", module.integer("ttg.num-warps", 4)),
        shared_bytes=module.integer("ttg.shared", 0),
        tensor_columns=columns,
        uses_tensor_memory=bool(columns)
        or any(
            op.name == "ttng.tmem_alloc" or "tcgen05" in str(op.attributes.get("asm_string", ""))
            for op in module.walk()
        ),
        multiplies_by_ptx=any("tcgen05.mma" in str(op.attributes.get("asm_string", "")) for op in module.walk()),
        arch=int(target.split(":")[-1]),
        role_names=names,
        first_partition=first,
        origins=origins(module),
    )
