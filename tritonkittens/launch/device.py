"""Device facts for a kernel's configuration, instead of hard-coded numbers."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tritonkittens.arch import REGISTERS, Chip, Gpu

from .target import simulator


@dataclass(frozen=True)
class Device:
    """Facts about one GPU.

    ``shared_memory_per_block`` and ``l2_bytes`` are bytes (the former with the opt-in above 48 KiB);
    ``registers_per_multiprocessor`` counts 32-bit registers.
    """

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    registers_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int

    @staticmethod
    def of_chip(chip: Chip, name: str, multiprocessors: int, l2_bytes: int, memory_bytes: int) -> "Device":
        """Return a device that does not exist here (index -1): its chip's limits, and the properties of one product."""
        return Device(
            index=-1,
            name=name,
            capability=divmod(chip.capability, 10),
            multiprocessors=multiprocessors,
            shared_memory_per_block=chip.shared_per_block,
            shared_memory_per_multiprocessor=chip.shared_per_multiprocessor,
            registers_per_multiprocessor=REGISTERS,
            l2_bytes=l2_bytes,
            memory_bytes=memory_bytes,
        )

    @staticmethod
    def of_gpu(gpu: Gpu) -> "Device":
        """Return a product that does not exist here. No compiled kernel depends on its memory, which counts 0 bytes."""
        return Device.of_chip(gpu.chip, gpu.name, gpu.multiprocessors, gpu.l2_bytes, memory_bytes=0)


@functools.cache
def _device(index: int) -> Device:
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack some of its fields
    return Device(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_memory_per_block=properties.shared_memory_per_block_optin,
        shared_memory_per_multiprocessor=properties.shared_memory_per_multiprocessor,
        registers_per_multiprocessor=properties.regs_per_multiprocessor,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
    )


def device_facts(device: int | torch.device | None = None) -> Device:
    """Return the facts of a device; they are read once per device.

    Args:
        device: an index, a torch device, or None for the current one. Within `tritonkittens.sim.device`, the CPU
            (index -1) and the current device are the simulated one.

    Raises:
        ValueError: for a device that is no GPU.
        RuntimeError: without a GPU.
    """
    simulated = simulator.get()
    if simulated is not None and (
        device is None or device == -1 or (isinstance(device, torch.device) and device.type in simulated.device_types)
    ):
        return simulated.facts
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"device_facts({device!s}): only CUDA devices have these facts")
        device = device.index
    return _device(torch.cuda.current_device() if device is None else device)


def multiprocessor_count(device: int | torch.device | None = None) -> int:
    """Return the number of streaming multiprocessors; `device` as in `device_facts`."""
    return device_facts(device).multiprocessors


def shared_memory_per_block(device: int | torch.device | None = None) -> int:
    """Return the bytes of shared memory that one thread block may use (opt-in maximum); `device` as in
    `device_facts`.
    """
    return device_facts(device).shared_memory_per_block


def l2_bytes(device: int | torch.device | None = None) -> int:
    """Return the bytes of L2 cache; `device` as in `device_facts`."""
    return device_facts(device).l2_bytes


def capability(device: int | torch.device | None = None) -> tuple[int, int]:
    """Return the compute capability (major, minor); `device` as in `device_facts`."""
    return device_facts(device).capability
