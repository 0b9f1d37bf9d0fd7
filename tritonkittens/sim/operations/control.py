"""Program ids, synchronisation of a whole CTA or cluster, messages and assertions. Branches and partitions are in
`control_flow`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..agents import Role, poisoned
from ..report import Stop
from ..ttgir import Op
from .registry import effect, view


@view("tt.get_program_id")
def program_id(role: Role, op: Op) -> int:
    return role.machine.ctas[role.rank].program[op.attributes["axis"]]


@view("tt.get_num_programs")
def num_programs(role: Role, op: Op) -> int:
    return role.machine.simulation.grid[op.attributes["axis"]]


@view("ttg.warp_id")
def warp_id(role: Role, op: Op) -> int:
    return role.start_warp


@view("ttng.cluster_id", "nvg.cluster_id")
def cluster_id(role: Role, op: Op) -> int:
    return role.rank


@effect("ttg.barrier", "gpu.barrier", "ttg.local_barrier")
def barrier(role: Role, op: Op) -> None:
    """bar.sync of the role's own warps (`Program.resolve` marks it). They are in lockstep already."""


@effect("ttng.fence_async_shared")
def fence_async_shared(role: Role, op: Op) -> None:
    for rank in role_ranks(role):
        role.fence_proxy(rank, bool(op.attributes.get("bCluster")))


@effect("ttng.fence_mbarrier_init_release_cluster")
def fence_mbarrier_init(role: Role, op: Op) -> None:
    """Order mbarrier.init before the following cluster barrier, for which others wait."""
    for rank in role_ranks(role):
        role.fence_cluster(rank)


@effect("ttng.cluster_arrive")
def cluster_arrive(role: Role, op: Op) -> None:
    machine = role.machine
    warps, relaxed = machine.simulation.program.total_warps, bool(op.attributes.get("relaxed"))
    generation = machine.cluster_barrier.arrive(role, warps, role_ranks(role), relaxed)
    role.seen_phase[-1] = generation


@effect("ttng.cluster_wait")
def cluster_wait(role: Role, op: Op) -> Any:
    machine = role.machine
    if -1 not in role.seen_phase:
        machine.stop("arrivals", "barrier.cluster.wait without barrier.cluster.arrive before it", role, op)
    yield machine.cluster_barrier.wait(role, role.seen_phase.pop(-1))
    machine.cluster_barrier.passed(role, role_ranks(role))


@effect("ttng.cluster_barrier")
def cluster_barrier(role: Role, op: Op) -> Any:
    cluster_arrive(role, op)
    yield from cluster_wait(role, op)


def exchange(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation whose CTAs exchange elements, for which the compiler adds barriers of the cluster."""

    def exchanging(role: Role, op: Op, *values: Any) -> Any:
        role.meet()
        return compute(op, *values)

    return exchanging


def role_ranks(role: Role) -> Sequence[int]:
    """Return the CTAs of a role that execute an operation: all, or those whose first thread is in this part of a
    divided role.
    """
    if role.mask is None:
        return role.ranks
    return [rank for rank in role.ranks if role.mask[(rank - role.ranks.start) * 32 * role.warps]]


@effect("tt.assert", "cf.assert")
def device_assert(role: Role, op: Op, condition: Any, *mask: Any) -> None:
    if poison := poisoned(condition):
        role.machine.report(
            "uninitialized",
            "an assertion on a value that was never computed",
            role,
            op,
            computed=str(poison.op.location),
        )
        return
    holds = np.asarray(condition).astype(bool)
    if mask:
        holds = holds | ~np.asarray(mask[0]).astype(bool)
    if not holds.all():
        message = op.attributes.get("message") or op.attributes.get("msg") or "assertion failed"
        role.machine.report(
            "assert",
            f"{message}" + (f" ({int((~holds).sum())} of {holds.size} elements)" if holds.size > 1 else ""),
            role,
            op,
        )
        from ..report import Finding, Place

        raise Stop(Finding("assert", str(message), (Place(role.machine.where(role), "asserts", op.location),)))


@effect("tt.print")
def device_print(role: Role, op: Op, *values: Any) -> None:
    x, y, z = role.machine.ctas[role.rank].program
    prefix = op.attributes.get("prefix", "")
    shown = ", ".join(np.array2string(np.asarray(v), threshold=64) for v in values)
    print(f"pid ({x}, {y}, {z}) {prefix}{shown}", file=sys.stdout)


@effect("tt.assume", "llvm.intr.assume")
def assume(role: Role, op: Op, condition: Any) -> None:
    if not poisoned(condition) and not np.asarray(condition).all():
        role.machine.report("assert", "an assumption (tl.assume) does not hold", role, op)


@effect("tt.gdc_wait", "ttg.gdc_wait", "nvvm.griddepcontrol.wait", "ttng.gdc_wait", "tt.grid_dependency_wait")
def dependency_wait(role: Role, op: Op) -> None:
    """Return at once: launches are simulated one after the other. From here on the role knows what they did."""
    role.clock.complete |= role.machine.simulation.launch_order.waited


@effect(
    "tt.gdc_launch_dependents",
    "ttg.gdc_launch_dependents",
    "nvvm.griddepcontrol.launch.dependents",
    "ttng.gdc_launch",
    "tt.grid_dependency_launch_dependents",
)
def launch_dependents(role: Role, op: Op) -> None:
    """From here on the next launch may start, when all CTAs are so far. It knows the launches that have ended now."""
    for rank in role_ranks(role):
        role.machine.dependents.setdefault(rank, role.clock.complete)
