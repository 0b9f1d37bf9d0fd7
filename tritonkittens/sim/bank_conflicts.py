"""Bank conflicts of a kernel's own accesses of shared memory, from the compiler's layouts: 32 banks of 4 bytes.

The model is in `sim/shared_access.py`.

Not included: TMA, wgmma and tcgen05, which access shared memory without threads; scratch of reductions and layout
conversions, which the compiler lays out; addresses in inline PTX. Addresses of a gather or scatter are known only at
run time (`degree` is None).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .control_flow import partitions
from .lowering import load_ttgir
from .program import Program
from .report import source_line
from .shared_access import access_cost, tensor_and_memory
from .ttgir import Block, Location, MemDesc, Module, Op


@dataclass(frozen=True)
class SharedAccess:
    """One access of shared memory in a kernel. `degree` 1: free of conflicts; None: the addresses are known only at
    run time.
    """

    line: str  # of the user's code
    role: str
    buffer: str
    access: str  # local_load, local_store, …
    layout: str  # of shared memory
    registers: str
    width: int  # bytes of a lane's access
    degree: int | None
    wavefronts: int | None
    ideal: int | None
    location: Location = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.degree is None:
            return (
                f"{self.line}\n    {self.role}: {self.access} of {self.buffer}: the degree depends on indices "
                "known only at run time"
            )
        how = (
            "no conflicts"
            if self.degree == 1
            else f"{self.degree}-way conflicts, {self.wavefronts} wavefronts where {self.ideal} would do"
        )
        return (
            f"{self.line}\n    {self.role}: {self.access} of {self.buffer}, {self.width} bytes a lane: {how}\n    "
            f"{self.layout}"
        )


def bank_conflicts(kernel: Any) -> list[SharedAccess]:
    """Return every access of shared memory by the threads of a kernel, with its conflict degree, in the order of the
    code.

    Args:
        kernel: the result of `sim.run`, one of `device.launches`, a compiled Triton or Gluon kernel, or TTGIR text.

    Returns:
        A list of `SharedAccess`. The module states the model and its limits.

    Raises:
        TypeError: for anything else.
    """
    program = _program(kernel)
    module = program.module
    names = _Names(module)
    out = []
    for role, warps, op in _walk(program):
        found = tensor_and_memory(op)
        if found is None:
            continue
        tensor, memory, value = found
        cost = access_cost(op, warps)
        out.append(
            SharedAccess(
                line=source_line(op.location),
                role=role,
                buffer=names.of(value) or op.result_name or "shared memory",
                access=op.name.split(".")[-1],
                layout=memory.layout,
                registers=tensor.layout or "",
                width=cost.width if cost else memory.element.nbytes,
                degree=cost.degree if cost else None,
                wavefronts=cost.wavefronts if cost else None,
                ideal=cost.ideal if cost else None,
                location=op.location,
            )
        )
    return out


# ---- where in the kernel


def _program(kernel: Any) -> Any:
    if isinstance(kernel, Program):
        return kernel
    if isinstance(getattr(kernel, "program", None), Program):
        return kernel.program
    if isinstance(kernel, str):
        return load_ttgir(kernel)
    text = getattr(kernel, "asm", {}).get("ttgir")
    if text is not None:
        return load_ttgir(text)
    raise TypeError(
        f"bank_conflicts takes a result of sim.run, a compiled kernel or TTGIR text, not {type(kernel).__name__}: a "
        "kernel's layouts exist once it is compiled"
    )


def _walk(program: Any) -> Iterator[tuple[str, int, Op]]:
    """Yield every operation with its role and the role's warps."""

    def blocks(some: list[Block], role: str, warps: int) -> Iterator[tuple[str, int, Op]]:
        for block in some:
            for op in block.operations:
                yield role, warps, op
                if op.name == "ttg.warp_specialize":
                    yield from blocks(op.regions[0].blocks, role, warps)
                    first = program.first_partition[id(op)]
                    for k, region in enumerate(partitions(op)):
                        yield from blocks(
                            region.blocks, program.role_names[first + k], op.attributes["partitionNumWarps"][k]
                        )

    for function in program.module.functions.values():
        yield from blocks(function.regions[0].blocks, program.role_names[0], program.num_warps)


class _Names:
    """The possible allocations of a memory descriptor, found through views, branches and the captures of partitions."""

    def __init__(self, module: Module):
        self.makers: dict[int, Op] = {}
        self.incoming: dict[int, list[int]] = {}
        for op in module.walk():
            for result in op.results:
                self.makers[result] = op
            if op.name == "ttg.warp_specialize.partitions":
                for region in op.regions:
                    self._flow(region.blocks[0].arguments, op.operands)
            elif op.name == "cf.br":
                self._flow(op.successors[0].arguments, op.operands)
            elif op.name == "cf.cond_br":
                _, yes, no = op.segments
                self._flow(op.successors[0].arguments, op.operands[yes])
                self._flow(op.successors[1].arguments, op.operands[no])

    def _flow(self, arguments: list[int], values: tuple[int, ...]) -> None:
        for argument, value in zip(arguments, values):
            self.incoming.setdefault(argument, []).append(value)

    def of(self, value: int) -> str:
        found: dict[str, None] = {}
        seen = set()
        stack = [value]
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            maker = self.makers.get(at)
            if maker is None:
                stack += self.incoming.get(at, [])
            elif maker.name == "ttg.local_alloc":
                found[maker.result_name or "shared memory"] = None
            elif maker.operands and isinstance(maker.operand_types[0], MemDesc):
                stack.append(maker.operands[0])
        return " or ".join(found)
