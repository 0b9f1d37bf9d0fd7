"""Compile what calls will launch before they are made: `tritonkittens.warm` and `python -m tritonkittens warm`.

Nothing runs, and no GPU is needed: operands are replaced by tensors without memory, launches are recorded, and their
kernels are compiled at the same time (`launch.ahead`). Triton keeps them on disk, where later processes find them.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tritonkittens._progress import DRAWN, Progress
from tritonkittens.arch import GPUS
from tritonkittens.kernels._ahead import launches_both_ways, stand_in
from tritonkittens.launch import Device, device_facts
from tritonkittens.launch.ahead import begin
from tritonkittens.launch.recorder import RecordedLaunch

__all__ = ["WarmError", "Warmed", "warm"]

NAMES = (*GPUS, *dict.fromkeys(product.chip.name for product in GPUS.values()))
Call: TypeAlias = "Callable[[], Any] | torch.fx.GraphModule | torch.export.ExportedProgram"


class WarmError(RuntimeError):
    """A call that could not be recorded, or kernels that could not be compiled: their errors' texts."""


@dataclass(frozen=True)
class Warmed:
    """The kernels that are on disk now, the GPU that they are for, and the seconds that it took."""

    kernels: int
    gpu: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernel{'s' * (self.kernels != 1)} for {self.gpu} in {self.seconds:.1f} s"


def warm(*calls: Call, gpu: str | None = None, progress: bool | None = None) -> Warmed:
    """Compile the kernels that calls launch, and those of their backwards where their results require gradients.

    Args:
        calls: functions without arguments, or what torch has traced: a `torch.export.ExportedProgram`, or a
            `torch.fx.GraphModule` whose placeholders carry their values' types. Tensors have no memory here: those of
            a `functools.partial` and the parameters of a module in it are replaced, and a function makes its own
            without memory unless it names a device. So a call that reads the values of a tensor cannot be recorded.
        gpu: "H100", "H200" or "B200", or an architecture ("sm_90a"); None for the current GPU, an H200 without one.
        progress: draw a bar on stderr; None: if that is a terminal.

    Returns the number of kernels. Raises WarmError, after all other kernels are compiled, for calls that cannot be
    recorded and kernels that cannot be compiled; ValueError for an unknown `gpu`. Ctrl-C keeps the kernels that are
    compiled.

    Example::

        tritonkittens.warm(functools.partial(gemm, a, b), functools.partial(model, tokens), gpu="H200")
    """
    began, facts = time.monotonic(), _facts(gpu)
    errors: list[str] = []
    found: dict[Any, tuple[Future[Any], RecordedLaunch]] = {}
    try:
        for number, call in enumerate(calls):
            try:
                forward, backward = _recorded(call, facts)
            except Exception as error:
                errors.append(f"call {number}, {_name(call)}: {type(error).__name__}: {error}")
                continue
            for launch, future in zip((*forward, *backward), begin((*forward, *backward)), strict=True):
                found.setdefault(launch.identity, (future, launch))
        _wait([future for future, _ in found.values()], progress)
    finally:
        for future, _ in found.values():
            future.cancel()  # of an interruption: those that have not begun
    for future, launch in found.values():
        if raised := future.exception():
            errors.append(f"{launch.name}: {type(raised).__name__}: {raised}")
    if errors:
        raise WarmError("\n".join(errors))
    return Warmed(len(found), facts.name, time.monotonic() - began)


def _facts(gpu: str | None) -> Device:
    if gpu is None and torch.cuda.is_available():
        return device_facts()
    name = "H200" if gpu is None else gpu
    for known, product in GPUS.items():
        if name.upper() == known or name == product.chip.name:
            return Device.of_gpu(product)
    raise ValueError(f"warm(gpu={gpu!r}): must be one of {', '.join(NAMES)}")


def _name(call: Any) -> str:
    function = call.func if isinstance(call, functools.partial) else call
    return getattr(function, "__name__", type(function).__name__)


def _recorded(call: Call, facts: Device) -> tuple[list[RecordedLaunch], list[RecordedLaunch]]:
    """The launches of a call and of its backward."""
    run = _without_memory(call)
    with torch.device("meta"):
        return launches_both_ways(run, facts)


def _without_memory(call: Any) -> Callable[[], Any]:
    """The call of tensors without memory."""
    if isinstance(call, torch.export.ExportedProgram):
        args, named = call.example_inputs
        return _without_memory(functools.partial(call.module(), *args, **named))
    if isinstance(call, torch.fx.GraphModule) and not inspect.signature(call.forward).parameters:
        return _without_memory(functools.partial(call))
    if isinstance(call, torch.fx.GraphModule):
        values = [node.meta.get("val") for node in call.graph.nodes if node.op == "placeholder"]
        return _without_memory(functools.partial(call, *values))
    if not isinstance(call, functools.partial):
        return call
    function = call.func
    args, named = pytree.tree_map(stand_in, (call.args, call.keywords))
    if not isinstance(function, nn.Module):
        return lambda: function(*args, **named)
    state = {name: stand_in(x) for name, x in (*function.named_parameters(), *function.named_buffers())}
    return lambda: torch.func.functional_call(function, state, args, named)


def _wait(futures: Sequence[Future[Any]], progress: bool | None) -> None:
    """Wait for all, and draw a bar."""
    waiting = set(futures)
    with Progress("warm", len(futures), progress) as bar:
        while waiting:
            bar.show(len(futures) - len(waiting), "kernels")
            _, waiting = wait(waiting, DRAWN if bar.shown else None, FIRST_COMPLETED)


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a Python file that defines `calls`, a list of calls as tritonkittens.warm takes them (or a function that "
        "returns one), or a program that torch.export.save has written (.pt2)",
    )
    parser.add_argument("--gpu", metavar="NAME", help=f"{', '.join(NAMES)}; default: the GPU here, an H200 without one")
    parser.add_argument("--jobs", type=int, metavar="N", help="threads that compile (default: TK_COMPILE_WORKERS)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Return the exit status: 0, 1 where something could not be compiled, 2 where the request is
    refused.
    """
    if arguments.jobs is not None:
        os.environ["TK_COMPILE_WORKERS"] = str(arguments.jobs)
    try:
        calls = [call for path in arguments.files for call in calls_of(path)]
        print(warm(*calls, gpu=arguments.gpu))
    except WarmError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"warm: {error}", file=sys.stderr)
        return 2
    return 0


def calls_of(path: Path) -> list[Call]:
    """The calls of a file. Raises ValueError where it defines none, OSError where it cannot be read."""
    if path.suffix == ".pt2":
        return [torch.export.load(path)]
    with torch.device("meta"):
        calls: Iterable[Call] | Callable[[], Iterable[Call]] | None = runpy.run_path(str(path)).get("calls")
        calls = calls() if callable(calls) else calls
    if calls is None:
        raise ValueError(f"{path}: it defines no `calls`, a list of functions without arguments")
    return list(calls)
