"""mbarrier operations of TTGIR. PTX ISA "Parallel Synchronization: mbarrier"; their instructions are in
TritonNvidiaGPUOps.td.
"""

from __future__ import annotations

from typing import Any

from ..agents import Role
from ..ttgir import Op
from ..values import View
from .control import role_ranks
from .registry import effect


def addresses(role: Role, bar: View) -> list[int]:
    """Return the barriers of a view: one where CTAs are programs of their own; else one of each CTA, or of each group
    of CTAs that share one.

    In a group, only the CTA of the lowest rank, the leader, has the barrier. It initialises the barrier and waits for
    it; the others arrive at it across the cluster.
    """
    if role.machine.simulation.program.num_ctas == 1:
        return [bar.base + int(bar.map.offsets.reshape(-1)[0])]
    return sorted(bar.base + int(o) for o in bar.map.offsets.reshape(-1))


def sharers(role: Role, bar: View) -> int:
    """Return the CTAs that share each barrier of the view: pairs for a barrier with `two_ctas`."""
    return len(role_ranks(role)) // len(addresses(role, bar))


@effect("ttng.init_barrier")
def init_barrier(role: Role, op: Op, bar: View) -> None:
    """Initialise a barrier. The count is one CTA's contribution."""
    for address in addresses(role, bar):
        role.machine.barriers.init(role, address, op.attributes["count"] * sharers(role, bar), op)


@effect("ttng.inval_barrier")
def inval_barrier(role: Role, op: Op, bar: View) -> None:
    for address in addresses(role, bar):
        role.machine.barriers.invalidate(role, address, op)


@effect("ttng.barrier_expect")
def barrier_expect(role: Role, op: Op, bar: View, predicate: Any) -> None:
    """mbarrier.arrive.expect_tx: one arrival, and the bytes of the phase. The leader expects the bytes of all
    sharers; the others arrive.
    """
    if not predicate:
        return
    count = sharers(role, bar)
    size = op.attributes["size"] * count
    for address in addresses(role, bar):
        barrier = role.machine.barriers.find(role, address, op, f"expects {size} bytes")
        if barrier is not None:
            role.machine.barriers.expect(role, barrier, size, op)
            role.machine.barriers.arrive(role, barrier, count, op, f"arrives, expecting {size} bytes")


@effect("ttng.arrive_barrier")
def arrive_barrier(role: Role, op: Op, bar: View, *predicate: Any) -> None:
    if predicate and not predicate[0]:
        return
    for address in addresses(role, bar):
        barrier = role.machine.barriers.find(role, address, op, "arrives")
        if barrier is not None:
            count = op.attributes["count"] * (32 * role.warps if op.attributes.get("perThread") else 1)
            role.machine.barriers.arrive(role, barrier, count * sharers(role, bar), op)


@effect("ttng.wait_barrier")
def wait_barrier(role: Role, op: Op, bar: View, phase: int, *rest: Any) -> Any:
    """Wait, in the leaders only.

    A cluster that is one program runs in lockstep here. On hardware, the other CTAs of a group may run ahead of their
    leader.
    """
    segments = op.attributes.get("operandSegmentSizes")
    if rest and (segments is None or segments[2]) and not rest[0]:
        return
    for address in addresses(role, bar):
        barrier = role.machine.barriers.find(role, address, op, f"waits for parity {phase & 1}")
        if barrier is not None:
            yield role.machine.barriers.wait_for(role, barrier, phase, op)
            role.machine.barriers.passed(role, barrier)


@effect("ttng.async_copy_mbarrier_arrive")
def async_copy_mbarrier_arrive(role: Role, op: Op, bar: View) -> None:
    """cp.async.mbarrier.arrive: every thread arrives once its earlier cp.async copies are complete. Without `noinc`,
    the pending count rises first.
    """
    machine = role.machine
    (address,) = addresses(role, bar)
    barrier = machine.barriers.find(role, address, op, "cp.async.mbarrier.arrive")
    if barrier is None:
        return
    threads = 32 * role.warps
    copies = [c for group in [*role.copy_groups, role.copy_open] for c in group if not c.done]
    if not op.attributes.get("noIncrement"):
        barrier.pending += threads
    clock = role.release()

    def done(operation: Any) -> None:
        for copy in copies:
            operation.clock.operations |= copy.bit
        clock.join(operation.clock)
        machine.barriers.arrive(role, barrier, threads, op, "arrives (cp.async complete)", clock)

    operation = machine.start("cp.async arrival", role, op, done, unit="cp.async")
    operation.gate = lambda: all(c.done for c in copies)
