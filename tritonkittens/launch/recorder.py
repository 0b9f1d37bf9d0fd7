"""A device that records launches instead of running them. So an operator's kernels can be compiled on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritonkittens.arch import capability_of

from .arguments import Args
from .device import Device
from .target import simulator

TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch of a `Launcher`, its arguments and its key, on the device that `facts` describe."""

    launcher: Any
    args: Args
    key: Any
    facts: Device

    def compile(self, arch: str | int = "sm_90a") -> Any:
        """Compile the kernel for an architecture without a GPU; return Triton's CompiledKernel.

        Raises `ArchitectureError` for an `arch` that is none of `tritonkittens.arch.ARCHITECTURES`, and the errors of
        the kernel's compilation.
        """
        target = Recorder(replace(self.facts, capability=divmod(capability_of(arch), 10)))
        return target.run(lambda: self.launcher.compile(self.args, self.key, target.facts.index))


class Recorder:
    """A device that keeps the launches of CPU tensors and runs none of them. Results stay uninitialised."""

    def __init__(self, facts: Device):
        self.facts = facts
        self.launches: list[RecordedLaunch] = []

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call()` on this device."""
        token = simulator.set(self)
        try:
            return call()
        finally:
            simulator.reset(token)

    def launch(self, launcher: Any, grid: tuple[int, int, int], args: Args, key: Any) -> None:
        """Record a launch instead of running it."""
        self.launches.append(RecordedLaunch(launcher, args, key, self.facts))

    def encode_tiled(
        self,
        address: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        fill: str,
    ) -> bytes:
        """Return an empty tensor map: no kernel reads it."""
        return bytes(TENSOR_MAP_BYTES)


def recorded(call: Callable[[], Any], facts: Device) -> list[RecordedLaunch]:
    """Return the launches of `call()`, whose tensors are on the CPU, on a device with these facts. None of them
    runs."""
    recorder = Recorder(facts)
    recorder.run(call)
    return recorder.launches
