"""The target of launches: a GPU, or, within `tritonkittens.sim.device(...)`, CPU tensors in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .arguments import Args
    from .device import Device


class Simulator(Protocol):
    """The interface of a simulated device for the launch path."""

    facts: Device
    device_types: tuple[str, ...]  # torch's, of tensors that it takes

    def launch(self, launcher: Any, grid: tuple[int, int, int], args: Args, key: Any) -> None:
        """Run one launch of a `Launcher` to its end."""

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
        """Return the bytes of a tensor map, dimensions from the fastest (`launch.encoding.encode_tiled`)."""


simulator: ContextVar[Simulator | None] = ContextVar("simulator", default=None)


def simulated_facts() -> Device | None:
    """Return the facts of the active simulated device, or None outside the simulator. Cache keys include them."""
    device = simulator.get()
    return None if device is None else device.facts


def is_reachable(device: torch.device) -> bool:
    """Whether a kernel can take tensors on `device` now."""
    if device.type == "cuda":
        return True
    target = simulator.get()
    return target is not None and device.type in target.device_types
