"""Control flow of roles: branches, calls, and the partitions of a `warp_specialize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import divergence
from .agents import Role, Wait
from .ttgir import Op, Region
from .values import Poison

if TYPE_CHECKING:
    from .simulation import Simulation

# name → f(simulation, role, operation), which returns True if the role yields
CONTROL: dict[str, Callable[[Simulation, Role, Op], bool]] = {}
_Control = Callable[["Simulation", Role, Op], bool]


def control(name: str) -> Callable[[_Control], _Control]:
    """Register the function of an operation."""

    def register(fn: _Control) -> _Control:
        CONTROL[name] = fn
        return fn

    return register


@control("ub.poison")
def poison(simulation: Simulation, role: Role, op: Op) -> bool:
    role.environment[op.results[0]] = Poison(op)
    role.at += 1
    return False


# ---------------------------------------------------------------- branches


@control("cf.br")
def branch(simulation: Simulation, role: Role, op: Op) -> bool:
    return simulation.jump(role, op.successors[0], op.operands)


@control("cf.cond_br")
def conditional_branch(simulation: Simulation, role: Role, op: Op) -> bool:
    """Take one way, or both where the condition differs between the role's threads."""
    condition = role.environment[op.operands[0]]
    if isinstance(condition, Poison):
        why = "a branch on a value that was never computed"
        role.machine.stop("uninitialized", why, role, op, computed=str(condition.op.location))
    _, yes, no = op.segments
    ways = [(op.successors[0], op.operands[yes]), (op.successors[1], op.operands[no])]
    if divergence.differs(role, condition):
        role.pending = divergence.diverge(simulation, role, op, condition, ways)
        role.pending_results, role.looks = (), False
        simulation.resume(role)
        return True
    return simulation.jump(role, *ways[0 if divergence.first(role, condition) else 1])


@control("cf.switch")
def switch(simulation: Simulation, role: Role, op: Op) -> bool:
    flag = int(role.environment[op.operands[0]])
    segments = op.attributes["case_operand_segments"]
    count = len(op.operands) - 1 - sum(segments)
    groups = [op.operands[1 : 1 + count]]
    at = 1 + count
    for size in segments:
        groups.append(op.operands[at : at + size])
        at += size
    cases = op.attributes.get("case_values")
    values = np.atleast_1d(cases.values).tolist() if cases is not None else []
    chosen = values.index(flag) + 1 if flag in values else 0
    return simulation.jump(role, op.successors[chosen], groups[chosen])


# ---------------------------------------------------------------- calls


@control("tt.call")
def call(simulation: Simulation, role: Role, op: Op) -> bool:
    function = simulation.program.module.functions[op.attributes["callee"].text.lstrip("@")]
    entry = function.regions[0].blocks[0]
    for slot, operand in zip(entry.arguments, op.operands):
        role.environment[slot] = role.environment[operand]
    role.frames.append((role.block, role.at + 1, op.results))
    role.block, role.at = entry, 0
    return False


@control("tt.return")
def return_(simulation: Simulation, role: Role, op: Op) -> bool:
    values = [role.environment[i] for i in op.operands]
    if not role.frames:
        simulation.finish(role)
        return True
    role.block, role.at, results = role.frames.pop()
    for slot, value in zip(results, values):
        role.environment[slot] = value
    return False


# ---------------------------------------------------------------- partitions


def partitions(op: Op) -> list[Region]:
    """Return the worker regions of a `warp_specialize`."""
    holder = _holder(op)
    return holder.regions if holder is not None else []


def _holder(op: Op) -> Op | None:
    """Return the operation that has the worker regions of a `warp_specialize`, and captures their values."""
    inside = (inner for block in op.regions[1].blocks for inner in block.operations)
    return next((inner for inner in inside if inner.name == "ttg.warp_specialize.partitions"), None)


@control("ttg.warp_specialize")
def specialize(simulation: Simulation, role: Role, op: Op) -> bool:
    """Start the partitions. The role itself continues with the default region."""
    machine = role.machine
    machine.version += 1
    holder = _holder(op)
    assert holder is not None
    captured = [role.environment[i] for i in holder.operands]
    warps = op.attributes["partitionNumWarps"]
    starts = op.attributes.get("warpGroupStartIds") or [0] * len(warps)
    first = role.index - role.index % simulation.roles_per_cta
    used = simulation.program.first_partition[id(op)]
    for k, region in enumerate(holder.regions):
        entry = region.blocks[0]
        environment: list[Any] = [None] * simulation.program.module.number_of_values
        for slot, value in zip(entry.arguments, captured):
            environment[slot] = value
        name = simulation.program.role_names[used + k]
        child = Role(machine, role.rank, first + used + k, name, warps[k], starts[k], environment, entry)
        child.join(role)
        for rank in child.ranks:
            child.advance(rank)
        child.time = role.time
        child.seen_phase = dict(role.seen_phase)
        role.children.append(child)
        machine.roles.append(child)
    for rank in role.ranks:
        role.advance(rank)
    role.frames.append((role.block, role.at + 1, op.results))
    role.block, role.at = op.regions[0].blocks[0], 0
    return True


@control("ttg.warp_return")
def end_partition(simulation: Simulation, role: Role, op: Op) -> bool:
    simulation.finish(role)
    return True


@control("ttg.warp_yield")
def end_default_region(simulation: Simulation, role: Role, op: Op) -> bool:
    """Wait for the partitions, then continue after their `warp_specialize`."""
    children = role.children
    if not all(c.done for c in children):
        role.wait = Wait(
            lambda: all(c.done for c in children),
            lambda: "the partitions " + ", ".join(c.name for c in children if not c.done) + " to end",
            time=lambda: max(c.time for c in children),
        )
        if simulation.recorder is not None:
            simulation.recorder.waits(role.machine, role)
        return True
    block, at, results = role.frames.pop()
    for child in children:
        role.join(child)
        role.time = max(role.time, child.time)
        role.machine.roles.remove(child)
        child.forget()
    role.children = []
    for slot, operand in zip(results, op.operands):
        role.environment[slot] = role.environment[operand]
    role.block, role.at = block, at
    return False
