"""Loads, stores and atomics of threads on global memory, and scratch memory of the compiler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..agents import Role, poisoned
from ..costs import CLOCK_GHZ, GLOBAL_LATENCY
from ..global_order import CTA, GPU, WEAK
from ..layouts import owners
from ..numbers import decode, encode, round_to
from ..report import Place
from ..spinning import Read, Rest
from ..ttgir import Op, Pointer, Scalar, Tensor
from ..values import Spans
from .registry import effect

_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# tt::RMWOp, by its value in the attribute
# tt::MemSemantic and tt::MemSyncScope, by their values
SEMANTICS = {1: "relaxed", 2: "acquire", 3: "release", 4: "acq_rel"}
SYNC_SCOPES = {1: GPU, 2: CTA, 3: GPU}
RMW = {1: "and", 2: "or", 3: "xor", 4: "add", 5: "fadd", 6: "max", 7: "min", 8: "umax", 9: "umin", 10: "exch"}


def element_of(kind: Any) -> Scalar:
    """Return the number type of a value, or of a pointer's target."""
    element: Any = kind.element if isinstance(kind, Tensor) else kind
    if isinstance(element, Pointer):
        element = element.pointee
    return Scalar("i64") if isinstance(element, Pointer) else element


def check_address(role: Role, op: Op, addresses: np.ndarray, nbytes: int) -> None:
    wrong = addresses % nbytes != 0
    if wrong.any():
        address = int(addresses[wrong][0])
        role.machine.stop(
            "misaligned",
            f"an access of {nbytes} bytes at {role.machine.simulation.memory.name(address)}, not a multiple of "
            f"{nbytes}",
            role,
            op,
        )
    within = role.machine.simulation.within(op)
    if within and addresses.size:
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        if not any(start <= low and high <= end for start, end in within):
            _check_tensors(role, op, addresses, nbytes, within)


def _check_tensors(role: Role, op: Op, addresses: np.ndarray, nbytes: int, within: list[tuple[int, int]]) -> None:
    """Stop at an access outside all of these tensors that lands in another one."""
    memory = role.machine.simulation.memory
    inside: np.ndarray = np.zeros(addresses.size, bool)
    for start, end in within:
        inside |= (addresses >= start) & (addresses + nbytes <= end)
    for address in addresses[~inside][:1].tolist():
        if memory.find(address) is not None:
            names = ", ".join(memory.name_only(start) for start, _ in within)
            role.machine.stop(
                "out-of-bounds",
                f"an access of {nbytes} bytes through a pointer to {names} lands in {memory.element(address)}",
                role,
                op,
            )


def outside(role: Role, op: Op, address: int, nbytes: int, what: str) -> None:
    nearest = role.machine.simulation.memory.name(address)
    role.machine.stop(
        "out-of-bounds",
        f"{what} of {nbytes} bytes at {address:#x}, outside every tensor of the launch; nearest before it: {nearest}",
        role,
        op,
    )


@effect("tt.load")
def load(role: Role, op: Op, pointers: Any, *rest: Any) -> Any:
    """Load. Masked-off elements are `other`, or zero without it (the compiler leaves them undefined)."""
    segments = op.attributes.get("operandSegmentSizes", (1, len(rest) > 0, len(rest) > 1))
    rest_list = list(rest)
    mask = rest_list.pop(0) if segments[1] else None
    other = rest_list.pop(0) if segments[2] else None
    if poison := poisoned(pointers, mask):
        role.machine.stop(
            "uninitialized",
            "a load whose address or mask was never computed",
            role,
            op,
            computed=str(poison.op.location),
        )
    kind = op.result_types[0]
    element = element_of(kind)
    scalar = not isinstance(kind, Tensor)
    shape = kind.shape if isinstance(kind, Tensor) else ()
    addresses = np.broadcast_to(np.asarray(pointers, np.int64), shape).reshape(-1)
    on = None if mask is None else np.broadcast_to(np.asarray(mask).astype(bool), shape).reshape(-1)
    active = addresses if on is None else addresses[on]
    check_address(role, op, active, element.nbytes)
    words, bad = role.machine.simulation.memory.gather(active, element.nbytes)
    if bad is not None:
        outside(role, op, bad, element.nbytes, "a load")
    strong = GPU if op.attributes.get("isVolatile") else WEAK
    threads = threads_of(role, kind, on, write=False)
    order = role.machine.simulation.global_order
    order.access(role, Spans(active, element.nbytes), False, op, scope=strong, owners=threads)
    if strong:
        order.acquire(role, active, order="relaxed", scope=GPU)
    values = decode(element.name, words)
    if on is not None:
        if other is None or poisoned(other):
            full = np.zeros(addresses.size, values.dtype)
        else:
            full = np.array(np.broadcast_to(np.asarray(other, values.dtype), shape)).reshape(-1)
        full[on] = values
        values = full
    return as_scalar(values[0], element) if scalar else values.reshape(shape)


def as_scalar(value: Any, element: Scalar) -> Any:
    """Return a number in the form of scalars between operations."""
    if not element.is_float:
        return int(value)
    return np.float64(value) if element.name == "f64" else np.float32(value)


@effect("tt.store")
def store(role: Role, op: Op, pointers: Any, values: Any, *mask: Any) -> None:
    if poison := poisoned(pointers, *mask):
        role.machine.stop(
            "uninitialized",
            "a store whose address or mask was never computed",
            role,
            op,
            computed=str(poison.op.location),
        )
    if poison := poisoned(values):
        place = Place(role.machine.where(role), poison.why, poison.op.location)
        role.machine.report(
            "uninitialized", "a store of a value that was never computed", role, op, "stores it", (place,)
        )
        return
    kind = op.operand_types[0]
    element = element_of(kind)
    shape = kind.shape if isinstance(kind, Tensor) else ()
    addresses = np.broadcast_to(np.asarray(pointers, np.int64), shape).reshape(-1)
    words = np.broadcast_to(encode(element.name, np.asarray(values)), shape).reshape(-1)
    on = None
    if mask:
        on = np.broadcast_to(np.asarray(mask[0]).astype(bool), shape).reshape(-1)
        addresses, words = addresses[on], words[on]
    if addresses.size == 0:
        return
    check_address(role, op, addresses, element.nbytes)
    memory = role.machine.simulation.memory
    role.machine.simulation.global_order.access(
        role,
        Spans(addresses, element.nbytes),
        True,
        op,
        single=not isinstance(kind, Tensor),
        owners=threads_of(role, kind, on, write=True),
        words=words,
    )
    bad = memory.scatter(addresses, words)
    if bad is not None:
        outside(role, op, bad, element.nbytes, "a store")
    if bool((addresses[1:] > addresses[:-1]).all()):
        return
    kept = memory.peek(addresses, element.nbytes)
    if not np.array_equal(kept, words):
        address = int(addresses[kept != words][0])
        role.machine.report(
            "race",
            f"{memory.name_only(address)} is written twice in no order, by threads of one store",
            role,
            op,
            "writes it",
            buffer=memory.name_only(address),
            element=memory.element(address),
        )


def threads_of(role: Role, kind: Any, on: np.ndarray | None, write: bool) -> np.ndarray | None:
    """Return the thread of each active element of an access, see `layouts.owners`. The first thread stores scalars, and
    all load them (−1). None where it is not known.
    """
    if role.mask is not None:
        return None
    if not isinstance(kind, Tensor):
        return np.array([0 if write else -1], np.int16)
    if kind.layout is None:
        return None
    threads = owners(kind.layout, kind.shape, role.warps)
    return threads if on is None else threads[on]


def combine(name: str, element: Scalar, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Apply one atomic operation to values."""
    if name in ("umax", "umin"):
        word: Any = _WORD[old.dtype.itemsize]
        return (np.maximum if name == "umax" else np.minimum)(old.view(word), new.astype(old.dtype).view(word)).view(
            old.dtype
        )
    if name in ("add", "fadd"):
        total = old + new
        return round_to(element.name, total) if element.is_float else total.astype(old.dtype)
    table = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "max": np.fmax if element.is_float else np.maximum,
        "min": np.fmin if element.is_float else np.minimum,
    }
    return new.astype(old.dtype) if name == "exch" else table[name](old, new)


def read_modify_write(role: Role, op: Op, addresses: np.ndarray, element: Scalar, change: Any) -> np.ndarray:
    """Apply `change(i, old) -> new` to every address in order (several elements may name one address). Return the old
    values.
    """
    memory = role.machine.simulation.memory
    check_address(role, op, addresses, element.nbytes)
    first = decode(element.name, np.zeros(1, _WORD[element.nbytes]))
    out = np.zeros(addresses.size, first.dtype)
    if len(np.unique(addresses)) == addresses.size:
        words, bad = memory.gather(addresses, element.nbytes)
        if bad is not None:
            outside(role, op, bad, element.nbytes, "an atomic")
        out = decode(element.name, words)
        new = encode(element.name, change(slice(None), out))
        role.machine.version += not np.array_equal(new, words)
        memory.scatter(addresses, new)
        return out
    for i in range(addresses.size):
        words, bad = memory.gather(addresses[i : i + 1], element.nbytes)
        if bad is not None:
            outside(role, op, bad, element.nbytes, "an atomic")
        out[i : i + 1] = decode(element.name, words)
        new = encode(element.name, change(slice(i, i + 1), out[i : i + 1]))
        role.machine.version += not np.array_equal(new, words)
        memory.scatter(addresses[i : i + 1], new)
    return out


def synchronise(
    role: Role,
    op: Op,
    words: Spans,
    semantics: str,
    scope: int,
    single: bool,
    *,
    reads: bool = True,
    writes: bool = True,
) -> None:
    """Record atomic accesses of these words, and what they acquire and release."""
    order = role.machine.simulation.global_order
    if reads:
        order.acquire(role, words.starts, order=semantics, scope=scope)
    order.access(role, words, writes, op, scope=scope, single=single)
    if writes:
        order.release(role, words.starts, order=semantics, scope=scope, single=single, continues=reads)


def _atomic(
    role: Role, op: Op, pointers: Any, mask: Any, change: Any, *, reads: bool = True, writes: bool = True
) -> Any:
    """An atomic operation; `change` as in `read_modify_write`."""
    kind = op.operand_types[0]
    element = element_of(kind)
    scalar = not isinstance(kind, Tensor)
    shape = kind.shape if isinstance(kind, Tensor) else ()
    addresses = np.broadcast_to(np.asarray(pointers, np.int64), shape).reshape(-1)
    on = (
        np.ones(addresses.size, bool)
        if mask is None
        else np.broadcast_to(np.asarray(mask).astype(bool), shape).reshape(-1)
    )
    active = addresses[on]
    old = read_modify_write(role, op, active, element, change(shape, on, element))
    semantics, scope = SEMANTICS[op.attributes.get("sem", 4)], SYNC_SCOPES[op.attributes.get("scope", 1)]
    synchronise(role, op, Spans(active, element.nbytes), semantics, scope, scalar, reads=reads, writes=writes)
    full = np.zeros(addresses.size, old.dtype)
    full[on] = old
    return as_scalar(full[0], element) if scalar else full.reshape(shape)


@effect("tt.atomic_rmw")
def atomic_rmw(role: Role, op: Op, pointers: Any, values: Any, *mask: Any) -> Any:
    name = RMW[op.attributes["atomic_rmw_op"]]

    def change(shape: Any, on: np.ndarray, element: Scalar) -> Any:
        new = np.broadcast_to(np.asarray(values), shape).reshape(-1)[on]
        return lambda at, old: combine(name, element, old, new[at])

    result = _atomic(role, op, pointers, mask[0] if mask else None, change)
    yield None  # other roles may run after every atomic, because spinning kernels need that
    return result


@effect("tt.atomic_cas")
def atomic_cas(role: Role, op: Op, pointers: Any, expected: Any, values: Any) -> Any:
    def change(shape: Any, on: np.ndarray, element: Scalar) -> Any:
        compare = np.broadcast_to(np.asarray(expected), shape).reshape(-1)[on]
        new = np.broadcast_to(np.asarray(values), shape).reshape(-1)[on]
        return lambda at, old: np.where(old == compare[at], new[at], old).astype(old.dtype)

    result = _atomic(role, op, pointers, None, change)
    yield None
    return result


@effect("tt.atomic_load")
def atomic_load(role: Role, op: Op, pointers: Any, *mask: Any) -> Any:
    result = _atomic(
        role, op, pointers, mask[0] if mask else None, lambda shape, on, element: lambda at, old: old, writes=False
    )
    yield None
    return result


@effect("tt.atomic_store")
def atomic_store(role: Role, op: Op, pointers: Any, values: Any, *mask: Any) -> Any:
    def change(shape: Any, on: np.ndarray, element: Scalar) -> Any:
        new = np.broadcast_to(np.asarray(values), shape).reshape(-1)[on]
        return lambda at, old: new[at].astype(old.dtype)

    _atomic(role, op, pointers, mask[0] if mask else None, change, reads=False)
    yield None


@effect("tt.atomic_poll")
def atomic_poll(role: Role, op: Op, pointers: Any, expected: Any, *timeout: Any) -> Any:
    """Wait until every address holds its expected value, with a timeout (ns, modelled time) if given. Return which
    ones do.
    """
    if poison := poisoned(pointers, expected, *timeout):
        role.machine.stop(
            "uninitialized",
            "a poll whose address, value or timeout was never computed",
            role,
            op,
            computed=str(poison.op.location),
        )
    kind = op.operand_types[0]
    element = element_of(kind)
    shape = kind.shape if isinstance(kind, Tensor) else ()
    addresses = np.broadcast_to(np.asarray(pointers, np.int64), shape).reshape(-1)
    check_address(role, op, addresses, element.nbytes)
    wanted = np.broadcast_to(np.asarray(expected), shape).reshape(-1)

    def equal() -> np.ndarray:
        words, bad = role.machine.simulation.memory.gather(addresses, element.nbytes)
        if bad is not None:
            outside(role, op, bad, element.nbytes, "a poll")
        return decode(element.name, words) == wanted

    simulation = role.machine.simulation
    end = role.time + int(timeout[0]) * CLOCK_GHZ if timeout else math.inf
    while not equal().all() and role.time < end:  # others run between two reads, also other CTAs
        yield (
            None
            if timeout
            else Rest(role, [Read(addresses, simulation.memory.peek(addresses, element.nbytes), op)], [], None)
        )
        role.time += GLOBAL_LATENCY
        role.steps += 1
        simulation.steps += 1
        if simulation.steps > simulation.step_limit:
            simulation.endless(role.machine, role, op)
    semantics, scope = SEMANTICS[op.attributes.get("sem", 2)], SYNC_SCOPES[op.attributes.get("scope", 1)]
    synchronise(role, op, Spans(addresses, element.nbytes), semantics, scope, shape == (), writes=False)
    return int(equal()[0]) if shape == () else equal().reshape(shape)


@effect("ttg.global_scratch_alloc")
def global_scratch_alloc(role: Role, op: Op) -> int:
    return role.machine.simulation.scratch(role, op.attributes["nbytes"], op.attributes.get("alignment", 128), op)
