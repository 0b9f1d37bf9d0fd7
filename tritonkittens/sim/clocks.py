"""Happens-before: vector clocks of roles and asynchronous operations, and a shadow memory of the last accesses to
each byte.

A role's threads in one CTA are a clock component that counts their releases. An asynchronous operation (a copy, a
matrix product) is one bit for each CTA that issues it, set in a clock once that CTA's threads have waited for it.
The asynchronous proxy (TMA, wgmma, tcgen05) sees ordinary accesses only after `fence.proxy.async` (PTX ISA, "Async
proxy"). So a clock has a second half: the fenced part of the past.
Loads and stores of tensor memory by threads are operations too, complete at tcgen05.wait. Other threads and the
tensor core follow them only through tcgen05.fence::before_thread_sync, a barrier and ::after_thread_sync (PTX ISA,
"tcgen05 Memory Consistency Model").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

GENERIC, ASYNC = "generic", "async"
TENSOR_THREADS = "tcgen05.ld/st"  # tcgen05.ld and .st of threads


class Past(NamedTuple):
    """What is known of a cluster: the epochs of its roles, those of their first threads alone where these are later,
    and the complete asynchronous operations.
    """

    roles: Sequence[int]
    firsts: Mapping[int, int]
    operations: int

    def join(self, other: Past) -> Past:
        if self is other:
            return self
        firsts = self.firsts
        if other.firsts:
            firsts = {**firsts, **{k: max(v, firsts.get(k, 0)) for k, v in other.firsts.items()}}
        roles = [a if a > b else b for a, b in zip(self.roles, other.roles)]
        return Past(roles, firsts, self.operations | other.operations)


World = Mapping[Any, Past]  # of other clusters, by their numbers; and of all, what TMA sees, by `Proxied`


class Proxied(NamedTuple):
    """The key, in a world, of what the asynchronous proxy sees of a cluster."""

    cluster: Any


def joined(a: World, b: World) -> World:
    """Return what two worlds know together."""
    if a is b or not b:
        return a
    if not a:
        return b
    return {**a, **{k: v.join(a[k]) if k in a else v for k, v in b.items()}}


def proxied(world: World) -> World:
    """Return what the asynchronous proxy sees after a fence by threads that know a world."""
    return {Proxied(k): past for k, past in world.items() if not isinstance(k, Proxied)}


class Clock:
    """The events known to have happened: the releases of each role, and the complete asynchronous operations.

    `world`: what is known of other clusters. `complete`: a bit for each launch that has ended. `firsts`: see `Past`.
    Worlds and firsts are replaced, never changed.
    """

    __slots__ = (
        "roles",
        "operations",
        "fenced",
        "fenced_operations",
        "before_sync",
        "after_sync",
        "world",
        "complete",
        "firsts",
    )

    def __init__(self, number_of_roles: int):
        self.roles = [0] * number_of_roles
        self.operations = 0
        self.fenced = [0] * number_of_roles  # like `roles`, for ordinary accesses visible to the asynchronous proxy
        self.fenced_operations = 0
        # tcgen05.ld and .st before a fence::before_thread_sync of their threads; barriers pass it on
        self.before_sync = 0
        # … after which these threads executed fence::after_thread_sync: their later tcgen05 operations follow
        self.after_sync = 0
        self.world: World = {}
        self.complete = 0
        self.firsts: Mapping[int, int] = {}

    def copy(self) -> Clock:
        new = Clock.__new__(Clock)
        new.roles, new.operations = self.roles[:], self.operations
        new.fenced, new.fenced_operations = self.fenced[:], self.fenced_operations
        new.before_sync, new.after_sync = self.before_sync, self.after_sync
        new.world, new.complete, new.firsts = self.world, self.complete, self.firsts
        return new

    def join(self, other: Clock) -> None:
        self.roles = [a if a > b else b for a, b in zip(self.roles, other.roles)]
        self.fenced = [a if a > b else b for a, b in zip(self.fenced, other.fenced)]
        self.operations |= other.operations
        self.fenced_operations |= other.fenced_operations
        self.before_sync |= other.before_sync
        self.complete |= other.complete
        if other.world:
            self.world = joined(self.world, other.world)
        if other.firsts:
            self.firsts = self.past().join(other.past()).firsts

    def past(self) -> Past:
        """Return what this clock knows of its own cluster."""
        return Past(tuple(self.roles), self.firsts, self.operations)

    def learn(self, world: World, own: Any) -> None:
        """Join what a word of global memory publishes; the cluster of this clock is `own`."""
        mine = world.get(own)
        if mine is not None:
            both = self.past().join(mine)
            self.roles, self.firsts, self.operations = list(both.roles), both.firsts, both.operations
            world = {k: v for k, v in world.items() if k != own}
        self.world = joined(self.world, world)

    def after(self, operation: Clock, bit: int) -> None:
        """Learn that an operation is complete, with those in its queue before it."""
        self.operations |= operation.operations | bit
        self.fenced_operations |= operation.fenced_operations | bit

    def fence(self) -> None:
        """Execute `fence.proxy.async`: the asynchronous proxy now sees everything known so far."""
        self.fenced, self.fenced_operations = self.roles[:], self.operations

    def covers(self, access: Access) -> bool:
        """Whether that access happened before."""
        if access.bit:
            return bool(self.operations & access.bit)
        return self.roles[access.role] >= access.epoch

    def covers_fenced(self, access: Access) -> bool:
        """Whether that access happened before and is visible to the asynchronous proxy."""
        if access.bit:
            return bool(self.fenced_operations & access.bit)
        return self.fenced[access.role] >= access.epoch


class Access(NamedTuple):
    """One read or write, by a role (epoch) or an asynchronous operation (bit)."""

    role: int
    epoch: int
    bit: int
    proxy: str
    write: bool
    op: Any  # the operation of the access, for reports
    who: str
    atomic: bool = False


class Conflict(NamedTuple):
    kind: str  # "race", "missing-fence" (of the asynchronous proxy) or "thread-sync" (the fences of tcgen05)
    before: Access
    start: int
    end: int


class _Segment:
    __slots__ = ("start", "end", "write", "reads")

    def __init__(self, start: int, end: int, write: Access | None, reads: tuple[Access, ...]):
        self.start, self.end, self.write, self.reads = start, end, write, reads


class Shadow:
    """The last write and the reads since then, for every byte of one memory. Equal neighbours are one segment."""

    def __init__(self, size: int):
        self.starts = [0]
        self.segments = [_Segment(0, size, None, ())]

    def grow(self, size: int) -> None:
        """Append untouched bytes at the end."""
        end = self.segments[-1].end
        self.starts.append(end)
        self.segments.append(_Segment(end, size, None, ()))

    def _cut(self, at: int) -> int:
        """Make `at` a boundary. Return the index of the segment that starts there."""
        i = bisect_right(self.starts, at) - 1
        segment = self.segments[i]
        if segment.start == at:
            return i
        if at >= segment.end:
            return i + 1
        self.segments.insert(i + 1, _Segment(at, segment.end, segment.write, segment.reads))
        self.starts.insert(i + 1, at)
        segment.end = at
        return i + 1

    def access(self, runs: list[tuple[int, int]], base: int, access: Access, clock: Clock) -> Conflict | None:
        """Record an access of the bytes `base + run`. Return the first conflict with an earlier access that `clock`
        does not order before it.
        """
        found: Conflict | None = None
        for start, end in runs:
            start += base
            end += base
            first = self._cut(start)
            last = self._cut(end) if end < self.segments[-1].end else len(self.segments)
            for segment in self.segments[first:last]:
                if found is None:
                    found = self._check(segment, access, clock)
            if access.write:
                if last - first > 1:
                    del self.segments[first + 1 : last]
                    del self.starts[first + 1 : last]
                whole = self.segments[first]
                whole.end, whole.write, whole.reads = end, access, ()
            else:
                for segment in self.segments[first:last]:
                    if not any(
                        r.role == access.role
                        and r.epoch == access.epoch
                        and r.bit == access.bit
                        and r.proxy == access.proxy
                        for r in segment.reads
                    ):
                        segment.reads = (
                            *(r for r in segment.reads if r.proxy != access.proxy or not clock.covers(r)),
                            access,
                        )
        return found

    @staticmethod
    def _check(segment: _Segment, access: Access, clock: Clock) -> Conflict | None:
        for before in (segment.write, *segment.reads) if access.write else (segment.write,):
            if before is None or (before.atomic and access.atomic):
                continue
            ours = before.proxy == TENSOR_THREADS == access.proxy and before.role == access.role
            if ours and access.write:
                continue  # a store after the same threads' loads and stores
            if not clock.covers(before):
                return Conflict("race", before, segment.start, segment.end)
            if before.proxy == TENSOR_THREADS and not ours and not clock.after_sync & before.bit:
                return Conflict("thread-sync", before, segment.start, segment.end)
            if before.proxy == GENERIC and access.proxy == ASYNC and not clock.covers_fenced(before):
                return Conflict("missing-fence", before, segment.start, segment.end)
        return None
