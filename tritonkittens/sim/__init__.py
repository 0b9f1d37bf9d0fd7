"""Run any compiled Triton, Gluon or tritonkittens kernel on the CPU, and learn what is wrong with it: deadlocks, races, byte counts, phases, memory."""

from .device import ARCHITECTURES, Launch, SimulatedDevice, device, run
from .explore import Exploration, explore
from . import memory, simulation  # noqa: F401
from .report import KINDS, Finding, SimulationError
from .schedule import Schedule

__all__ = ["ARCHITECTURES", "KINDS", "Exploration", "Finding", "Launch", "Schedule", "SimulatedDevice", "SimulationError", "device", "explore", "run"]
