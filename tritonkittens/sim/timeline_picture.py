"""The picture of a timeline: a lane for each role and engine of the shown CTAs, over modelled cycles."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from .costs import CLOCK_GHZ
from .shapes import Box, Line, Shape, Text
from .spans import NOTE, Cta, Span, rows_without_overlap

if TYPE_CHECKING:
    from .timeline import Timeline

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
_LEFT, _RIGHT, _LANE, _STRIP, _GAP = 130.0, 120.0, 30.0, 5.0, 7.0


class Picture:
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
        self.shapes: list[Shape] = []
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

    def draw(self) -> tuple[list[Shape], float]:
        put = self.shapes.append
        shown = "" if len(self.ctas) == self.of else f", {len(self.ctas)} of {self.of} CTAs"
        put(Text(_LEFT, 18, f"{self.title}{shown}: {NOTE}", 16, bold=True))
        scale = (
            f"cycles of one multiprocessor by the cost model of tritonkittens.sim; {CLOCK_GHZ * 1000:.0f} cycles "
            "are a microsecond"
        )
        put(Text(_LEFT, 37, scale, 11, colour="#666666"))
        y = 54.0
        shares = {(s.launch, s.cta, s.lane): s for s in self.timeline.summary()}
        for cta in self.ctas:
            put(Text(_LEFT, y + 6, cta.name, 12, bold=True))
            put(Text(self.width - _RIGHT + 8, y + 6, "busy · waiting", 10, colour="#666666"))
            y += 20
            top = y
            below = len(self.shapes)
            spans = self.timeline.spans(cta)
            for lane in cta.lanes:
                engine = lane in cta.engines
                mine = [s for s in spans if s.lane == lane and s.end >= self.first and s.start <= self.last]
                put(Text(_LEFT - 8, y + _LANE / 2, lane, 12, "end"))
                put(Box(_LEFT, y, self.width - _LEFT - _RIGHT, _LANE, "#f7f7f7"))
                share = shares[cta.launch, cta.name, lane]
                shown = f"{share.busy:.0%} · {share.wait:.0%}"
                put(Text(self.width - _RIGHT + 8, y + _LANE / 2, shown, 11, colour="#444444"))
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
            inset = 4 if waits else 0
            box = self.box(span, span.start, span.end, y + inset, _LANE - 2 * inset, hatched=waits)
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
                owner = span.args["issued by"]
                shade = owners.index(owner) if span.kind == "tensor core" else 0
                box = self.box(span, start, end, y, _LANE, shade=shade)
                buffers = span.args.get("buffers", span.name)
                short = " · ".join(b.rsplit(".", 1)[-1] for b in buffers.split(", "))
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
        rows = rows_without_overlap(flying)
        for i, row in enumerate(rows):
            for span in row:
                self.box(span, span.start, span.end, y + _LANE + 1 + i * _STRIP, _STRIP - 1, faint=True)
        return y + len(rows) * _STRIP

    def box(
        self,
        span: Span,
        start: float,
        end: float,
        y: float,
        height: float,
        *,
        hatched: bool = False,
        shade: int = 0,
        faint: bool = False,
    ) -> Box:
        self.kinds[span.kind] = None
        left, right = self.x(start), self.x(end)
        colour = _mixed(COLOURS[span.kind], 0.55 if faint else 0.22 * (shade % 3))
        more = [f"{k}: {v}" for k, v in span.args.items() if k not in ("lines", "operations")]
        tip = "\n".join([span.name, f"{span.kind}, cycles {start:.0f} to {end:.0f} ({end - start:.0f})", *more])
        box = Box(
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

    def label(self, box: Box, colour: str, *texts: str) -> None:
        """Draw the first of the texts that fits, else a part of the last."""
        room = int((box.width - 4) / 5.8)
        text = next((t for t in texts if len(t) <= room), texts[-1][: room - 1] + "…" if room >= 5 else "")
        if text:
            self.shapes.append(Text(box.x + 3, box.y + box.height / 2, text, 9.5, colour=colour))

    def axis(self, top: float, bottom: float, at: int) -> None:
        """Draw ticks below a CTA's lanes. Their lines go below the shapes drawn from `at` on."""
        span = self.last - self.first
        steps = [m * 10**e for e in range(9) for m in (1, 2, 5)]
        step = steps[bisect_right(steps, span / 12)]
        cycle = -(-self.first // step) * step
        while cycle <= self.last:
            x = self.x(cycle)
            self.shapes.append(Line(x, bottom - _GAP + 1, x, bottom, "#999999"))
            self.shapes.append(Text(x, bottom + 8, f"{cycle:,.0f}".replace(",", " "), 10, "middle", "#555555"))
            cycle += step
        self.shapes.append(Text(self.width - 6, bottom + 8, "cycles (modelled)", 10, "end", "#555555"))

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
            self.shapes.append(Box(x, y, 16, 12, COLOURS[kind], kind == "wait"))
            self.shapes.append(Text(x + 21, y + 6, text, 11))
            x += 36 + 6.2 * len(text)
        if self.strips:
            text = "thin: in flight, from the engine's start to completion"
            if x + 24 + 6.2 * len(text) > self.width - 10:
                x, y = _LEFT, y + 20
            self.shapes.append(Box(x, y + 4, 16, _STRIP - 1, _mixed(COLOURS["load"], 0.55)))
            self.shapes.append(Text(x + 21, y + 6, text, 11))
        return y + 26


def _mixed(colour: str, white: float) -> str:
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (255 - p) * white):02x}" for p in parts)


def _ink(colour: str) -> str:
    """Return black or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#222222" if 0.3 * red + 0.59 * green + 0.11 * blue > 150 else "#ffffff"
