"""What acts in a cluster: roles, the asynchronous operations that they start, and a role's wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .clocks import Clock, Past, World
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
    """

    __slots__ = (
        "kind",
        "role",
        "op",
        "clock",
        "bit",
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
        self.clock: Clock = role.clock.copy()
        self.bit = 1 << number
        self.done = False
        self.started: float = role.time
        self.finish: float = role.time
        self.who = f"{kind} of {role.name}"
        self.barrier: Barrier | None = None  # the barrier to signal
        self.phase = 0  # the barrier's phase at the start
        self.gate: Callable[[], bool] | None = None
        # a matrix operand in registers, which must stay unchanged until the wait for the product
        self.registers: Any = None

    def can_complete(self) -> bool:
        return (self.after is None or self.after.done) and (self.gate is None or self.gate())


class Role:
    """The threads of one partition of one CTA (or of the pair, where Triton compiled for several CTAs), in lockstep
    between operations.
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
        self.machine, self.rank, self.index, self.name, self.warps, self.start_warp = (
            machine,
            rank,
            index,
            name,
            warps,
            start_warp,
        )
        self.environment, self.block, self.at = environment, block, 0
        self.clock: Clock = Clock(machine.number_of_roles)
        self.clock.roles[index] = 1
        self.clock.complete = machine.simulation.launch_order.before
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
        # for global memory: barriers of the role's threads so far, and the epoch of the last one
        self.barriers = 0
        self.synced = 0
        self.touched: list[Threads] = []  # accesses since then
        self.observed: tuple[World, int] | None = None  # what relaxed reads have seen, for a fence to acquire
        self.fenced: tuple[World, int] | None = None  # what a fence lets relaxed writes publish

    @property
    def ready(self) -> bool:
        return not self.done and (self.wait is None or self.wait.ready())

    def release(self) -> Clock:
        """Return the clock that an arrival releases, without the role's later work."""
        clock = self.clock.copy()
        self.clock.roles[self.index] += 1
        return clock

    def barrier(self) -> None:
        """A barrier of the role's threads: from here on each knows the others' accesses of global memory."""
        self.synced = self.clock.roles[self.index]
        self.clock.roles[self.index] += 1
        self.barriers += 1
        self.forget()

    def forget(self) -> None:
        """Free what is known of single threads' accesses of global memory."""
        for threads in self.touched:
            threads.forget()
        self.touched = []

    def published(self, single: bool) -> tuple[World, int]:
        """Return what a release by all threads, or by a `single` one, tells other clusters."""
        clock = self.clock
        roles, firsts = list(clock.roles), clock.firsts
        if single:
            firsts = {**firsts, self.index: roles[self.index]}
            roles[self.index] = self.synced
        clock.roles[self.index] += 1
        return {**clock.world, self.machine.uid: Past(roles, firsts, clock.operations)}, clock.complete

    def learn(self, known: tuple[World, int]) -> None:
        """Acquire what others have published."""
        self.clock.learn(known[0], self.machine.uid)
        self.clock.complete |= known[1]

    def fence(self) -> None:
        """Execute a fence of gpu scope: it acquires what relaxed reads saw, and relaxed writes after it release."""
        if self.observed is not None:
            self.learn(self.observed)
            self.observed = None
        self.fenced = self.published(False)


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
