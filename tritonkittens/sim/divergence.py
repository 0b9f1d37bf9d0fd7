"""Branches that divide the threads of a role: on a scalar that differs between threads.

A block of inline PTX can give each thread another scalar, although the compiler takes scalars to be uniform. The two
parts run as roles of their own, with the same clock component. They rejoin at the block where every path from the
branch meets (its immediate post-dominator). Operations of whole roles are refused inside a part.

Where nothing else can happen, the CTAs of a program drift: those that wait for no other go on as a part of their own,
past a wait or the end of a branch, up to the next operation of the whole role. There the parts rejoin.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .agents import Role, Wait
from .layouts import SHARED_STRIDE, registers
from .report import Finding, Place, Stop
from .ttgir import Block, Op, Tensor
from .values import Poison, View

if TYPE_CHECKING:
    from .machine import Machine
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

# Control flow of whole roles.
OF_ROLES = {"cf.switch", "tt.call", "tt.return", "ttg.warp_return", "ttg.warp_specialize", "ttg.warp_yield"}

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


def between(block: Block, meets: Block | None) -> Iterator[tuple[int, Any]]:
    """Return (value, type) of the values computed from a branch to its meeting, or to the end.

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


def ends(role: Role) -> bool:
    """Whether a part of a role has come to its end. A part that drifts goes on."""
    if role.meets is None or role.block is not role.meets:
        return False
    if role.drifts:
        role.meets = None
    return not role.drifts


def parks(role: Role, op: Op, acts: bool) -> bool:
    """Whether a part that drifts ends here, before an operation of its whole role. In other parts, refuse operations
    that single threads cannot do. `acts`: the operation has effects.
    """
    needs_all = acts and _needs_all(role, op)
    if role.drifts and role.meets is None:
        role.done = needs_all or op.name in OF_ROLES
        return role.done
    if needs_all:
        place = Place(role.machine.where(role), op.name, op.location)
        some = f"only some threads take ({int(role.mask.sum())} of {role.mask.size})"
        raise Stop(
            Finding("unknown", f"{op.name} in a branch that {some}; the simulator does it for whole roles", (place,))
        )
    return False


def _needs_all(role: Role, op: Op) -> bool:
    """Whether a part of a role cannot execute an operation."""
    if op.name in BY_THREAD:
        return False
    firsts = role.mask.reshape(len(role.ranks), -1)[:, 0]  # the CTAs whose first thread comes here
    some_ctas = not firsts.all() and op.name not in BY_CTA
    return any(isinstance(kind, Tensor) for kind in op.operand_types) or not firsts.any() or some_ctas


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
    if isinstance(a, View) and isinstance(b, View) and a.base == b.base and a.map is b.map:
        return a
    if isinstance(kind, Tensor) or not isinstance(a, numbers) or not isinstance(b, numbers):
        return Poison(op)  # its use is a finding
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and a == b:
        return a
    return np.where(parts[1].mask, b, a)


def diverge(
    simulation: Simulation, role: Role, op: Op, condition: np.ndarray, ways: list[tuple[Block, tuple[int, ...]]]
) -> Generator[Wait, None, None]:
    """Take both ways of a branch. The role continues at the meeting."""
    everyone = np.ones(condition.size, bool) if role.mask is None else role.mask
    taken = condition.astype(bool) & everyone
    meets = meeting(role.block)
    if meets is None and role.frames:
        place = Place(role.machine.where(role), op.name, op.location)
        raise Stop(
            Finding("unknown", "a return in a branch that only some threads of a called function take", (place,))
        )
    parts = []
    for mask, (block, operands) in zip((taken, everyone & ~taken), ways):
        part = part_of(role, mask, meets)
        simulation.jump(part, block, operands)
        parts.append(part)
    yield from together(simulation, role, op, parts, meets)


def together(
    simulation: Simulation, role: Role, op: Op, parts: list[Role], meets: Block | None
) -> Generator[Wait, None, None]:
    """Run the parts of a role until they end, and go on where they do: at `meets`, or where they have drifted to."""
    machine, start = role.machine, role.block
    role.parts = parts
    machine.roles.extend(part for part in parts if not part.done)
    yield Wait(
        lambda: all(part.done for part in parts),
        lambda: "its threads that have gone another way",
        time=lambda: max(part.time for part in parts),
    )
    role.parts = []
    machine.roles = [r for r in machine.roles if not any(r is part for part in parts)]
    rejoin(role, parts)
    drifted = any(part.drifts for part in parts)
    if meets is None and not drifted:
        simulation.finish(role)
        return
    ends = {(part.block, part.at) for part in parts}
    if len(ends) > 1:
        role.machine.stop("unknown", "CTAs of one program that have drifted come to different operations", role, op)
    slots = between(start, None if drifted else meets)
    if meets is not None:
        slots = itertools.chain(zip(meets.arguments, meets.argument_types), slots)
    for slot, kind in slots:
        values = [part.environment[slot] for part in parts]
        known = [v for v in values if v is not None]  # values of only one part are unused after the meeting
        role.environment[slot] = (
            merged(role, op, kind, parts, values) if len(known) == 2 else known[0] if known else None
        )
    ((role.block, role.at),) = ends
    role.done = not drifted and meets is role.meets


def drift(simulation: Simulation, machine: Machine) -> bool:
    """Let CTAs go on that wait only for other CTAs of their role. Return whether there are any."""
    for role in machine.roles:
        if role.mask is not None or len(role.ranks) == 1 or role.done or role.op is None:
            continue
        if any(part.done for part in role.parts) and not any(part.drifts for part in role.parts):
            for part in role.parts:
                part.drifts = True
                if part.done:
                    part.done, part.meets = False, None
            machine.roles += [part for part in role.parts if part not in machine.roles]
            return True
        if not role.parts and role.op.name == "ttng.wait_barrier":
            waiting = [rank for rank in role.ranks if _waits(role, role.op, rank)]
            if len(waiting) < len(role.ranks):
                _split(simulation, role, role.op, waiting)
                return True
    return False


def _waits(role: Role, op: Op, rank: int) -> bool:
    """Whether a CTA waits for its barrier in a wait of all CTAs of a role."""
    bar, phase = (role.environment[i] for i in op.operands[:2])
    barriers = [role.machine.barriers.get(bar.base + int(o)) for o in bar.map.offsets.reshape(-1)]
    return any(b is not None and b.address // SHARED_STRIDE == rank and not b.completed(phase) for b in barriers)


def _split(simulation: Simulation, role: Role, op: Op, waiting: list[int]) -> None:
    """Divide a role that waits into the CTAs that wait and the others. Both execute the wait again."""
    apart: np.ndarray = np.repeat([rank in waiting for rank in role.ranks], 32 * role.warps)
    parts = [part_of(role, mask, None) for mask in (apart, ~apart)]
    for part in parts:
        part.drifts, part.at = True, role.at - 1
    role.pending = together(simulation, role, op, parts, None)
    simulation.resume(role)
