"""Schedules: the only place where a simulation makes choices. Every choice is deterministic by seed, recorded and
replayable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from .agents import Async, Role
from .machine import Machine

Agent = Role | Async


def candidates(roles: list[Role], operations: list[Async]) -> list[Agent]:
    """Return all roles and operations that can proceed."""
    return [*roles, *operations]


class Schedule:
    """The schedule by modelled time: the earliest event happens first. Base of all others."""

    name = "by modelled time"
    interleaves = False  # whether clusters take turns at accesses of global memory

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.random = random.Random(seed)

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        """Choose one of the roles that can run and the operations that can complete. There is at least one."""
        best: Agent | None = None
        time = float("inf")
        for role in roles:
            at = role.time if role.wait is None or role.wait.time is None else max(role.time, role.wait.time())
            if at < time:
                best, time = role, at
        for operation in operations:
            if operation.finish < time:
                best, time = operation, operation.finish
        assert best is not None
        return best

    def reads_early(self) -> bool:
        """Whether a copy reads its source when it starts (else when it completes). The memory model allows both."""
        return False

    def cluster_order(self, count: int) -> list[int]:
        return list(range(count))

    def switches(self) -> bool:
        """Whether another cluster runs after an access of global memory, where clusters take turns."""
        return False

    def next_cluster(self, clusters: list[Machine]) -> Machine:
        """Choose the cluster that runs next. There is at least one."""
        return clusters[0]


class Eager(Schedule):
    """Asynchronous operations complete at once; roles in random order."""

    name = "everything asynchronous completes at once"

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        return operations[0] if operations else self.random.choice(roles)

    def reads_early(self) -> bool:
        return True


class Lazy(Schedule):
    """Asynchronous operations complete only when no role can go on: the slowest copies and products."""

    name = "asynchronous operations as late as possible"

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        return self.random.choice(roles) if roles else self.random.choice(operations)


class SlowUnit(Schedule):
    """One unit (TMA, the tensor cores, …) completes only when nothing else can happen."""

    def __init__(self, seed: int, unit: str):
        super().__init__(seed)
        self.unit = unit
        self.name = f"the slowest {unit}"

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        quick: list[Agent] = [*roles, *(o for o in operations if not o.unit.startswith(self.unit))]
        return self.random.choice(quick) if quick else self.random.choice(operations)


class OneAhead(Schedule):
    """One role runs whenever it can, the others when it cannot: one consumer (or the producer) far ahead."""

    def __init__(self, seed: int, favourite: int):
        super().__init__(seed)
        self.favourite = favourite
        self.name = f"role {favourite} far ahead"

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        for role in roles:
            if role.index % machine.simulation.roles_per_cta == self.favourite:
                return role
        return self.random.choice(candidates(roles, operations))


class OneBehind(Schedule):
    """One role runs only when nothing else can happen."""

    def __init__(self, seed: int, loser: int):
        super().__init__(seed)
        self.loser = loser
        self.name = f"role {loser} far behind"

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        others: list[Agent] = [
            *(r for r in roles if r.index % machine.simulation.roles_per_cta != self.loser),
            *operations,
        ]
        return self.random.choice(others) if others else self.random.choice(roles)


class Priorities(Schedule):
    """Random priorities of roles and units that change at random moments (probabilistic concurrency testing, Burckhardt
    et al., ASPLOS 2010)."""

    name = "random priorities"
    interleaves = True

    def __init__(self, seed: int):
        super().__init__(seed)
        self.priority: dict[Any, float] = {}

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        if self.random.random() < 0.05:
            self.priority.clear()

        def rank(agent: Agent) -> float:
            key = ("role", agent.index) if isinstance(agent, Role) else ("unit", agent.unit)
            if key not in self.priority:
                self.priority[key] = self.random.random()
            return self.priority[key]

        return max(candidates(roles, operations), key=rank)

    def reads_early(self) -> bool:
        return self.random.random() < 0.5

    def cluster_order(self, count: int) -> list[int]:
        order = list(range(count))
        self.random.shuffle(order)
        return order

    def switches(self) -> bool:
        return self.random.random() < 0.5

    def next_cluster(self, clusters: list[Machine]) -> Machine:
        return self.random.choice(clusters)


class Uniform(Priorities):
    """Everything that can happen is equally likely, at every step."""

    name = "uniformly random"

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        return self.random.choice(candidates(roles, operations))


def nth(seed: int, roles: int) -> Schedule:
    """Return the schedule of a seed: 0 by modelled time, then the adversarial ones, then random ones without end."""
    fixed: list[Callable[[], Schedule]] = [
        lambda: Schedule(seed),
        lambda: Eager(seed),
        lambda: Lazy(seed),
        lambda: SlowUnit(seed, "TMA"),
        lambda: SlowUnit(seed, "tensor core"),
        lambda: SlowUnit(seed, "cp.async"),
        *[lambda r=r: OneAhead(seed, r) for r in range(roles)],
        *[lambda r=r: OneBehind(seed, r) for r in range(roles)],
    ]
    if seed < len(fixed):
        return fixed[seed]()
    return Uniform(seed) if seed % 3 == 0 else Priorities(seed)


class Recorded(Schedule):
    """Another schedule that records its choices: at each step, the index of the chosen agent in a fixed order of the
    candidates.
    """

    def __init__(self, inner: Schedule):
        super().__init__(inner.seed)
        self.inner, self.name, self.interleaves = inner, inner.name, inner.interleaves
        self.choices: list[int] = []
        self.order: list[int] = []  # of the clusters

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        candidates: list[Agent] = [*roles, *operations]
        if len(candidates) == 1:
            return candidates[0]
        chosen = self.inner.choose(machine, roles, operations)
        self.choices.append(next(i for i, c in enumerate(candidates) if c is chosen))
        return chosen

    def reads_early(self) -> bool:
        early = self.inner.reads_early()
        self.choices.append(int(early))
        return early

    def cluster_order(self, count: int) -> list[int]:
        self.order = self.inner.cluster_order(count)
        return self.order

    def switches(self) -> bool:
        switches = self.inner.switches()
        self.choices.append(int(switches))
        return switches

    def next_cluster(self, clusters: list[Machine]) -> Machine:
        if len(clusters) == 1:
            return clusters[0]
        chosen = self.inner.next_cluster(clusters)
        self.choices.append(next(i for i, c in enumerate(clusters) if c is chosen))
        return chosen


class Replay(Schedule):
    """Replays recorded choices. After their end, and where one is None, it takes the first candidate (the role that
    started first). `order`: of the clusters.
    """

    name = "replay"

    def __init__(self, choices: list[int | None], order: Sequence[int] = (), interleaves: bool = False):
        super().__init__(0)
        self.choices, self.order, self.interleaves = choices, order, interleaves
        self.at = 0
        self.trace: list[str] = []

    def _next(self) -> int:
        choice = self.choices[self.at] if self.at < len(self.choices) else None
        self.at += 1
        return choice or 0

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Agent:
        candidates: list[Agent] = [*roles, *operations]
        if len(candidates) == 1:
            return candidates[0]
        index = self._next()
        return candidates[min(index, len(candidates) - 1)]

    def reads_early(self) -> bool:
        return bool(self._next())

    def cluster_order(self, count: int) -> list[int]:
        return list(self.order) or list(range(count))

    def switches(self) -> bool:
        return bool(self._next())

    def next_cluster(self, clusters: list[Machine]) -> Machine:
        return clusters[0] if len(clusters) == 1 else clusters[min(self._next(), len(clusters) - 1)]
