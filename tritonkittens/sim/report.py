"""Findings of the simulator in readable form: kind, both places in the code, CTA, role, buffer, stage, phase."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

from .ttgir import Location, Op

_LIBRARIES = (
    Path(triton.__file__).parent,
    Path(__file__).parents[1] / "lang",
    Path(__file__).parents[1] / "inline_ptx",
)

# every kind of finding, with its meaning in one line
KINDS = {
    "deadlock": "every role that is left waits for something that nothing will do",
    "race": "two accesses of the same bytes, one of them a write, in no order (two writes of one value to global "
    "memory are none)",
    "missing-fence": "an ordinary access followed by an access of the asynchronous proxy without fence.proxy.async "
    "between them",
    "bytes": "a barrier's phase expected other bytes than the copies of that phase deliver",
    "arrivals": "more arrivals at a barrier's phase than it was initialised for",
    "phase-wrap": "a barrier completed two phases while a role waited for one of them",
    "barrier-life": "a barrier used before mbarrier.init or after mbarrier.inval, initialised twice, or its memory "
    "overwritten",
    "uninitialized": "memory or registers read that nothing has written",
    "in-flight": "an accumulator or register operand touched while a wgmma that uses it is in flight; a value of a "
    "tcgen05.ld used before a wait for it",
    "out-of-bounds": "an access outside every tensor and allocation",
    "misaligned": "an address or coordinate that the instruction does not take",
    "tmem": "tensor memory not released, released while in use, or used after release",
    "budget": "more shared memory, tensor memory or registers than the target has",
    "loop": "a loop without end: nothing changes the values that it reads, or the step limit was reached",
    "unfinished": "asynchronous work in flight when the kernel ended",
    "nondeterministic": "the result depends on the schedule",
    "assert": "a device_assert of the kernel failed",
    "trap": "the kernel executed trap",
    "illegal": "an instruction with operands that the hardware rejects or gives no meaning",
    "unknown": "an operation or instruction without a meaning in the simulator",
}


def source_line(location: Location) -> str:
    """Return `file.py:12  code` for the innermost line of the user's own code, else for the library's line."""
    frames = location.frames
    if not frames:
        return "unknown line"
    user = [f for f in frames if not any(Path(f.file).is_relative_to(library) for library in _LIBRARIES)]
    frame = (user or list(frames))[0]
    code = linecache.getline(frame.file, frame.line).strip()
    return f"{Path(frame.file).name}:{frame.line}" + (f"  {code}" if code else "")


@dataclass(frozen=True)
class Place:
    """One place in the code of a finding."""

    who: str
    what: str
    location: Location

    def __str__(self) -> str:
        return f"{self.who}: {self.what}\n      at {source_line(self.location)}"


@dataclass
class Finding:
    """One bug. `key` identifies it; a run reports each once."""

    kind: str
    message: str
    places: tuple[Place, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    @property
    def key(self) -> tuple[str, ...]:
        return (self.kind, *sorted(str(p.location) for p in self.places), self.details.get("buffer", "").split("[")[0])

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}"]
        lines += [f"    {place}" for place in self.places]
        lines += [f"    {name}: {value}" for name, value in self.details.items()]
        return "\n".join(lines)


class SimulationError(RuntimeError):
    """A simulated kernel has bugs. `findings` describes them; `run` is the launch with all its data."""

    def __init__(self, kernel: str, findings: list[Finding], run: Any = None):
        self.findings, self.run = findings, run
        head = f"{kernel}: the simulator found {len(findings)} problem{'s' if len(findings) > 1 else ''}"
        super().__init__("\n".join([head, *map(str, findings)]))


class Stop(Exception):
    """Ends a run at once, where its continuation would be meaningless after the finding."""

    def __init__(self, finding: Finding):
        self.finding = finding


def unknown_operation(op: Op) -> Finding:
    return Finding(
        "unknown",
        f"the simulator has no meaning for the operation {op.name}",
        (Place("compiler", f'"{op.name}"', op.location),),
    )
