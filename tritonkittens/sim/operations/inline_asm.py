"""Inline PTX in a kernel: operands to registers in the layouts' order, the block executed for the role's threads,
results back.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from tritonkittens.inline_ptx import extern
from tritonkittens.inline_ptx._meaning import NoMeaning, PtxFault

from ..agents import Role, Wait, poisoned, used_in_flight
from ..layouts import SHARED_STRIDE, registers
from ..numbers import decode, encode
from ..ptx import Block, PtxSyntaxError, execute, parse
from ..report import Finding, Place, Stop
from ..ttgir import Op, Pointer, Scalar, Tensor
from ..values import InFlight, View
from .global_memory import as_scalar
from .products import Product
from .ptx_machine import RoleThreads
from .registry import effect

_WORD: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SPIN_CYCLES = 30.0  # modelled time of one turn of a loop inside a block


# ---------------------------------------------------------------- threads and values


def threads_of(role: Role) -> int:
    """Return all threads of a role, those of every CTA where Triton compiled one program for a cluster."""
    return 32 * role.warps * len(role.ranks)


def chosen(role: Role) -> np.ndarray:
    """Return the indices of the executing threads: all, or those of this part of a divided role."""
    return np.arange(threads_of(role)) if role.mask is None else np.flatnonzero(role.mask)


def bits_of(value: Any, kind: Any) -> np.ndarray:
    """Return a value's bits as zero-extended words."""
    element = kind.element if isinstance(kind, Tensor) else kind
    name = "i64" if isinstance(element, Pointer) else element.name
    return encode(name, np.asarray(value)).astype(np.uint64)


def shaped(column: np.ndarray, kind: Any) -> Any:
    element = kind.element if isinstance(kind, Tensor) else kind
    name = "i64" if isinstance(element, Pointer) else element.name
    return decode(name, column.astype(_WORD[Scalar(name).nbytes]))


def scalar_column(role: Role, value: Any, kind: Any) -> np.ndarray:
    """Return the value of every thread. Scalars are mostly uniform; a value that a block gave to each thread is an
    array.
    """
    words = bits_of(value, kind)
    return np.full(threads_of(role), words) if words.ndim == 0 else words


def scalar_result(role: Role, column: np.ndarray, kind: Any) -> Any:
    """Return a scalar where all executing threads agree, else an array with the value of each thread.

    The compiler takes scalars to be uniform, but inline PTX may differ between threads.
    """
    values = shaped(column, kind)
    if (column == column[0]).all():
        return int(values[0]) if isinstance(kind, Pointer) else as_scalar(values[0], kind)
    out: np.ndarray = np.zeros(threads_of(role), np.int64 if isinstance(kind, Pointer) else values.dtype)
    out[chosen(role)] = values
    return out


def tensor_address(view: View) -> int:
    """Return a tensor-memory address: lane in bits 16 and up, column below (PTX ISA "Tensor Memory Addressing")."""
    inside = (view.base + int(view.map.offsets.reshape(-1)[0])) % SHARED_STRIDE
    return (inside // 2048) << 16 | (inside % 2048) // 4


def view_column(role: Role, view: View) -> np.ndarray:
    """Return the address of a descriptor, in each CTA its own."""
    if view.space != "shared":
        return np.full(threads_of(role), tensor_address(view), np.uint64)
    first = view.base + int(view.map.offsets.reshape(-1)[0])
    if len(role.ranks) == 1:
        return np.full(threads_of(role), first, np.uint64)
    return np.repeat(
        np.uint64(first % SHARED_STRIDE) + (np.array(role.ranks, np.uint64) << np.uint64(24)), 32 * role.warps
    )


# ---------------------------------------------------------------- execution


def stop(role: Role, op: Op, error: Exception) -> Stop:
    kind = "illegal" if isinstance(error, PtxFault) else "unknown"
    return Stop(Finding(kind, str(error), (Place(role.machine.where(role), "inline PTX", op.location),)))


def parsed(role: Role, op: Op, text: str, constraints: str) -> Block:
    try:
        return parse(text, constraints)
    except (PtxSyntaxError, NoMeaning) as error:
        raise stop(role, op, error) from None


def run_block(
    threads: RoleThreads, block: Block, inputs: Sequence[np.ndarray]
) -> Generator[Wait | None, None, list[np.ndarray]]:
    """Execute a block. Yields the waits of its instructions, and None at every turn of a loop, which counts as a
    step.
    """
    role, op = threads.role, threads.op
    simulation = role.machine.simulation
    running = execute(block, threads, inputs, turned=threads.watch.turn)
    while True:
        try:
            wait = next(running)
        except StopIteration as end:
            threads.watch.forget()
            return end.value
        except (PtxFault, NoMeaning) as error:
            raise stop(role, op, error) from None
        simulation.steps += 1
        role.steps += 1
        if simulation.steps > simulation.step_limit:
            simulation.endless(role.machine, role, op)
        if wait is None:
            role.time += SPIN_CYCLES
        yield wait
        then = getattr(wait, "then", None)
        if then is not None:
            then()


def side_by_side(
    runs: list[Generator[Wait | None, None, list[np.ndarray]]],
) -> Generator[Wait | None, None, list[list[np.ndarray]]]:
    """Execute a block in each CTA of a role; they may wait for one another."""
    if len(runs) == 1:
        return [(yield from runs[0])]
    results: dict[int, list[np.ndarray]] = {}
    waits: dict[int, Wait | None] = dict.fromkeys(range(len(runs)))
    while waits:
        able = [k for k, wait in waits.items() if wait is None or wait.ready()]
        for k in able:
            try:
                waits[k] = next(runs[k])
            except StopIteration as end:
                results[k] = end.value
                del waits[k]
        pending = [w for w in waits.values() if w is not None]
        if waits and len(pending) == len(waits):
            first = pending[0]
            wait = Wait(
                lambda: any(w.ready() for w in pending),
                lambda: " and ".join(dict.fromkeys(w.describe() for w in pending)),
                first.barrier,
                first.parity,
                lambda: min((w.time() for w in pending if w.time is not None and w.ready()), default=0.0),
            )
            wait.outside = any(w.outside for w in pending)
            yield wait
        elif waits:
            yield None
    return [results[k] for k in range(len(runs))]


def run_threads(
    role: Role, op: Op, block: Block, columns: list[np.ndarray], per_thread: int = 1
) -> Generator[Wait | None, None, list[np.ndarray]]:
    """Execute a block for the role's threads, `per_thread` times each (for elements). Columns and results have one
    entry for each time.
    """
    who: np.ndarray = np.repeat(chosen(role), per_thread)
    if len(role.ranks) == 1:
        threads = RoleThreads(role, op, role.ranks[0], who + 32 * role.start_warp)
        return (yield from run_block(threads, block, columns))
    each = 32 * role.warps
    ranks = [rank for k, rank in enumerate(role.ranks) if (who // each == k).any()]
    parts = [np.flatnonzero(who // each == k) for k in range(len(role.ranks))]
    parts = [p for p in parts if len(p)]
    runs = []
    for rank, part in zip(ranks, parts):
        threads = RoleThreads(role, op, rank, who[part] % each + 32 * role.start_warp)
        runs.append(run_block(threads, block, [column[part] for column in columns]))
    results = yield from side_by_side(runs)
    return [np.concatenate(column) for column in zip(*results)] if len(runs) > 1 else results[0]


# ---------------------------------------------------------------- results in flight


def settle(role: Role, op: Op, value: Any, misused: bool) -> Any:
    """Return a value that may be a wgmma's or tcgen05.ld's result in flight, as a tile. `misused` handles its use
    before the wait.
    """
    if not isinstance(value, InFlight):
        return value
    operation = value.product.operation
    if misused:
        used_in_flight(role, op, operation, "inline PTX reads it")
    while value.product.value is None:
        role.machine.complete(next(o for o in role.machine.flying if o.can_complete() and o.unit == operation.unit))
    return value.product.value


def in_flight(role: Role, block: Block, results: list[tuple[Any, range]], operands: Sequence[Any]) -> list[Any]:
    """Mark the tiles of a wgmma or tcgen05.ld in flight: those that the block writes, and those that only pass
    through it.
    """
    written = set(block.in_flight)
    out = []
    for k, (value, numbers) in enumerate(results):
        before = operands[k] if k < len(operands) else None
        product = Product()
        product.value = value
        if written & set(numbers):
            loads = role.tensor_accesses["ld"]
            product.operation = loads[-1] if loads else role.machine.queues["wgmma", role.index]
        elif isinstance(before, InFlight) and not before.product.operation.awaited(role):
            product.operation = before.product.operation
        out.append(value if product.operation is None else InFlight(product, None))  # type: ignore[arg-type]
    return out


# ---------------------------------------------------------------- the operations


def unpoisoned(role: Role, op: Op, operands: Sequence[Any]) -> None:
    if poison := poisoned(*operands):
        role.machine.stop(
            "uninitialized",
            "inline PTX gets a value that was never computed",
            role,
            op,
            computed=str(poison.op.location),
        )


@effect("ttg.inline_asm")
def inline_asm(role: Role, op: Op, *operands: Any) -> Any:
    """Execute inline PTX: every thread executes the block once. A tile is its registers, in the layout's order."""
    unpoisoned(role, op, operands)
    block = parsed(role, op, op.attributes["asm_string"], op.attributes["constraints"])
    # values in flight are legal operands
    takes = any(m.startswith(("wgmma.", "tcgen05.wait::ld")) for m in block.mnemonics)
    mine = chosen(role)
    columns: list[np.ndarray] = []
    for value, kind in zip(operands, op.operand_types):
        value = settle(role, op, value, not takes)
        if isinstance(value, View):
            columns.append(view_column(role, value)[mine])
        elif isinstance(kind, Tensor):
            assert kind.layout is not None
            flat = bits_of(np.ascontiguousarray(value), kind).reshape(-1)
            columns.extend(flat[registers(kind.layout, kind.shape, role.warps)[mine].T])
        else:
            columns.append(scalar_column(role, value, kind)[mine])
    outputs = yield from run_threads(role, op, block, columns)
    results: list[tuple[Any, range]] = []
    at = 0
    for kind in op.result_types:
        if isinstance(kind, Tensor):
            assert kind.layout is not None
            index = registers(kind.layout, kind.shape, role.warps)[mine]
            words = np.stack([np.asarray(o).astype(np.uint64) for o in outputs[at : at + index.shape[1]]], axis=1)
            decoded = shaped(words, kind)
            out = np.zeros(int(np.prod(kind.shape)), decoded.dtype)
            out[index] = decoded
            results.append((out.reshape(kind.shape), range(at, at + index.shape[1])))
            at += index.shape[1]
        else:
            results.append((scalar_result(role, np.asarray(outputs[at]).astype(np.uint64), kind), range(at, at + 1)))
            at += 1
    values = in_flight(role, block, results, operands) if takes or block.in_flight else [value for value, _ in results]
    return tuple(values) if len(values) != 1 else values[0]


@effect("tt.elementwise_inline_asm")
def elementwise(role: Role, op: Op, *operands: Any) -> Any:
    """Execute the block once for every `packed_element` elements. Elements of fewer than 32 bits share 32-bit
    registers.
    """
    unpoisoned(role, op, operands)
    block = parsed(role, op, op.attributes["asm_string"], op.attributes["constraints"])
    return (yield from by_element(role, op, block, op.attributes.get("packed_element", 1), operands))


def extern_function(role: Role, op: Op, *operands: Any) -> Any:
    """Execute tt.extern_elementwise of a function of `inline_ptx.extern`: its PTX, once for every element."""
    unpoisoned(role, op, operands)
    return (yield from by_element(role, op, parsed(role, op, *extern.PTX[op.attributes["symbol"]]), 1, operands))


def by_element(
    role: Role, op: Op, block: Block, pack: int, operands: Sequence[Any]
) -> Generator[Wait | None, None, Any]:
    tile = next((k for k in (*op.result_types, *op.operand_types) if isinstance(k, Tensor)), None)
    mine = chosen(role)
    if tile is None:
        columns = [scalar_column(role, v, k)[mine] for v, k in zip(operands, op.operand_types)]
        outputs = yield from run_threads(role, op, block, columns)
        scalars = [
            scalar_result(role, np.asarray(o).astype(np.uint64), kind) for o, kind in zip(outputs, op.result_types)
        ]
        return tuple(scalars) if len(scalars) != 1 else scalars[0]
    assert tile.layout is not None
    index = registers(tile.layout, tile.shape, role.warps)[mine]
    if index.shape[1] % pack:
        index = np.repeat(index, pack, axis=1)  # the compiler repeats elements to fill the pack
    per_thread = index.shape[1] // pack
    groups = index.reshape(-1, pack)
    columns = []
    for value, kind in zip(operands, op.operand_types):
        value = settle(role, op, value, True)
        if isinstance(kind, Tensor):
            flat = bits_of(np.ascontiguousarray(value), kind).reshape(-1)[groups]
            columns.extend(packed_registers(flat, kind.element.bits))
        else:
            columns.append(np.repeat(scalar_column(role, value, kind)[mine], per_thread))
    outputs = yield from run_threads(role, op, block, columns, per_thread)
    results: list[Any] = []
    at = 0
    for kind in op.result_types:
        assert isinstance(kind, Tensor)
        bits = max(kind.element.bits, 8)
        each = max(1, min(pack, 32 // bits))
        number = -(-pack // each)
        words = np.stack([np.asarray(o).astype(np.uint64) for o in outputs[at : at + number]], axis=1)
        at += number
        if each > 1:
            split = [(words >> np.uint64(bits * k)) & np.uint64((1 << bits) - 1) for k in range(each)]
            words = np.stack(split, axis=2).reshape(len(groups), -1)[:, :pack]
        decoded = shaped(words, kind)
        out = np.zeros(int(np.prod(kind.shape)), decoded.dtype)
        out[groups] = decoded
        results.append(out.reshape(kind.shape))
    return tuple(results) if len(results) != 1 else results[0]


def packed_registers(words: np.ndarray, bits: int) -> list[np.ndarray]:
    """Return (groups, pack) elements as 32-bit registers, as many elements in each as fit."""
    bits = max(bits, 8)
    pack = words.shape[1]
    each = max(1, min(pack, 32 // bits))
    out = []
    for start in range(0, pack, each):
        register: np.ndarray = np.zeros(len(words), np.uint64)
        for k in range(each):
            if start + k < pack:
                register |= words[:, start + k] << np.uint64(bits * k)
        out.append(register)
    return out
