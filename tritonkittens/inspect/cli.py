"""`python -m tritonkittens inspect`: compile a kernel of `tritonkittens.kernels` for a named architecture and print
its report.

A kernel module offers a dictionary `inspectable`: name -> function of the architecture ("sm_90a") that returns the
compiled kernel, or its `Report` (with names of roles and buffers).
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tritonkittens.arch import ARCHITECTURES, ArchitectureError, capability_of

from ._inspect import inspect
from .report import Report


def registry(package: ModuleType | None = None) -> dict[str, Callable[[str], Any]]:
    """Every `inspectable` of a package's modules (default: tritonkittens.kernels), by name; imports them all.

    Raises:
        ValueError: two modules use one name.
    """
    package = package or importlib.import_module("tritonkittens.kernels")
    found: dict[str, Callable[[str], Any]] = {}
    owner: dict[str, str] = {}
    names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    for module in [package, *map(importlib.import_module, names)]:
        for name, function in getattr(module, "inspectable", {}).items():
            # a package may re-export its modules' dictionary
            if name in found and found[name] is not function:
                raise ValueError(
                    f"inspectable kernel {name!r} is in {owner[name]} and in {module.__name__}; a name stands for one "
                    "kernel"
                )
            found[name], owner[name] = function, module.__name__
    return dict(sorted(found.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help="a kernel's name; without it, the names are listed")
    parser.add_argument(
        "--arch", default="sm_90a", metavar="ARCH", help=f"{', '.join(ARCHITECTURES)} (default: sm_90a)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace, kernels: Mapping[str, Callable[[str], Any]] | None = None) -> int:
    """Run the command. Return the exit status: 0, or 2 where it refuses the request (with a message on stderr)."""
    kernels = registry() if kernels is None else kernels
    try:
        capability_of(arguments.arch)
    except ArchitectureError as error:
        return _refuse(f"--{error}")
    if arguments.kernel is None:
        print("\n".join(kernels) if kernels else "no kernel can be inspected")
        return 0
    if arguments.kernel not in kernels:
        return _refuse(f"{arguments.kernel}: no kernel of that name; there are {', '.join(kernels) or 'none'}")
    try:
        made = kernels[arguments.kernel](arguments.arch)
    except (ValueError, ArchitectureError) as error:  # the kernel's own refusal of an architecture
        return _refuse(f"{arguments.kernel} for {arguments.arch}: {error}")
    report = made if isinstance(made, Report) else inspect(made)
    print(report.to_json() if arguments.json else report.table().rstrip())
    return 0


def _refuse(message: str) -> int:
    print(f"tritonkittens inspect: {message}", file=sys.stderr)
    return 2
