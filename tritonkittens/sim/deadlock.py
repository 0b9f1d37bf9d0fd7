"""The report of a deadlock: each role's wait, the event that would complete it, and why that event cannot happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .agents import Role
from .barriers import Barrier
from .report import Finding, Place, Stop
from .spinning import Rest

if TYPE_CHECKING:
    from .machine import Machine
    from .simulation import Simulation

MAX_PLACES = 16  # reported places of a deadlock


def deadlock(simulation: Simulation, machines: list[Machine]) -> Stop:
    """Return what stops a simulation in which no role of these clusters can run, and no operation completes."""
    roles = [r for machine in machines for r in machine.roles]
    stuck = [r for r in roles if not r.done]
    # a role that only waits for its partitions, or its parts, is not the cause
    stuck = [r for r in stuck if not r.parts and (r.op is None or r.op.name != "ttg.warp_yield")] or stuck
    places = []
    details: dict[str, Any] = {}
    for role in stuck:
        assert role.wait is not None and role.op is not None
        op = isinstance(role.wait, Rest) and role.wait.op or role.op
        places.append(Place(role.machine.where(role), f"waits for {role.wait.describe()}", op.location))
        barrier = role.wait.barrier
        if barrier is None or barrier.name in details:
            continue
        details[barrier.name] = "\n        ".join(history(role, barrier, role.wait.phase))
        for finding in misuse(role, barrier, places[-1]):
            simulation.found(finding)
    if details:
        details["buffer"] = ", ".join(sorted(details))
    if len(places) > MAX_PLACES:
        details["not shown"] = f"{len(places) - MAX_PLACES} more that wait"
    kind, message = summary(simulation, roles, stuck)
    return Stop(Finding(kind, message, tuple(places[:MAX_PLACES]), details))


def history(role: Role, barrier: Barrier, phase: int) -> Iterator[str]:
    """Yield, a line each, what is missing in the phase that a role waits for, and who took part so far."""
    yield barrier.state()
    yield f"arrived in this phase: {', '.join(barrier.arrived) or 'no role'}"
    for who, (what, op) in barrier.history.items():
        where = op.location.frames[0] if op.location.frames else "unknown line"
        yield f"{who} {what} at {where}{_state_of(role.machine, who)}"
    if not barrier.history:
        yield "nothing ever arrived at it"
    if barrier.phase > phase:
        yield f"it has completed {barrier.phase - phase} phases since the wait began"


def misuse(role: Role, barrier: Barrier, place: Place) -> Iterator[Finding]:
    """Yield mistakes that a deadlock at a barrier reveals."""
    last = role.seen_phase.get(barrier.address)
    # checked only here, because alternating roles legally skip phases, and parity does not show it
    if last is not None and barrier.phase == last + 3:
        message = (
            f"{barrier.name}: {role.name} saw phase {last} last; {last + 1} and {last + 2} are both "
            f"complete, and it waits for {last + 3}"
        )
        yield Finding("phase-wrap", message, (place,), {"buffer": barrier.name, "phase": last + 1})
    # all have arrived, copies have delivered, and the bytes do not match
    if not barrier.pending and barrier.tx and barrier.delivered:
        took_part = (Place(who, what, op.location) for who, (what, op) in barrier.history.items() if "bytes" in what)
        message = (
            f"{barrier.name}: phase {barrier.phase} expects {barrier.expected} bytes, and its copies "
            f"delivered {barrier.delivered}"
        )
        yield Finding("bytes", message, (*took_part, place), {"buffer": barrier.name, "phase": barrier.phase})


def summary(simulation: Simulation, roles: list[Role], stuck: list[Role]) -> tuple[str, str]:
    """Return the kind of the finding and its message."""
    # the compiler fills up warp groups with partitions that only return
    working = [r for r in roles if r in stuck or r.steps > 1]
    if simulation.waiting:
        what = "clusters" if simulation.residency.size > 1 else "CTAs"
        return "deadlock", (
            f"all CTAs on the device wait, and {len(simulation.waiting)} of the grid's {len(simulation.clusters())} "
            f"{what} have not started: {simulation.residency}"
        )
    if all(isinstance(r.wait, Rest) for r in stuck):
        return "loop", (
            f"{len(stuck)} of {len(working)} roles are in a loop without end: no role will change the values that "
            "they read"
        )
    return "deadlock", f"{len(stuck)} of {len(working)} roles wait, and nothing is in flight that would wake them"


def _state_of(machine: Machine, who: str) -> str:
    """Return why that participant will not arrive again."""
    for role in machine.roles:
        if who.split(" (")[0] == role.name:
            if role.done:
                return " (has ended)"
            if role.wait is not None:
                return f" (itself waits for {role.wait.describe()})"
    return ""
