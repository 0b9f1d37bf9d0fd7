"""The inspector's results for one kernel, as plain frozen data. None means that the compiled kernel does not show the
value.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ._tiles import BankConflicts


@dataclass(frozen=True)
class Loop:
    """An innermost loop with tensor-core instructions. `counts` are static instructions by opcode, independent of how
    often each runs.
    """

    roles: tuple[str, ...]  # roles that run it; several where ptxas merged their code
    source: str | None  # file:line of its first tensor-core instruction
    instructions: int
    mma: dict[str, int]
    counts: dict[str, int]


@dataclass(frozen=True)
class Role:
    """A warp-specialised partition, or the whole kernel without warp roles."""

    name: str
    warps: int
    # of a thread; None for the default partition, which receives the remaining registers
    requested_registers: int | None
    registers: int | None  # the register limit of its code: setmaxnreg's, or the kernel's
    live_registers: int | None  # the most registers that hold values at once
    instructions: int | None
    mma: dict[str, int] | None
    counts: dict[str, int] | None


@dataclass(frozen=True)
class Buffer:
    """An allocation in shared or tensor memory."""

    name: str | None
    space: str  # "shared", "barrier" (mbarriers, in shared memory) or "tensor"
    dtype: str
    shape: tuple[int, ...]
    bytes: int | None
    slots: int | None  # the leading dimension, where the kernel picks one of several by index
    # pipeline stages: `slots` where the index is a run-time value. None for a fixed index (one slot per consumer)
    stages: int | None
    columns: int | None  # columns of tensor memory
    layout: str | None
    bank_conflicts: BankConflicts | None
    source: str | None


@dataclass(frozen=True)
class Report:
    """The result of `inspect`. `to_json` is for machines, `table` for people."""

    kernel: str
    arch: str
    warps: int
    registers: int | None  # of a thread, when the kernel starts
    register_cap: int  # share of each of these threads in 65536 registers, in steps of 8, at most 255
    reallocation_requested: bool
    reallocated: bool  # setmaxnreg is in the code
    stack_bytes: int | None
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    spill_instructions: int  # LDL and STL
    shared_bytes: int  # total of a thread block
    tensor_columns: int
    wgmma_serialized: bool | None  # whether ptxas serialised wgmma; None without wgmma
    roles: tuple[Role, ...]
    buffers: tuple[Buffer, ...]
    loops: tuple[Loop, ...]
    mma: dict[str, int]
    counts: dict[str, int]
    remarks: tuple[str, ...]  # ptxas' remarks on wgmma, and its other numbered messages
    # products that run on mma.sync on a chip with tensor memory, each with the reason
    fallbacks: tuple[str, ...] = ()

    @property
    def register_budget_used(self) -> int | None:
        """Registers of all roles together, of 65536, without the padding warps of an incomplete worker warpgroup."""
        limits = [role.registers for role in self.roles]
        return sum(32 * role.warps * (role.registers or 0) for role in self.roles) if None not in limits else None

    def role(self, name: str) -> Role:
        """Return the role of that name. Raises KeyError without one."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"role {name!r}: {self.kernel} has {', '.join(r.name for r in self.roles)}")

    def buffer(self, name: str) -> Buffer:
        """Return the first buffer of that name. Raises KeyError without one."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(f"buffer {name!r}: {self.kernel} has {', '.join(str(b.name) for b in self.buffers)}")

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of plain values."""
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as JSON; None is null."""
        return json.dumps(self.to_dict(), indent=indent)

    def table(self) -> str:
        """Return the report as text, one section a topic."""
        return "\n".join(
            [
                *self._summary(),
                "",
                *self._roles(),
                *self._buffers(),
                *self._loops(),
                *(f"ptxas: {r}" for r in self.remarks),
                *(f"on mma.sync instead of tcgen05: {product}" for product in self.fallbacks),
            ]
        )

    def _summary(self) -> Iterable[str]:
        yield f"{self.kernel} for {self.arch}: {self.warps} warps"
        took_effect = (
            "took effect"
            if self.reallocated
            else "DID NOT TAKE EFFECT"
            if self.reallocation_requested
            else "not requested"
        )
        yield (
            f"  registers       {_text(self.registers)} a thread at the start (cap {self.register_cap}); "
            f"reallocation {took_effect}"
        )
        yield (
            f"  spills          {self.spill_instructions} LDL/STL; {_text(self.spill_store_bytes)} bytes stored, "
            f"{_text(self.spill_load_bytes)} loaded; stack {_text(self.stack_bytes)} bytes"
        )
        in_buffers = sum(b.bytes or 0 for b in self.buffers if b.space != "tensor")
        yield f"  shared memory   {self.shared_bytes} bytes; the buffers below: {in_buffers}"
        if self.tensor_columns:
            yield f"  tensor memory   {self.tensor_columns} columns"
        yield f"  tensor cores    {_counts(self.mma)}"
        yield f"  other           {_counts(self.counts)}"
        if self.wgmma_serialized is not None:
            yield f"  wgmma           {'SERIALIZED by ptxas' if self.wgmma_serialized else 'asynchronous'}"

    def _roles(self) -> Iterable[str]:
        rows = [
            (
                r.name,
                r.warps,
                r.requested_registers,
                r.registers,
                r.live_registers,
                r.instructions,
                _counts(r.mma),
                _counts(r.counts),
            )
            for r in self.roles
        ]
        return _columns(("role", "warps", "asked", "registers", "live", "instructions", "tensor cores", "other"), rows)

    def _buffers(self) -> Iterable[str]:
        rows = []
        for b in self.buffers:
            conflicts = f"{b.bank_conflicts.fragment} / {b.bank_conflicts.column}" if b.bank_conflicts else None
            size = b.columns if b.space == "tensor" else b.bytes
            rows.append(
                (
                    b.name,
                    b.space,
                    f"{'x'.join(map(str, b.shape))} {b.dtype}",
                    size,
                    b.stages,
                    b.layout,
                    conflicts,
                    b.source,
                )
            )
        return _columns(
            ("buffer", "in", "shape", "bytes/columns", "stages", "layout", "conflicts fragment / column", "source"),
            rows,
        )

    def _loops(self) -> Iterable[str]:
        rows = [
            (", ".join(loop.roles) or None, loop.source, loop.instructions, _counts(loop.mma), _counts(loop.counts))
            for loop in self.loops
        ]
        return _columns(("main loop of", "source", "instructions", "tensor cores", "other"), rows)


def _text(value: Any) -> str:
    return "?" if value is None else str(value)


def _counts(counts: dict[str, int] | None) -> str:
    return "?" if counts is None else " ".join(f"{n} {name}" for name, n in counts.items()) or "none"


def _columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return an aligned table and an empty line; nothing without rows. A dash is None."""
    if not rows:
        return []
    cells = [list(head), *([("-" if c is None else str(c)) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [*("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells), ""]
