"""Compiling a backward while its forward is compiled: most calls whose operands want gradients are followed by it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tritonkittens.launch import Device, device_facts, simulator
from tritonkittens.launch.ahead import begin, followed_by, workers
from tritonkittens.launch.recorder import RecordedLaunch, Recorder


def stand_in(x: Any) -> Any:
    """A tensor without memory of the shape, strides, dtype and gradient's wish of `x`, if that is a tensor."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


def launches_both_ways(call: Callable[[], Any], facts: Device) -> tuple[list[RecordedLaunch], list[RecordedLaunch]]:
    """The launches of `call()`, whose tensors have no memory, and those of the backward of its results, where they want
    gradients."""
    recorder = Recorder(facts)

    def backward(found: Any) -> None:
        wanted = [x for x in _tensors(found) if x.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.empty_like(x) for x in wanted])

    found = recorder.run(call)
    count = len(recorder.launches)
    recorder.run(lambda: backward(found))
    return recorder.launches[:count], recorder.launches[count:]


def _tensors(found: Any) -> list[Tensor]:
    """The tensors of a result: of a tensor, a mapping (also a model's output), or a sequence."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        found = tuple(found.values())
    return [x for part in found for x in _tensors(part)] if isinstance(found, (tuple, list)) else []


def _is_followed(device: torch.device) -> bool:
    """Does a kernel that is compiled for tensors on a device run there, and are there threads to compile others?"""
    return device.type == "cuda" and simulator.get() is None and workers() > 0


def followed_by_backward(function: Callable[..., Any], *args: Any) -> AbstractContextManager[None]:
    """A context for the first call of a kind, `function(*args)`: if a kernel has to be compiled there, those of its
    backward are compiled at the same time."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    if not _is_followed(device):
        return nullcontext()
    facts = device_facts(device)
    given = [stand_in(x) for x in args]

    def begin_backward() -> None:
        forward, backward = launches_both_ways(lambda: function(*given), facts)
        known = {launch.identity for launch in forward}  # which the call itself compiles
        begin([launch for launch in backward if launch.identity not in known])

    return followed_by(begin_backward)
