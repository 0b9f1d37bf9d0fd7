"""mbarrier objects, exactly as PTX ISA "Parallel Synchronization: mbarrier" defines them: pending arrivals, tx-count, phase.

A phase completes when no arrival is pending and the tx-count is zero; the next begins at once with the initial count. Beside that state a barrier remembers who
arrived and what was expected and delivered in the current phase, so that a report can say why a phase does not complete.
"""
from __future__ import annotations

from typing import Any

from .clocks import Clock
from .ttgir import Op

MAX_COUNT = (1 << 20) - 1


class Barrier:
    """One initialised mbarrier. `phase` counts completed phases; its parity is what a wait names."""

    def __init__(self, name: str, count: int, roles: int, init_op: Op, init_access: Any, address: int):
        self.name, self.count, self.address = name, count, address
        self.init_op, self.init_access = init_op, init_access
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.time = 0.0  # modelled time at which the last phase completed
        self.pending_time = 0.0
        self.gathering = Clock(roles)  # what the arrivals of the current phase released
        self.released = Clock(roles)  # what the last completed phase released
        self.expected = 0
        self.delivered = 0
        self.arrived: list[str] = []
        self.history: dict[str, tuple[str, Op]] = {}  # everyone who ever took part: who → (what, where)

    def completed(self, parity: int) -> bool:
        """Would a wait for the phase of that parity return now? The phase before the current one has the other parity."""
        return (self.phase & 1) != (parity & 1)

    def advance(self, time: float) -> bool:
        """Complete the phase if nothing is missing."""
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.count
        self.time = max(time, self.pending_time)
        self.released, self.gathering = self.gathering, Clock(len(self.gathering.roles))
        self.gathering.join(self.released)  # later phases come after earlier ones
        self.expected = self.delivered = 0
        self.arrived = []
        return True

    def state(self) -> str:
        """For reports: what the current phase still misses."""
        parts = [f"phase {self.phase} (parity {self.phase & 1}) is open"]
        if self.pending:
            parts.append(f"{self.pending} of {self.count} arrivals missing")
        if self.tx > 0:
            parts.append(f"{self.tx} of {self.expected} expected bytes missing")
        elif self.tx < 0:
            parts.append(f"{-self.tx} bytes delivered beyond the {self.expected} expected")
        return ", ".join(parts)
