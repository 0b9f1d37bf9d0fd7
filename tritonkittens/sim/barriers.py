"""mbarrier objects as the PTX ISA defines them ("Parallel Synchronization: mbarrier"): pending arrivals, tx-count,
phase.

A phase completes when no arrival is pending and the tx-count is zero. The next phase begins at once with the initial
count. A barrier also records the arrivals and the expected and delivered bytes of the current phase, so that a report
can explain an incomplete phase.
"""

from __future__ import annotations

from typing import Any

from .clocks import Clock
from .ttgir import Op

MAX_COUNT = (1 << 20) - 1


class Barrier:
    """One initialised mbarrier. `phase` counts completed phases; a wait names its parity."""

    def __init__(self, name: str, count: int, roles: int, init_op: Op, init_access: Any, address: int):
        self.name, self.count, self.address = name, count, address
        self.init_op, self.init_access = init_op, init_access
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.time = 0.0  # modelled time at which the last phase completed
        self.pending_time = 0.0
        self.gathering = Clock(roles)  # the clock released by the arrivals of the current phase
        self.released = Clock(roles)  # the clock released by the last completed phase
        self.expected = 0
        self.delivered = 0
        self.arrived: list[str] = []
        self.history: dict[str, tuple[str, Op]] = {}  # all participants so far: name → (action, operation)

    def completed(self, parity: int) -> bool:
        """Whether a wait for the phase of that parity would return now. The phase before the current one has the
        other parity.
        """
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
        """Return, for reports, the missing arrivals and bytes of the current phase."""
        parts = [f"phase {self.phase} (parity {self.phase & 1}) is open"]
        if self.pending:
            parts.append(f"{self.pending} of {self.count} arrivals missing")
        if self.tx > 0:
            parts.append(f"{self.tx} of {self.expected} expected bytes missing")
        elif self.tx < 0:
            parts.append(f"{-self.tx} bytes delivered beyond the {self.expected} expected")
        return ", ".join(parts)
