"""Kernels for `python -m tritonkittens inspect` by the operators that launch them: what is compiled is what a call
would launch on an H200, or on a B200 where an H200 has no such kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tritonkittens.arch import GPUS
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import RecordedLaunch, recorded


@functools.cache
def _device(gpu: str) -> Device:
    return Device.of_gpu(GPUS[gpu])


def h200() -> Device:
    """The device whose kernels are shown."""
    return _device("H200")


@dataclass(frozen=True)
class Inspectable:
    """Launch `number` of the `count` launches that `call()` does with CPU tensors on a product of `arch.GPUS`. Called
    with an architecture, it compiles that launch's kernel."""

    call: Callable[[], Any]
    number: int
    count: int
    gpu: str = "H200"

    def launch(self) -> RecordedLaunch:
        """The launch. Raises RuntimeError where the call does another number of launches."""
        recorded(self.call, _device(self.gpu))  # the first call of a kind may launch kernels to plan those that follow
        launches = recorded(self.call, _device(self.gpu))
        if len(launches) != self.count:
            raise RuntimeError(f"{self.call}: {len(launches)} kernel launches; {self.count} are named")
        return launches[self.number]

    @property
    def template(self) -> Any:
        """The template of the launch, or the constants of its kernel; None where that is a plain one."""
        key = self.launch().key
        return key[0][0][0] if isinstance(key, tuple) else None

    def __call__(self, arch: str) -> Any:
        return self.launch().compile(arch)


def launches_of(call: Callable[[], Any], *names: str | None, gpu: str = "H200") -> dict[str, Inspectable]:
    """The kernels that `call()` launches, by their names in the order of the launches; None for one that another call
    shows."""
    return {name: Inspectable(call, number, len(names), gpu) for number, name in enumerate(names) if name}
