"""Exploration of many legal interleavings of one launch. A failing interleaving is shrunk, so that a person can read
and replay it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .agents import Async, Role
from .device import Launch, device, start_kernel
from .global_order import GlobalOrder
from .machine import Machine
from .report import Finding, Place, SimulationError, source_line
from .schedule import Recorded, Replay, nth
from .simulation import STEP_LIMIT

SHRINK_SECONDS = 20.0
ORDER_DEPENDENT = ("tt.atomic_rmw", "ttng.async_tma_reduce")  # sums that round differently in another order
CHECKED_STEPS = 12  # steps of a trace that are shown


@dataclass
class Exploration:
    """The result of `explore`: the number of `seeds` that ran, and of a failure its `schedule` and `findings`.

    `choices` is the shrunk schedule, for `replay`; `trace` describes it.
    """

    kernel: str
    seeds: int
    seconds: float
    failing_seed: int | None = None
    schedule: str = ""
    findings: list[Finding] = field(default_factory=list)
    choices: list[int | None] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    launch: Launch | None = None
    order: list[int] = field(default_factory=list)  # of the clusters
    interleaves: bool = False
    _rerun: Callable[[Any], Any] | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        return self.failing_seed is None

    def replay(self, recorder: Any = None) -> list[Finding]:
        """Run the shrunk schedule again. Returns its findings."""
        assert self._rerun is not None and self.launch is not None
        self.launch.recorder = recorder
        return self._rerun(Replay(self.choices, self.order, self.interleaves))

    def __str__(self) -> str:
        if self.ok:
            return f"{self.kernel}: {self.seeds} schedules, no finding ({self.seconds:.1f} s)"
        lines = [f"{self.kernel}: schedule {self.failing_seed} ({self.schedule}) fails"]
        lines += [str(f) for f in self.findings]
        if not self.choices:
            lines.append("  it fails under every schedule that lets the role started first go first")
            return "\n".join(lines)
        moves = sum(c is not None for c in self.choices)
        lines.append(
            f"  shrunk to {moves} choices of {len(self.choices)}; every other step goes to the role that was started "
            "first:"
        )
        shown = self.trace[-CHECKED_STEPS:]
        if len(self.trace) > len(shown):
            lines.append(f"    … {len(self.trace) - len(shown)} before")
        lines += [f"    {step}" for step in shown]
        return "\n".join(lines)


def _difference(
    launch: Launch, seed: int, snapshot: _Snapshot, reference: list[np.ndarray], writers: GlobalOrder
) -> Finding:
    """Return the finding of a result that is not that of the first schedule: which elements, and who wrote them."""
    memory, simulation = launch.memory, launch.simulation
    assert simulation is not None
    messages, places = [], []
    for (start, data, _), before in zip(snapshot.parts, reference):
        wrong = np.flatnonzero(data != before)
        if not wrong.size:
            continue
        owner = memory.ranges[start][3]
        size = owner.element_size() if hasattr(owner, "element_size") else 1
        count, first = len(np.unique(wrong // size)), start + int(wrong[0]) // size * size
        element = memory.element(first)
        messages.append(
            f"{memory.name_only(start)} differs in {count} of {data.size // size} elements, first at {element}"
        )
        for number, order in ((0, writers), (seed, simulation.global_order)):
            access = order.writer(first)
            if access is not None:
                places.append(Place(access.who, f"writes {element} in schedule {number}", access.op.location))
    if not places:
        places = [Place(launch.program.name, "kernel", launch.program.module.kernel.location)]
    message = f"{'; '.join(messages)}: schedule {seed} gives another result than schedule 0"
    return Finding("nondeterministic", message, tuple(places))


class _Traced(Replay):
    """A replay that describes its choices."""

    def choose(self, machine: Machine, roles: list[Role], operations: list[Async]) -> Any:
        before = self.at
        chosen = super().choose(machine, roles, operations)
        if self.at > before and before < len(self.choices) and self.choices[before] is not None:
            if isinstance(chosen, Async):
                self.trace.append(
                    f"{machine.name}: {chosen.kind} started by {chosen.role.name} completes "
                    f"({source_line(chosen.op.location)})"
                )
            else:
                where = source_line(chosen.op.location) if chosen.op is not None else "its start"
                self.trace.append(f"{machine.name}: {chosen.name} goes on from {where}")
        return chosen


class _Snapshot:
    """The contents of a launch's memory, so that every run begins alike."""

    def __init__(self, launch: Launch):
        memory = launch.memory
        self.parts = [(s, found[1], found[1].copy()) for s, found in memory.ranges.items() if s not in memory.read_only]

    def restore(self) -> None:
        for _, data, saved in self.parts:
            data[:] = saved

    def contents(self) -> list[np.ndarray]:
        return [data.copy() for _, data, _ in self.parts]

    def differ(self, reference: list[np.ndarray]) -> bool:
        """Whether the contents are others now."""
        return any(not np.array_equal(data, before) for (_, data, _), before in zip(self.parts, reference))


def explore_launch(
    launch: Launch,
    schedules: int,
    snapshot: _Snapshot,
    step_limit: int = STEP_LIMIT,
    seeds: Sequence[int] | None = None,
) -> Exploration:
    """Run a launch under many schedules, each from the contents of `snapshot`. Stop at the first with findings."""
    started = time.perf_counter()
    compare = not any(
        op.name in ORDER_DEPENDENT or "red." in str(op.attributes.get("asm_string", ""))
        for op in launch.program.module.walk()
    )
    reference: list[np.ndarray] | None = None
    writers: GlobalOrder | None = None  # of the reference

    def run(schedule: Any) -> list[Finding]:
        snapshot.restore()
        return launch.run(schedule, step_limit, launch.recorder).findings

    result = Exploration(launch.program.name, 0, 0.0, launch=launch, _rerun=run)
    for seed in seeds if seeds is not None else range(schedules):
        recorded = Recorded(nth(seed, len(launch.program.role_names)))
        findings = run(recorded)
        result.seeds += 1
        if not findings and compare:
            assert launch.simulation is not None
            if reference is None or writers is None:
                reference, writers = snapshot.contents(), launch.simulation.global_order
            elif snapshot.differ(reference):
                findings = [_difference(launch, seed, snapshot, reference, writers)]
                launch.findings.extend(findings)
        if findings:
            result.failing_seed, result.schedule, result.findings = seed, recorded.name, list(findings)
            result.choices, result.order, result.interleaves = (
                list(recorded.choices),
                recorded.order,
                recorded.interleaves,
            )
            _shrink(result, run, compare, reference, snapshot)
            break
    result.seconds = time.perf_counter() - started
    return result


def _shrink(
    result: Exploration, run: Callable[[Any], list[Finding]], compare: bool, reference: Any, snapshot: _Snapshot
) -> None:
    """Shrink the choices by delta debugging (Zeller and Hildebrandt, 2002): reset as many to the default as the
    failure does not need.
    """
    wanted = result.findings[0].kind
    deadline = time.perf_counter() + SHRINK_SECONDS

    def fails(choices: list[int | None]) -> bool:
        findings = run(Replay(choices, result.order, result.interleaves))
        if wanted == "nondeterministic":
            return not findings and reference is not None and snapshot.differ(reference)
        return any(f.kind == wanted for f in findings)

    choices: list[int | None] = [c if c else None for c in result.choices]
    if not fails(choices):
        result.trace = ["the failure needs the whole schedule: run it again by its seed"]
        return
    size = max(1, len(choices) // 2)
    while size >= 1 and time.perf_counter() < deadline:
        changed = False
        for start in range(0, len(choices), size):
            if all(c is None for c in choices[start : start + size]) or time.perf_counter() > deadline:
                continue
            trial = choices[:start] + [None] * len(choices[start : start + size]) + choices[start + size :]
            if fails(trial):
                choices, changed = trial, True
        if size == 1 and not changed:
            break
        size = max(1, size // 2) if size > 1 else (1 if changed else 0)
    while choices and choices[-1] is None:
        choices.pop()
    result.choices = choices
    traced = _Traced(choices, result.order, result.interleaves)
    run(traced)
    result.trace = traced.trace


def explore(
    kernel: Any,
    grid: Any = None,
    *args: Any,
    schedules: int = 50,
    arch: str | int = "sm_90a",
    raise_findings: bool = True,
    step_limit: int = STEP_LIMIT,
    multiprocessors: int | None = None,
    **options: Any,
) -> Exploration:
    """Run a launch under different legal interleavings, with delays on every asynchronous completion. Adversarial
    schedules run first.

    Args:
        kernel: as in `run`, or a function that launches. With such a function, grid is None, and each of its launches
            is explored separately from the contents of memory at that launch.
        grid: as in `run`.
        args: as in `run`.
        schedules: the number of schedules.
        arch: as in `run`.
        raise_findings: False returns failures instead of raising.
        step_limit: the most operations of one run.
        multiprocessors: of the simulated device; None: as many as the GPU has.
        options: the kernel's keywords.

    Returns:
        An `Exploration` of the first launch that failed, or of the last one.

    Raises:
        SimulationError: its text contains the shrunk schedule.

    A result that differs between schedules is a finding too, unless the kernel adds atomically.
    """
    snapshots: list[_Snapshot] = []
    with device(arch, raise_findings=False, step_limit=step_limit, multiprocessors=multiprocessors) as simulated:
        simulated.before_launch = lambda made: snapshots.append(_Snapshot(made))
        start_kernel(simulated, kernel, grid, args, options)
        launches = simulated.launches
    final = [s.contents() for s in snapshots]
    result = Exploration(getattr(kernel, "__name__", type(kernel).__name__), 0, 0.0)
    for made, snapshot, contents in zip(launches, snapshots, final, strict=True):
        result = explore_launch(made, schedules, snapshot, step_limit)
        if not result.ok:
            break
        snapshot.restore()
        for (_, data, _), after in zip(snapshot.parts, contents):
            data[:] = after  # the caller receives the first run's result
    if not result.ok and raise_findings:
        error = SimulationError(result.kernel, result.findings, result)
        error.args = (str(result),)
        raise error
    return result
