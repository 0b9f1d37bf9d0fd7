"""One SVG beside each result file, drawn from the file alone: `python -m bench plot [FOLDER]`. Needs matplotlib (the
extra `bench`).

A file's "plot" says how: `x`, the fact along the horizontal axis (absent: one bar a row); `y`, "value" (default),
"ratio" or the name of an extra figure, or several, a column of panels each; `panel`, the fact that parts rows into
panels; `series`, the fact that parts ours into lines (default: one a contender).

Text stays text (no glyph outlines) and equal figures give equal files, so that a plot is small and a new one differs
where the figures do.
"""

from __future__ import annotations

import io
import json
import math
import pathlib
import re
from typing import Any

PANEL = (5.0, 3.4)  # inches
NARROW = 3  # panels side by side
SMALL = {"svg.fonttype": "none", "svg.hashsalt": "tritonkittens", "font.sans-serif": ["DejaVu Sans"]}


def draw(source: pathlib.Path) -> str:
    """Draw a result file's plot; returns the line that says what became of it."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        return (
            f"{source.stem}: plot skipped ({error}); `python -m bench plot {source.parent}` draws it where "
            "matplotlib is installed"
        )
    report = json.loads(source.read_text())
    panels = split(report)
    if not panels:
        return f"{source.stem}: plot skipped (no row with a figure in {source.name})"
    columns = min(NARROW, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines), layout="constrained")
    figure.suptitle(report.get("title", source.stem), fontsize=11)
    grid: Any = figure.subplots(lines, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels):
        (_lines if panel["x"] else _bars)(axes, panel)
        axes.set_title(panel["title"], fontsize=9)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    target = source.with_suffix(".svg")
    drawn = io.StringIO()
    with rc_context(SMALL):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    target.write_text(_in_tenths(drawn.getvalue()))
    return str(target)


def _in_tenths(svg: str) -> str:
    """The picture with coordinates, which stand in tags, to a tenth of a point; labels are as they were."""
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", tag[0]), svg)


def split(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a report: title, axis labels, whether x is logarithmic, and the points (x, y, low, high) of every
    series."""
    if "suite" not in report:
        return _standalone(report)
    plot = report["plot"]
    x, part, series = plot.get("x"), plot.get("panel"), plot.get("series")
    quantities = plot.get("y", ["value"])
    panels: dict[tuple[Any, ...], dict[str, Any]] = {}
    for quantity in [quantities] if isinstance(quantities, str) else quantities:
        for row in report["rows"]:
            name = row["facts"].get(part) if part else None
            for contender, cell in row["contenders"].items():
                y = cell.get(quantity, cell.get("extra", {}).get(quantity))
                if not isinstance(y, (int, float)) or (series and not cell["ours"]):
                    continue
                unit = (
                    report["unit"]
                    if quantity == "value"
                    else "times the best peer"
                    if quantity == "ratio"
                    else quantity
                )
                panel = panels.setdefault(
                    (quantity, name), {"title": "" if name is None else str(name), "x": x, "y": unit, "series": {}}
                )
                place = row["facts"][x] if x else row["case"]
                ends = (cell["low"], cell["high"]) if quantity == "value" else (y, y)
                panel["series"].setdefault(str(row["facts"][series]) if series else contender, []).append(
                    (place, y, min(ends), max(ends))
                )
    return list(panels.values())


def _standalone(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The files of `launch_overhead` and `template_host` (microseconds of every way to launch or construct) and
    `simulator` (seconds of every case)."""
    found: dict[str, list[Any]] = {"µs": [], "s": []}
    for name, cell in report.get("results", {}).items():
        found["µs"].append((name, cell["median_us"], cell["min_us"], cell["max_us"]))
    for row in report.get("rows", []):
        if "seconds" in row:
            found["s"].append((row["case"], row["seconds"], row["seconds"], row["seconds"]))
    return [{"title": "", "x": None, "y": unit, "series": {unit: points}} for unit, points in found.items() if points]


def _lines(axes: Any, panel: dict[str, Any]) -> None:
    for name, points in panel["series"].items():
        points = sorted(points)
        (line,) = axes.plot(
            [point[0] for point in points], [point[1] for point in points], marker="o", markersize=3, label=name
        )
        ranges = [(x, end) for x, _, low, high in points for end in (low, high, math.nan)]  # one line with gaps
        axes.plot(*zip(*ranges), color=line.get_color(), linewidth=0.8)
    places = sorted({point[0] for points in panel["series"].values() for point in points})
    if places[0] > 0 and places[-1] >= 4 * places[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(
        places, [f"{place:g}" for place in places], minor=False, fontsize=7, rotation=45 if len(places) > 6 else 0
    )
    axes.minorticks_off()
    if panel["y"] == "times the best peer":
        axes.axhline(1.0, color="black", linewidth=0.8)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(panel["x"], fontsize=8)
    axes.set_ylabel(panel["y"], fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(length=0)
    axes.legend(fontsize=6)


def _bars(axes: Any, panel: dict[str, Any]) -> None:
    cases = list(dict.fromkeys(point[0] for points in panel["series"].values() for point in points))
    height = 0.8 / len(panel["series"])
    for i, (name, points) in enumerate(panel["series"].items()):
        places = [cases.index(point[0]) + (i + 0.5) * height - 0.4 for point in points]
        ends = [[point[1] - point[2] for point in points], [point[3] - point[1] for point in points]]
        axes.barh(places, [point[1] for point in points], height, xerr=ends, error_kw={"elinewidth": 0.6}, label=name)
    axes.set_yticks(range(len(cases)), cases, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(panel["y"], fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(length=0)
    if len(panel["series"]) > 1:
        axes.legend(fontsize=6)
