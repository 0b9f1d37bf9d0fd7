"""Synchronisation by inline PTX: mbarriers, named barriers, the cluster barrier, fences."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonkittens.inline_ptx._meaning import NoMeaning, PtxFault

from ..agents import Role, Wait
from ..clocks import Clock
from ..costs import CLOCK_GHZ, Duration
from ..ttgir import Op
from .control import dependency_wait, launch_dependents
from .ptx_threads import PtxThreads, ThenWait

# Fences that other CTAs see.
PUBLISHING = ("acq_rel.", "sc.", "mbarrier_init.")
# Fences of accesses that are in order here anyway.
IN_ORDER = (*PUBLISHING, "proxy.tensormap::generic.", "proxy.alias")
SHARED = ("shared::cta", "shared::cluster")
PROXY_FENCES = ("proxy.async", "proxy.async.global", *(f"proxy.async.{space}" for space in SHARED))


class PtxSynchronisation(PtxThreads):
    """Barriers and fences of threads."""

    def __init__(self, role: Role, op: Op, rank: int, tid: np.ndarray):
        super().__init__(role, op, rank, tid)
        self._rounds: dict[int, tuple[NamedBarrier, int]] = {}  # of named barriers: the round for which this role waits

    def barrier(self, address: int) -> PtxBarrier:
        return PtxBarrier(self.role, self.op, int(address), self.rank)

    def named_barrier(
        self, number: int, threads: int | None, arriving: int, arrive_only: bool, votes: int = 0
    ) -> Wait | None:
        machine, role = self.machine, self.role
        if not 0 <= number < 16:
            raise PtxFault(f"barrier {number}: a CTA has 16")
        key = (self.rank, number)
        state = machine.named.setdefault(key, NamedBarrier(number, machine.number_of_roles))
        total = 32 * machine.simulation.program.total_warps if threads is None else threads
        generation = state.arrive(role, self.clock, arriving, total, votes, self.op)
        role.advance(self.rank)
        if arrive_only:
            return None
        self._rounds[number] = (state, generation)
        return ThenWait(
            lambda: state.generation > generation,
            lambda: f"named barrier {number}: {state.arrived} of {state.threads} threads have arrived",
            lambda: self.clock.join(state.rounds[generation][2]),
            time=lambda: state.time,
        )

    def barrier_votes(self, number: int) -> tuple[int, int]:
        state, generation = self._rounds[number]
        return state.rounds[generation][:2]

    def cluster_arrive(self, order: str, active: np.ndarray) -> None:
        machine, role = self.machine, self.role
        lockstep = machine.simulation.program.num_ctas > 1
        role.seen_phase[-1 - self.rank * lockstep] = machine.cluster_barrier.arrive(
            role, len(np.unique(self.warp[active])), [self.rank], order == "relaxed"
        )

    def cluster_wait(self, active: np.ndarray) -> Wait | None:
        machine, role = self.machine, self.role
        key = -1 - self.rank * (machine.simulation.program.num_ctas > 1)
        if key not in role.seen_phase:
            machine.stop("arrivals", "barrier.cluster.wait without barrier.cluster.arrive before it", role, self.op)
        inner = machine.cluster_barrier.wait(role, role.seen_phase.pop(key))
        return ThenWait(
            inner.ready, inner.describe, lambda: machine.cluster_barrier.passed(role, [self.rank]), time=inner.time
        )

    def fence(self, kind: str, active: np.ndarray) -> None:
        """Fence. Ordinary accesses happen in order here; only other CTAs, the asynchronous proxy and tcgen05 need
        fences."""
        clock = self.clock
        if kind == "tcgen05.before_thread_sync":
            clock.before_sync |= clock.operations
        elif kind == "tcgen05.after_thread_sync":
            clock.after_sync |= clock.before_sync
        elif kind in PROXY_FENCES:
            if kind != "proxy.async.global":
                self.role.fence_proxy(self.rank, kind != "proxy.async.shared::cta")
            if not kind.endswith(SHARED):
                self.role.fence_global_proxy(self.rank, int(np.count_nonzero(active)) == 1)
        elif kind.startswith(PUBLISHING) and not kind.endswith(".cta"):
            self.role.fence_cluster(self.rank)
            if kind.endswith((".gpu", ".sys")):
                self.role.fence()
        elif not kind.startswith(IN_ORDER) and kind != "warp":
            raise NoMeaning(f"fence.{kind}")

    def grid_dependency(self, action: str) -> Wait | None:
        if action == "wait":
            dependency_wait(self.role, self.op)
        else:
            launch_dependents(self.role, self.op)
        return None

    def sleep(self, nanoseconds: int) -> Wait:
        until = self.role.time + nanoseconds * CLOCK_GHZ
        return Wait(lambda: True, lambda: "nanosleep", time=lambda: until)


class PtxBarrier:
    """An mbarrier for PTX instructions. Without an initialised mbarrier, the use is reported and has no effect."""

    def __init__(self, role: Role, op: Op, address: int, rank: int):
        self.role, self.op, self.address, self.rank, self.barriers = role, op, address, rank, role.machine.barriers

    def _find(self, what: str) -> Any:
        return self.barriers.find(self.role, self.address, self.op, what, self.rank)

    def init(self, count: int) -> None:
        self.barriers.init(self.role, self.address, int(count), self.op, self.rank)

    def invalidate(self) -> None:
        self.barriers.invalidate(self.role, self.address, self.op, self.rank)

    def arrive(self, count: int, remote: bool) -> None:
        found = self._find("arrives")
        if found is not None:
            self.barriers.arrive(self.role, found, int(count), self.op, rank=self.rank)

    def expect(self, nbytes: int) -> None:
        found = self._find(f"expects {nbytes} bytes")
        if found is not None:
            self.barriers.expect(self.role, found, int(nbytes), self.op)

    def complete(self, nbytes: int) -> None:
        found = self._find(f"completes {nbytes} bytes")
        if found is not None:
            self.barriers.complete_bytes(self.role, found, int(nbytes), self.op, self.rank)

    def completed(self, parity: int) -> bool:
        found = self._find(f"tests parity {parity & 1}")
        if found is None:
            return True
        for watch in self.role.watching:
            watch.looked[f"{found.name} (waiting for its phase of parity {parity & 1}: {found.state()})"] = None
        done = bool(found.completed(int(parity)))
        if done:
            self.barriers.passed(self.role, found, self.rank)
        return done

    def wait(self, parity: int, limit_ns: int | None) -> Wait | None:
        machine, role, op = self.role.machine, self.role, self.op
        found = self._find(f"waits for parity {parity & 1}")
        if found is None or found.completed(int(parity)):
            return None
        inner = machine.barriers.wait_for(role, found, int(parity), op)
        if limit_ns is None:
            return ThenWait(
                inner.ready, inner.describe, lambda: None, barrier=found, parity=inner.parity, time=inner.time
            )
        # the timer completes last: a timeout expires only when nothing else can happen
        timer = machine.start(
            "timer",
            role,
            op,
            lambda operation: None,
            unit=f"timer of {role.name}",
            duration=Duration(0, limit_ns * CLOCK_GHZ),
        )
        timer.gate = lambda: machine.idle_but_for(timer)

        def over() -> None:
            if timer in machine.flying:
                machine.flying.remove(timer)

        return ThenWait(
            lambda: found.completed(int(parity)) or timer.done,
            inner.describe,
            over,
            barrier=found,
            parity=inner.parity,
            time=lambda: found.time if found.completed(int(parity)) else timer.finish,
        )


class NamedBarrier:
    """One of a CTA's 16 barriers (PTX ISA "bar / barrier"). A round completes when its number of threads has arrived,
    in whole warps.
    """

    def __init__(self, number: int, roles: int):
        self.number, self.roles = number, roles
        self.generation = self.arrived = self.threads = self.votes = 0
        self.time = self.latest = 0.0
        self.gathering = Clock(roles)
        self.rounds: dict[int, tuple[int, int, Clock]] = {}  # votes, voters and released clock of the latest rounds

    def arrive(self, role: Role, clock: Clock, count: int, threads: int, votes: int, op: Op) -> int:
        """Arrive with `count` threads, and release their clock. Return their round."""
        if threads % 32 or threads <= 0:
            role.machine.report(
                "arrivals",
                f"named barrier {self.number}: {threads} threads; a positive multiple of 32 is needed",
                role,
                op,
            )
        if self.arrived and threads != self.threads:
            message = (
                f"named barrier {self.number}: {role.name} expects {threads} threads, those before expected "
                f"{self.threads}"
            )
            role.machine.report("arrivals", message, role, op)
        self.threads = threads
        generation = self.generation
        self.gathering.join(clock)
        self.latest = max(self.latest, role.time)
        self.arrived += count
        self.votes += votes
        if self.arrived > threads:
            role.machine.report(
                "arrivals",
                f"named barrier {self.number}: {self.arrived} threads have arrived, it is for {threads}",
                role,
                op,
            )
        if self.arrived >= threads:
            self.rounds[generation] = (self.votes, self.arrived, self.gathering)
            self.rounds.pop(generation - 8, None)
            self.generation += 1
            self.arrived = self.votes = 0
            self.gathering = Clock(self.roles)
            self.time = self.latest
        return generation
