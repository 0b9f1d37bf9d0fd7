"""Where kernels run: on a GPU, or, within `tritonkittens.sim.device(...)`, on CPU tensors in the simulator."""
from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .arguments import Args
    from .device import Device


class Simulator(Protocol):
    """What the launch path needs of a simulated device."""

    facts: Device

    def launch(self, launcher: Any, grid: tuple[int, int, int], args: Args, key: Any) -> None:
        """Run one launch of a `Launcher` to its end."""

    def encode_tiled(self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, fill: str) -> bytes:
        """The bytes of a tensor map, dimensions from the fastest (`launch.encoding.encode_tiled`)."""


simulator: ContextVar[Simulator | None] = ContextVar("simulator", default=None)


def simulated_facts() -> Device | None:
    """The device that is simulated now, None without: what is kept for one such device does not hold for another."""
    device = simulator.get()
    return None if device is None else device.facts


def is_reachable(device: torch.device) -> bool:
    """May a kernel take tensors on that device now?"""
    return device.type == "cuda" or (device.type == "cpu" and simulator.get() is not None)
