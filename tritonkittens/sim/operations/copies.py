"""cp.async: background copies of threads from global to shared memory, with waits by group.

PTX ISA "cp.async" (an ordinary access, not the bulk copy).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..agents import Async, Role, Wait, poisoned
from ..clocks import GENERIC
from ..costs import GLOBAL_LATENCY, Duration, global_cycles
from ..numbers import encode
from ..ttgir import Op
from ..values import Poison, Spans, View
from .global_memory import check_address, element_of, outside
from .registry import effect


@effect("ttg.async_copy_global_to_local")
def async_copy(role: Role, op: Op, pointers: np.ndarray, target: View, *rest: Any) -> None:
    segments = op.attributes.get("operandSegmentSizes", (1, 1, len(rest) > 0, len(rest) > 1))
    given = list(rest)
    mask = given.pop(0) if segments[2] else None
    other = given.pop(0) if segments[3] else None
    machine = role.machine
    if poison := poisoned(pointers, mask):
        machine.stop(
            "uninitialized",
            "a copy whose address or mask was never computed",
            role,
            op,
            computed=str(poison.op.location),
        )
    element = element_of(op.operand_types[0])
    shape = target.map.shape
    addresses = np.broadcast_to(np.asarray(pointers, np.int64), shape).reshape(-1)
    on = (
        np.ones(addresses.size, bool)
        if mask is None
        else np.broadcast_to(np.asarray(mask).astype(bool), shape).reshape(-1)
    )
    check_address(role, op, addresses[on], element.nbytes)

    def effect(operation: Async) -> None:
        words = np.zeros(addresses.size, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[element.nbytes])
        if other is not None and not isinstance(other, Poison):
            words[:] = np.broadcast_to(encode(element.name, np.asarray(other)), shape).reshape(-1)
        found, bad = machine.simulation.memory.gather(addresses[on], element.nbytes)
        if bad is not None:
            outside(role, op, bad, element.nbytes, "cp.async")
        machine.simulation.global_order.access(operation, Spans(addresses[on], element.nbytes), False, op)
        words[on] = found
        machine.touch(operation, target, True, GENERIC, op)
        machine.write(target, words.reshape(shape))

    role.copy_open.append(
        machine.start(
            "cp.async",
            role,
            op,
            effect,
            unit="cp.async",
            duration=Duration(global_cycles(target.map.total), GLOBAL_LATENCY),
        )
    )


@effect("ttg.async_commit_group")
def commit_group(role: Role, op: Op, *tokens: Any) -> None:
    role.copy_groups.append(role.copy_open)
    role.copy_open = []


@effect("ttg.async_wait")
def wait_group(role: Role, op: Op, *tokens: Any) -> Any:
    yield from wait_copy_groups(role, op.attributes["num"])


def wait_copy_groups(role: Role, pending: int) -> Any:
    """Wait until all but the last `pending` groups are complete."""
    over = role.copy_groups[: max(0, len(role.copy_groups) - pending)]
    operations = [o for group in over for o in group]
    if operations:
        yield Wait(
            lambda: all(o.done for o in operations), lambda: f"{sum(not o.done for o in operations)} cp.async copies",
            time=lambda: max(o.finish for o in operations),
        )  # fmt: skip
        for operation in operations:
            # they are ordinary stores, so the asynchronous proxy needs a fence after them
            for rank in operation.ranks:
                role.clocks[rank].operations |= operation.bits[rank]
            role.time = max(role.time, operation.finish)
    role.copy_groups = role.copy_groups[len(over) :]
