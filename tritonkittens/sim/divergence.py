"""Branches that divide the threads of a role: on a scalar that differs between threads.

A block of inline PTX can give each thread another scalar, although the compiler takes scalars to be uniform. The two
parts run as roles of their own, with the same clock component. They rejoin at the block where every path from the
branch meets (its immediate post-dominator). Operations of whole roles are refused inside a part.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .agents import Role, Wait
from .layouts import registers
from .report import Finding, Place, Stop
from .ttgir import Block, Op, Tensor
from .values import Poison

if TYPE_CHECKING:
    from .simulation import Simulation

# Effects that a part of a role may have. Other effects belong to all threads or to the first; the compiler does not
# distinguish these.
BY_THREAD = {"ttg.inline_asm", "tt.elementwise_inline_asm", "tt.print", "tt.assert", "llvm.intr.assume", "tt.assume"}
# Effects of one CTA's threads, where one program has several CTAs and only some of them come here.
BY_CTA = {
    "ttg.barrier",
    "ttng.arrive_barrier",
    "ttng.barrier_expect",
    "ttng.fence_async_shared",
    "ttng.init_barrier",
    "ttng.inval_barrier",
    "ttng.wait_barrier",
}

_MEETINGS: weakref.WeakKeyDictionary[Block, weakref.ref[Block] | None] = weakref.WeakKeyDictionary()


def successors(block: Block) -> tuple[Block, ...]:
    return block.operations[-1].successors


def meeting(block: Block) -> Block | None:
    """Return the immediate post-dominator of a block: the first block on every path from it. None where paths end
    separately.
    """
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
    """Return (value, type) of the values computed from a branch to its meeting.

    After a loop that threads leave at different times, the header's values are still needed.
    """
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
    """Whether the executing threads differ in a condition."""
    if not isinstance(condition, np.ndarray) or not condition.ndim:
        return False
    own = condition if role.mask is None else condition[role.mask]
    return bool((own != own[0]).any())


def first(role: Role, value: Any) -> Any:
    """Return a scalar that is equal in all executing threads."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return value
    return (value if role.mask is None else value[role.mask])[0]


def check(role: Role, op: Op) -> None:
    """Refuse operations that single threads cannot do, in a part of a role."""
    if op.name in BY_THREAD:
        return
    firsts = role.mask.reshape(len(role.ranks), -1)[:, 0]  # the CTAs whose first thread comes here
    some_ctas = not firsts.all() and op.name not in BY_CTA
    if any(isinstance(kind, Tensor) for kind in op.operand_types) or not firsts.any() or some_ctas:
        place = Place(role.machine.where(role), op.name, op.location)
        some = f"only some threads take ({int(role.mask.sum())} of {role.mask.size})"
        raise Stop(
            Finding("unknown", f"{op.name} in a branch that {some}; the simulator does it for whole roles", (place,))
        )


def part_of(role: Role, mask: np.ndarray, meets: Block | None) -> Role:
    """Return a part of a role: some of its threads."""
    part = Role(
        role.machine, role.rank, role.index, role.name, role.warps, role.start_warp, list(role.environment), role.block
    )
    part.clocks, part.time, part.op = {r: c.copy() for r, c in role.clocks.items()}, role.time, role.op
    part.visible = {r: c.copy() for r, c in role.visible.items()}
    part.seen_phase, part.mask, part.meets = dict(role.seen_phase), mask, meets
    part.tensor_accesses = {what: list(accesses) for what, accesses in role.tensor_accesses.items()}
    part.products, part.copy_groups, part.copy_open = list(role.products), list(role.copy_groups), list(role.copy_open)
    part.bulk_groups, part.bulk_open = list(role.bulk_groups), list(role.bulk_open)
    part.barriers, part.synced, part.observed, part.fenced = role.barriers, role.synced, role.observed, role.fenced
    return part


def rejoin(role: Role, parts: list[Role]) -> None:
    """Merge the knowledge and the operations in flight of the parts into the role."""
    for part in parts:
        role.join(part)
        role.time = max(role.time, part.time)
        role.seen_phase.update({k: v for k, v in part.seen_phase.items() if v >= role.seen_phase.get(k, v)})
        role.steps += part.steps
    for name in ("products", "bulk_groups", "bulk_open", "copy_groups", "copy_open"):
        before = getattr(role, name)
        # removes the operations for which a part has waited
        kept = [x for x in before if all(any(x is y for y in getattr(part, name)) for part in parts)]
        for part in parts:
            kept += [x for x in getattr(part, name) if not any(x is y for y in before)]
        setattr(role, name, kept)
    for part in parts:
        for what, accesses in part.tensor_accesses.items():
            role.tensor_accesses[what] += [o for o in accesses if o not in role.tensor_accesses[what]]
    for what, accesses in role.tensor_accesses.items():
        role.tensor_accesses[what] = [o for o in accesses if not o.awaited(role)]


def merged(role: Role, op: Op, kind: Any, parts: list[Role], values: list[Any]) -> Any:
    """Merge the parts' values: each thread, and each element of a tile that a thread holds, takes its own part's
    value.
    """
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
        return Poison(op)  # its use is a finding
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and a == b:
        return a
    return np.where(parts[1].mask, b, a)


def diverge(
    simulation: Simulation, role: Role, op: Op, condition: np.ndarray, ways: list[tuple[Block, tuple[int, ...]]]
) -> Generator[Wait, None, None]:
    """Take both ways of a branch. The role continues at the meeting."""
    machine = role.machine
    everyone = np.ones(condition.size, bool) if role.mask is None else role.mask
    taken = condition.astype(bool) & everyone
    meets = meeting(role.block)
    if meets is None and role.frames:
        place = Place(machine.where(role), op.name, op.location)
        raise Stop(
            Finding("unknown", "a return in a branch that only some threads of a called function take", (place,))
        )
    parts = []
    for mask, (block, operands) in zip((taken, everyone & ~taken), ways):
        part = part_of(role, mask, meets)
        simulation.jump(part, block, operands)
        parts.append(part)
    machine.roles.extend(part for part in parts if not part.done)
    yield Wait(
        lambda: all(part.done for part in parts),
        lambda: "its threads on the other way of a branch",
        time=lambda: max(part.time for part in parts),
    )
    machine.roles = [r for r in machine.roles if not any(r is part for part in parts)]
    rejoin(role, parts)
    if meets is None:
        simulation.finish(role)
        return
    for slot, kind in [*zip(meets.arguments, meets.argument_types), *between(role.block, meets)]:
        values = [part.environment[slot] for part in parts]
        known = [v for v in values if v is not None]  # values of only one part are unused after the meeting
        role.environment[slot] = (
            merged(role, op, kind, parts, values) if len(known) == 2 else known[0] if known else None
        )
    role.block, role.at = meets, 0
    role.done = meets is role.meets
