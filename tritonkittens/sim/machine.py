"""One running cluster: its CTAs' memories, the roles, the asynchronous operations in flight, and the rules of order
between them.

This module contains no TTGIR operation; `operations/` defines each in terms of this machine. A role runs until an
operation touches shared state. Then the schedule chooses the next event: a role that can run, or an asynchronous
operation that completes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .agents import Async, Role, needs_wait
from .barriers import Barriers
from .clocks import ASYNC, GENERIC, TENSOR_THREADS, Access, Clock
from .cluster_barrier import ClusterBarrier
from .costs import AT_ONCE, Duration, Unit
from .layouts import LANES, SHARED_MASK, TENSOR_LANE_BYTES
from .memory import Bytes
from .numbers import decode, encode
from .report import Finding, Place, Stop
from .ttgir import Op
from .values import AddressMap, Allocation, InFlight, View

if TYPE_CHECKING:
    from .simulation import Simulation


def _nothing(operation: Async) -> None:
    """The effect of a completed operation."""


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
        self.uid = (simulation.launch_order.number, index)  # of all launches of the device
        module = simulation.program
        self.number_of_roles = simulation.roles_per_cta * len(programs)
        self.ctas = [
            Cta(rank, program, module.shared_bytes, module.uses_tensor_memory) for rank, program in enumerate(programs)
        ]
        self.roles: list[Role] = []
        self.flying: list[Async] = []
        # operations that need a wait of some role before the CTA ends
        self.completed: list[tuple[int, Role, Op, str]] = []
        self.barriers = Barriers(self)
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
        # by rank, when it lets the next launch start: the launches known to have ended
        self.dependents: dict[int, int] = {}

    def release_memory(self) -> None:
        """Free the memory of an ended cluster, but keep its state for later queries."""
        for cta in self.ctas:
            cta.shared, cta.tensor = Bytes(0), None
        for role in self.roles:
            role.environment = []
            role.forget()

    # ---- findings

    def where(self, role: Role, rank: int | None = None) -> str:
        """Return a role's place, in CTA `rank` where it has several."""
        at = role.rank if rank is None else rank
        return f"{self.name if len(self.ctas) == 1 else f'{self.name} rank {at}'}, {role.name}"

    def report(
        self,
        kind: str,
        message: str,
        role: Role | None,
        op: Op,
        what: str = "",
        more: tuple[Place, ...] = (),
        rank: int | None = None,
        **details: Any,
    ) -> None:
        place = Place(self.where(role, rank) if role else self.name, what or op.name, op.location)
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
            return [(base >> 24, base & SHARED_MASK, map.runs)]
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for start, end in map.runs:
            by_rank.setdefault((start + base) >> 24, []).append((start & SHARED_MASK, end & SHARED_MASK or end))
        return [(rank, base & SHARED_MASK, runs) for rank, runs in by_rank.items()]

    def touch(
        self,
        agent: Role | Async,
        view: View,
        write: bool,
        proxy: str,
        op: Op,
        atomic: bool = False,
        by: int | None = None,
    ) -> None:
        """Record an access by CTA `by`, or by each CTA that the view lies in. Report races, overruns and
        misalignment."""
        role = agent if isinstance(agent, Role) else agent.role
        if write and not atomic:
            self.version += 1
        elif isinstance(agent, Role):
            for watch in role.watching:
                watch.looked[view.name] = None
        if view.space == "tensor" and proxy != TENSOR_THREADS:
            proxy = ASYNC  # proxies concern shared and global memory; tcgen05 orders its own accesses of tensor memory
        for rank, base, runs in self._pieces(view.base, view.map):
            if rank >= len(self.ctas):
                self.stop("out-of-bounds", f"{view.name}: rank {rank} of a cluster of {len(self.ctas)}", role, op)
            memory = self.memory(view.space, rank)
            if runs and base + runs[-1][1] > memory.size:
                self.stop(
                    "out-of-bounds",
                    f"{view.name} ends at byte {base + runs[-1][1]} of {memory.size} of {view.space} memory",
                    role,
                    op,
                )
            access, clock = self._access(agent, rank if by is None else by, proxy, write, op, atomic)
            if view.space == "shared" and access.role // self.simulation.roles_per_cta != rank:
                self._check_exists(rank, access, clock, view, role)
            conflict = memory.shadow.access(runs, base, access, clock)
            if conflict is not None:
                self._conflict(conflict, access, view, rank)
            if write and view.space == "shared" and self.barriers and not atomic:
                for address, barrier in self.barriers.items():
                    if address >> 24 == rank and any(
                        base + s < (address & SHARED_MASK) + 8 and (address & SHARED_MASK) < base + e for s, e in runs
                    ):
                        self.report("barrier-life", f"{barrier.name} is overwritten while it is in use", role, op)

    def _access(
        self, agent: Role | Async, rank: int, proxy: str, write: bool, op: Op, atomic: bool
    ) -> tuple[Access, Clock]:
        """Return the access of CTA `rank`, or of the CTA that issues an operation for it, with its clock."""
        if isinstance(agent, Async):
            role, by = agent.role, agent.issuer(rank)
            epoch, bit, who = 0, agent.bits[by], f"{self.where(role, by)}, {agent.kind}"
        else:
            role, by = agent, rank if len(agent.ranks) > 1 else agent.rank
            epoch, bit, who = agent.clocks[by].roles[agent.components[by]], 0, self.where(role, by)
        return Access(role.components[by], epoch, bit, proxy, write, op, who, atomic), agent.clocks[by]

    def _check_exists(self, rank: int, access: Access, clock: Clock, view: View, role: Role) -> None:
        """Report an access of another CTA's shared memory while that CTA may not run."""
        roles = self.simulation.roles_per_cta
        if self.has_ended(rank, role):
            why = "whose threads have all ended"
        elif not any(clock.roles[rank * roles : (rank + 1) * roles]):
            why = "whose threads may not have started: nothing orders the access after them"
        else:
            return
        place = Place(access.who, "accesses it", access.op.location)
        message = f"{view.name}: the shared memory of rank {rank}, {why}"
        self.simulation.found(Finding("out-of-bounds", message, (place,), {"buffer": view.name}))

    def check_last_accesses(self, awaited: int) -> None:
        """Report accesses of a CTA's shared memory by others that nothing orders before the end of its threads.
        `awaited`: the operations for which some role has waited. The others are reported as unfinished.
        """
        for cta in self.ctas:
            known = Clock(self.number_of_roles)
            for role in self.roles:
                if cta.rank in role.ranks:
                    known.join(role.clocks[cta.rank])
            for segment in cta.shared.shadow.segments:
                for access in (segment.write, *segment.reads):
                    own = access is None or access.role // self.simulation.roles_per_cta == cta.rank
                    if access is None or own or known.covers(access) or access.bit & ~awaited:
                        continue
                    name = self.name_of("shared", (cta.rank << 24) + segment.start)
                    message = f"{name}: the shared memory of rank {cta.rank}, whose threads may have ended"
                    place = Place(access.who, "accesses it", access.op.location)
                    self.simulation.found(Finding("out-of-bounds", message, (place,), {"buffer": name}))

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
            return self.memory(view.space, view.base >> 24).read(view.base & SHARED_MASK, view.map)
        nbytes = view.map.nbytes
        places: np.ndarray = view.base + view.map.offsets
        out = np.zeros(places.shape, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[nbytes])
        for rank in np.unique(places >> 24):
            here = (places >> 24) == rank
            memory = self.memory(view.space, int(rank))
            out[here] = memory.bytes[: memory.size // nbytes * nbytes].view(out.dtype)[
                (places[here] & SHARED_MASK) // nbytes
            ]
        return out

    def write(self, view: View, bits: np.ndarray) -> None:
        if not view.map.spread:
            self.memory(view.space, view.base >> 24).write(view.base & SHARED_MASK, view.map, bits)
            return
        nbytes = view.map.nbytes
        for offsets in [view.map.offsets] if view.map.replicas is None else view.map.replicas:
            places: np.ndarray = view.base + offsets
            for rank in np.unique(places >> 24):
                here = (places >> 24) == rank
                memory = self.memory(view.space, int(rank))
                memory.bytes[: memory.size // nbytes * nbytes].view(bits.dtype)[
                    (places[here] & SHARED_MASK) // nbytes
                ] = np.broadcast_to(bits, places.shape)[here]
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
        first = self.memory(view.space, view.base >> 24).unwritten(view.base & SHARED_MASK, view.map)
        if first is not None:
            self._uninitialized(role, view, op, agent)

    def _uninitialized(self, role: Role, view: View, op: Op, agent: Any) -> None:
        who = "" if isinstance(agent, Role) else f" by the {agent.kind}"
        kind = "shared" if view.space == "shared" else "tensor"
        allocated = Place("allocation", view.allocation.name, view.allocation.op.location)
        message = f"{view.name} is read{who}, but parts of this {kind} memory were never written"
        self.report("uninitialized", message, role, op, "reads it", (allocated,), buffer=view.name)

    def load(
        self,
        agent: Role | Async,
        view: View,
        op: Op,
        proxy: str = GENERIC,
        parts: Sequence[tuple[int | None, View]] = (),
    ) -> np.ndarray:
        """Return the values of a view, after checks. `parts`: what each CTA reads, unless that is its own memory."""
        for rank, part in parts or [(None, view)]:
            self.touch(agent, part, False, proxy, op, by=rank)
        self.check_written(agent, view, op)
        return decode(view.type.element.name, self.read(view))

    def store(
        self, role: Role, view: View, values: np.ndarray, op: Op, parts: Sequence[tuple[int | None, View]] = ()
    ) -> None:
        """Write values of threads. `parts`: what each CTA writes, unless that is its own memory."""
        for rank, part in parts or [(None, view)]:
            self.touch(role, part, True, GENERIC, op, by=rank)
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
        duration: Duration = AT_ONCE,
        rank: int | None = None,
    ) -> Async:
        """Start an operation of all CTAs of the role, or of `rank`. Operations of one `queue` complete in order.
        `unit` and `duration` give the modelled time.
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
            rank,
        )
        self.operations += len(operation.ranks)
        for each in operation.ranks:
            if after is not None:
                operation.learn(each, after)
            role.advance(each)  # the CTA's later work is not ordered before the operation
        if queue is not None:
            self.queues[queue] = operation
        engine = (operation.unit, role.rank)
        begin = max(role.time, self.units.get(engine, 0.0))
        operation.started = begin
        self.units[engine] = begin + duration.cycles
        operation.finish = begin + duration.cycles + duration.latency
        self.flying.append(operation)
        if self.simulation.recorder is not None:
            self.simulation.recorder.issued(self, operation, duration.cycles)
        return operation

    def tensor_access(self, role: Role, op: Op, what: str, rank: int) -> Async:
        """Start a tcgen05.ld or .st (`what`) of a role's threads in CTA `rank`. Its bytes move at once here, but the
        result is valid only after the role's tcgen05.wait.
        """
        operation = Async(f"tcgen05.{what}", role, op, _nothing, None, "tensor memory", self.operations, rank)
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
        rank = first.ranks[0] if len(first.ranks) == 1 else None
        second = Async(kind, first.role, first.op, effect, first, f"{first.unit} ({kind})", self.operations, rank)
        self.operations += len(first.ranks)
        second.clocks = {rank: first.past([rank]) for rank in first.ranks}
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
        for rank, clock in operation.clocks.items():
            clock.after(clock, operation.bits[rank])  # its own accesses are in order
        operation.effect(operation)
        operation.effect = _nothing  # frees the operands
        operation.done = True
        if needs_wait(operation.kind):
            self.completed.append(
                (sum(operation.bits[i] for i in operation.issuers()), operation.role, operation.op, operation.kind)
            )
        if self.simulation.recorder is not None:
            self.simulation.recorder.operation(self, operation)

    def acquire(self, role: Role, operations: list[Async]) -> None:
        """Record that the role has waited for these operations, each CTA for what it issued."""
        for operation in operations:
            for issuer in operation.issuers():
                role.clocks[issuer].after(operation.clocks[issuer], operation.bits[issuer])
            role.time = max(role.time, operation.finish)

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

    # ---- CTAs

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
            if (
                allocation.base & SHARED_MASK
                <= address & SHARED_MASK
                < (allocation.base & SHARED_MASK) + allocation.size
            ):
                best = allocation
        return best.describe(address) if best else f"{space} memory at {address & SHARED_MASK}"
