"""The barrier of a cluster. PTX ISA "barrier.cluster"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .agents import Role, Wait
from .clocks import Clock

if TYPE_CHECKING:
    from .machine import Machine


class ClusterBarrier:
    """barrier.cluster.arrive / wait: every thread of every CTA of the cluster arrives. Ended threads count as arrived
    (PTX ISA "barrier.cluster").
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.generation = 0
        self.arrived: dict[int, int] = {}
        self.came: dict[int, set[str]] = {}  # the roles of each rank that have arrived
        self.gathering = Clock(machine.number_of_roles)
        self.released = Clock(machine.number_of_roles)
        self.time = 0.0

    def arrive(self, role: Role, warps: int, ranks: Sequence[int], relaxed: bool = False) -> int:
        """Arrive with `warps` warps of each of these CTAs. A `relaxed` arrival releases only what a fence has
        published. Return the generation to wait for.
        """
        self.time = max(self.time, role.time)
        for rank in ranks:
            self.gathering.join(role.visible[rank] if relaxed else role.release(rank))
            self.arrived[rank] = self.arrived.get(rank, 0) + warps
            self.came.setdefault(rank, set()).add(role.name)
        generation = self.generation + 1
        self.advance()
        return generation

    def advance(self) -> None:
        total = self.machine.simulation.program.total_warps
        if not self.arrived:
            return
        for rank in range(len(self.machine.ctas)):
            mine = [r for r in self.machine.roles if r.rank == rank]
            ended = bool(mine) and all(r.done for r in mine)
            if not ended and self.arrived.get(rank, 0) < total:
                return
        self.generation += 1
        self.arrived, self.came = {}, {}
        self.released, self.gathering = self.gathering, Clock(self.machine.number_of_roles)

    def wait(self, role: Role, generation: int) -> Wait:
        def missing() -> str:
            total = self.machine.simulation.program.total_warps
            late = [r for r in range(len(self.machine.ctas)) if self.arrived.get(r, 0) < total]
            parts = [
                f"rank {r} ({self.arrived.get(r, 0)} of {total} warps have arrived; {self._absent(r)})" for r in late
            ]
            counted = (
                ", which counts the warps of roles that are not running too"
                if any("not running" in part for part in parts)
                else ""
            )
            return f"the cluster barrier{counted}; missing: {', '.join(parts)}"

        return Wait(lambda: self.generation >= generation, missing, time=lambda: self.time)

    def _absent(self, rank: int) -> str:
        """Return the roles of a CTA that have not arrived, with reasons."""
        program = self.machine.simulation.program
        running = {r.name: r for r in self.machine.roles if r.rank == rank or program.num_ctas > 1}
        came = self.came.get(rank, set())
        absent: dict[str, list[str]] = {}
        for name, warps in zip(program.role_names, program.role_warps()):
            role = running.get(name)
            why = "not running" if role is None else "ended" if role.done else "still on its way"
            if name not in came:
                absent.setdefault(why, []).append(f"{name} ({warps})")
        return (
            "; ".join(f"{why}: {', '.join(names)}" for why, names in absent.items()) or "some of every role are missing"
        )

    def passed(self, role: Role, ranks: Sequence[int]) -> None:
        """Record that the role's threads in these CTAs have waited."""
        for rank in ranks:
            role.clocks[rank].join(self.released)
