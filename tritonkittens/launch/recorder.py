"""A device that records launches instead of running them. So an operator's kernels can be compiled on any machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritonkittens.arch import capability_of

from .arguments import Args, argument_types
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

    @property
    def name(self) -> str:
        """The kernel's name in messages."""
        name: str = self.launcher._name(self.key)
        return name

    @property
    def identity(self) -> Hashable:
        """What the compiled kernel depends on: launches of equal identities have one."""
        return self.launcher, self.key, argument_types(self.args, self.launcher.names(self.key)), self.facts.capability

    def compile(self, arch: str | int | None = None) -> Any:
        """Compile the kernel for an architecture without a GPU, None for the device's; return Triton's CompiledKernel.

        Raises `ArchitectureError` for an `arch` that is none of `tritonkittens.arch.ARCHITECTURES`, and the errors of
        the kernel's compilation.
        """
        facts = self.facts if arch is None else replace(self.facts, capability=divmod(capability_of(arch), 10))
        target = Recorder(replace(facts, index=-1))
        return target.run(lambda: self.launcher.compile(self.args, self.key, target.facts.index))


class Recorder:
    """A device that keeps the launches of tensors on the CPU, or without memory ("meta"), and runs none of them.
    Results stay uninitialised."""

    device_types: tuple[str, ...] = ("cpu", "meta")

    def __init__(self, facts: Device):
        self.facts = replace(facts, index=-1)
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
    """Return the launches of `call()`, whose tensors are on the CPU or "meta", on a device with these facts.

    None of them runs.
    """
    recorder = Recorder(facts)
    recorder.run(call)
    return recorder.launches
