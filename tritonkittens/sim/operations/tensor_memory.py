"""tcgen05: tensor memory, products that accumulate in it, copies into it, and cluster launch control. PTX ISA
"TensorCore 5th generation".
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tritonkittens.arch import chip_of

from ..agents import Async, Role, Wait
from ..clocks import ASYNC, GENERIC
from ..costs import CLC_DURATION, TCGEN05_LATENCY, Duration, tcgen05_cycles
from ..layouts import LANES, SHARED_STRIDE, TENSOR_LANE_BYTES, free_ranks
from ..numbers import decode, encode, round_to
from ..pure_arith import max_number, maximum, min_number, minimum
from ..ttgir import MemDesc, Op, Tensor
from ..values import Poison, View
from .barriers import addresses
from .products import accumulate
from .registry import effect, view
from .shared_memory import address_map, allocate, buffer_name, idle

_CHOICES = {("min", False): min_number, ("min", True): minimum, ("max", False): max_number, ("max", True): maximum}


@effect("ttng.tmem_alloc")
def tmem_alloc(role: Role, op: Op, *source: Any) -> Any:
    machine = role.machine
    kind = op.result_types[0]
    assert isinstance(kind, MemDesc)
    column, row = op.attributes.get("tensor_memory_col_offset"), op.attributes.get("tensor_memory_row_offset", 0)
    if column is None or row is None:
        machine.stop("unknown", "tmem_alloc without an offset: the allocation pass has not run", role, op)
        raise AssertionError
    map, stride = address_map(kind)
    made = allocate(
        role, op, kind, row * TENSOR_LANE_BYTES + column * 4, LANES * TENSOR_LANE_BYTES, buffer_name(op), stride
    )
    for rank, base, runs in machine._pieces(made.base, made.map) if idle(role) else ():
        memory = machine.memory("tensor", rank)
        for start, end in runs:
            memory.forget(base + start, base + end)
    if source:
        machine.store(role, made, source[0], op)
    return made if len(op.results) == 1 else (made, None)


def written(role: Role, view: View) -> bool:
    """Whether every byte of the view is written."""
    machine = role.machine
    pieces = machine._pieces(view.base, view.map)
    return all(
        machine.memory(view.space, rank).written[base + s : base + e].all()
        for rank, base, runs in pieces
        for s, e in runs
    )


@effect("ttng.tmem_load")
def tmem_load(role: Role, op: Op, source: View, *token: Any) -> Any:
    machine = role.machine
    if not written(role, source):
        # compilers may read an unwritten accumulator speculatively; only the use of its value is a bug
        machine.touch(role, source, False, GENERIC, op)
        nothing = Poison(op, f"reads {source.name}, parts of which were never written")
        return nothing if len(op.results) == 1 else (nothing,) * len(op.results)
    values = machine.load(role, source, op)
    kind = op.result_types[0]
    assert isinstance(kind, Tensor)
    out: list[Any] = [values.reshape(kind.shape)]
    for result in op.result_types[1:]:  # a token, or the reduced rows
        out.append(reduced_rows(role, op, values) if isinstance(result, Tensor) else None)
    return tuple(out) if len(out) > 1 else out[0]


def reduced_rows(role: Role, op: Op, values: np.ndarray) -> np.ndarray:
    """tcgen05.ld.red: the least or largest of each row, (M, N) → (M,), of absolute values with `abs`. NaN loses to
    numbers, or wins with `NaN`.
    """
    name, arch = op.result_types[0].element.name, role.machine.simulation.program.arch  # type: ignore[union-attr]
    if name != "f32" or not chip_of(arch).tcgen05_load_max:
        role.machine.stop(
            "illegal",
            f"tcgen05.ld.red of {name} on sm_{arch}: the instruction belongs to sm_103 and takes f32",
            role,
            op,
        )
    choose = _CHOICES[op.attributes["redOp"].text.partition("<")[2].rstrip(">"), bool(op.attributes.get("NaN"))]
    shown = np.abs(values) if op.attributes.get("abs") else values
    return functools.reduce(choose, np.moveaxis(shown, -1, 0))


@effect("ttng.tmem_store")
def tmem_store(role: Role, op: Op, target: View, *rest: Any) -> None:
    values, predicate = rest[-2:]
    if predicate:
        role.machine.store(role, target, values, op)


@effect("ttng.tmem_wait")
def tmem_wait(role: Role, op: Op) -> None:
    """tcgen05.wait::ld / ::st: accesses of the role's own threads are complete at once here."""


@effect("ttng.tmem_barrier")
def tmem_barrier(role: Role, op: Op) -> None:
    """Order the role's own warps' accesses of tensor memory. They are in lockstep already."""


def queue(role: Role) -> Any:
    """Return the queue of one issuer's tcgen05 products and copies, which complete in order."""
    return ("tcgen05", role.index)


def pairs(role: Role) -> bool:
    """Whether the kernel's tcgen05 operations work on pairs of CTAs (cta_group::2). The CTA of even rank then issues
    them for both.
    """
    return bool(role.machine.simulation.program.module.attributes.get("ttng.two-ctas"))


def issuing(role: Role) -> int:
    """Return `Async.leads` of tcgen05 operations."""
    return ~1 if pairs(role) and len(role.ranks) > 1 else -1


def committed(role: Role, shared: tuple[View, ...]) -> list[tuple[int, int]]:
    """Return (issuer, rank of the barrier) of each arrival by the commits of all issuing CTAs.

    They arrive in the issuer's own CTA, its pair's, and those with the same `shared` multicast data.
    """
    if len(role.ranks) == 1:
        return [(role.rank, role.rank)]
    ranks = role.ranks
    masks = {free_ranks(view.type) | pairs(role) for view in shared} or {int(pairs(role))}
    out = []
    for issuer in ranks:
        if not (pairs(role) and issuer & 1):
            out += [(issuer, rank) for rank in ranks if any(rank & ~mask == issuer & ~mask for mask in masks)]
    return out


def signal(role: Role, op: Op, operation: Async, bars: list[View], shared: tuple[View, ...] = ()) -> None:
    """tcgen05.commit, without or with .multicast::cluster."""
    machine = role.machine
    for bar in bars:
        place = addresses(role, bar)[0] & (SHARED_STRIDE - 1)
        for issuer, rank in committed(role, shared):
            barrier = machine.barriers.find(role, rank * SHARED_STRIDE + place, op, "tcgen05.commit", issuer)
            if barrier is not None:
                machine.barriers.arrive(role, barrier, 1, op, "arrives (tcgen05.commit)", issuer, operation)


def matrix(role: Role, agent: Async, value: View, op: Op) -> np.ndarray:
    values = role.machine.load(agent, value, op, ASYNC)
    return round_to("tf32", values, toward_zero=True) if value.type.element.name == "f32" else values


def product(
    role: Role, op: Op, d: View, use: bool, bars: list[View], shared: tuple[View, ...], operands: Any, cycles: float
) -> Any:
    """Start D = A·B (+ D). `operands(operation)` reads A and B."""
    machine = role.machine

    def effect(operation: Async) -> None:
        a, b = operands(operation)
        old = None
        if use:
            machine.check_written(operation, d, op)
            old = decode(d.type.element.name, machine.read(d))
        machine.touch(operation, d, True, ASYNC, op)
        machine.write(
            d, np.broadcast_to(encode(d.type.element.name, accumulate(a, b, old, d.type.element)), d.map.shape)
        )
        if bars:
            signal(role, op, operation, bars, shared if op.attributes.get("multicast") else ())

    operation = machine.start(
        "tcgen05.mma",
        role,
        op,
        effect,
        queue=queue(role),
        unit=f"tensor core {role.rank}",
        duration=Duration(cycles, TCGEN05_LATENCY),
    )
    operation.leads = issuing(role)
    return operation


def in_shared(*views: View) -> tuple[View, ...]:
    return tuple(v for v in views if v.space == "shared")


def finish(role: Role, op: Op, operation: Async) -> Any:
    """Complete a product without is_async: the compiler waits for it."""
    yield Wait(lambda: operation.done, lambda: "a tcgen05 product", time=lambda: operation.finish)
    role.machine.acquire(role, [operation])


@effect("ttng.tc_gen5_mma")
def tc_gen5_mma(role: Role, op: Op, *operands: Any) -> Any:
    (a,), (b,), (d,), _, (use,), (predicate,), bars, bar_predicates = op.split(operands)
    if not predicate:
        return None
    chosen = [bar for i, bar in enumerate(bars) if i >= len(bar_predicates) or bar_predicates[i]]
    m, n = d.map.shape[-2:]

    def read(operation: Async) -> tuple[np.ndarray, np.ndarray]:
        x, y = matrix(role, operation, a, op), matrix(role, operation, b, op)
        if op.attributes.get("is_unsigned"):
            x, y = (
                v.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[v.dtype.itemsize]) if v.dtype.kind == "i" else v
                for v in (x, y)
            )
        return x, y

    operation = product(
        role,
        op,
        d,
        bool(use),
        chosen,
        in_shared(a, b),
        read,
        tcgen05_cycles(m, n, a.map.shape[-1], a.type.element.bits),
    )
    if not op.attributes.get("is_async") and not bars and "is_async" in op.attributes:
        yield from finish(role, op, operation)
    yield None
    return None


@effect("ttng.tc_gen5_commit")
def tc_gen5_commit(role: Role, op: Op, *operands: Any) -> None:
    """Arrive once at the barrier when all tcgen05 operations of this role are complete."""
    (bar,), predicate, shared = op.split(operands)
    if predicate and not predicate[0]:
        return
    operation = role.machine.start(
        "tcgen05.commit",
        role,
        op,
        lambda operation: signal(role, op, operation, [bar], shared),
        queue=queue(role),
        unit=f"tensor core {role.rank}",
    )
    operation.leads = issuing(role)


@effect("ttng.tmem_copy")
def tmem_copy(role: Role, op: Op, source: View, target: View, *bar: Any) -> None:
    machine = role.machine
    scales = "scales" in target.type.layout

    def effect(operation: Async) -> None:
        machine.touch(operation, source, False, ASYNC, op)
        whole = written(role, source)
        words = machine.read(source)
        if scales and words.shape != target.map.shape:
            words = unblock_scales(words, target.map.shape)
        machine.touch(operation, target, True, ASYNC, op)
        machine.write(target, words.reshape(target.map.shape))
        # a pipeline may copy unwritten scales for a predicated-off product; only a product that reads them is a bug
        if not whole:
            for rank, base, runs in machine._pieces(target.base, target.map):
                for start, end in runs:
                    machine.memory("tensor", rank).forget(base + start, base + end)
        if bar:
            signal(role, op, operation, list(bar))

    operation = machine.start(
        "tcgen05.cp",
        role,
        op,
        effect,
        queue=queue(role),
        unit=f"tensor core {role.rank}",
        duration=Duration(source.map.total / 128),
    )
    operation.leads = issuing(role)


def unblock_scales(words: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reorder scales from blocks of 32 rows by 16 bytes, (m/128, k/4, 32, 4, 4), to the order of their matrix
    (TritonNvidiaGPUOps.td, tmem_copy).
    """
    rows, columns = shape
    blocks = words.reshape(rows // 128, columns // 4, 32, 4, 4)
    return blocks.transpose(0, 3, 2, 1, 4).reshape(rows, columns)


# ---- cluster launch control


@effect("ttng.clc_try_cancel")
def clc_try_cancel(role: Role, op: Op, result: View, bar: View) -> None:
    """clusterlaunchcontrol.try_cancel: take over the next cluster of the grid that has not started. The answer, 16
    bytes, is reported to a barrier.
    """
    machine = role.machine
    taken: list[Any] = []
    bars = [
        b for b in (machine.barriers.find(role, a, op, "try_cancel") for a in addresses(role, bar)) if b is not None
    ]

    def effect(operation: Async) -> None:
        program = machine.simulation.cancel_next()
        taken.append(program)
        words: np.ndarray = np.zeros(2, np.uint64)
        if program is not None:
            x, y, z = program
            words[:] = (1 << 63) | (x & 0xFFFFFFFF) << 1 & 0x7FFFFFFF | (y & 0xFFFF) << 32, z
        machine.touch(operation, result, True, ASYNC, op)
        data = np.frombuffer(words.tobytes(), np.uint8)
        machine.write(
            result,
            data.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[result.map.nbytes]).reshape(
                result.map.shape
            ),
        )
        for barrier, phase in zip(bars, phases):
            machine.barriers.deliver(operation, barrier, phase, 16)

    operation = machine.start("try_cancel", role, op, effect, unit="CLC", duration=CLC_DURATION)
    operation.leads = 0 if len(role.ranks) > 1 else -1  # the first CTA asks, for all
    phases = [machine.barriers.promise(operation, b) for b in bars]


@effect("ttng.clc_load_result")
def clc_load_result(role: Role, op: Op, source: View) -> int:
    machine = role.machine
    machine.touch(role, source, False, "generic", op)
    machine.check_written(role, source, op)
    low, high = np.frombuffer(machine.read(source).tobytes(), np.uint64)[:2]
    return int(low) | int(high) << 64


@view("ttng.clc_is_canceled")
def clc_is_canceled(role: Role, op: Op, answer: int) -> int:
    return (answer >> 63) & 1


@view("ttng.clc_get_program_id")
def clc_get_program_id(role: Role, op: Op, answer: int) -> int:
    axis = op.attributes["dim"]
    return [(answer & 0x7FFFFFFF) >> 1, (answer >> 32) & 0xFFFF, (answer >> 64) & 0xFFFF][axis]
