"""What acts in a cluster: roles, the asynchronous operations that they start, and a role's wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .clocks import Clock, World, joined, proxied
from .report import Place
from .ttgir import Block, Op
from .values import Poison

if TYPE_CHECKING:
    from .barriers import Barrier
    from .global_order import Threads
    from .machine import Machine

WAITED_FOR = {"TMA load", "TMA gather", "wgmma", "tcgen05.mma", "tcgen05.cp", "cp.async"}
# work in flight at a CTA's end that must no longer read its shared memory
BULK_STORES = ("TMA store", "TMA reduce", "TMA scatter")


def needs_wait(kind: str) -> bool:
    """Whether a role must wait for such an operation before its CTA ends."""
    return kind in WAITED_FOR or kind.startswith(BULK_STORES)


class Wait:
    """A role's wait: `ready` tells whether it can continue, `describe` names the event.

    `barrier` and `parity` are set for waits of an mbarrier. `outside`: other clusters can end the wait.
    """

    __slots__ = ("ready", "describe", "barrier", "parity", "phase", "time", "outside")

    def __init__(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        barrier: Barrier | None = None,
        parity: int = 0,
        time: Callable[[], float] | None = None,
    ):
        self.ready, self.describe, self.barrier, self.parity, self.time = ready, describe, barrier, parity, time
        self.phase = barrier.phase if barrier is not None else 0
        self.outside = False


class Async:
    """An operation that a role starts and hardware completes, at any moment that the schedule chooses.

    `effect` runs at completion: it accesses memory (as this agent) and signals. `after` is an operation of the same
    in-order unit that completes first.

    Each CTA of a role issues the operation, or `rank` alone. They complete together here, but each issuer has its own
    clock and its own bit: who waits for one issuer's work is not ordered after another's. CTA `r & leads` issues what
    concerns CTA r, where fewer CTAs issue an operation than it concerns (pairs, multicast).
    """

    __slots__ = (
        "kind",
        "role",
        "op",
        "ranks",
        "leads",
        "clocks",
        "bits",
        "effect",
        "after",
        "done",
        "started",
        "finish",
        "who",
        "number",
        "barrier",
        "phase",
        "unit",
        "gate",
        "registers",
    )

    def __init__(
        self,
        kind: str,
        role: Role,
        op: Op,
        effect: Callable[[Async], None],
        after: Async | None,
        unit: str,
        number: int,
        rank: int | None = None,
    ):
        self.kind, self.role, self.op, self.effect, self.after, self.unit, self.number = (
            kind,
            role,
            op,
            effect,
            after,
            unit,
            number,
        )
        self.ranks: range = role.ranks if rank is None else range(rank, rank + 1)
        self.leads = -1
        self.clocks: dict[int, Clock] = {r: role.clocks[r].copy() for r in self.ranks}
        self.bits = {r: 1 << number + k for k, r in enumerate(self.ranks)}
        self.done = False
        self.started: float = role.time
        self.finish: float = role.time
        self.who = f"{kind} of {role.name}"
        self.barrier: Barrier | None = None  # the barrier to signal
        self.phase = 0  # the barrier's phase at the start
        self.gate: Callable[[], bool] | None = None
        # a matrix operand in registers, which must stay unchanged until the wait for the product
        self.registers: Any = None

    @property
    def clock(self) -> Clock:
        """The clock of the first CTA that issues the operation, mostly the only one."""
        return self.clocks[self.ranks[0]]

    def issuer(self, rank: int) -> int:
        """Return the CTA that issues what the operation does in CTA `rank`."""
        return self.ranks[0] if len(self.ranks) == 1 else rank & self.leads

    def issuers(self) -> Iterable[int]:
        return self.ranks if self.leads == -1 else {self.issuer(rank) for rank in self.ranks}

    def learn(self, issuer: int, other: Async) -> None:
        """Order an issuer's part of the operation after its part of another."""
        self.clocks[issuer].after(other.clocks[issuer], other.bits[issuer])

    def past(self, issuers: Iterable[int]) -> Clock:
        """Return the clock of those who have waited for these issuers' parts of the operation."""
        first, *others = issuers
        clock = self.clocks[first].copy()
        clock.after(clock, self.bits[first])
        for issuer in others:
            clock.join(self.past([issuer]))
        return clock

    def awaited(self, role: Role) -> bool:
        """Whether the role has waited for the operation, in every CTA that issued it."""
        return all(role.clocks[issuer].operations & self.bits[issuer] for issuer in self.issuers())

    def can_complete(self) -> bool:
        return (self.after is None or self.after.done) and (self.gate is None or self.gate())


class Role:
    """The threads of one partition of one CTA, in lockstep between operations.

    Where Triton compiled one program for several CTAs, a role has the partition's threads of all of them. They compute
    together, but each CTA has its own clock: only barriers and operations that reach a CTA order its accesses.
    """

    def __init__(
        self,
        machine: Machine,
        rank: int,
        index: int,
        name: str,
        warps: int,
        start_warp: int,
        environment: list[Any],
        block: Block,
    ):
        self.machine, self.rank, self.index, self.name = machine, rank, index, name
        self.warps, self.start_warp = warps, start_warp
        self.environment, self.block, self.at = environment, block, 0
        self.ranks: range = (
            range(len(machine.ctas)) if machine.simulation.program.num_ctas > 1 else range(rank, rank + 1)
        )
        # the component of these threads in all clocks, and their own clock, by CTA
        self.components = {r: index + k * machine.simulation.roles_per_cta for k, r in enumerate(self.ranks)}
        self.clocks: dict[int, Clock] = {r: Clock(machine.number_of_roles) for r in self.ranks}
        # what fences of the cluster have made visible to those who wait for a relaxed arrival: at first, the start
        self.visible: dict[int, Clock] = {r: Clock(machine.number_of_roles) for r in self.ranks}
        for r in self.ranks:
            self.visible[r].roles[self.components[r]] = 1
            self.clocks[r].roles[self.components[r]] = 2
            self.clocks[r].complete = machine.simulation.launch_order.before
        self.time: float = 0.0
        self.wait: Wait | None = None
        self.pending: Any = None  # the generator of the operation in progress
        self.pending_results: tuple[int, ...] = ()
        self.pending_barrier = False  # whether a barrier of the role's threads is in it
        self.done = False
        self.frames: list[tuple[Block, int, tuple[int, ...]]] = []  # callers
        self.steps = 0
        self.op: Op | None = None
        self.products: list[Async] = []  # wgmma groups in flight, oldest first
        self.bulk_groups: list[list[Async]] = []  # of bulk stores: the writes, each after its reads (`after`)
        self.bulk_open: list[Async] = []
        self.copy_groups: list[list[Async]] = []
        self.copy_open: list[Async] = []
        # accesses of tensor memory by its threads, until tcgen05.wait
        self.tensor_accesses: dict[str, list[Async]] = {"ld": [], "st": []}
        self.seen_phase: dict[int, int] = {}
        self.children: list[Role] = []
        self.looks = False  # whether the operation in progress only reads (`spinning`)
        self.watch: Any = None  # for loops that only read
        self.watching: list[Any] = []  # watches of the role's reads
        # bool for each thread: the threads in this part of a divided role (`divergence`); None is all
        self.mask: Any = None
        self.meets: Block | None = None  # where a part of a divided role ends
        self.parts: list[Role] = []  # of this role, while it is divided
        self.drifts = False  # whether a part goes on past its end, up to an operation of whole roles
        # for global memory: barriers of the role's threads so far, and the epoch of the last one
        self.barriers = 0
        self.synced = 0
        self.touched: list[Threads] = []  # accesses since then
        self.observed: tuple[World, int] | None = None  # what relaxed reads have seen, for a fence to acquire
        self.fenced: tuple[World, int] | None = None  # what a fence lets relaxed writes publish

    @property
    def ready(self) -> bool:
        return not self.done and (self.wait is None or self.wait.ready())

    @property
    def clock(self) -> Clock:
        """The clock of the role's threads in its first CTA, mostly the only one."""
        return self.clocks[self.rank]

    def release(self, rank: int | None = None) -> Clock:
        """Return the clock that an arrival of CTA `rank` releases, without its later work."""
        rank = self.rank if rank is None else rank
        clock = self.clocks[rank].copy()
        self.advance(rank)
        return clock

    def barrier(self) -> None:
        """A barrier of the role's threads: from here on each knows the others' accesses of global memory."""
        self.synced = self.clock.roles[self.index]
        for rank in self.ranks:
            self.advance(rank)
        self.barriers += 1
        self.forget()

    def forget(self) -> None:
        """Free what is known of single threads' accesses of global memory."""
        for threads in self.touched:
            threads.forget()
        self.touched = []

    def published(self, single: bool) -> tuple[World, int]:
        """Return what a release by all threads, or by a `single` one, tells other clusters."""
        past, complete, world = self.clock.past(), self.clock.complete, self.clock.world
        for rank in self.ranks[1:]:
            clock = self.clocks[rank]
            past, complete, world = past.join(clock.past()), complete | clock.complete, joined(world, clock.world)
        if single:
            roles = list(past.roles)
            past = past._replace(roles=roles, firsts={**past.firsts, self.index: roles[self.index]})
            roles[self.index] = self.synced
        for rank in self.ranks:
            self.advance(rank)
        return {**world, self.machine.uid: past}, complete

    def learn(self, known: tuple[World, int]) -> None:
        """Acquire what others have published."""
        for clock in self.clocks.values():
            clock.learn(known[0], self.machine.uid)
            clock.complete |= known[1]

    def fence(self) -> None:
        """Execute a fence of gpu scope: it acquires what relaxed reads saw, and relaxed writes after it release."""
        if self.observed is not None:
            self.learn(self.observed)
            self.observed = None
        self.fenced = self.published(False)

    def fence_cluster(self, rank: int) -> None:
        """Execute a fence of the cluster: a relaxed arrival now releases what happened before."""
        if len(self.machine.ctas) > 1:
            self.visible[rank] = self.release(rank)

    def advance(self, rank: int) -> None:
        """Begin an epoch: the later accesses of CTA `rank` are not ordered before what it has just started."""
        self.clocks[rank].roles[self.components[rank]] += 1

    def fence_proxy(self, rank: int, whole_cluster: bool) -> None:
        """Execute fence.proxy.async by CTA `rank`: the asynchronous proxy now sees what that CTA's threads know of
        their own accesses, and with `whole_cluster` (no `.shared::cta`) of the other CTAs'.
        """
        clock = self.clocks[rank]
        fenced = clock.fenced
        clock.fence()
        if not whole_cluster and len(self.ranks) > 1:
            roles = self.machine.simulation.roles_per_cta
            own = slice(rank * roles, (rank + 1) * roles)
            fenced[own] = clock.fenced[own]
            clock.fenced = fenced
        self.advance(rank)  # its later accesses need another fence

    def fence_global_proxy(self, rank: int, single: bool) -> None:
        """Execute fence.proxy.async of global memory by all threads in CTA `rank`, or by a `single` one: TMA now sees
        what they know.
        """
        known, _ = self.published(single)
        self.clocks[rank].world = joined(self.clocks[rank].world, proxied(known))

    def meet(self) -> None:
        """Execute a barrier of the cluster by all CTAs of the role."""
        released = [self.release(rank) for rank in self.ranks]
        for clock in self.clocks.values():
            for other in released:
                clock.join(other)

    def join(self, other: Role) -> None:
        """Learn in each CTA what the other role's threads there know."""
        for rank in self.ranks:
            self.clocks[rank].join(other.clocks[rank])
            self.visible[rank].join(other.visible[rank])

    def called(self, rank: int) -> str:
        """Return the role's name, with the CTA where the role has several."""
        return self.name if len(self.ranks) == 1 else f"{self.name} (rank {rank})"


def used_in_flight(role: Role, op: Op, operation: Async, what: str) -> None:
    """Report the use of a result that is still in flight."""
    result = "values of a tcgen05.ld are" if operation.kind == "tcgen05.ld" else "accumulator of a wgmma is"
    places = (Place(role.machine.where(role), operation.kind, operation.op.location),)
    role.machine.report(
        "in-flight",
        f"the {result} used before a wait for {'them' if result.endswith('are') else 'it'}",
        role,
        op,
        what,
        places,
    )


def poisoned(*values: Any) -> Poison | None:
    """Return the first poison among the operands."""
    return next((v for v in values if isinstance(v, Poison)), None)
