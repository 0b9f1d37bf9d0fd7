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
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .costs import CLOCK_GHZ
from .report import source_line
from .values import View

if TYPE_CHECKING:
    from .machine import Async, Machine, Role
    from .program import Step
    from .ttgir import Op

NOTE = "modelled, not measured"
_CYCLES_PER_MICROSECOND = CLOCK_GHZ * 1000

# colours by kind; roles' own work, then engines. Distinct in lightness as well as in hue
COLOURS = {
    "arithmetic": "#4e79a7",
    "special functions": "#b07aa1",
    "product": "#59a14f",
    "shared memory": "#76b7b2",
    "global memory": "#9c755f",
    "tensor memory": "#499894",
    "issue": "#f1ce63",
    "synchronisation": "#bab0ac",
    "wait": "#e6e6e6",
    "load": "#f28e2b",
    "store": "#e15759",
    "tensor core": "#59a14f",
    "other": "#79706e",
}
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


@dataclass(eq=False)
class Span:
    """An interval on a lane. For an asynchronous operation, `busy` is the time when its engine worked on it (it is in
    flight from start to end).
    """

    cta: Cta
    lane: str
    kind: str
    name: str
    start: float
    end: float
    args: dict[str, Any]
    busy: tuple[float, float] | None = None
    lines: dict[str, float] = field(default_factory=dict)  # cycles by source line, where several operations were merged


@dataclass(eq=False)
class Cta:
    """A process of the trace. `offset` is the start of its launch."""

    launch: int
    kernel: str
    name: str
    offset: float
    number: int
    roles: list[str] = field(default_factory=list)  # lanes in order
    engines: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    end: float = 0.0

    @property
    def lanes(self) -> list[str]:
        return [*self.roles, *self.engines]

    def on(self, lane: str) -> list[Span]:
        return [s for s in self.spans if s.lane == lane]


@dataclass(frozen=True)
class Share:
    """The shares of a CTA's modelled time in which a lane was busy, waiting, and neither.

    An engine waits while all its operations are in flight and move no data.
    """

    launch: int
    kernel: str
    cta: str
    lane: str
    busy: float
    wait: float
    cycles: float

    @property
    def idle(self) -> float:
        return max(0.0, 1.0 - self.busy - self.wait)

    def __str__(self) -> str:
        parts = f"busy {self.busy:.0%}, waiting {self.wait:.0%}, idle {self.idle:.0%}"
        return f"{self.kernel} {self.cta}, {self.lane}: {parts} of {self.cycles:.0f} cycles ({NOTE})"


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
                    busy = _total([s.busy for s in mine if s.busy is not None])
                    wait = _total([(s.start, s.end) for s in mine]) - busy
                else:
                    busy = _total([(s.start, s.end) for s in mine if s.kind != "wait"])
                    wait = _total([(s.start, s.end) for s in mine if s.kind == "wait"])
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
                rows = _rows([s for s in spans if s.lane == lane])
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
        shapes, height = _Picture(self, there[:ctas], of, cycles, title, width).draw()
        if path.suffix == ".svg":
            path.write_text(_svg(shapes, width, height), encoding="utf-8")
        else:
            _png(shapes, width, height, path)


# ---- intervals


def _total(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(intervals):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Arrange spans in as few rows as possible, so that none overlap in a row. There is at least one row."""
    rows: list[list[Span]] = [[]]
    ends = [float("-inf")]
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        for i, end in enumerate(ends):
            if span.start >= end - 1e-6:
                rows[i].append(span)
                ends[i] = span.end
                break
        else:
            rows.append([span])
            ends.append(span.end)
    return rows


# ---- the picture: shapes first, then a file of them


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    hatched: bool = False
    edge: str | None = None
    tip: str = ""


@dataclass(frozen=True)
class _Text:
    x: float
    y: float  # the middle of the line
    text: str
    size: float
    anchor: str = "start"
    colour: str = "#222222"
    bold: bool = False


@dataclass(frozen=True)
class _Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str


_Shape = _Box | _Text | _Line
_LEFT, _RIGHT, _LANE, _STRIP, _GAP = 130.0, 120.0, 30.0, 5.0, 7.0


class _Picture:
    def __init__(
        self,
        timeline: Timeline,
        ctas: list[Cta],
        of: int,
        cycles: tuple[float, float] | None,
        title: str | None,
        width: int,
    ):
        self.timeline, self.ctas, self.of, self.title, self.width = (
            timeline,
            ctas,
            of,
            title or self.named(ctas[0]),
            width,
        )
        self.first, self.last = cycles or (0.0, max(c.end for c in ctas))
        self.shapes: list[_Shape] = []
        self.kinds: dict[str, None] = {}
        self.strips = False

    @staticmethod
    def named(cta: Cta) -> str:
        """Return the kernel and the file in which its roles spend most time. A template's kernel has the template's
        name.
        """
        files: dict[str, float] = {}
        for span in cta.spans:
            for line, cycles in span.lines.items():
                file = line.split(":")[0]
                files[file] = files.get(file, 0.0) + cycles
        return f"{cta.kernel} of {max(files, key=lambda f: files[f])}" if files else cta.kernel

    def x(self, cycle: float) -> float:
        inside = min(max(cycle, self.first), self.last)
        return _LEFT + (inside - self.first) / max(self.last - self.first, 1e-9) * (self.width - _LEFT - _RIGHT)

    def draw(self) -> tuple[list[_Shape], float]:
        put = self.shapes.append
        shown = "" if len(self.ctas) == self.of else f", {len(self.ctas)} of {self.of} CTAs"
        put(_Text(_LEFT, 18, f"{self.title}{shown}: {NOTE}", 16, bold=True))
        scale = (
            f"cycles of one multiprocessor by the cost model of tritonkittens.sim; {CLOCK_GHZ * 1000:.0f} cycles "
            "are a microsecond"
        )
        put(_Text(_LEFT, 37, scale, 11, colour="#666666"))
        y = 54.0
        shares = {(s.launch, s.cta, s.lane): s for s in self.timeline.summary()}
        for cta in self.ctas:
            put(_Text(_LEFT, y + 6, cta.name, 12, bold=True))
            put(_Text(self.width - _RIGHT + 8, y + 6, "busy · waiting", 10, colour="#666666"))
            y += 20
            top = y
            below = len(self.shapes)
            spans = self.timeline.spans(cta)
            for lane in cta.lanes:
                engine = lane in cta.engines
                mine = [s for s in spans if s.lane == lane and s.end >= self.first and s.start <= self.last]
                put(_Text(_LEFT - 8, y + _LANE / 2, lane, 12, "end"))
                put(_Box(_LEFT, y, self.width - _LEFT - _RIGHT, _LANE, "#f7f7f7"))
                share = shares[cta.launch, cta.name, lane]
                put(
                    _Text(
                        self.width - _RIGHT + 8,
                        y + _LANE / 2,
                        f"{share.busy:.0%} · {share.wait:.0%}",
                        11,
                        colour="#444444",
                    )
                )
                if engine:
                    y = self.engine(mine, y)
                else:
                    self.role(mine, y)
                y += _LANE + _GAP
            self.axis(top, y, below)
            y += 30
        return self.shapes, self.legend(y)

    def role(self, spans: list[Span], y: float) -> None:
        for span in spans:
            waits = span.kind == "wait"
            box = self.box(span, span.start, span.end, y + (4 if waits else 0), _LANE - (8 if waits else 0), waits)
            short = span.name.removeprefix("waits for ") if waits else span.name
            self.label(
                box,
                "#666666" if waits else _ink(box.colour),
                span.name,
                short,
                short.rsplit(".", 1)[-1] if waits else short,
            )

    def engine(self, spans: list[Span], y: float) -> float:
        """Draw an engine's work on the lane, and below it a thin strip for each operation from start to completion.
        Return y after the strips.
        """
        owners = sorted({s.args["issued by"] for s in spans})
        for span in spans:
            start, end = span.busy or (span.start, span.end)
            if end > start:
                box = self.box(
                    span,
                    start,
                    end,
                    y,
                    _LANE,
                    False,
                    owners.index(span.args["issued by"]) if span.kind == "tensor core" else 0,
                )
                buffers = span.args.get("buffers", span.name)
                short = " · ".join(b.rsplit(".", 1)[-1] for b in buffers.split(", "))
                owner = span.args["issued by"]
                names = [
                    f"{owner}: {buffers}",
                    f"{owner}: {short}",
                    owner,
                    short,
                    owner[0] + owner.lstrip("abcdefghijklmnopqrstuvwxyz_"),
                ]
                if span.kind != "tensor core":
                    names = [buffers, short]
                self.label(box, _ink(box.colour), *names)
        flying = [s for s in spans if s.busy is not None and s.end - s.start > s.busy[1] - s.busy[0] + 1e-6]
        if not flying:
            return y
        self.strips = True
        rows = _rows(flying)
        for i, row in enumerate(rows):
            for span in row:
                self.box(span, span.start, span.end, y + _LANE + 1 + i * _STRIP, _STRIP - 1, False, faint=True)
        return y + len(rows) * _STRIP

    def box(
        self,
        span: Span,
        start: float,
        end: float,
        y: float,
        height: float,
        hatched: bool,
        shade: int = 0,
        faint: bool = False,
    ) -> _Box:
        self.kinds[span.kind] = None
        left, right = self.x(start), self.x(end)
        colour = _mixed(COLOURS[span.kind], 0.55 if faint else 0.22 * (shade % 3))
        more = [f"{k}: {v}" for k, v in span.args.items() if k not in ("lines", "operations")]
        tip = "\n".join([span.name, f"{span.kind}, cycles {start:.0f} to {end:.0f} ({end - start:.0f})", *more])
        box = _Box(
            left,
            y,
            max(right - left, 0.35),
            height,
            colour,
            hatched,
            "#ffffff" if right - left > 3 and not faint else None,
            tip,
        )
        self.shapes.append(box)
        return box

    def label(self, box: _Box, colour: str, *texts: str) -> None:
        """Draw the first of the texts that fits, else a part of the last."""
        room = int((box.width - 4) / 5.8)
        text = next((t for t in texts if len(t) <= room), texts[-1][: room - 1] + "…" if room >= 5 else "")
        if text:
            self.shapes.append(_Text(box.x + 3, box.y + box.height / 2, text, 9.5, colour=colour))

    def axis(self, top: float, bottom: float, at: int) -> None:
        """Draw ticks below a CTA's lanes. Their lines go below the shapes drawn from `at` on."""
        span = self.last - self.first
        steps = [m * 10**e for e in range(9) for m in (1, 2, 5)]
        step = steps[bisect_right(steps, span / 12)]
        cycle = -(-self.first // step) * step
        while cycle <= self.last:
            x = self.x(cycle)
            self.shapes.append(_Line(x, bottom - _GAP + 1, x, bottom, "#999999"))
            self.shapes.append(_Text(x, bottom + 8, f"{cycle:,.0f}".replace(",", " "), 10, "middle", "#555555"))
            cycle += step
        self.shapes.append(_Text(self.width - 6, bottom + 8, "cycles (modelled)", 10, "end", "#555555"))

    def legend(self, y: float) -> float:
        x = _LEFT
        for kind in COLOURS:
            if kind not in self.kinds:
                continue
            text = {
                "load": "TMA or cp.async load",
                "store": "TMA store",
                "tensor core": "tensor core (a shade for each role)",
            }.get(kind, kind)
            if x + 24 + 6.2 * len(text) > self.width - 10:
                x, y = _LEFT, y + 20
            self.shapes.append(_Box(x, y, 16, 12, COLOURS[kind], kind == "wait"))
            self.shapes.append(_Text(x + 21, y + 6, text, 11))
            x += 36 + 6.2 * len(text)
        if self.strips:
            text = "thin: in flight, from the engine's start to completion"
            if x + 24 + 6.2 * len(text) > self.width - 10:
                x, y = _LEFT, y + 20
            self.shapes.append(_Box(x, y + 4, 16, _STRIP - 1, _mixed(COLOURS["load"], 0.55)))
            self.shapes.append(_Text(x + 21, y + 6, text, 11))
        return y + 26


def _mixed(colour: str, white: float) -> str:
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (255 - p) * white):02x}" for p in parts)


def _ink(colour: str) -> str:
    """Return black or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#222222" if 0.3 * red + 0.59 * green + 0.11 * blue > 150 else "#ffffff"


def _svg(shapes: list[_Shape], width: float, height: float) -> str:
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} '
        f'{height:g}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f"<desc>{NOTE}: tritonkittens.sim</desc>",
        '<defs><pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4f4f4"/>'
        '<rect width="1.6" height="6" fill="#c4c4c4"/></pattern></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for s in shapes:
        if isinstance(s, _Box):
            fill = "url(#waits)" if s.hatched else s.colour
            edge = f' stroke="{s.edge}" stroke-width="0.6"' if s.edge else ""
            tip = f"<title>{escape(s.tip)}</title>" if s.tip else ""
            out.append(
                f'<rect x="{s.x:.2f}" y="{s.y:.2f}" width="{s.width:.2f}" height="{s.height:.2f}" '
                f'fill="{fill}"{edge}>{tip}</rect>'
            )
        elif isinstance(s, _Line):
            out.append(f'<line x1="{s.x1:.2f}" y1="{s.y1:.2f}" x2="{s.x2:.2f}" y2="{s.y2:.2f}" stroke="{s.colour}"/>')
        else:
            weight = ' font-weight="bold"' if s.bold else ""
            style = f'font-size="{s.size}" text-anchor="{s.anchor}" fill="{s.colour}"{weight}'
            out.append(
                f'<text x="{s.x:.2f}" y="{s.y + 0.35 * s.size:.2f}" {style} '
                f'pointer-events="none">{escape(s.text)}</text>'
            )
    return "\n".join([*out, "</svg>\n"])


def _png(shapes: list[_Shape], width: float, height: float, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(
            f"{path}: a .png needs matplotlib (pip install 'tritonkittens[bench]'); .svg needs nothing"
        ) from error
    figure = Figure(figsize=(width / 100, height / 100), dpi=160)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for order, s in enumerate(shapes):
        if isinstance(s, _Box):
            face, edge = ("#f4f4f4", "#c4c4c4") if s.hatched else (s.colour, s.edge or "none")
            hatch = "////" if s.hatched else None
            axes.add_patch(
                Rectangle(
                    (s.x, s.y),
                    s.width,
                    s.height,
                    facecolor=face,
                    edgecolor=edge,
                    linewidth=0.4,
                    hatch=hatch,
                    zorder=order,
                )
            )
        elif isinstance(s, _Line):
            axes.plot([s.x1, s.x2], [s.y1, s.y2], color=s.colour, linewidth=0.7, zorder=order)
        else:
            where = {"start": "left", "middle": "center", "end": "right"}[s.anchor]
            axes.text(
                s.x,
                s.y,
                s.text.replace("$", r"\$"),
                fontsize=s.size * 0.72,
                ha=where,
                va="center",
                color=s.colour,
                weight="bold" if s.bold else "normal",
                zorder=order,
                clip_on=True,
            )
    figure.savefig(path)
