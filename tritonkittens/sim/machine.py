"""One running cluster: its CTAs' memories, the roles, the asynchronous operations in flight, and the rules of order
between them.

This module contains no TTGIR operation; `operations/` defines each in terms of this machine. A role runs until an
operation touches shared state. Then the schedule chooses the next event: a role that can run, or an asynchronous
operation that completes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .barriers import MAX_COUNT, Barrier
from .clocks import ASYNC, GENERIC, TENSOR_THREADS, Access, Clock
from .costs import Unit
from .layouts import LANES, SHARED_STRIDE, TENSOR_LANE_BYTES
from .memory import Bytes
from .numbers import decode, encode
from .report import Finding, Place, Stop
from .ttgir import Block, Op
from .values import AddressMap, Allocation, InFlight, Poison, Spans, View

if TYPE_CHECKING:
    from .simulation import Simulation

MASK = SHARED_STRIDE - 1
WAITED_FOR = {"TMA load", "TMA gather", "wgmma", "tcgen05.mma", "tcgen05.cp", "cp.async"}
# work in flight at a CTA's end that must no longer read its shared memory
BULK_STORES = ("TMA store", "TMA reduce", "TMA scatter")


def needs_wait(kind: str) -> bool:
    """Whether a role must wait for such an operation before its CTA ends."""
    return kind in WAITED_FOR or kind.startswith(BULK_STORES)


def _nothing(operation: Async) -> None:
    """The effect of a completed operation."""


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
        self.time: float = 0.0
        self.wait: Wait | None = None
        self.pending: Any = None  # the generator of the operation in progress
        self.pending_results: tuple[int, ...] = ()
        self.done = False
        self.frames: list[tuple[Block, int, tuple[int, ...]]] = []  # callers
        self.steps = 0
        self.op: Op | None = None
        self.products: list[Async] = []  # wgmma groups in flight, oldest first
        self.bulk_groups: list[list[Async]] = []  # of bulk stores: the writes, each after its reads (`after`)
        self.bulk_open: list[Async] = []
        self.bulk_writes: list[tuple[Async, Spans]] = []  # writes to global memory without a wait of this role so far
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

    @property
    def ready(self) -> bool:
        return not self.done and (self.wait is None or self.wait.ready())

    def release(self) -> Clock:
        """Return the clock that an arrival releases, without the role's later work."""
        clock = self.clock.copy()
        self.clock.roles[self.index] += 1
        return clock


class Cta:
    def __init__(self, rank: int, program: tuple[int, int, int], shared_bytes: int, tensor: bool):
        self.rank, self.program = rank, program
        self.shared = Bytes(shared_bytes)
        self.tensor = Bytes(LANES * TENSOR_LANE_BYTES) if tensor else None
        self.allocations: dict[str, list[Allocation]] = {"shared": [], "tensor": []}
        self.tensor_live: dict[int, Allocation] = {}  # allocations of tcgen05.alloc, by column
        self.tensor_relinquished = False
        self.registers: dict[int, int] = {}  # registers of each warp's threads, where setmaxnreg changed them
        self.free_registers = 0  # free registers of the CTA's pool
        self.registers_time = 0.0
        self.static_top = 0


class Machine:
    """One cluster."""

    def __init__(self, simulation: Simulation, index: int, programs: list[tuple[int, int, int]], name: str):
        self.simulation, self.index, self.name = simulation, index, name
        module = simulation.program
        self.number_of_roles = simulation.roles_per_cta * len(programs)
        self.ctas = [
            Cta(rank, program, module.shared_bytes, module.uses_tensor_memory) for rank, program in enumerate(programs)
        ]
        self.roles: list[Role] = []
        self.flying: list[Async] = []
        # operations that need a wait of some role before the CTA ends
        self.completed: list[tuple[int, Role, Op, str]] = []
        self.barriers: dict[int, Barrier] = {}
        self.dead_barriers: dict[int, Op] = {}
        self.operations = 0
        self.units: dict[tuple[str, int], float] = {}  # modelled time at which an engine of a CTA is free
        self.shared_units: dict[tuple[str, int], Unit] = {}  # units that the roles of a CTA share
        self.queues: dict[Any, Async] = {}  # last operation of an in-order unit
        self.named: dict[tuple[int, int], Any] = {}
        self.words: dict[tuple[str, int], Clock] = {}  # clocks of releasing stores, by word
        self.cluster_barrier = ClusterBarrier(self)
        self.time = 0.0
        self.steps = 0
        self.unanswered = 0  # steps of roles since an operation completed
        self.version = 0  # counts changes in the cluster, and by it in global memory

    def release_memory(self) -> None:
        """Free the memory of an ended cluster, but keep its state for later queries."""
        for cta in self.ctas:
            cta.shared, cta.tensor = Bytes(0), None
        for role in self.roles:
            role.environment = []

    # ---- findings

    def where(self, role: Role) -> str:
        return f"{self.name if len(self.ctas) == 1 else f'{self.name} rank {role.rank}'}, {role.name}"

    def report(
        self,
        kind: str,
        message: str,
        role: Role | None,
        op: Op,
        what: str = "",
        more: tuple[Place, ...] = (),
        **details: Any,
    ) -> None:
        place = Place(self.where(role) if role else self.name, what or op.name, op.location)
        self.simulation.found(
            Finding(kind, message, (*more, place), {k: v for k, v in details.items() if v is not None})
        )

    def stop(self, kind: str, message: str, role: Role | None, op: Op, what: str = "", **details: Any) -> None:
        place = Place(self.where(role) if role else self.name, what or op.name, op.location)
        raise Stop(Finding(kind, message, (place,), details))

    # ---- memory

    def memory(self, space: str, rank: int) -> Bytes:
        cta = self.ctas[rank]
        found = cta.shared if space == "shared" else cta.tensor
        assert found is not None
        return found

    def _pieces(self, base: int, map: AddressMap) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Return (rank, base within the CTA, runs) of a view."""
        if not map.spread:
            return [(base >> 24, base & MASK, map.runs)]
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for start, end in map.runs:
            by_rank.setdefault((start + base) >> 24, []).append((start & MASK, end & MASK or end))
        return [(rank, base & MASK, runs) for rank, runs in by_rank.items()]

    def touch(self, agent: Role | Async, view: View, write: bool, proxy: str, op: Op, atomic: bool = False) -> None:
        """Record an access. Report races, overruns and misalignment."""
        role = agent if isinstance(agent, Role) else agent.role
        if write and not atomic:
            self.version += 1
        elif isinstance(agent, Role):
            for watch in role.watching:
                watch.looked[view.name] = None
        if view.space == "tensor" and proxy != TENSOR_THREADS:
            proxy = ASYNC  # proxies concern shared and global memory; tcgen05 orders its own accesses of tensor memory
        if isinstance(agent, Role):
            access = Access(role.index, role.clock.roles[role.index], 0, proxy, write, op, self.where(role), atomic)
        else:
            access = Access(role.index, 0, agent.bit, proxy, write, op, f"{self.where(role)}, {agent.kind}", atomic)
        for rank, base, runs in self._pieces(view.base, view.map):
            if rank >= len(self.ctas):
                self.stop("out-of-bounds", f"{view.name}: rank {rank} of a cluster of {len(self.ctas)}", role, op)
            if view.space == "shared" and self.has_ended(rank, role):
                self.report(
                    "out-of-bounds",
                    f"{view.name}: the shared memory of rank {rank}, whose threads have all ended",
                    role,
                    op,
                    buffer=view.name,
                )
            memory = self.memory(view.space, rank)
            if runs and base + runs[-1][1] > memory.size:
                self.stop(
                    "out-of-bounds",
                    f"{view.name} ends at byte {base + runs[-1][1]} of {memory.size} of {view.space} memory",
                    role,
                    op,
                )
            conflict = memory.shadow.access(runs, base, access, agent.clock)
            if conflict is not None:
                self._conflict(conflict, access, view, rank)
            if write and view.space == "shared" and self.barriers and not atomic:
                for address, barrier in self.barriers.items():
                    if address >> 24 == rank and any(
                        base + s < (address & MASK) + 8 and (address & MASK) < base + e for s, e in runs
                    ):
                        self.report("barrier-life", f"{barrier.name} is overwritten while it is in use", role, op)

    def _conflict(self, conflict: Any, access: Access, view: View, rank: int) -> None:
        before = conflict.before
        verb = {True: "writes", False: "reads"}
        name = view.name
        first = Place(before.who, f"{verb[before.write]} {name}", before.op.location)
        second = Place(access.who, f"{verb[access.write]} {name}", access.op.location)
        if conflict.kind == "race":
            how = {
                (True, False): "is read while it may still be written (read before arrival)",
                (False, True): "is overwritten while it may still be read (overwrite of a stage in use)",
                (True, True): "is written twice in no order",
            }[before.write, access.write]
            message = f"{name} {how}"
        elif conflict.kind == "thread-sync":
            message = (
                f"{name}: the {before.who.rsplit(', ', 1)[-1]} is over, but accesses on the other side of a barrier "
                "are ordered after it only between "
                "tcgen05.fence::before_thread_sync and tcgen05.fence::after_thread_sync"
            )
        else:
            message = (
                f"{name}: the {'store' if before.write else 'load'} and the {access.who.rsplit(', ', 1)[-1]} after it "
                "are ordered, but the asynchronous proxy "
                "sees ordinary accesses only across fence.proxy.async"
            )
        details = {"buffer": name, "bytes": f"{conflict.start} to {conflict.end} of the CTA's {view.space} memory"}
        if rank or len(self.ctas) > 1:
            details["CTA"] = f"rank {rank}"
        kind = "missing-fence" if conflict.kind == "missing-fence" else "race"
        self.simulation.found(Finding(kind, message, (first, second), details))

    def read(self, view: View) -> np.ndarray:
        """Return the bits of a view's elements."""
        if not view.map.spread:
            return self.memory(view.space, view.base >> 24).read(view.base & MASK, view.map)
        nbytes = view.map.nbytes
        places: np.ndarray = view.base + view.map.offsets
        out = np.zeros(places.shape, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[nbytes])
        for rank in np.unique(places >> 24):
            here = (places >> 24) == rank
            memory = self.memory(view.space, int(rank))
            out[here] = memory.bytes[: memory.size // nbytes * nbytes].view(out.dtype)[(places[here] & MASK) // nbytes]
        return out

    def write(self, view: View, bits: np.ndarray) -> None:
        if not view.map.spread:
            self.memory(view.space, view.base >> 24).write(view.base & MASK, view.map, bits)
            return
        nbytes = view.map.nbytes
        for offsets in [view.map.offsets] if view.map.replicas is None else view.map.replicas:
            places: np.ndarray = view.base + offsets
            for rank in np.unique(places >> 24):
                here = (places >> 24) == rank
                memory = self.memory(view.space, int(rank))
                memory.bytes[: memory.size // nbytes * nbytes].view(bits.dtype)[(places[here] & MASK) // nbytes] = (
                    np.broadcast_to(bits, places.shape)[here]
                )
        for rank, base, runs in self._pieces(view.base, view.map):
            memory = self.memory(view.space, rank)
            for start, end in runs:
                memory.written[base + start : base + end] = True

    def check_written(self, agent: Role | Async, view: View, op: Op) -> None:
        role = agent if isinstance(agent, Role) else agent.role
        if view.map.spread:
            for rank, base, runs in self._pieces(view.base, view.map):
                memory = self.memory(view.space, rank)
                if any(not memory.written[base + s : base + e].all() for s, e in runs):
                    self._uninitialized(role, view, op, agent)
                    return
            return
        first = self.memory(view.space, view.base >> 24).unwritten(view.base & MASK, view.map)
        if first is not None:
            self._uninitialized(role, view, op, agent)

    def _uninitialized(self, role: Role, view: View, op: Op, agent: Any) -> None:
        who = "" if isinstance(agent, Role) else f" by the {agent.kind}"
        kind = "shared" if view.space == "shared" else "tensor"
        allocated = Place("allocation", view.allocation.name, view.allocation.op.location)
        message = f"{view.name} is read{who}, but parts of this {kind} memory were never written"
        self.report("uninitialized", message, role, op, "reads it", (allocated,), buffer=view.name)

    def load(self, agent: Role | Async, view: View, op: Op, proxy: str = GENERIC) -> np.ndarray:
        """Return the values of a view, after checks."""
        self.touch(agent, view, False, proxy, op)
        self.check_written(agent, view, op)
        return decode(view.type.element.name, self.read(view))

    def store(self, agent: Role | Async, view: View, values: np.ndarray, op: Op, proxy: str = GENERIC) -> None:
        self.touch(agent, view, True, proxy, op)
        self.write(view, np.broadcast_to(encode(view.type.element.name, np.asarray(values)), view.map.shape))

    # ---- asynchronous operations

    def start(
        self,
        kind: str,
        role: Role,
        op: Op,
        effect: Callable[[Async], None],
        *,
        queue: Any = None,
        unit: str = "",
        cost: float = 0.0,
        latency: float = 0.0,
    ) -> Async:
        """Start an operation. Operations of one `queue` complete in order. `unit`, `cost` and `latency` give the
        modelled time, in cycles.
        """
        self.version += kind != "timer"
        after = self.queues.get(queue) if queue is not None else None
        operation = Async(
            kind,
            role,
            op,
            effect,
            after if after is not None and not after.done else None,
            unit or kind,
            self.operations,
        )
        self.operations += 1
        if after is not None:
            operation.clock.operations |= after.clock.operations | after.bit
            operation.clock.fenced_operations |= after.clock.fenced_operations | after.bit
        if queue is not None:
            self.queues[queue] = operation
        engine = (operation.unit, role.rank)
        begin = max(role.time, self.units.get(engine, 0.0))
        operation.started = begin
        operation.finish = begin + cost + latency
        self.units[engine] = begin + cost
        role.clock.roles[role.index] += 1  # the role's later work is not ordered before the operation
        self.flying.append(operation)
        if self.simulation.recorder is not None:
            self.simulation.recorder.issued(self, operation, cost)
        return operation

    def tensor_access(self, role: Role, op: Op, what: str) -> Async:
        """Start a tcgen05.ld or .st (`what`) of a role's threads. Its bytes move at once here, but the result is
        valid only after the role's tcgen05.wait.
        """
        operation = Async(f"tcgen05.{what}", role, op, _nothing, None, "tensor memory", self.operations)
        operation.done = True
        self.operations += 1
        role.tensor_accesses[what].append(operation)
        return operation

    def tensor_wait(self, role: Role, what: str) -> None:
        """Execute tcgen05.wait::ld or ::st: the accesses are complete, and loaded values are valid."""
        over, role.tensor_accesses[what] = role.tensor_accesses[what], []
        self.acquire(role, over)
        for slot, value in enumerate(role.environment if over else ()):
            if isinstance(value, InFlight) and value.product.operation in over:
                role.environment[slot] = value.product.value

    def follow(self, first: Async, kind: str, effect: Callable[[Async], None]) -> Async:
        """Add a second part to an operation just started. It completes at any moment after the first; by modelled
        time, at once.
        """
        second = Async(kind, first.role, first.op, effect, first, f"{first.unit} ({kind})", self.operations)
        self.operations += 1
        second.clock = first.clock.copy()
        second.clock.operations |= first.bit
        second.clock.fenced_operations |= first.bit
        second.started = second.finish = first.finish
        self.flying.append(second)
        return second

    def shared_unit(self, name: str, rank: int) -> Unit:
        """Return a unit that the roles of a CTA share, for modelled time."""
        found = self.shared_units.get((name, rank))
        if found is None:
            found = self.shared_units[name, rank] = Unit()
        return found

    def complete(self, operation: Async) -> None:
        self.flying.remove(operation)
        self.version += operation.kind != "timer"
        self.time = max(self.time, operation.finish)
        operation.clock.operations |= operation.bit  # its own accesses are in order
        operation.clock.fenced_operations |= operation.bit
        operation.effect(operation)
        operation.effect = _nothing  # frees the operands
        operation.done = True
        if needs_wait(operation.kind):
            self.completed.append((operation.bit, operation.role, operation.op, operation.kind))
        if self.simulation.recorder is not None:
            self.simulation.recorder.operation(self, operation)

    def acquire(self, role: Role, operations: list[Async]) -> None:
        """Record that the role has waited for these operations."""
        for operation in operations:
            role.clock.operations |= operation.bit | operation.clock.operations  # and those of its queue before it
            role.clock.fenced_operations |= operation.bit | operation.clock.fenced_operations
            role.time = max(role.time, operation.finish)

    def settled(self, role: Role, spans: Spans, op: Op, what: str) -> None:
        """Report a read of global memory that may precede the writes of the role's own bulk stores."""
        role.bulk_writes = [pair for pair in role.bulk_writes if not role.clock.operations & pair[0].bit]
        for operation, written in role.bulk_writes:
            if written.meets(spans):
                name = self.simulation.memory.name(int(spans.starts[0]))
                message = (
                    f"{name} is read while a {operation.after.kind if operation.after else operation.kind} of the "
                    "same role may still write it: only "
                    "cp.async.bulk.wait_group without .read waits for its writes"
                )
                self.report(
                    "race",
                    message,
                    role,
                    op,
                    f"{what} reads it",
                    (Place(self.where(role), "writes it", operation.op.location),),
                )
                return

    def idle_but_for(self, timer: Async) -> bool:
        """Whether only a timer can run out next. Of several timers, the first does."""
        if any(role.ready for role in self.roles):
            return False
        return all(
            o is timer
            or (o.kind == "timer" and o.finish >= timer.finish)
            or (o.kind != "timer" and not o.can_complete())
            for o in self.flying
        )

    # ---- barriers

    def barrier(self, role: Role, address: int, op: Op, what: str) -> Barrier | None:
        """Return the barrier at an address; report and return None without one."""
        found = self.barriers.get(address)
        if self.has_ended(address >> 24, role):
            name = self.name_of("shared", address)
            message = f"{name}: {what} in the shared memory of rank {address >> 24}, whose threads have all ended"
            self.report("barrier-life", message, role, op, what, buffer=name)
        if found is None:
            name = self.name_of("shared", address)
            dead = self.dead_barriers.get(address)
            why = "after mbarrier.inval" if dead is not None else "before mbarrier.init"
            more = (Place("here", "mbarrier.inval", dead.location),) if dead is not None else ()
            self.report("barrier-life", f"{name}: {what} {why}", role, op, what, more, buffer=name)
        elif not (role.clock.covers(found.init_access)):
            self.report(
                "barrier-life", f"{found.name}: {what} is not ordered after its mbarrier.init", role, op, what,
                (Place(found.init_access.who, "mbarrier.init", found.init_op.location),), buffer=found.name,
            )  # fmt: skip
        return found

    def has_ended(self, rank: int, role: Role) -> bool:
        """Whether `rank` is another CTA of the cluster whose threads have all ended. Its shared memory no longer
        exists.
        """
        if rank == role.rank or len(self.ctas) == 1:
            return False
        owners = [r for r in self.roles if r.rank == rank]
        return bool(owners) and all(r.done for r in owners)

    def name_of(self, space: str, address: int) -> str:
        """Return the name of the buffer at an address."""
        best = None
        for allocation in self.ctas[min(address >> 24, len(self.ctas) - 1)].allocations[space]:
            if allocation.base & MASK <= address & MASK < (allocation.base & MASK) + allocation.size:
                best = allocation
        return best.describe(address) if best else f"{space} memory at {address & MASK}"

    def init_barrier(self, role: Role, address: int, count: int, op: Op) -> None:
        name = self.name_of("shared", address)
        if not 1 <= count <= MAX_COUNT:
            self.report("arrivals", f"{name}: mbarrier.init with a count of {count}; 1 to {MAX_COUNT}", role, op)
            count = max(1, min(count, MAX_COUNT))
        if address % 8:
            self.report("misaligned", f"{name}: an mbarrier lies on 8 bytes, not at {address & MASK}", role, op)
        if address in self.barriers:
            old = self.barriers[address]
            before = Place("before", "mbarrier.init", old.init_op.location)
            self.report(
                "barrier-life",
                f"{name}: initialised again without mbarrier.inval",
                role,
                op,
                "mbarrier.init",
                (before,),
            )
        access = Access(role.index, role.clock.roles[role.index], 0, GENERIC, True, op, self.where(role), True)
        role.clock.roles[role.index] += 1
        self.ctas[address >> 24].shared.written[(address & MASK) : (address & MASK) + 8] = True
        self.barriers[address] = Barrier(name, count, self.number_of_roles, op, access, address)
        self.dead_barriers.pop(address, None)

    def invalidate_barrier(self, role: Role, address: int, op: Op) -> None:
        barrier = self.barrier(role, address, op, "mbarrier.inval")
        if barrier is None:
            return
        waiting = [r for r in self.roles if r.wait is not None and r.wait.barrier is barrier and r is not role]
        for other in waiting:
            self.report("barrier-life", f"{barrier.name}: invalidated while {other.name} waits for it", role, op)
        if barrier.tx > 0:
            self.report(
                "bytes",
                f"{barrier.name}: invalidated while it expects {barrier.tx} more bytes",
                role,
                op,
                buffer=barrier.name,
            )
        del self.barriers[address]
        self.dead_barriers[address] = op

    def arrive(
        self,
        role: Role,
        barrier: Barrier,
        count: int,
        op: Op,
        what: str = "arrives",
        clock: Clock | None = None,
        who: str | None = None,
    ) -> None:
        """Subtract `count` from the pending arrivals, and release `clock` (or the role's)."""
        if count <= 0:
            return
        who = who or role.name
        barrier.gathering.join(clock if clock is not None else role.release())
        barrier.history[who] = (what, op)
        barrier.pending_time = max(barrier.pending_time, role.time if clock is None else self.time)
        if count > barrier.pending:
            others = ", ".join(barrier.arrived) or "no role"
            self.report(
                "arrivals",
                f"{barrier.name}: {count} arrivals at a phase that misses {barrier.pending} of {barrier.count} "
                f"(phase {barrier.phase}; arrived before: {others})",
                role,
                op,
                what,
                (Place("initialised", f"count {barrier.count}", barrier.init_op.location),),
                buffer=barrier.name,
                phase=barrier.phase,
            )
            count = barrier.pending
        barrier.pending -= count
        barrier.arrived.append(f"{who} ×{count}" if count > 1 else who)
        self._advance(barrier)

    def expect(self, role: Role, barrier: Barrier, nbytes: int, op: Op) -> None:
        barrier.tx += nbytes
        barrier.expected += nbytes
        barrier.history[f"{role.name} (bytes)"] = (f"expects {nbytes} bytes", op)
        if not -MAX_COUNT <= barrier.tx <= MAX_COUNT:
            self.report(
                "bytes",
                f"{barrier.name}: a tx-count of {barrier.tx}; the hardware counts to {MAX_COUNT}",
                role,
                op,
                buffer=barrier.name,
            )
        self._advance(barrier)

    def complete_bytes(self, role: Role, barrier: Barrier, nbytes: int, op: Op) -> None:
        """Execute mbarrier.complete_tx by a thread, with the effect of a delivered copy."""
        barrier.history[f"{role.name} (complete_tx)"] = (f"completes {nbytes} bytes", op)
        barrier.gathering.join(role.release())
        barrier.tx -= nbytes
        barrier.delivered += nbytes
        self._advance(barrier)

    def promise(self, operation: Async, barrier: Barrier) -> int:
        """Register a started copy with the barrier's current phase. Pass the result to `deliver`."""
        operation.barrier, operation.phase = barrier, barrier.phase
        return barrier.phase

    def deliver(self, operation: Async, barrier: Barrier, phase: int, nbytes: int) -> None:
        """Execute complete_tx of a copy that started in `phase`."""
        role = operation.role
        if self.barriers.get(barrier.address) is not barrier:
            self.report(
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
            self.report(
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
        clock = operation.clock.copy()
        clock.operations |= operation.bit
        clock.fenced_operations |= operation.bit
        barrier.gathering.join(clock)
        barrier.tx -= nbytes
        barrier.delivered += nbytes
        barrier.pending_time = max(barrier.pending_time, operation.finish)
        self._advance(barrier)

    def _advance(self, barrier: Barrier) -> None:
        before = barrier.phase
        if not barrier.advance(self.time):
            return
        for role in self.roles:
            wait = role.wait
            if wait is not None and wait.barrier is barrier and barrier.phase >= wait.phase + 2 and not role.done:
                op = role.op
                assert op is not None
                self.report(
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

    def passed(self, role: Role, barrier: Barrier) -> None:
        role.clock.join(barrier.released)
        role.time = max(role.time, barrier.time)
        role.seen_phase[barrier.address] = barrier.phase - 1


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

    def arrive(self, role: Role, warps: int, ranks: range) -> int:
        """Arrive with `warps` warps of each of these CTAs. Return the generation to wait for."""
        self.gathering.join(role.release())
        self.time = max(self.time, role.time)
        for rank in ranks:
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

    def passed(self, role: Role) -> None:
        role.clock.join(self.released)


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
