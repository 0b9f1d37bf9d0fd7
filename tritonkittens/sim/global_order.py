"""Happens-before on global memory: what each cluster and each launch knows of the others, and the last accesses of
every granule of the tensors.

A cluster learns of another one only through a word that the other one releases and it acquires (PTX ISA, "Memory
Consistency Model": release and acquire patterns, scopes, fences around relaxed operations, read-modify-writes that
continue a release). It learns of earlier launches because they have ended, or with programmatic dependent launch from
griddepcontrol.wait.

TMA belongs to the asynchronous proxy. It sees ordinary accesses of the same launch only where `fence.proxy.async` lies
on the path of this order, in the thread that releases or in the one that acquires (PTX ISA, "Proxy-preserved base
causality order"). The end of a launch, and of a bulk copy, is such a fence. What the asynchronous proxy sees of a
cluster is known as `Proxied(cluster)`, beside what ordinary accesses see.

Threads of a role see each other's accesses across a barrier only. So a release by one thread publishes the accesses of
the other threads up to the role's last barrier, and two threads that touch one element without a barrier between them
race.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .agents import Async, Role
from .clocks import Clock, Past, Proxied, World, joined
from .report import Finding, Place
from .ttgir import Op
from .values import Spans

if TYPE_CHECKING:
    from .machine import Machine
    from .memory import Global
    from .simulation import Simulation

WEAK, CTA, CLUSTER, GPU = range(4)  # how far an access is strong: with whom it may collide
SCOPES = {"": GPU, "cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": GPU, "gl": GPU}
WIDEST = 16  # bytes of a granule
MOST_READERS = 4096  # readers of a granule that a write is checked against


class GlobalAccess(NamedTuple):
    """One access by the threads of a role, in an epoch of its clock component, or by an asynchronous operation, which
    is a bit of clocks (`clocks.py`). CTAs of one cluster are ordered by their roles' clocks, others by `Clock.world`.
    """

    machine: Machine
    role: Role
    epoch: int
    bit: int
    write: bool
    scope: int  # of a strong access (PTX), or WEAK
    single: bool  # by the first thread of the role alone
    barriers: int  # of the role so far
    op: Op
    who: str
    threads: Threads | None
    proxied: bool  # by TMA, so in the asynchronous proxy


Places = np.ndarray | slice  # granules of a tensor
NONE: np.ndarray = np.empty(0, np.int64)


def _numbers(places: Places) -> np.ndarray:
    return np.arange(places.start, places.stop) if isinstance(places, slice) else places


class Threads:
    """Which thread of a role accesses which bytes: pieces of `nbytes` at `starts`, each by its owner, −1 for all; and
    the words that it is going to write there. Of use until the role's next barrier.
    """

    __slots__ = ("starts", "nbytes", "owners", "words")

    def __init__(self, starts: np.ndarray, nbytes: int, owners: np.ndarray, words: np.ndarray | None):
        self.starts, self.nbytes, self.owners = starts, nbytes, owners
        self.words = words

    def at(self, addresses: np.ndarray) -> np.ndarray:
        """Return the owners of the bytes at these addresses, −1 where there is none."""
        order = np.argsort(self.starts, kind="stable")
        starts = self.starts[order]
        found = np.maximum(np.searchsorted(starts, addresses, side="right") - 1, 0)
        inside = (addresses >= starts[found]) & (addresses < starts[found] + self.nbytes)
        return np.where(inside, self.owners[order[found]], -1)

    def forget(self) -> None:
        self.starts = self.owners = self.words = NONE

    def equals(self, other: Threads) -> bool:
        return self.owners is other.owners and self.nbytes == other.nbytes and np.array_equal(self.starts, other.starts)


class _Readers:
    """The reads of a granule since its last write: the latest, and those before it."""

    __slots__ = ("access", "before")

    def __init__(self, access: GlobalAccess, before: _Readers | None):
        self.access, self.before = access, before


class _Tensor:
    """The last accesses of one tensor's granules, as numbers of accesses. 0 is none."""

    __slots__ = ("start", "size", "granule", "writes", "reads")

    def __init__(self, start: int, size: int):
        self.start, self.size, self.granule = start, size, 0
        self.writes: np.ndarray = np.empty(0, np.int32)
        self.reads: np.ndarray = np.empty(0, np.int32)

    def refine(self, granule: int) -> None:
        """Divide the granules, so that an access of such granules covers whole ones."""
        if not self.granule:
            count = -(-self.size // granule)
            self.writes, self.reads = np.zeros(count, np.int32), np.zeros(count, np.int32)
        elif granule < self.granule:
            times = self.granule // granule
            self.writes, self.reads = np.repeat(self.writes, times), np.repeat(self.reads, times)
        self.granule = min(granule, self.granule or granule)

    def places(self, starts: np.ndarray, nbytes: int) -> Places:
        """Return the granules of pieces of `nbytes` each."""
        first = int(starts[0]) - self.start
        end = int(starts[-1]) - self.start + nbytes
        if end - first == starts.size * nbytes and bool((starts[1:] - starts[:-1] == nbytes).all()):
            self.refine(_granule(first | end))
            return slice(first // self.granule, end // self.granule)
        offsets: np.ndarray = starts - self.start
        self.refine(_granule(int(np.bitwise_or.reduce(offsets)) | nbytes))
        places = offsets >> (self.granule.bit_length() - 1)
        each = nbytes // self.granule
        return places if each == 1 else (places[:, None] + np.arange(each)).reshape(-1)


def _granule(bits: int) -> int:
    bits |= WIDEST
    return bits & -bits


def _runs(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the first index, the number) of every run of equal numbers."""
    if numbers.min() == numbers.max():
        return np.zeros(1, np.int64), numbers[:1]
    first = np.concatenate([[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1])
    return first, numbers[first]


class Word(NamedTuple):
    """What the releases of one word publish: to everyone, or to the CTAs of a cluster."""

    world: World
    complete: int
    narrow: Mapping[Any, World]


NOTHING = Word({}, 0, {})


class GlobalOrder:
    """The accesses of global memory of a launch, and of those before it that may still run."""

    def __init__(self, memory: Global):
        self.memory = memory
        self.tensors: dict[int, _Tensor] = {}
        self.accesses: list[GlobalAccess | None] = [None]
        self.readers: list[_Readers | None] = [None]
        self.words: dict[int, Word] = {}
        self.touched = False  # whether anything was accessed since it was set to False

    def forget(self) -> None:
        """Free what is known: later launches come after everything."""
        self.tensors, self.words = {}, {}
        self.accesses, self.readers = [None], [None]

    # ---- accesses

    def access(
        self,
        agent: Role | Async,
        spans: Spans,
        write: bool,
        op: Op,
        *,
        scope: int = WEAK,
        single: bool = False,
        owners: np.ndarray | None = None,
        words: np.ndarray | None = None,
    ) -> None:
        """Record an access of `spans`, and report the races with earlier ones and missing fences of proxies.

        `scope`: of a strong access, else WEAK. `single`: by the first thread of the role alone. `owners`: the thread
        of each piece.
        `words`: what is going to be written there. Two writes of the same words do no harm.
        """
        starts, nbytes = spans.starts, spans.nbytes
        if not starts.size or not nbytes:
            return
        self.touched = True
        rest = starts if starts.dtype == np.int64 else starts.astype(np.int64)
        while rest.size:
            found = self.memory.find(int(rest[0]))
            if found is None:
                return
            start, size, _ = found
            here = None
            if int(rest.min()) < start or int(rest.max()) + nbytes > start + size:
                here = (rest >= start) & (rest + nbytes <= start + size)
                if not here.any():
                    return  # out of bounds
            tensor = self.tensors.get(start)
            if tensor is None or tensor.size < size:
                tensor = self.tensors[start] = _Tensor(start, size)
            places = tensor.places(rest if here is None else rest[here], nbytes)
            threads = None
            if owners is not None:
                threads = Threads(rest, nbytes, owners, words)
                if here is not None:
                    threads = Threads(rest[here], nbytes, owners[here], None if words is None else words[here])
                role = agent if isinstance(agent, Role) else agent.role
                role.touched.append(threads)
            self._record(agent, tensor, places, write, op, scope, single, threads)
            if here is None:
                return
            rest = rest[~here]
            owners = None if owners is None else owners[~here]
            words = None if words is None else words[~here]

    def _record(
        self,
        agent: Role | Async,
        tensor: _Tensor,
        places: Places,
        write: bool,
        op: Op,
        scope: int,
        single: bool,
        threads: Threads | None,
    ) -> None:
        if isinstance(agent, Role):
            role, bit, epoch = agent, 0, agent.clock.roles[agent.index]
        else:
            role, bit, epoch = agent.role, agent.bits[agent.ranks[0]], 0
        machine = role.machine
        who = machine.where(role) if isinstance(agent, Role) else f"{machine.where(role)}, {agent.kind}"
        tma = isinstance(agent, Async) and agent.kind != "cp.async"
        access = GlobalAccess(machine, role, epoch, bit, write, scope, single, role.barriers, op, who, threads, tma)
        for number in set(_runs(tensor.writes[places])[1].tolist()):
            if number:
                self._check(self.accesses[number], access, agent, tensor, tensor.writes, number, places)
        read = tensor.reads[places]
        first, readers = _runs(read)
        if write:
            for number in set(readers.tolist()):
                reader, left = self.readers[number], MOST_READERS
                while reader is not None and left:
                    self._check(reader.access, access, agent, tensor, tensor.reads, number, places)
                    reader, left = reader.before, left - 1
            tensor.writes[places] = len(self.accesses)
            tensor.reads[places] = 0
            self.accesses.append(access)
            return
        new = {number: self._joined(number, access) for number in set(readers.tolist())}
        if len(new) == 1:
            tensor.reads[places] = next(iter(new.values()))
            return
        values = np.array([new[number] for number in readers.tolist()], np.int32)
        tensor.reads[places] = np.repeat(values, np.diff(np.append(first, read.size)))

    def _joined(self, number: int, access: GlobalAccess) -> int:
        """Return the number of the readers `number` with a further one."""
        before = self.readers[number]
        if before is not None and before.access.role is access.role and before.access.bit == access.bit:
            latest = before.access
            if (latest.epoch, latest.barriers, latest.scope) == (access.epoch, access.barriers, access.scope) and (
                latest.op is access.op
            ):
                return number
            before = before.before
        self.readers.append(_Readers(access, before))
        return len(self.readers) - 1

    def writer(self, address: int) -> GlobalAccess | None:
        """Return the last write of the byte at an address."""
        found = self.memory.find(address)
        tensor = None if found is None else self.tensors.get(found[0])
        if tensor is None or not tensor.granule:
            return None
        return self.accesses[int(tensor.writes[(address - tensor.start) // tensor.granule])]

    # ---- order

    def _check(
        self,
        before: GlobalAccess | None,
        access: GlobalAccess,
        agent: Role | Async,
        tensor: _Tensor,
        numbers: np.ndarray,
        number: int,
        places: Places,
    ) -> None:
        assert before is not None
        if before.scope and access.scope and min(before.scope, access.scope) >= _distance(before, access):
            return
        clock = agent.clock
        if clock.complete >> before.machine.uid[0] & 1:
            return
        mixed = access.proxied and not before.proxied
        if before.role is access.role and not before.bit and not mixed:
            if access.bit or before.threads is None or before.barriers != access.barriers or access.threads is None:
                return
            if before.threads.equals(access.threads):
                return
            own = access.threads
            here = numbers[(own.starts - tensor.start) // tensor.granule] == number
            old, new = before.threads.at(own.starts[here]), own.owners[here]
            # a value that all threads have read may be overwritten by one: the others seldom use theirs
            wrong = (old != new) & (old >= 0)
            if wrong.any():
                address = int(own.starts[here][wrong][0])
                self._report(before, access, tensor, (address - tensor.start) // tensor.granule, "threads")
            return
        known = clock if before.machine is access.machine else clock.world.get(before.machine.uid)
        ordered = _covers(known, before)
        if ordered and not (mixed and not _covers(clock.world.get(Proxied(before.machine.uid)), before)):
            return
        given = access.threads
        if before.write and given is not None and given.words is not None:
            here = numbers[(given.starts - tensor.start) // tensor.granule] == number
            if np.array_equal(self.memory.peek(given.starts[here], given.nbytes), given.words[here]):
                return
        place = int(_numbers(places)[numbers[places] == number][0])
        self._report(before, access, tensor, place, "proxy" if ordered else _why(known, before, access))

    def _report(self, before: GlobalAccess, access: GlobalAccess, tensor: _Tensor, place: int, why: str) -> None:
        element = self.memory.element(tensor.start + place * tensor.granule)
        name = self.memory.name_only(tensor.start)
        how = {
            (True, False): "is read while it may still be written",
            (False, True): "is overwritten while it may still be read",
            (True, True): "is written twice in no order",
        }[before.write, access.write]
        if why == "proxy":
            how = "is overwritten" if access.write else "is read"
        verb = {True: "writes it", False: "reads it"}
        places = (
            Place(before.who, verb[before.write], before.op.location),
            Place(access.who, verb[access.write], access.op.location),
        )
        message = f"{name} {how}{WHY[why]}"
        kind = "missing-fence" if why == "proxy" else "race"
        access.machine.simulation.found(Finding(kind, message, places, {"buffer": name, "element": element}))

    # ---- words that synchronise

    def release(
        self, role: Role, addresses: np.ndarray, *, order: str, scope: int, single: bool, continues: bool
    ) -> None:
        """A strong write of these words. `order`: "relaxed" or stronger. `continues`: a read-modify-write, which keeps
        what the word published before."""
        if order in ("release", "acq_rel", "sc"):
            world, complete = role.published(single)
        elif role.fenced is not None:
            world, complete = role.fenced
        else:
            world, complete = {}, 0
        for address in set(addresses.tolist()):
            known = self.words.get(address, NOTHING) if continues else NOTHING
            if not world and not complete and known is NOTHING:
                self.words.pop(address, None)
                continue
            if scope >= GPU:
                known = known._replace(world=joined(known.world, world), complete=known.complete | complete)
            else:
                narrow = dict(known.narrow)
                narrow[role.machine.uid] = joined(narrow.get(role.machine.uid, {}), world)
                known = known._replace(narrow=narrow)
            self.words[address] = known

    def acquire(self, role: Role, addresses: np.ndarray, *, order: str, scope: int) -> None:
        """A strong read of these words: acquire what they publish, or let a later fence do it."""
        for address in set(addresses.tolist()):
            word = self.words.get(address)
            if word is None:
                continue
            narrow = word.narrow.get(role.machine.uid, {})
            if scope >= GPU:
                world = joined(word.world, narrow) if narrow else word.world
            else:
                own = (role.machine.uid, Proxied(role.machine.uid))
                world = joined(narrow, {k: word.world[k] for k in own if k in word.world})
            if order in ("acquire", "acq_rel", "sc"):
                role.learn((world, word.complete))
            else:
                old, complete = role.observed or ({}, 0)
                role.observed = (joined(old, world), complete | word.complete)


WHY = {
    "": "",
    "threads": " by threads of one role without a barrier between them (tl.debug_barrier)",
    "barrier": ": one thread released it before a barrier (tl.debug_barrier) of the threads that accessed it",
    "scope": ": a scope of fewer threads than the accesses' does not order them",
    "weak": ": one access is atomic, and the other one is not",
    "bulk": ": only cp.async.bulk.wait_group without .read waits for the writes of a bulk store",
    "proxy": " by TMA after an ordinary access, without fence.proxy.async of global memory between them",
    "launch": " by a launch that may still run: griddepcontrol.wait (tk.dependency_wait) comes first",
}


def _distance(before: GlobalAccess, access: GlobalAccess) -> int:
    """The least scope that includes both."""
    if before.machine is not access.machine:
        return GPU
    return CTA if before.role.rank == access.role.rank else CLUSTER


def _covers(known: Past | Clock | None, before: GlobalAccess) -> bool:
    """Whether an access is part of what is known of its cluster."""
    if known is None:
        return False
    if before.bit:
        return bool(known.operations & before.bit)
    role = before.role.index
    return known.roles[role] >= before.epoch or (before.single and known.firsts.get(role, 0) >= before.epoch)


def _why(known: Past | Clock | None, before: GlobalAccess, access: GlobalAccess) -> str:
    if before.machine.simulation is not access.machine.simulation:
        return "launch"
    if before.bit and before.write and before.role is access.role:
        return "bulk"
    if known is not None and known.firsts.get(before.role.index, 0) >= before.epoch > 0:
        return "barrier"
    if before.scope and access.scope:
        return "scope"
    return "weak" if before.scope or access.scope else ""


class LaunchOrder(NamedTuple):
    """What a launch knows of the launches before it, as bits by their numbers: at its start, and after
    griddepcontrol.wait.
    """

    number: int = 0
    before: int = 0
    waited: int = 0


class Launches:
    """The launches of a stream, in order: with programmatic dependent launch, one may start before the previous ones
    end.
    """

    def __init__(self) -> None:
        self.number = 0
        self.order: GlobalOrder | None = None
        self.started = self.ended = 0  # what is complete when the next one starts early, and when the last has ended

    def next(self, memory: Global, early: bool) -> tuple[LaunchOrder, GlobalOrder]:
        """Begin a launch. `early`: it may start before the previous one ends."""
        number = self.number
        self.number += 1
        if not early or self.order is None:
            everything = (1 << number) - 1
            if self.order is not None:
                self.order.forget()
            self.order = GlobalOrder(memory)
            return LaunchOrder(number, everything, everything), self.order
        self.order.memory = memory
        self.order.words = {}
        return LaunchOrder(number, self.started, self.started | self.ended), self.order

    def ran(self, simulation: Simulation) -> None:
        """Record what has ended when the next launch starts early, and when this one has ended."""
        order = simulation.launch_order
        self.started, self.ended = order.before, order.before | 1 << order.number
        for machine in simulation.finished:
            ended = order.before
            for role in machine.roles:
                ended |= role.clock.complete
            self.ended |= ended
            # the next launch starts when all CTAs let it, or end: then what any of them has waited for has ended
            for known in machine.dependents.values() or [ended]:
                self.started |= known
