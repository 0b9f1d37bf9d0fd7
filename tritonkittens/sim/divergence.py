"""Branches that divide the threads of a role: on a scalar that differs between threads (a block of inline PTX can give each its own, whatever the compiler
believes).

The two parts run as roles of their own, with the same clock component, until both have come to the block where every path from the branch meets (its immediate
post-dominator); there they are one role again. What only whole roles can do is refused inside a part.
"""
from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .layouts import registers
from .machine import Role, Wait
from .report import Finding, Place, Stop
from .ttgir import Block, Op, Tensor
from .values import Poison

if TYPE_CHECKING:
    from .simulation import Simulation

# Effects that a part of a role may have: the others belong to all its threads, or to its first, which the compiler does not tell apart.
BY_THREAD = {"ttg.inline_asm", "tt.elementwise_inline_asm", "tt.print", "tt.assert", "llvm.intr.assume", "tt.assume"}

_MEETINGS: weakref.WeakKeyDictionary[Block, weakref.ref[Block] | None] = weakref.WeakKeyDictionary()


def successors(block: Block) -> tuple[Block, ...]:
    return block.operations[-1].successors


def meeting(block: Block) -> Block | None:
    """The immediate post-dominator of a block: the first that is on every path from it; None where paths end apart."""
    if block in _MEETINGS:
        found = _MEETINGS[block]
        return None if found is None else found()
    reachable, stack = [block], [block]
    while stack:
        for after in successors(stack.pop()):
            if after not in reachable:
                reachable.append(after)
                stack.append(after)
    everything = set(reachable)
    behind = {b: (set(everything) if successors(b) else {b}) for b in reachable}
    changed = True
    while changed:
        changed = False
        for b in reversed(reachable):
            if successors(b):
                new = {b} | set.intersection(*(behind[a] for a in successors(b)))
                if new != behind[b]:
                    behind[b], changed = new, True
    candidates = behind[block] - {block}
    nearest = max(candidates, key=lambda b: len(behind[b]), default=None)
    _MEETINGS[block] = None if nearest is None else weakref.ref(nearest)
    return nearest


def between(block: Block, meets: Block) -> Iterator[tuple[int, Any]]:
    """(value, type) of what is computed from a branch to its meeting: behind a loop that threads leave at different times the header's values live on."""
    seen, stack = {block}, [block]
    while stack:
        here = stack.pop()
        yield from zip(here.arguments, here.argument_types)
        for op in here.operations:
            yield from zip(op.results, op.result_types)
        for after in successors(here):
            if after is not meets and after not in seen:
                seen.add(after)
                stack.append(after)


def differs(role: Role, condition: Any) -> bool:
    """Do the executing threads disagree about a condition?"""
    if not isinstance(condition, np.ndarray) or not condition.ndim:
        return False
    own = condition if role.mask is None else condition[role.mask]
    return bool((own != own[0]).any())


def first(role: Role, value: Any) -> Any:
    """A scalar that executing threads agree about."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return value
    return (value if role.mask is None else value[role.mask])[0]


def check(role: Role, op: Op) -> None:
    """Refuse in a part of a role what is no single thread's doing."""
    if op.name in BY_THREAD:
        return
    if any(isinstance(kind, Tensor) for kind in op.operand_types) or not role.mask[0]:
        place = Place(role.machine.where(role), op.name, op.location)
        some = f"only some threads take ({int(role.mask.sum())} of {role.mask.size})"
        raise Stop(Finding("unknown", f"{op.name} behind a branch that {some}; the simulator does it for whole roles", (place,)))


def part_of(role: Role, mask: np.ndarray, meets: Block | None) -> Role:
    """Some of a role's threads, to go their own way."""
    part = Role(role.machine, role.rank, role.index, role.name, role.warps, role.start_warp, list(role.environment), role.block)
    part.clock, part.time, part.op = role.clock.copy(), role.time, role.op
    part.seen_phase, part.mask, part.meets = dict(role.seen_phase), mask, meets
    part.tensor_accesses = {what: list(accesses) for what, accesses in role.tensor_accesses.items()}
    part.products, part.copy_groups, part.copy_open = list(role.products), list(role.copy_groups), list(role.copy_open)
    part.bulk_groups, part.bulk_open, part.bulk_writes = list(role.bulk_groups), list(role.bulk_open), list(role.bulk_writes)
    return part


def rejoin(role: Role, parts: list[Role]) -> None:
    """What the parts learned and left in flight is the role's."""
    for part in parts:
        role.clock.join(part.clock)
        role.time = max(role.time, part.time)
        role.seen_phase.update({k: v for k, v in part.seen_phase.items() if v >= role.seen_phase.get(k, v)})
        role.steps += part.steps
    for name in ("products", "bulk_groups", "bulk_open", "bulk_writes", "copy_groups", "copy_open"):
        before = getattr(role, name)
        kept = [x for x in before if all(any(x is y for y in getattr(part, name)) for part in parts)]  # what a part waited for is over
        for part in parts:
            kept += [x for x in getattr(part, name) if not any(x is y for y in before)]
        setattr(role, name, kept)
    for part in parts:
        for what, accesses in part.tensor_accesses.items():
            role.tensor_accesses[what] += [o for o in accesses if o not in role.tensor_accesses[what]]
    for what, accesses in role.tensor_accesses.items():
        role.tensor_accesses[what] = [o for o in accesses if not role.clock.operations & o.bit]


def merged(role: Role, op: Op, kind: Any, parts: list[Role], values: list[Any]) -> Any:
    """One value from those of the parts: for each thread, and each element of a tile that a thread holds, its own part's."""
    a, b = values
    if a is b:
        return a
    if isinstance(kind, Tensor) and isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        assert kind.layout is not None
        out = np.array(a).reshape(-1)
        index = registers(kind.layout, kind.shape, role.warps)[np.flatnonzero(parts[1].mask)]
        out[index] = b.reshape(-1)[index]
        return out.reshape(kind.shape)
    numbers = (int, float, np.generic, np.ndarray)
    if isinstance(kind, Tensor) or not isinstance(a, numbers) or not isinstance(b, numbers):
        return Poison(op)  # whoever uses it is told
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and a == b:
        return a
    return np.where(parts[1].mask, b, a)


def diverge(simulation: Simulation, role: Role, op: Op, condition: np.ndarray, ways: list[tuple[Block, tuple[int, ...]]]) -> Generator[Wait, None, None]:
    """Go both ways of a branch; the role goes on where they meet."""
    machine = role.machine
    everyone = np.ones(condition.size, bool) if role.mask is None else role.mask
    taken = condition.astype(bool) & everyone
    meets = meeting(role.block)
    if meets is None and role.frames:
        place = Place(machine.where(role), op.name, op.location)
        raise Stop(Finding("unknown", "a return behind a branch that only some threads of a called function take", (place,)))
    parts = []
    for mask, (block, operands) in zip((taken, everyone & ~taken), ways):
        part = part_of(role, mask, meets)
        simulation.jump(part, block, operands)
        parts.append(part)
    machine.roles.extend(part for part in parts if not part.done)
    yield Wait(
        lambda: all(part.done for part in parts), lambda: "its threads on the other way of a branch", time=lambda: max(part.time for part in parts)
    )
    machine.roles = [r for r in machine.roles if not any(r is part for part in parts)]
    rejoin(role, parts)
    if meets is None:
        simulation.finish(role)
        return
    for slot, kind in [*zip(meets.arguments, meets.argument_types), *between(role.block, meets)]:
        values = [part.environment[slot] for part in parts]
        known = [v for v in values if v is not None]  # what only one part has computed nobody uses behind the meeting
        role.environment[slot] = merged(role, op, kind, parts, values) if len(known) == 2 else known[0] if known else None
    role.block, role.at = meets, 0
    role.done = meets is role.meets
