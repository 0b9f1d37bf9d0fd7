"""`python -m tritonkittens tuned`: list the tuned problems of kernel families, explain a configuration, and export
shipped tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch

from . import families, shipped
from .cost import Device
from .report import plain
from .store import DeviceKey, Entry, folder, known_devices, store_for
from .tuner import AnyFamily


def registered() -> dict[str, AnyFamily]:
    """Return every family of `tritonkittens.kernels`, by name; import all of them."""
    package = importlib.import_module("tritonkittens.kernels")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return dict(sorted(families.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("family", nargs="?", metavar="FAMILY", help="a family of kernels; without it, all are listed")
    parser.add_argument(
        "problem", nargs="*", metavar="key=value", help="a problem of the family: why it has its configuration"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="part of a GPU's name (default: the GPU here; H200 without one)"
    )
    parser.add_argument(
        "--export",
        metavar="FAMILY",
        help="write the family's results on disk into the table that comes with the package",
    )
    parser.add_argument("--output", metavar="PATH", type=Path, help="with --export: write this table instead")


def run(arguments: argparse.Namespace, known: Mapping[str, AnyFamily] | None = None) -> int:
    """Run the command. Return the exit status: 0, or 2 where it refuses the request (with a message on stderr)."""
    known = registered() if known is None else known
    try:
        if arguments.export is not None:
            if arguments.family is not None:
                raise ValueError(
                    f"tuned {arguments.family} --export {arguments.export}: --export takes the family's name, and "
                    "nothing stands before it"
                )
            print(_export(_family(known, arguments.export), arguments.device, arguments.output))
        elif arguments.output is not None:
            raise ValueError(f"--output {arguments.output}: only --export writes a file")
        elif arguments.problem:
            family = _family(known, arguments.family)
            print(family.explain(_problem(family, arguments.problem), device=_device(arguments.device)))
        elif arguments.family is not None:
            print(_listing(_family(known, arguments.family), arguments.device))
        else:
            print(_overview(known, arguments.device))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _family(known: Mapping[str, AnyFamily], name: str) -> AnyFamily:
    if name not in known:
        raise ValueError(f"{name}: no family of kernels of that name; there are {', '.join(known) or 'none'}")
    return known[name]


def _problem(family: AnyFamily, words: list[str]) -> Any:
    """Parse `m=64 dtype=bf16` as the family's problem. A value is read as JSON unless its field is a string or that
    fails.
    """
    hints = get_type_hints(family.problem_type)
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in family.problem_fields:
            raise ValueError(
                f"{word}: a problem of {family.name} is given as key=value with the keys "
                f"{', '.join(family.problem_fields)}"
            )
        value: Any = text
        if hints.get(name) is not str:
            with contextlib.suppress(ValueError):
                value = json.loads(
                    text
                    if text not in ("True", "False", "None")
                    else {"True": "true", "False": "false", "None": "null"}[text]
                )
        wanted = hints.get(name)
        if wanted in (int, float, bool) and not isinstance(value, (int, float) if wanted is float else wanted):
            raise ValueError(f"{word}: {name} of {family.name} is a value of type {wanted.__name__}")
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return family.problem_type(**values)
    except TypeError as error:
        raise ValueError(
            f"{family.name} {' '.join(words)}: a problem has the keys {', '.join(family.problem_fields)} ({error})"
        ) from error


def _device(name: str | None) -> Device:
    """Return the device to explain for: by name, else the current one, else an H200."""
    if name is None:
        return Device.of() if torch.cuda.is_available() else Device.named("H200")
    if torch.cuda.is_available() and name.lower() in torch.cuda.get_device_name().lower():
        return Device.of()
    return Device.named(name)


def _measured_devices(name: str | None) -> list[DeviceKey]:
    """Return the devices with results on disk whose names contain `name`."""
    return [device for device in known_devices() if name is None or name.lower() in device.name.lower()]


def _entries(family: AnyFamily, device: str | None) -> list[tuple[str, DeviceKey, Entry]]:
    """Return the known results of a family: ("disk" or "table", device, entry)."""
    found = [("disk", key, entry) for key in _measured_devices(device) for entry in store_for(key).entries().values()]
    tables = [table for table in shipped.tables() if device is None or device.lower() in table.device.name.lower()]
    found += [("table", table.device, entry) for table in tables for entry in table.entries.values()]
    return [item for item in found if item[2].family == family.name]


def _overview(known: Mapping[str, AnyFamily], device: str | None) -> str:
    lines = [f"results on disk: {folder()}"]
    for name, family in known.items():
        counts: dict[tuple[str, str], int] = {}
        for source, key, _ in _entries(family, device):
            counts[key.name, source] = counts.get((key.name, source), 0) + 1
        listed = [f"{count} on {gpu} ({source})" for (gpu, source), count in counts.items()]
        lines.append(f"{name} ({', '.join(family.problem_fields)}): tuned problems: {', '.join(listed) or 'none'}")
    return "\n".join(lines) if known else "no family of kernels is registered"


def _listing(family: AnyFamily, device: str | None) -> str:
    lines = [
        f"{key.name} ({source}, {entry.date}): {plain(entry.problem)}: {entry.seconds * 1e6:.2f} µs with "
        f"{plain(entry.config)}"
        for source, key, entry in _entries(family, device)
    ]
    return "\n".join(lines) or f"{family.name}: no problem was tuned; TK_TUNE=1 tunes those that are run"


def _export(family: AnyFamily, device: str | None, output: Path | None) -> str:
    devices = _measured_devices(device)
    if len(devices) > 1 and device is None and torch.cuda.is_available():
        devices = [key for key in devices if key.name == torch.cuda.get_device_name()]
    if len(devices) != 1:
        names = ", ".join(str(key) for key in known_devices()) or "none"
        asked = f"--device {device}" if device is not None else "no --device"
        raise ValueError(
            f"--export {family.name} with {asked}: one device with results in {folder()} is exported; there are {names}"
        )
    entries = [entry for entry in store_for(devices[0]).entries().values() if entry.family == family.name]
    if not entries:
        raise ValueError(f"--export {family.name}: {folder()} has no result of that family for {devices[0].name}")
    path = output or shipped.TABLES / f"{devices[0].slug}.json"
    total = shipped.write(path, devices[0], entries)
    return f"{path}: {len(entries)} problems of {family.name} written; the table holds {total}"
