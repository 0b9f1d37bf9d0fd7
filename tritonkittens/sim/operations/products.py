"""wgmma: products of a warpgroup, in flight until a wait. PTX ISA "Asynchronous warpgroup level matrix
instructions"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..agents import Async, Role, Wait
from ..clocks import ASYNC
from ..costs import WGMMA_LATENCY, Duration, wgmma_cycles
from ..machine import Machine
from ..numbers import round_to
from ..report import Place
from ..ttgir import Op, Scalar, Tensor
from ..values import InFlight, Poison, View
from .registry import effect


class Product:
    """A wgmma in flight: the accumulator is available once `value` is set."""

    __slots__ = ("operation", "value", "waited")

    def __init__(self) -> None:
        self.operation: Async | None = None
        self.value: np.ndarray | None = None
        self.waited = False


def accumulate(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, element: Scalar) -> np.ndarray:
    """Compute a·b + c as the tensor cores do: exact products, fp32 (or int32, fp64, fp16) accumulation."""
    if a.dtype.kind in "iub":
        total = a.astype(np.int64) @ b.astype(np.int64)
        return total.astype(np.int32) if c is None else (total + c).astype(np.int32)
    if element.name == "f64":
        return a.astype(np.float64) @ b.astype(np.float64) + (0 if c is None else c)
    product = a.astype(np.float32) @ b.astype(np.float32)
    if c is not None:
        product = product + c
    return round_to(element.name, product) if element.name != "f32" else product


def operand(machine: Machine, agent: Any, value: Any, op: Op, kind: Any) -> np.ndarray:
    """Return a matrix operand's values: from shared memory (as the asynchronous proxy) or from registers."""
    if isinstance(value, View):
        values = machine.load(agent, value, op, ASYNC)
        element = value.type.element.name
    else:
        values, element = value, kind.element.name
    return round_to("tf32", values, toward_zero=True) if element == "f32" else values


def accumulator(role: Role, op: Op, c: Any, use_c: bool) -> Callable[[], np.ndarray | None]:
    """Return what gives the accumulator when the product is computed: the value of an earlier product is then there.
    None is an accumulator of zeros.
    """
    if use_c and isinstance(c, Poison):
        why = "wgmma adds to an accumulator that was never computed"
        role.machine.report("uninitialized", why, role, op, computed=str(c.op.location))
        use_c = False
    if not use_c:
        return lambda: None
    return lambda: c.product.value if isinstance(c, InFlight) else c


@effect("ttng.warp_group_dot")
def warp_group_dot(role: Role, op: Op, a: Any, b: View, c: Any, *use: Any) -> Any:
    machine = role.machine
    product = Product()
    kind, (left, right) = op.result_types[0], op.operand_types[:2]
    assert isinstance(kind, Tensor)
    start = accumulator(role, op, c, not use or bool(use[0]))
    if isinstance(a, InFlight):
        why = "the register operand of a wgmma is the accumulator of another that is still in flight"
        machine.report("in-flight", why, role, op)
        a = np.zeros(kind.shape, np.float32)

    def effect(operation: Async) -> None:
        factors = operand(machine, operation, a, op, left), operand(machine, operation, b, op, right)
        product.value = accumulate(*factors, start(), kind.element)  # type: ignore[arg-type]

    m, n = kind.shape[-2:]
    operation = machine.start(
        "wgmma",
        role,
        op,
        effect,
        queue=("wgmma", role.index),
        unit=f"tensor core {role.rank}",
        duration=Duration(wgmma_cycles(m, n, left.shape[-1], left.element.bits), WGMMA_LATENCY),  # type: ignore[union-attr]
    )
    product.operation = operation
    role.products.append(operation)
    if not isinstance(a, View):
        for earlier in role.products:
            check_registers(role, earlier, op)
        operation.registers = a
    if not op.attributes.get("isAsync"):
        yield from wait_products(role, 0)
        product.waited = True
        return product.value
    return InFlight(product, kind)


def check_registers(role: Role, product: Async, op: Op) -> None:
    """Report an operand in registers that is computed again before the wait for the product.

    A value without further uses is left to ptxas, as in Triton's own pipelining. Only registers that a loop writes
    again count.
    """
    if product.registers is not None and role.environment[product.op.operands[0]] is not product.registers:
        role.machine.report(
            "in-flight",
            "the register operand of a wgmma is overwritten before a wait for the wgmma that reads it",
            role,
            op,
            "comes too late",
            (Place(role.machine.where(role), "wgmma", product.op.location),),
        )


def wait_products(role: Role, pending: int) -> Any:
    """Execute wgmma.wait_group for all but the last `pending` groups of this warpgroup."""
    over = role.products[: max(0, len(role.products) - pending)]
    if over:
        yield Wait(
            lambda: all(o.done for o in over),
            lambda: f"{sum(not o.done for o in over)} wgmma",
            time=lambda: max(o.finish for o in over),
        )
        role.machine.acquire(role, over)
    role.products = role.products[len(over) :]


@effect("ttng.warp_group_dot_wait")
def warp_group_dot_wait(role: Role, op: Op, *inputs: Any) -> Any:
    over = role.products[: max(0, len(role.products) - op.attributes["pendings"])]
    for operation in over:
        check_registers(role, operation, op)
    yield from wait_products(role, op.attributes["pendings"])
    results = []
    for value in inputs:
        product = value.product.operation if isinstance(value, InFlight) else None
        if product is not None and product.done and product not in role.products:
            value.product.waited = True
            results.append(value.product.value)
        else:
            results.append(value)
    return tuple(results) if len(results) != 1 else results[0]
