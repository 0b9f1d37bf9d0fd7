"""mbarrier operations of TTGIR. PTX ISA "Parallel Synchronization: mbarrier"; their instructions are in
TritonNvidiaGPUOps.td.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from ..agents import Async, Role
from ..layouts import SHARED_STRIDE
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


def owned(role: Role, bar: View) -> list[tuple[int, int]]:
    """Return (address, rank) of the barriers that the executing CTAs have themselves."""
    ranks = role_ranks(role)
    if len(role.ranks) == 1:
        return [(addresses(role, bar)[0], role.rank)]
    return [(a, a // SHARED_STRIDE) for a in addresses(role, bar) if a // SHARED_STRIDE in ranks]


def sharers(role: Role, barriers: list[int], address: int) -> list[int]:
    """Return the CTAs that share the barrier at `address`, one of those of a view; with `two_ctas` a pair."""
    if len(role.ranks) == 1:
        return [role.rank]
    kept = functools.reduce(operator.or_, barriers) // SHARED_STRIDE  # the bits of a rank that select a barrier
    return [rank for rank in role.ranks if rank & kept == address // SHARED_STRIDE]


def sources(role: Role, op: Op, bar: View, address: int) -> list[int]:
    """Return the CTAs whose threads arrive at one barrier of the view: its sharers, or the one of `from_cta`."""
    mask = op.attributes.get("fromCTA")
    if op.attributes.get("multicastCTA"):
        raise NotImplementedError(f"{op.name} with a multicast arrival")
    if mask is None or len(role.ranks) == 1:
        ranks = sharers(role, addresses(role, bar), address)
    else:
        ranks = [address // SHARED_STRIDE & mask]
    return [rank for rank in ranks if rank in role_ranks(role)]


@effect("ttng.init_barrier")
def init_barrier(role: Role, op: Op, bar: View) -> None:
    """Initialise a barrier. The count is one CTA's contribution."""
    for address, rank in owned(role, bar):
        count = op.attributes["count"] * len(sharers(role, addresses(role, bar), address))
        role.machine.barriers.init(role, address, count, op, rank)


@effect("ttng.inval_barrier")
def inval_barrier(role: Role, op: Op, bar: View) -> None:
    for address, rank in owned(role, bar):
        role.machine.barriers.invalidate(role, address, op, rank)


@effect("ttng.barrier_expect")
def barrier_expect(role: Role, op: Op, bar: View, predicate: Any) -> None:
    """mbarrier.arrive.expect_tx: one arrival of each CTA that shares the barrier, and the bytes that it expects."""
    if not predicate:
        return
    barriers, size = role.machine.barriers, op.attributes["size"]
    for address in addresses(role, bar):
        ranks = sources(role, op, bar, address)
        found = [barriers.find(role, address, op, f"expects {size} bytes", rank) for rank in ranks]
        for barrier in found:
            if barrier is not None:
                barriers.expect(role, barrier, size, op)
        for rank, barrier in zip(ranks, found):
            if barrier is not None:
                barriers.arrive(role, barrier, 1, op, f"arrives, expecting {size} bytes", rank)


@effect("ttng.arrive_barrier")
def arrive_barrier(role: Role, op: Op, bar: View, *predicate: Any) -> None:
    if predicate and not predicate[0]:
        return
    count = op.attributes["count"] * (32 * role.warps if op.attributes.get("perThread") else 1)
    for address in addresses(role, bar):
        for rank in sources(role, op, bar, address):
            barrier = role.machine.barriers.find(role, address, op, "arrives", rank)
            if barrier is not None:
                role.machine.barriers.arrive(role, barrier, count, op, rank=rank)


@effect("ttng.wait_barrier")
def wait_barrier(role: Role, op: Op, bar: View, phase: int, *rest: Any) -> Any:
    """Wait, in the leaders only: the other CTAs of a group pass, and are not ordered after the phase."""
    segments = op.attributes.get("operandSegmentSizes")
    if rest and (segments is None or segments[2]) and not rest[0]:
        return
    for address, rank in owned(role, bar):
        barrier = role.machine.barriers.find(role, address, op, f"waits for parity {phase & 1}", rank)
        if barrier is not None:
            yield role.machine.barriers.wait_for(role, barrier, phase, op)
            role.machine.barriers.passed(role, barrier, rank)


@effect("ttng.async_copy_mbarrier_arrive")
def async_copy_mbarrier_arrive(role: Role, op: Op, bar: View) -> None:
    """cp.async.mbarrier.arrive: every thread arrives once its earlier cp.async copies are complete. Without `noinc`,
    the pending count rises first.
    """
    machine = role.machine
    threads = 32 * role.warps
    copies = [c for group in [*role.copy_groups, role.copy_open] for c in group]
    in_flight = [c for c in copies if not c.done]
    arrivals = [
        (rank, machine.barriers.find(role, address, op, "cp.async.mbarrier.arrive", rank))
        for address in addresses(role, bar)
        for rank in sources(role, op, bar, address)
    ]
    for _, barrier in arrivals:
        if barrier is not None and not op.attributes.get("noIncrement"):
            barrier.pending += threads

    def done(operation: Async) -> None:
        for rank, barrier in arrivals:
            for copy in copies:
                operation.clocks[rank].operations |= copy.bits[rank]
            if barrier is not None:
                machine.barriers.arrive(role, barrier, threads, op, "arrives (cp.async complete)", rank, operation)

    operation = machine.start("cp.async arrival", role, op, done, unit="cp.async")
    operation.gate = lambda: all(c.done for c in in_flight)
