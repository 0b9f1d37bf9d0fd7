"""Timelines in modelled time: a recorder for a simulation, a trace for Perfetto, a picture, and the shares of busy,
waiting and idle.

    timeline = Timeline()
    with sim.device("sm_90a", recorder=timeline):
        attention(q, k, v)
    timeline.save("attention.json")     # ui.perfetto.dev or chrome://tracing
    timeline.draw("attention.svg")

Times come from the model in `costs`, in cycles. Nothing is measured, and every output states that. Schedules other
than the first (by modelled time) are legal, but do not follow the model. Every cluster's clock begins at 0; launches
follow each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .costs import CLOCK_GHZ
from .report import source_line
from .shapes import png, svg
from .spans import NOTE, Cta, Share, Span, rows_without_overlap, total
from .timeline_picture import Picture
from .values import View

if TYPE_CHECKING:
    from .agents import Async, Role
    from .machine import Machine
    from .program import Step
    from .ttgir import Op

_CYCLES_PER_MICROSECOND = CLOCK_GHZ * 1000

_ENGINE_KINDS = {
    "TMA load": "load",
    "TMA gather": "load",
    "cp.async": "load",
    "TMA store": "store",
    "TMA scatter": "store",
    "wgmma": "tensor core",
    "tcgen05.mma": "tensor core",
    "tcgen05.cp": "tensor core",
}


class Timeline:
    """A recorder for `sim.run(..., recorder=...)` or `sim.device(arch, recorder=...)`.

    Args:
        clusters: the number of clusters to record of each launch.
    """

    def __init__(self, clusters: int | None = None):
        self.clusters = clusters
        self.ctas: list[Cta] = []
        # (launch, cluster, rank) of CTAs that ran but were not recorded
        self.left_out: set[tuple[int, int, int]] = set()
        self._launches: list[Any] = []  # simulations, kept alive so that no other has the same identity
        self._offset = 0.0
        self._by_machine: dict[tuple[int, int, int], Cta] = {}
        self._open: dict[tuple[int, int, int], Span] = {}  # the last span of a role's own work
        self._waiting: dict[tuple[int, int, int], Span] = {}
        self._flying: dict[int, tuple[Async, Span, float]] = {}
        self._lines: dict[int, tuple[Op, str]] = {}

    # ---- the recorder's interface

    def work(self, machine: Machine, role: Role, step: Step, begin: float) -> None:
        """Record an operation of a role's own, from `begin` to now."""
        cta = self._cta(machine, role)
        if cta is None:
            return
        lane = self._lane(cta, role)
        line = self._line(step.op)
        kind, end = step.cost.kind, role.time
        cta.end = max(cta.end, end)
        key = self._key(machine, role)
        last = self._open.get(key)
        if last is not None and last.kind == kind and begin <= last.end + 1e-6:
            last.end = end
            last.args["operations"] += 1
        else:
            last = self._open[key] = Span(cta, lane, kind, "", begin, end, {"operations": 1})
            cta.spans.append(last)
        last.lines[line] = last.lines.get(line, 0.0) + end - begin

    def waits(self, machine: Machine, role: Role) -> None:
        """Record that a role begins to wait."""
        cta = self._cta(machine, role)
        if cta is None or role.wait is None:
            return
        what = role.wait.describe()
        args: dict[str, Any] = {"for": what}
        barrier = role.wait.barrier
        if barrier is not None:
            args |= {"barrier": barrier.name, "phase": role.wait.phase, "parity": role.wait.parity}
        if role.op is not None:
            args |= self._where(role.op)
        name = f"waits for {barrier.name}" if barrier is not None else f"waits for {what}"
        self._waiting[self._key(machine, role)] = Span(
            cta, self._lane(cta, role), "wait", name, role.time, role.time, args
        )

    def waited(self, machine: Machine, role: Role) -> None:
        """Record that a role continues, at `role.time`. A wait for an earlier event takes no time and leaves no
        span."""
        span = self._waiting.pop(self._key(machine, role), None)
        if span is not None and role.time > span.start:
            span.end = role.time
            span.cta.spans.append(span)
            span.cta.end = max(span.cta.end, span.end)

    def issued(self, machine: Machine, operation: Async, cost: float) -> None:
        """Record that a role has issued an asynchronous operation that needs its engine for `cost` cycles."""
        role = operation.role
        cta = self._cta(machine, role)
        if cta is None:
            return
        lane = operation.unit.removesuffix(f" {role.rank}")
        if lane not in cta.engines:
            cta.engines.append(lane)
        op = operation.op
        views = [
            v
            for v in (role.environment[i] for i in op.operands)
            if isinstance(v, View) and v.base not in machine.barriers
        ]
        kind = _ENGINE_KINDS.get(operation.kind, "store" if operation.kind.startswith("TMA reduce") else "other")
        args = {"issued by": role.name, "issued at cycle": round(role.time, 1), **self._where(op)}
        if views:
            args["buffers"] = ", ".join(v.name for v in views)
            if kind in ("load", "store"):
                args["bytes"] = sum(v.map.total for v in views)
        name = f"{operation.kind} {args.get('buffers', '')}".strip()
        self._flying[id(operation)] = (
            operation,
            Span(cta, lane, kind, name, operation.started, operation.finish, args),
            cost,
        )

    def operation(self, machine: Machine, operation: Async) -> None:
        """Record that an asynchronous operation is complete."""
        found = self._flying.pop(id(operation), None)
        if found is None:
            return
        _, span, cost = found
        span.start, span.end = operation.started, operation.finish
        # a load's bytes arrive at the end of its time; a product or a store works first, and its result or completion
        # follows
        span.busy = (span.end - cost, span.end) if span.kind == "load" else (span.start, span.start + cost)
        if operation.barrier is not None:
            span.args |= {"barrier": operation.barrier.name, "phase": operation.phase}
        span.cta.spans.append(span)
        span.cta.end = max(span.cta.end, span.end)

    # ---- keeping order

    def _key(self, machine: Machine, role: Role) -> tuple[int, int, int]:
        return self._launch(machine), machine.index, role.index

    def _launch(self, machine: Machine) -> int:
        simulation = machine.simulation
        if not self._launches or self._launches[-1] is not simulation:
            self._offset = max((c.offset + c.end for c in self.ctas), default=0.0)
            self._launches.append(simulation)
        return len(self._launches) - 1

    def _cta(self, machine: Machine, role: Role) -> Cta | None:
        launch = self._launch(machine)
        if self.clusters is not None and machine.index >= self.clusters:
            self.left_out.add((launch, machine.index, role.rank))
            return None
        key = (launch, machine.index, role.rank)
        found = self._by_machine.get(key)
        if found is None:
            several = machine.simulation.program.num_ctas == 1 and len(machine.ctas) > 1
            name = f"{machine.name} rank {role.rank}" if several else machine.name
            found = self._by_machine[key] = Cta(
                launch, machine.simulation.program.name, name, self._offset, len(self.ctas)
            )
            self.ctas.append(found)
        return found

    @staticmethod
    def _lane(cta: Cta, role: Role) -> str:
        if role.name not in cta.roles:
            cta.roles.append(role.name)
        return role.name

    def _line(self, op: Op) -> str:
        known = self._lines.get(id(op))
        if known is None:
            # keeps the operation alive, so that no other has the same identity
            known = self._lines[id(op)] = (op, source_line(op.location))
        return known[1]

    def _where(self, op: Op) -> dict[str, Any]:
        return {"line": self._line(op), "called from": str(op.location)}

    def spans(self, cta: Cta) -> list[Span]:
        """Return the spans of a CTA, in order of time. Merged work is named after the line that took most of it."""
        for span in cta.spans:
            if span.lines:
                line = max(span.lines, key=lambda k: span.lines[k])
                span.name = line.split("  ", 1)[-1]
                span.args["line"] = line
                if len(span.lines) > 1:
                    span.args["lines"] = {
                        k: round(v, 1) for k, v in sorted(span.lines.items(), key=lambda item: -item[1])
                    }
        unfinished = [s for o, s, _ in self._flying.values() if s.cta is cta]
        for span in unfinished:
            span.args["unfinished"] = "still in flight when the run ended"
        stuck = [s for s in self._waiting.values() if s.cta is cta]
        for span in stuck:
            span.end = max(span.start, cta.end)
            span.args["unfinished"] = "still waiting when the run ended"
        return sorted([*cta.spans, *unfinished, *stuck], key=lambda s: (s.start, s.end))

    # ---- numbers

    def summary(self) -> list[Share]:
        r"""Return, for every CTA and lane, the shares of busy and waiting time.

        Example::

            print(*timeline.summary(), sep="\n")
        """
        out = []
        for cta in self.ctas:
            spans = self.spans(cta)
            for lane in cta.lanes:
                mine = [s for s in spans if s.lane == lane]
                if lane in cta.engines:
                    busy = total([s.busy for s in mine if s.busy is not None])
                    wait = total([(s.start, s.end) for s in mine]) - busy
                else:
                    busy = total([(s.start, s.end) for s in mine if s.kind != "wait"])
                    wait = total([(s.start, s.end) for s in mine if s.kind == "wait"])
                length = max(cta.end, 1e-9)
                out.append(
                    Share(cta.launch, cta.kernel, cta.name, lane, busy / length, max(0.0, wait) / length, cta.end)
                )
        return out

    # ---- a trace

    def trace(self) -> dict[str, Any]:
        """Return the Trace Event Format of Chrome and Perfetto: a process for each CTA, a thread for each role and
        engine (several where operations overlap).
        """
        events: list[dict[str, Any]] = []
        for cta in self.ctas:
            pid = cta.number
            title = f"{cta.kernel}, {cta.name} ({NOTE})"
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}})
            events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
            spans = self.spans(cta)
            tid = 0
            for lane in cta.lanes:
                rows = rows_without_overlap([s for s in spans if s.lane == lane])
                for number, row in enumerate(rows):
                    name = lane if len(rows) == 1 else f"{lane} {number}"
                    events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
                    events.append(
                        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
                    )
                    events += [self._event(span, pid, tid) for span in row]
                    tid += 1
        return {
            "traceEvents": events,
            "displayTimeUnit": "ns",
            "otherData": {
                "time": f"{NOTE}: the cost model of tritonkittens/sim/costs.py at {CLOCK_GHZ} GHz",
                "CTAs left out": len(self.left_out),
            },
        }

    @staticmethod
    def _event(span: Span, pid: int, tid: int) -> dict[str, Any]:
        args = {"cycles": f"{span.start:.0f} to {span.end:.0f}", **span.args, "time": NOTE}
        if span.busy is not None:
            args["engine busy, cycles"] = f"{span.busy[0]:.0f} to {span.busy[1]:.0f}"
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": span.name,
            "cat": span.kind,
            "ts": (span.cta.offset + span.start) / _CYCLES_PER_MICROSECOND,
            "dur": (span.end - span.start) / _CYCLES_PER_MICROSECOND,
            "args": args,
        }

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, for ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.trace(), separators=(",", ":")), encoding="utf-8")

    # ---- a picture

    def draw(
        self,
        path: str | Path,
        *,
        launch: int = -1,
        ctas: int = 1,
        cycles: tuple[float, float] | None = None,
        title: str | None = None,
        width: int = 1500,
    ) -> None:
        """Draw a launch's first CTAs: lanes of roles and engines over modelled cycles.

        Args:
            path: an .svg, or a .png (needs matplotlib).
            launch: the index of the launch.
            ctas: the number of CTAs to show.
            cycles: a part of the time.
            title: replaces the kernel's name. A note on the modelled times is always added.
            width: the width of the picture.

        Raises:
            ValueError: for another ending, or without any recorded launch.
        """
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise ValueError(f"{path}: a picture is .svg or .png")
        if not self.ctas:
            raise ValueError("nothing was recorded: give the timeline to sim.run or sim.device as `recorder` first")
        number = range(len(self._launches))[launch]
        there = [c for c in self.ctas if c.launch == number]
        of = len(there) + sum(1 for left, _, _ in self.left_out if left == number)
        shapes, height = Picture(self, there[:ctas], of, cycles, title, width).draw()
        if path.suffix == ".svg":
            path.write_text(svg(shapes, width, height), encoding="utf-8")
        else:
            png(shapes, width, height, path)
