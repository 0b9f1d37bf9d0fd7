"""Boxes, lines and text of a picture, written as an .svg or a .png."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .spans import NOTE


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    hatched: bool = False
    edge: str | None = None
    tip: str = ""


@dataclass(frozen=True)
class Text:
    x: float
    y: float  # the middle of the line
    text: str
    size: float
    anchor: str = "start"
    colour: str = "#222222"
    bold: bool = False


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str


Shape = Box | Text | Line


def svg(shapes: Sequence[Shape], width: float, height: float) -> str:
    """Return the text of an .svg file. A box shows its `tip` under the pointer."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} '
        f'{height:g}" font-family="Helvetica, Arial, sans-serif">',
        f"<desc>{NOTE}: tritonkittens.sim</desc>",
        '<defs><pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4f4f4"/>'
        '<rect width="1.6" height="6" fill="#c4c4c4"/></pattern></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for s in shapes:
        if isinstance(s, Box):
            fill = "url(#waits)" if s.hatched else s.colour
            edge = f' stroke="{s.edge}" stroke-width="0.6"' if s.edge else ""
            tip = f"<title>{escape(s.tip)}</title>" if s.tip else ""
            out.append(
                f'<rect x="{s.x:.2f}" y="{s.y:.2f}" width="{s.width:.2f}" height="{s.height:.2f}" '
                f'fill="{fill}"{edge}>{tip}</rect>'
            )
        elif isinstance(s, Line):
            out.append(f'<line x1="{s.x1:.2f}" y1="{s.y1:.2f}" x2="{s.x2:.2f}" y2="{s.y2:.2f}" stroke="{s.colour}"/>')
        else:
            weight = ' font-weight="bold"' if s.bold else ""
            style = f'font-size="{s.size}" text-anchor="{s.anchor}" fill="{s.colour}"{weight}'
            out.append(
                f'<text x="{s.x:.2f}" y="{s.y + 0.35 * s.size:.2f}" {style} '
                f'pointer-events="none">{escape(s.text)}</text>'
            )
    return "\n".join([*out, "</svg>\n"])


def png(shapes: Sequence[Shape], width: float, height: float, path: Path) -> None:
    """Write a .png file. Raises ImportError without matplotlib."""
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
        if isinstance(s, Box):
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
        elif isinstance(s, Line):
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
