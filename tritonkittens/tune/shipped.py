"""The tables that ship with the package: results of the project's own tuning, so that a first call needs no
measurement.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .store import DeviceKey, Entry, versions

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Table:
    """The tuned problems of one device, by family and problem. The only trial of an entry is its winner."""

    path: Path
    device: DeviceKey
    entries: dict[tuple[str, str], Entry]


def read(path: Path) -> Table:
    values = json.loads(path.read_text(encoding="utf-8"))
    entries = (
        Entry.from_dict({**entry, "family": family, "tried": [_as_trial(entry)]})
        for family, listed in values["families"].items()
        for entry in listed
    )
    return Table(path, DeviceKey.from_dict(values["device"]), {entry.key: entry for entry in entries})


def _as_trial(entry: dict[str, Any]) -> dict[str, Any]:
    return {"config": entry["config"], "predicted": {}, "seconds": entry["seconds"]}


@functools.cache
def tables() -> tuple[Table, ...]:
    """Return every table of the package; read once."""
    return tuple(read(path) for path in sorted(TABLES.glob("*.json")))


def tables_for(device: DeviceKey) -> list[Table]:
    """Return the tables whose winners apply to a device, in order of preference.

    Its own table comes first. Then come those of devices with equal capability and number of multiprocessors, the
    fullest first. H100 and H200 (SXM) differ in their memory only; an H100's own table holds the problems with
    another winner.
    """
    alike = [
        t
        for t in tables()
        if (t.device.capability, t.device.multiprocessors) == (device.capability, device.multiprocessors)
    ]
    return sorted(alike, key=lambda t: (t.device != device, -len(t.entries)))


def relatives(device: DeviceKey) -> list[Table]:
    """Return tables of devices of the same capability, the most similar first. Their winners are worth a try."""
    found = [t for t in tables() if t.device.capability == device.capability]
    return sorted(found, key=lambda t: (t.device != device, abs(t.device.multiprocessors - device.multiprocessors)))


def write(path: Path, device: DeviceKey, entries: Iterable[Entry]) -> int:
    """Write entries into a table, replacing those of the same problems. Return the number of problems in the table.

    One problem is one line, for readable diffs. Of its trials only the winner is written. Raises ValueError for the
    table of another device.
    """
    merged: dict[tuple[str, str], Entry] = {}
    if path.exists():
        table = read(path)
        if table.device != device:
            raise ValueError(f"{path} is the table of {table.device}, not of {device}")
        merged.update(table.entries)
    merged.update((entry.key, entry) for entry in entries)
    families: dict[str, list[str]] = {}
    for (family, _), entry in sorted(
        merged.items(), key=lambda item: (item[0][0], [(str(type(v)), v) for v in item[1].problem.values()])
    ):
        families.setdefault(family, []).append(
            json.dumps({k: v for k, v in entry.as_dict().items() if k not in ("family", "tried")})
        )
    body = ",\n".join(f"{json.dumps(family)}: [\n" + ",\n".join(lines) + "\n]" for family, lines in families.items())
    text = f'{{"device": {json.dumps(device.as_dict())},\n"versions": {json.dumps(versions())},\n"families": {{\n{body}\n}}}}\n'  # noqa: E501
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    tables.cache_clear()
    return len(merged)
