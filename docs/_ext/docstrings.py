"""Docstrings are written for the terminal: `code` in single backticks, lists without blank lines, indented examples.
This makes reStructuredText of them."""

from __future__ import annotations

import re
from typing import Any

BULLET = re.compile(r"\s*(?:[-*]|\d+\.) ")
SECTION = re.compile(r"\s*(?:Args|Returns|Raises|Yields|Example|Examples|Note|Attributes):{1,2}\s*$")
COLUMN = re.compile(r"(\S+) {2,}(?=\S)")  # a parameter and its description, as the columns of a table
PROSE_MARKUP = re.compile(r"([*|\\])|(?<=\w)(_)(?!\w)")  # emphasis, substitutions and references of reStructuredText


def _line(text: str) -> str:
    """One line of prose: code spans doubled, everything else as it reads."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    for i, part in enumerate(parts):
        if i % 2:  # a word may touch it, which reStructuredText allows behind an escaped space only
            parts[i] = (
                ("\\ " if parts[i - 1][-1:].isalnum() else "")
                + f"``{part.strip('`')}``"
                + ("\\ " if parts[i + 1][:1].isalnum() else "")
            )
        else:
            parts[i] = PROSE_MARKUP.sub(lambda found: "\\" + found[0], part)
    return "".join(parts)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def convert(lines: list[str]) -> list[str]:
    """The lines of a docstring, without its common indentation, as reStructuredText."""
    # a table of reStructuredText stays as it is
    if borders := [i for i, line in enumerate(lines) if line.startswith("====")]:
        first, last = borders[0], borders[-1] + 1
        return [*convert(lines[:first]), *lines[first:last], *convert(lines[last:])]
    out: list[str] = []
    literal: int | None = None  # the indentation that a code block is deeper than
    section: int | None = None  # the indentation of the heading "Args:" that the lines are below
    text = _joined_spans(_listed_columns(lines))
    for i, line in enumerate(text):
        indent, before = _indent(line), text[i - 1] if i else ""
        if literal is not None:
            if line.strip() and indent <= literal:
                literal = None
            else:
                out.append(line)
                continue
        if not line.strip():
            out.append("")
            continue
        if section is not None and indent <= section:
            section = None
        if SECTION.match(line):
            section = indent
            out += ["", line]
            if line.rstrip().endswith("::"):
                literal, section = indent, None
            continue
        bullet = BULLET.match(line)
        if not bullet and section is None and not before.strip() and indent >= 4 and not _within_list(out, indent):
            out += ["::", "", line]  # an example that is set apart by its indentation
            literal = 3
            continue
        if bullet and before.strip() and not BULLET.match(before) and section is None:
            out.append("")
        head = line[: bullet.end()] if bullet else line[:indent]
        out.append(head + _line(line[len(head) :]))
    return out


def _listed_columns(lines: list[str]) -> list[str]:
    """Parameters that stand in a column beside their descriptions become a list."""
    out: list[str] = []
    within = False
    for line in lines:
        if found := COLUMN.match(line):
            out += [] if within else [""]
            out.append(f"- `{found[1]}`: {line[found.end() :]}")
            within = True
        elif within and line.strip() and _indent(line):
            out[-1] += " " + line.strip()
        else:
            out += [""] if within and line.strip() else []
            out.append(line)
            within = False
    return out


def _joined_spans(lines: list[str]) -> list[str]:
    """Code spans that a line break cuts are joined on their first line."""
    out: list[str] = []
    for line in lines:
        if out and out[-1].strip() and line.strip() and out[-1].replace("``", "").count("`") % 2:
            out[-1] = f"{out[-1].rstrip()} {line.strip()}"
        else:
            out.append(line)
    return out


def _within_list(out: list[str], indent: int) -> bool:
    """Whether a line of this indentation continues an item of a list."""
    for line in reversed(out):
        if line.strip() and _indent(line) < indent:
            return bool(BULLET.match(line))
    return False


def process(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    lines[:] = convert(lines)


def shortened(signature: str) -> str:
    signature = re.sub(r": (?:~?typing\.)?Any(?=[,)= ])| = <factory>", "", signature)
    return signature.replace("triton.language.core.constexpr", "tl.constexpr")


def shorten(
    app: Any, what: str, name: str, subject: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Values of the traced program are annotated as `Any`, which says nothing."""
    return shortened(signature) if signature else signature, None if result == "Any" else result


def setup(app: Any) -> dict[str, Any]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten)
    return {"version": "1", "parallel_read_safe": True}
