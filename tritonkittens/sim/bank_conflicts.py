"""Bank conflicts of a kernel's own accesses of shared memory, from the layouts that the compiler chose: 32 banks of 4 bytes.

The model. A warp's access is served in wavefronts of at most 128 bytes: all 32 lanes at once for 1, 2 and 4 bytes a lane, half warps for 8, quarter warps for
16 (CUDA C++ Programming Guide, "Shared Memory"; NVIDIA's GTC talks on the wider accesses). Lanes that want the same word share it. The degree of an access is
the most different words that one bank is asked for within one such group: in how many turns shared memory serves it, and 1 is none.

What is assumed. An access is ld.shared / st.shared (cp.async for copies) as wide as both layouts allow, up to 16 bytes, with registers in any order, which is
what Triton emits where it does not take ldmatrix or stmatrix. Where it takes those, the degree is the same: a matrix of 8 rows of 16 bytes is what a warp's
lanes hold of a fragment, 4 bytes each. (A transposing ldmatrix reads such rows too; here it is taken for accesses of single elements, in which 4 rows meet,
not 8.) All warps of a role take part, also where several hold the same elements.

What is not here. TMA, wgmma and tcgen05 read and write shared memory without threads; scratch of reductions and layout conversions is laid out by the
compiler; addresses in inline PTX, and of a gather or scatter, are known only at run time (`degree` is None for the latter).
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .layouts import SHARED_STRIDE, layout_rank, registers, shared_offsets
from .report import source_line
from .ttgir import Block, Location, MemDesc, Module, Op, Tensor

BANKS = 32
WORD = 4
WAVEFRONT = BANKS * WORD
WIDEST = 16  # bytes of one lane's access
_TENSOR_FIRST = ("ttg.local_store", "ttg.async_copy_global_to_local")  # operations whose first operand is the tensor and whose second is the memory
_RUN_TIME = ("ttg.local_gather", "ttg.local_scatter")


@dataclass(frozen=True)
class Cost:
    """How shared memory serves one operation. `degree`: turns for the worst group of lanes; `wavefronts`: turns in all; `ideal`: turns if nothing met."""

    degree: int
    wavefronts: int
    ideal: int
    width: int  # bytes of a lane's access


@dataclass(frozen=True)
class SharedAccess:
    """One access of shared memory in a kernel. `degree` 1: free of conflicts; None: the addresses are known only at run time."""

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
            return f"{self.line}\n    {self.role}: {self.access} of {self.buffer}: the degree depends on indices known only at run time"
        how = "no conflicts" if self.degree == 1 else f"{self.degree}-way conflicts, {self.wavefronts} wavefronts where {self.ideal} would do"
        return f"{self.line}\n    {self.role}: {self.access} of {self.buffer}, {self.width} bytes a lane: {how}\n    {self.layout}"


def bank_conflicts(kernel: Any) -> list[SharedAccess]:
    """Every access of shared memory by the threads of a kernel, with its conflict degree, in the order of the code.

    kernel: what `sim.run` returned (or one of `device.launches`), a compiled Triton or Gluon kernel, or TTGIR text. See this module for the model and limits.
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


def access_cost(op: Op, warps: int) -> Cost | None:
    """How shared memory serves an operation's access by a role of so many warps; None where the addresses are known only at run time."""
    found = tensor_and_memory(op)
    assert found is not None, op.name
    tensor, memory, _ = found
    if op.name in _RUN_TIME:
        return None
    assert tensor.layout is not None
    return conflict(tensor.layout, tensor.shape, memory, warps)


@functools.cache
def conflict(layout: str, shape: tuple[int, ...], memory: MemDesc, warps: int) -> Cost:
    """An access of `memory` by a tensor of `shape` in the register layout `layout`, by a role of so many warps."""
    addresses = _addresses(layout, shape, memory, warps)
    width, first = _vectors(addresses, memory.element.nbytes)
    starts = addresses[:, first].T.reshape(-1, 32)  # one row for each instruction of each warp
    lanes = min(32, WAVEFRONT // width)
    groups = starts.reshape(-1, lanes)
    ways = _ways(groups, width)
    return Cost(int(ways.max()), int(ways.sum()), len(groups), width)


def _addresses(layout: str, shape: tuple[int, ...], memory: MemDesc, warps: int) -> np.ndarray:
    """Byte address of every register of the role's threads in one CTA: (threads, registers), without registers that repeat an element."""
    nbytes = memory.element.nbytes
    rank = min(layout_rank(memory), len(memory.alloc_shape))
    tail = memory.alloc_shape[len(memory.alloc_shape) - rank :]
    offsets, _ = shared_offsets(memory.layout, tail, nbytes)
    view = memory.shape[len(memory.shape) - rank :]
    offsets = offsets[tuple(slice(0, n) for n in view)] & (SHARED_STRIDE - 1)
    # a view with a leading dimension of buffers holds them one after the other; the banks of one are those of all
    places = np.broadcast_to(offsets, memory.shape).reshape(-1)
    own = registers(layout, shape, warps)[: 32 * warps]
    _, kept = np.unique(own[0], return_index=True)
    return places[own[:, np.sort(kept)]]


def _vectors(addresses: np.ndarray, nbytes: int) -> tuple[int, np.ndarray]:
    """The widest access that the layouts allow, and for each instruction the register that its address comes from."""
    count = addresses.shape[1]
    width = WIDEST
    while width > nbytes:
        each = width // nbytes
        within: Any = addresses % width
        if count % each == 0 and (within == within[0]).all():
            order = np.argsort(addresses[0], kind="stable")  # the registers of thread 0 by address; the same ones must lie together in every thread
            runs: Any = (addresses[:, order] // width).reshape(len(addresses), -1, each)
            if (runs == runs[..., :1]).all() and (within[0][order].reshape(-1, each) == np.arange(each) * nbytes).all():
                return width, order[::each]
        width //= 2
    return nbytes, np.arange(count)


def _ways(starts: np.ndarray, width: int) -> np.ndarray:
    """For each group of lanes that are served together: the most different words in one bank."""
    words = starts[..., None] // WORD + np.arange(max(1, width // WORD))
    words = np.sort(words.reshape(len(starts), -1), axis=1)
    fresh = np.ones(words.shape, bool)
    fresh[:, 1:] = words[:, 1:] != words[:, :-1]
    counts: Any = np.zeros((len(starts), BANKS), np.int64)
    np.add.at(counts, (np.nonzero(fresh)[0], words[fresh] % BANKS), 1)
    return counts.max(axis=1)


# ---- where in the kernel


def _program(kernel: Any) -> Any:
    from .lowering import load_ttgir
    from .program import Program

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
        f"bank_conflicts takes what sim.run gave, a compiled kernel or TTGIR text, not {type(kernel).__name__}: a kernel's layouts exist once it is compiled"
    )


def tensor_and_memory(op: Op) -> tuple[Tensor, MemDesc, int] | None:
    """The tensor and the memory of an access by threads, and the value that the memory is; None for other operations."""
    if op.name in ("ttg.local_load", "ttg.local_gather"):
        tensor, memory, value = op.result_types[0], op.operand_types[0], op.operands[0]
    elif op.name in _TENSOR_FIRST:
        tensor, memory, value = op.operand_types[0], op.operand_types[1], op.operands[1]
    elif op.name == "ttg.local_scatter":
        memory, tensor, value = op.operand_types[0], op.operand_types[1], op.operands[0]
    elif op.name == "ttg.local_alloc" and op.operands:
        tensor, memory, value = op.operand_types[0], op.result_types[0], op.results[0]
    else:
        return None
    assert isinstance(tensor, Tensor) and isinstance(memory, MemDesc), op.name
    return tensor, memory, value


def _walk(program: Any) -> Iterator[tuple[str, int, Op]]:
    """Every operation with the role that runs it and the role's warps."""
    from .program import partitions

    def blocks(some: list[Block], role: str, warps: int) -> Iterator[tuple[str, int, Op]]:
        for block in some:
            for op in block.operations:
                yield role, warps, op
                if op.name == "ttg.warp_specialize":
                    yield from blocks(op.regions[0].blocks, role, warps)
                    first = program.first_partition[id(op)]
                    for k, region in enumerate(partitions(op)):
                        yield from blocks(region.blocks, program.role_names[first + k], op.attributes["partitionNumWarps"][k])

    for function in program.module.functions.values():
        yield from blocks(function.regions[0].blocks, program.role_names[0], program.num_warps)


class _Names:
    """Which allocations a memory descriptor may come from: back through views, branches and the captures of partitions."""

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
