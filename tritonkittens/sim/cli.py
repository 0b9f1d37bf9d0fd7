"""`python -m tritonkittens check FILE:NAME`: run a file's kernel in the simulator, under many schedules, and print
the findings.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tritonkittens.arch import ARCHITECTURES, ArchitectureError, capability_of

from .explore import explore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "target",
        metavar="FILE:NAME",
        help="a Python file and in it a kernel, a template or its class, whose example arguments the function "
        "example_NAME() gives as "
        "(grid, arguments) or (grid, arguments, keywords); or a function without parameters that launches kernels on "
        "CPU tensors",
    )
    parser.add_argument(
        "--arch", default="sm_90a", metavar="ARCH", help=f"{', '.join(ARCHITECTURES)} (default: sm_90a)"
    )
    parser.add_argument(
        "--schedules", type=int, default=20, metavar="N", help="how many interleavings to run (default: 20)"
    )
    parser.add_argument(
        "--step-limit",
        type=int,
        default=20_000_000,
        metavar="N",
        help="operations after which a launch counts as endless",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="save a run as a Chrome/Perfetto trace (.json) or a picture (.svg): modelled time, not measured",
    )


def load(path: str) -> ModuleType:
    """Import a file as a module."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    specification = importlib.util.spec_from_file_location(file.stem.replace("-", "_"), file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(file.parent))
    specification.loader.exec_module(module)
    return module


def example(module: ModuleType, name: str) -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
    """Return (kernel, grid, arguments, keywords) of a name in a file. A template's class gives the template with its
    default knobs.

    Raises LookupError that names the missing part.
    """
    kernel = getattr(module, name, None)
    if kernel is None:
        raise LookupError(f"{module.__file__} has no {name}")
    given = getattr(module, f"example_{name}", None)
    if given is not None:
        kernel = kernel() if inspect.isclass(kernel) else kernel
        made = given()
        grid, args, *rest = made if isinstance(made, tuple) else (None, made)
        return kernel, grid, tuple(args), dict(rest[0]) if rest else {}
    if inspect.isfunction(kernel) and all(
        p.default is not p.empty for p in inspect.signature(kernel).parameters.values()
    ):
        return kernel, None, (), {}
    raise LookupError(
        f"{name} takes arguments: write a function example_{name}() beside it that returns (grid, arguments) or "
        "(grid, arguments, keywords)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Return 0 without findings, 1 with findings, 2 where it refuses the request."""
    path, _, name = arguments.target.rpartition(":")
    if not path or not name:
        return _refuse(f"{arguments.target!r}: give FILE:NAME")
    try:
        capability_of(arguments.arch)
    except ArchitectureError as error:
        return _refuse(f"--{error}")
    if arguments.schedules < 1:
        return _refuse(f"--schedules {arguments.schedules}: at least 1")
    try:
        kernel, grid, args, keywords = example(load(path), name)
    except (LookupError, FileNotFoundError) as error:
        return _refuse(str(error))
    keywords |= dict(
        schedules=arguments.schedules, arch=arguments.arch, raise_findings=False, step_limit=arguments.step_limit
    )
    try:
        result = explore(kernel, grid, *args, **keywords)
    except ArchitectureError as error:  # the kernel's own refusal of an architecture
        return _refuse(f"{name} for {arguments.arch}: {error}")
    if result.launch is None:
        return _refuse(f"{name} launched no kernel on CPU tensors")
    print(result)
    if arguments.timeline:
        from .schedule import Schedule
        from .timeline import Timeline

        timeline = Timeline()
        result.launch.run(Schedule(), arguments.step_limit, timeline)
        (timeline.save if arguments.timeline.endswith(".json") else timeline.draw)(arguments.timeline)
        print(f"wrote {arguments.timeline} (modelled time, not measured)")
    return 0 if result.ok else 1


def _refuse(message: str) -> int:
    print(f"tritonkittens check: {message}", file=sys.stderr)
    return 2
