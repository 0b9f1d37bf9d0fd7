"""The cost model that ranks configurations: the slowest of the memory levels and units, plus setup and
synchronisation.

Levels and units work concurrently, so the busiest one bounds a kernel, and the others delay it a little (`overlap`).
Filling the pipeline and waiting at barriers add to that. A kernel family gives the bytes and operations of a
configuration; `Device` gives the rates.
Source: ThunderKittens (arXiv:2410.20399), section 2.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from tritonkittens.arch import GPUS, Chip, chip_of
from tritonkittens.launch import Device as Facts
from tritonkittens.launch import device_facts

UNITS = ("hbm", "l2", "shared", "tensor", "alu", "latency")


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of one launch: of each memory level and unit alone, and of the work that nothing overlaps.

    latency: waits for loads in flight, of a pipeline with few stages. overlap: the exponent of the norm that sums the
    levels and units; infinity takes the largest, 1 their sum. An infinite component means that the device cannot run
    the configuration (too much shared memory, for example). It is never chosen or measured.
    """

    hbm: float = 0.0
    l2: float = 0.0
    shared: float = 0.0
    tensor: float = 0.0
    alu: float = 0.0
    latency: float = 0.0
    setup: float = 0.0
    synchronisation: float = 0.0
    overlap: float = math.inf

    @property
    def total(self) -> float:
        """The norm of the memory levels and units, plus setup and synchronisation; seconds."""
        units = [getattr(self, unit) for unit in UNITS]
        together = max(units) if self.overlap == math.inf else sum(x**self.overlap for x in units) ** (1 / self.overlap)
        return together + self.setup + self.synchronisation

    @property
    def bound(self) -> str:
        """The memory level or unit that takes longest: one of UNITS."""
        return max(UNITS, key=lambda unit: getattr(self, unit))

    def components(self) -> dict[str, float]:
        """Component -> seconds."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "overlap"}


_UNITS_OF_BITS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Device:
    """The rates of one GPU, all multiprocessors together, at its clock under load.

    The device gives its name, capability, number of multiprocessors, L2 and shared memory (bytes), and from the
    driver, where available, clock and HBM bandwidth. Rates per multiprocessor and clock come from the CUDA C++
    Programming Guide and data sheets:

    - tensor cores: 4096 dense 16-bit FLOP on sm_90 (989 TFLOP/s over 132 multiprocessors at 1.83 GHz), 8192 on sm_100
      and sm_103 (2.25 PFLOP/s over 148 at 1.85 GHz); twice that with 8 bits, four times with 4 (sm_100 on), half with
      tf32;
    - shared memory: 128 bytes (32 banks of 4);
    - L2 53 bytes (64 on sm_100 and sm_103), arithmetic 128 float results, special functions 16: the simulator's
      numbers, with their sources in `tritonkittens.sim.costs` and `tritonkittens.arch`.

    `launch_seconds`, from the end of one kernel to the start of the next in its stream, is assumed. It separates
    configurations of two kernels from those of one.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    shared_memory_per_block: int
    clock_hz: float
    hbm_bytes_per_second: float
    l2_bytes_per_second: float
    shared_bytes_per_second: float
    alu_per_second: float
    special_per_second: float
    launch_seconds: float = 2e-6

    @property
    def chip(self) -> Chip:
        """The device's architecture."""
        return chip_of(self.capability)

    def tensor_flops(self, bits: int) -> float:
        """Return the dense FLOP/s of the tensor cores for operands of `bits` bits (32: tf32).

        Raises:
            ValueError: the tensor cores do not take such operands.
        """
        chip = self.chip
        if bits not in _UNITS_OF_BITS or bits < chip.narrowest:
            taken = ", ".join(str(b) for b in _UNITS_OF_BITS if b >= chip.narrowest)
            raise ValueError(f"tensor_flops(bits={bits}): the tensor cores of {self.name} take {taken} bits")
        return chip.tensor_flops * 16 / bits * self.multiprocessors * self.clock_hz

    def seconds(self, cycles: float) -> float:
        """Return the seconds of clock cycles."""
        return cycles / self.clock_hz

    @staticmethod
    def of(index: int | torch.device | None = None) -> Device:
        """Return the rates of a CUDA device (None: the current one, or the simulated one within
        `tritonkittens.sim.device`), computed once.

        Raises:
            ValueError: its compute capability is not 9.x or 10.x.
        """
        return Device.from_facts(device_facts(index))

    @staticmethod
    def named(name: str) -> Device:
        """Return the rates of a known GPU, on any machine: "H100" (SXM), "H200" or "B200".

        Raises:
            ValueError: an unknown name.
        """
        if name.upper() not in GPUS:
            raise ValueError(f"Device.named({name!r}): known are {', '.join(GPUS)}")
        gpu = GPUS[name.upper()]
        capability = divmod(gpu.chip.capability, 10)
        return _device(
            gpu.name,
            capability,
            gpu.multiprocessors,
            gpu.l2_bytes,
            gpu.chip.shared_per_block,
            None,
            gpu.hbm_bytes_per_second,
        )

    @staticmethod
    def from_facts(facts: Facts) -> Device:
        """Return the rates of the device with these facts."""
        clock, _ = _told(facts.index)
        return _device(
            facts.name,
            facts.capability,
            facts.multiprocessors,
            facts.l2_bytes,
            facts.shared_memory_per_block,
            clock,
            _bandwidth(facts),
        )


def memory_bandwidth(index: int | torch.device | None = None) -> float:
    """Return the bytes per second of a device's HBM (None: of the current one), as in `Device.of`.

    It does not load the simulator, whose rates take 0.2 s to import.

    Raises:
        ValueError: its compute capability is not 9.x or 10.x.
    """
    facts = device_facts(index)
    bandwidth = _bandwidth(facts)
    if bandwidth is None:
        raise ValueError(_unknown(facts.name, facts.capability))
    return bandwidth


def _bandwidth(facts: Facts) -> float | None:
    _, told = _told(facts.index)
    known = {gpu.name: gpu.hbm_bytes_per_second for gpu in GPUS.values()}
    of_capability = {gpu.chip.capability // 10: gpu.hbm_bytes_per_second for gpu in GPUS.values()}
    return told or known.get(facts.name, of_capability.get(facts.capability[0]))


def _unknown(name: str, capability: tuple[int, int]) -> str:
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}: the cost model knows the rates of 9.x and 10.x"
    )


@functools.cache
def _told(index: int) -> tuple[float | None, float | None]:
    """Return the driver's highest clock (Hz) and HBM bandwidth (bytes/s), None for values that the driver lacks (CUDA
    13 removed them from cudaDeviceProp).
    """
    if index < 0:  # simulated
        return None, None
    properties: Any = torch.cuda.get_device_properties(index)
    # kHz, kHz, bits
    clock, memory, width = (
        getattr(properties, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    return clock * 1e3 or None, 2 * memory * 1e3 * width / 8 or None  # data moves on both edges of the memory's clock


@functools.cache
def _device(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    l2_bytes: int,
    shared_per_block: int,
    highest_clock: float | None,
    hbm: float | None,
) -> Device:
    if not chip_of(capability).tensor_flops or hbm is None:
        raise ValueError(_unknown(name, capability))
    from tritonkittens.sim import costs  # imported here, because a known configuration does not need the simulator

    # the power limit, not the highest clock, bounds matrix products
    clock = min(highest_clock or costs.CLOCK_GHZ * 1e9, costs.CLOCK_GHZ * 1e9)
    everywhere = multiprocessors * clock
    return Device(
        name, capability, multiprocessors, l2_bytes, shared_per_block, clock, hbm,
        l2_bytes_per_second=chip_of(capability).l2_bytes * everywhere,
        shared_bytes_per_second=costs.SHARED_BYTES * everywhere,
        alu_per_second=costs.FMA_RESULTS * everywhere, special_per_second=costs.SPECIAL_RESULTS * everywhere,
    )  # fmt: skip
