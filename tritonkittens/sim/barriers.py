"""mbarrier objects as the PTX ISA defines them ("Parallel Synchronization: mbarrier"): pending arrivals, tx-count,
phase.

A phase completes when no arrival is pending and the tx-count is zero. The next phase begins at once with the initial
count. A barrier also records the arrivals and the expected and delivered bytes of the current phase, so that a report
can explain an incomplete phase. `Barriers` has those of a cluster, and reports their misuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .agents import Async, Role, Wait
from .clocks import GENERIC, Access, Clock
from .layouts import SHARED_MASK
from .report import Place
from .ttgir import Op

if TYPE_CHECKING:
    from .machine import Machine

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


class Barriers(dict[int, Barrier]):
    """The mbarriers of a cluster by their addresses: what roles and copies do to them, and what is reported."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.invalidated: dict[int, Op] = {}

    def find(self, role: Role, address: int, op: Op, what: str, rank: int | None = None) -> Barrier | None:
        """Return the barrier at an address, for the role's threads in CTA `rank`; report and return None without
        one."""
        found = self.get(address)
        if self.machine.has_ended(address >> 24, role):
            name = self.machine.name_of("shared", address)
            message = f"{name}: {what} in the shared memory of rank {address >> 24}, whose threads have all ended"
            self.machine.report("barrier-life", message, role, op, what, rank=rank, buffer=name)
        if found is None:
            name = self.machine.name_of("shared", address)
            dead = self.invalidated.get(address)
            why = "after mbarrier.inval" if dead is not None else "before mbarrier.init"
            more = (Place("here", "mbarrier.inval", dead.location),) if dead is not None else ()
            self.machine.report("barrier-life", f"{name}: {what} {why}", role, op, what, more, rank, buffer=name)
        elif not role.clocks[role.rank if rank is None else rank].covers(found.init_access):
            self.machine.report(
                "barrier-life", f"{found.name}: {what} is not ordered after its mbarrier.init", role, op, what,
                (Place(found.init_access.who, "mbarrier.init", found.init_op.location),), rank, buffer=found.name,
            )  # fmt: skip
        return found

    def init(self, role: Role, address: int, count: int, op: Op, rank: int | None = None) -> None:
        rank = role.rank if rank is None else rank
        name = self.machine.name_of("shared", address)
        if not 1 <= count <= MAX_COUNT:
            self.machine.report(
                "arrivals", f"{name}: mbarrier.init with a count of {count}; 1 to {MAX_COUNT}", role, op
            )
            count = max(1, min(count, MAX_COUNT))
        if address % 8:
            self.machine.report(
                "misaligned", f"{name}: an mbarrier lies on 8 bytes, not at {address & SHARED_MASK}", role, op
            )
        if address in self:
            old = self[address]
            before = Place("before", "mbarrier.init", old.init_op.location)
            self.machine.report(
                "barrier-life",
                f"{name}: initialised again without mbarrier.inval",
                role,
                op,
                "mbarrier.init",
                (before,),
            )
        epoch = role.clocks[rank].roles[role.components[rank]]
        access = Access(role.components[rank], epoch, 0, GENERIC, True, op, self.machine.where(role, rank), True)
        role.advance(rank)
        self.machine.ctas[address >> 24].shared.written[(address & SHARED_MASK) : (address & SHARED_MASK) + 8] = True
        self[address] = Barrier(name, count, self.machine.number_of_roles, op, access, address)
        self.invalidated.pop(address, None)

    def invalidate(self, role: Role, address: int, op: Op, rank: int | None = None) -> None:
        barrier = self.find(role, address, op, "mbarrier.inval", rank)
        if barrier is None:
            return
        waiting = [r for r in self.machine.roles if r.wait is not None and r.wait.barrier is barrier and r is not role]
        for other in waiting:
            self.machine.report(
                "barrier-life", f"{barrier.name}: invalidated while {other.name} waits for it", role, op
            )
        if barrier.tx > 0:
            self.machine.report(
                "bytes",
                f"{barrier.name}: invalidated while it expects {barrier.tx} more bytes",
                role,
                op,
                buffer=barrier.name,
            )
        del self[address]
        self.invalidated[address] = op

    def arrive(
        self,
        role: Role,
        barrier: Barrier,
        count: int,
        op: Op,
        what: str = "arrives",
        rank: int | None = None,
        operation: Async | None = None,
    ) -> None:
        """Subtract `count` from the pending arrivals, and release the clock of the role's threads in CTA `rank`, or of
        an operation that this CTA issued.
        """
        if count <= 0:
            return
        rank = role.rank if rank is None else rank
        who = role.called(rank) if operation is None else f"{role.called(rank)} ({operation.kind})"
        clock = role.release(rank) if operation is None else operation.past([rank])
        self._early(role, rank, barrier, clock, op)
        barrier.gathering.join(clock)
        barrier.history[who] = (what, op)
        barrier.pending_time = max(barrier.pending_time, role.time if operation is None else self.machine.time)
        if count > barrier.pending:
            others = ", ".join(barrier.arrived) or "no role"
            self.machine.report(
                "arrivals",
                f"{barrier.name}: {count} arrivals at a phase that misses {barrier.pending} of {barrier.count} "
                f"(phase {barrier.phase}; arrived before: {others})",
                role,
                op,
                what,
                (Place("initialised", f"count {barrier.count}", barrier.init_op.location),),
                rank,
                buffer=barrier.name,
                phase=barrier.phase,
            )
            count = barrier.pending
        barrier.pending -= count
        barrier.arrived.append(f"{who} ×{count}" if count > 1 else who)
        self._advance(barrier)

    def _early(self, role: Role, rank: int, barrier: Barrier, clock: Clock, op: Op) -> None:
        """Report an arrival of CTA `rank` that may precede the arrivals of other CTAs at the phase before, although
        the CTAs of a program compute together here.
        """
        if len(role.ranks) == 1 or not barrier.phase:
            return
        per_cta = self.machine.simulation.roles_per_cta
        for component, epoch in enumerate(barrier.released.roles):
            if component // per_cta != rank and clock.roles[component] < epoch:
                message = (
                    f"{barrier.name}: rank {rank} arrives in phase {barrier.phase}, but nothing orders it after an "
                    f"arrival of rank {component // per_cta} in phase {barrier.phase - 1}, where it may count instead"
                )
                self.machine.report("arrivals", message, role, op, "arrives", rank=rank, buffer=barrier.name)
                return

    def expect(self, role: Role, barrier: Barrier, nbytes: int, op: Op) -> None:
        barrier.tx += nbytes
        barrier.expected += nbytes
        barrier.history[f"{role.name} (bytes)"] = (f"expects {nbytes} bytes", op)
        if not -MAX_COUNT <= barrier.tx <= MAX_COUNT:
            self.machine.report(
                "bytes",
                f"{barrier.name}: a tx-count of {barrier.tx}; the hardware counts to {MAX_COUNT}",
                role,
                op,
                buffer=barrier.name,
            )
        self._advance(barrier)

    def complete_bytes(self, role: Role, barrier: Barrier, nbytes: int, op: Op, rank: int | None = None) -> None:
        """Execute mbarrier.complete_tx by a thread, with the effect of a delivered copy."""
        barrier.history[f"{role.name} (complete_tx)"] = (f"completes {nbytes} bytes", op)
        barrier.gathering.join(role.release(rank))
        barrier.tx -= nbytes
        barrier.delivered += nbytes
        self._advance(barrier)

    def promise(self, operation: Async, barrier: Barrier) -> int:
        """Register a started copy with the barrier's current phase. Pass the result to `deliver`."""
        operation.barrier, operation.phase = barrier, barrier.phase
        return barrier.phase

    def deliver(
        self, operation: Async, barrier: Barrier, phase: int, nbytes: int, issuers: Iterable[int] | None = None
    ) -> None:
        """Execute complete_tx of a copy that started in `phase`. `issuers`: the CTAs whose copies signal this barrier,
        all by default."""
        role = operation.role
        if self.get(barrier.address) is not barrier:
            self.machine.report(
                "barrier-life",
                f"{barrier.name}: a copy delivers {nbytes} bytes after mbarrier.inval",
                role,
                operation.op,
                "copy",
                buffer=barrier.name,
            )
            return
        barrier.history[f"{role.name} ({operation.kind})"] = (f"delivers {nbytes} bytes", operation.op)
        if barrier.phase != phase:
            self.machine.report(
                "bytes",
                f"{barrier.name}: a copy started in phase {phase} delivers its {nbytes} bytes in phase "
                f"{barrier.phase}: phase "
                f"{phase} completed without them, because fewer bytes were expected than its copies deliver",
                role,
                operation.op,
                f"copies {nbytes} bytes",
                tuple(
                    Place(who, what, place.location)
                    for who, (what, place) in barrier.history.items()
                    if "expects" in what
                ),
                buffer=barrier.name,
                phase=phase,
            )
        barrier.gathering.join(operation.past(operation.issuers() if issuers is None else issuers))
        barrier.tx -= nbytes
        barrier.delivered += nbytes
        barrier.pending_time = max(barrier.pending_time, operation.finish)
        self._advance(barrier)

    def _advance(self, barrier: Barrier) -> None:
        before = barrier.phase
        if not barrier.advance(self.machine.time):
            return
        for role in self.machine.roles:
            wait = role.wait
            if wait is not None and wait.barrier is barrier and barrier.phase >= wait.phase + 2 and not role.done:
                op = role.op
                assert op is not None
                self.machine.report(
                    "phase-wrap",
                    f"{barrier.name}: phases {wait.phase} and {before} both completed while {role.name} waited for "
                    "phase "
                    f"{wait.phase}; its parity cannot distinguish two completed phases from none",
                    role,
                    op,
                    f"waits for parity {wait.parity}",
                    buffer=barrier.name,
                    phase=wait.phase,
                )

    def wait_for(self, role: Role, barrier: Barrier, parity: int, op: Op) -> Wait:
        """Return the wait that a role yields for the phase of that parity. Afterwards the role calls `passed`."""
        return Wait(
            lambda: barrier.completed(parity),
            lambda: f"phase of parity {parity & 1} of {barrier.name}",
            barrier, parity & 1, lambda: barrier.time,
        )  # fmt: skip

    def passed(self, role: Role, barrier: Barrier, rank: int | None = None) -> None:
        """Record that the role's threads in CTA `rank` have waited for the barrier's last phase."""
        role.clocks[role.rank if rank is None else rank].join(barrier.released)
        role.time = max(role.time, barrier.time)
        role.seen_phase[barrier.address] = barrier.phase - 1
