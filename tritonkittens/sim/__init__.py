"""Run any compiled Triton, Gluon or tritonkittens kernel on the CPU, and report its bugs: deadlocks, races, byte
counts, phases, memory.
"""

from tritonkittens.arch import ARCHITECTURES

from .bank_conflicts import SharedAccess, bank_conflicts
from .device import Launch, SimulatedDevice, device, run
from .explore import Exploration, explore
from .memory import ReadOnlyError
from .report import KINDS, Finding, SimulationError
from .schedule import Schedule
from .timeline import Timeline

__all__ = [
    "ARCHITECTURES",
    "KINDS",
    "Exploration",
    "Finding",
    "Launch",
    "ReadOnlyError",
    "Schedule",
    "SharedAccess",
    "SimulatedDevice",
    "SimulationError",
    "Timeline",
    "bank_conflicts",
    "device",
    "explore",
    "run",
]
